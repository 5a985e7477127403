"""Without torch or lightning, imports that need them name the extra to install."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

_BLOCKED = """
import sys
for name in {missing!r}:
    sys.modules[name] = None  # importing it is a ModuleNotFoundError
try:
    {code}
except ModuleNotFoundError as exc:
    print(exc)
"""


@pytest.mark.parametrize(
    ("missing", "code", "says"),
    [
        (
            ["torch"],
            "from aioflux.checkpoint import load; load('gs://bucket/model.pt')",
            "aioflux.checkpoint.load needs PyTorch: pip install 'aioflux[torch]'",
        ),
        (
            ["torch"],
            "from aioflux.checkpoint import save; save(1, 'gs://bucket/model.pt')",
            "aioflux.checkpoint.save needs PyTorch: pip install 'aioflux[torch]'",
        ),
        (
            ["torch"],
            "from aioflux.checkpoint import Checkpointer",
            "aioflux.checkpoint.Checkpointer needs PyTorch: pip install 'aioflux[torch]'",
        ),
        (
            ["torch"],
            "from aioflux.checkpoint.dcp import StorageReader",
            "aioflux.checkpoint.dcp needs PyTorch: pip install 'aioflux[torch]'",
        ),
        (
            ["lightning"],
            "import aioflux.integrations.lightning",
            "aioflux.integrations.lightning needs lightning: pip install 'aioflux[lightning]'",
        ),
        (
            ["lightning", "torch"],
            "from aioflux.integrations.lightning import ModelCheckpoint",
            "aioflux.integrations.lightning needs lightning: pip install 'aioflux[lightning]'",
        ),
    ],
    ids=["load", "save", "Checkpointer", "dcp", "lightning", "lightning-and-torch"],
)
def test_the_error_of_a_missing_module_names_the_extra(
    missing: list[str], code: str, says: str
) -> None:
    script = _BLOCKED.format(missing=missing, code=code)
    result = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True, timeout=240
    )
    assert result.stdout.strip() == says


_CHECKPOINT = Path(__file__).parents[2] / "aioflux" / "checkpoint"
WITHOUT_TORCH = {
    **{
        package: sorted(path.stem for path in (_CHECKPOINT / package).glob("[!_]*.py"))
        for package in ("_format", "_store", "_maintain")
    },
    "_save": ["uploader_main", "process_uploader", "tag_save"],
}
"""Modules that the command line and the process that uploads import; and all that these import."""


@pytest.mark.parametrize("package", WITHOUT_TORCH)
def test_modules_import_without_torch(package: str) -> None:
    names = [f"aioflux.checkpoint.{package}.{name}" for name in WITHOUT_TORCH[package]]
    assert names
    script = _BLOCKED.format(missing=["torch"], code=f"import {', '.join(names)}")
    result = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True, timeout=240
    )
    assert result.stdout == ""
