"""`import aioflux` costs little: no event loop, no cloud SDK, no torch, few modules."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

BUDGET = 56
"""48 modules on CPython 3.11, of which dataclasses and typing bring nearly all; the rest is for
what other versions of Python split off."""

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
before = set(sys.modules)
import aioflux
loaded = sorted(set(sys.modules) - before)
import json
print(json.dumps(loaded))
"""


@pytest.fixture(scope="module")
def loaded() -> list[str]:
    """Modules that `import aioflux` loads beyond those of a bare interpreter.

    `-I -S` leaves out site-packages, and with them whatever start-up hooks measure coverage there,
    so that the count is the same on every machine.
    """
    command = [sys.executable, "-I", "-S", "-c", PROBE, str(ROOT)]
    return json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)


@pytest.mark.parametrize("name", HEAVY)
def test_import_leaves_out(name: str, loaded: list[str]) -> None:
    assert [module for module in loaded if module.split(".")[0] == name] == []


def test_import_keeps_within_the_budget(loaded: list[str]) -> None:
    assert len(loaded) <= BUDGET, loaded


def test_the_lazy_names_are_those_that_would_cost(loaded: list[str]) -> None:
    ours = [module for module in loaded if module.split(".")[0] == "aioflux"]
    assert ours == [
        "aioflux",
        "aioflux._values",
        "aioflux._values.meta",
        "aioflux.errors",
        "aioflux.options",
    ]
