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
for code in {codes!r}:
    try:
        exec(code)
    except ModuleNotFoundError as exc:
        print(exc)
"""


def messages(missing: list[str], *codes: str) -> list[str]:
    """Run code in a process without some modules, and return the messages of its errors."""
    script = _BLOCKED.format(missing=missing, codes=codes)
    result = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True, timeout=240
    )
    return result.stdout.splitlines()


def test_the_error_of_missing_torch_names_the_extra() -> None:
    codes = {
        "from aioflux.checkpoint import load; load('gs://bucket/model.pt')": "load",
        "from aioflux.checkpoint import save; save(1, 'gs://bucket/model.pt')": "save",
        "from aioflux.checkpoint import Checkpointer": "Checkpointer",
        "from aioflux.checkpoint.dcp import StorageReader": "dcp",
    }
    assert messages(["torch"], *codes) == [
        f"aioflux.checkpoint.{name} needs PyTorch: pip install 'aioflux[torch]'"
        for name in codes.values()
    ]


@pytest.mark.parametrize("missing", [["lightning"], ["lightning", "torch"]], ids="-".join)
def test_the_error_of_missing_lightning_names_the_extra(missing: list[str]) -> None:
    assert messages(missing, "from aioflux.integrations.lightning import ModelCheckpoint") == [
        "aioflux.integrations.lightning needs lightning: pip install 'aioflux[lightning]'"
    ]


_CHECKPOINT = Path(__file__).parents[2] / "aioflux" / "checkpoint"
WITHOUT_TORCH = {
    **{
        package: sorted(path.stem for path in (_CHECKPOINT / package).glob("[!_]*.py"))
        for package in ("_format", "_store", "_maintain")
    },
    "_save": ["uploader_main", "process_uploader", "tag_save"],
}
"""Modules that the command line and the process that uploads import; and all that these import."""


def test_modules_import_without_torch() -> None:
    assert all(WITHOUT_TORCH.values())
    codes = [
        f"import aioflux.checkpoint.{package}.{name}"
        for package, names in WITHOUT_TORCH.items()
        for name in names
    ]
    assert messages(["torch"], *codes) == []
