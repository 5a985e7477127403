"""`import aioflux` costs little: no event loop, no cloud SDK, no torch, few modules."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

HEAVY = [
    "aiohttp",
    "asyncio",
    "azure",
    "botocore",
    "concurrent",
    "fsspec",
    "gcloud",
    "google",
    "google_crc32c",
    "httptools",
    "lightning",
    "msgspec",
    "multiprocessing",
    "numpy",
    "requests",
    "rich",
    "socket",
    "ssl",
    "threading",
    "torch",
    "typer",
    "uvloop",
    "zstandard",
]

PROBE = """
import sys
sys.path.insert(0, sys.argv[1])
import dataclasses, typing  # nearly all modules, whose number depends on the version of Python
before = set(sys.modules)
import aioflux
loaded = sorted(set(sys.modules) - before)
import json
print(json.dumps(loaded))
"""


@pytest.fixture(scope="module")
def loaded() -> list[str]:
    """Modules that `import aioflux` loads beyond those of `dataclasses` and `typing`.

    `-I -S` leaves out site-packages, and with them whatever start-up hooks measure coverage there,
    so that the count is the same on every machine.
    """
    command = [sys.executable, "-I", "-S", "-c", PROBE, str(ROOT)]
    return json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)


@pytest.mark.parametrize("name", HEAVY)
def test_import_leaves_out(name: str, loaded: list[str]) -> None:
    assert [module for module in loaded if module.split(".")[0] == name] == []


def test_import_loads_few_modules(loaded: list[str]) -> None:
    assert loaded == [
        "__future__",
        "aioflux",
        "aioflux._values",
        "aioflux._values.meta",
        "aioflux.errors",
        "aioflux.options",
        "math",
    ]
