"""Without torch or lightning, imports that need them name the extra to install."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

_RUN = """
import sys
for code, missing in {cases!r}:
    for name in missing:
        sys.modules[name] = None  # importing it is a ModuleNotFoundError
    try:
        exec(code)
    except ModuleNotFoundError as exc:
        print(exc)
    for name in missing:
        del sys.modules[name]
"""

NEEDS = {
    "from aioflux.checkpoint import load; load('gs://bucket/model.pt')": (
        ["torch"],
        "aioflux.checkpoint.load needs PyTorch: pip install 'aioflux-storage[torch]'",
    ),
    "from aioflux.checkpoint import save; save(1, 'gs://bucket/model.pt')": (
        ["torch"],
        "aioflux.checkpoint.save needs PyTorch: pip install 'aioflux-storage[torch]'",
    ),
    "from aioflux.checkpoint import Checkpointer": (
        ["torch"],
        "aioflux.checkpoint.Checkpointer needs PyTorch: pip install 'aioflux-storage[torch]'",
    ),
    "from aioflux.checkpoint.dcp import StorageReader": (
        ["torch"],
        "aioflux.checkpoint.dcp needs PyTorch: pip install 'aioflux-storage[torch]'",
    ),
    "from aioflux.integrations.lightning import ModelCheckpoint": (
        ["lightning", "torch"],
        "aioflux.integrations.lightning needs lightning: pip install 'aioflux-storage[lightning]'",
    ),
    "import aioflux.integrations.lightning": (
        ["lightning"],
        "aioflux.integrations.lightning needs lightning: pip install 'aioflux-storage[lightning]'",
    ),
}
"""What is run, the modules that are missing, and the message."""


def output_of(cases: list[tuple[str, list[str]]]) -> list[str]:
    """Run code without some modules, one piece after the other in one new process."""
    script = _RUN.format(cases=cases)
    result = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True, timeout=240
    )
    return result.stdout.splitlines()


def test_the_error_of_a_missing_module_names_the_extra() -> None:
    printed = output_of([(code, missing) for code, (missing, _) in NEEDS.items()])
    assert printed == [message for _, message in NEEDS.values()]


_CHECKPOINT = Path(__file__).parents[2] / "aioflux" / "checkpoint"
WITHOUT_TORCH = {
    **{
        package: sorted(path.stem for path in (_CHECKPOINT / package).glob("[!_]*.py"))
        for package in ("_format", "_store")
    },
    "_save": ["uploader_main", "process_uploader"],
    "": ["_tag_checkpoints"],
}
"""Modules that the command line and the process that uploads import; and all that these import."""
WITHOUT_TORCH["_format"].remove("nesting")  # only processes that train or load import it


def test_modules_import_without_torch() -> None:
    names = [
        f"aioflux.checkpoint.{package}.{name}".replace("..", ".")
        for package, names in WITHOUT_TORCH.items()
        for name in names
    ]
    assert output_of([(f"import {name}", ["torch"]) for name in names]) == []
