"""Imports point down: a reading of every `import` below aioflux/, function bodies included.

What only a type checker reads (`if TYPE_CHECKING:`) must not point up either, but costs nothing at
run time and may therefore name a foreign library that its room does not load.
"""

from __future__ import annotations

import ast
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    Plant = Callable[[str, str], list[str]]

PACKAGE = Path(__file__).parents[2] / "aioflux"

GROUND = {
    "_access",
    "_arguments",
    "_checksums",
    "_columns",
    "_errors",
    "_listing",
    "_meta",
    "_policy",
    "_stats",
    "_uri",
}
CORE = ("ground", "http", "auth", "service", "transfer", "store", "bridge", "sync", "_files")
FACE = {"ground", "store", "bridge", "sync", "_files"}

MAY_IMPORT: dict[str, set[str]] = {
    **{room: set(CORE[:floor]) for floor, room in enumerate(CORE)},
    "auth": {"ground"},  # on the same floor as http
    "data": FACE,
    "checkpoint": FACE,
    "integrations": FACE | {"data", "checkpoint"},
    "compat": FACE | {"data", "checkpoint", "integrations"},
    "testing": {"ground", "service", "store", "sync", "testing.gcs_server"},
    "testing.gcs_server": {"ground"},
    # The front door and the command line see everything.
    "aioflux": {*CORE, "data", "checkpoint", "testing"},
    "cli": {
        *CORE,
        "aioflux",
        "data",
        "checkpoint",
        "integrations",
        "compat",
        "testing",
        "testing.gcs_server",
    },
}
"""Rooms that each room may import, apart from itself."""

ONLY_IN: dict[str, tuple[str, ...]] = {
    "threading": ("bridge", "testing", "cli"),
    "_thread": ("bridge", "testing", "cli"),
    "os.register_at_fork": ("bridge", "testing.gcs_server._fork"),
    "torch": ("data", "checkpoint", "integrations", "compat", "cli"),
    "aiohttp": ("http", "auth", "service._gcs"),
    "gcloud": ("auth", "service._gcs"),
    "google.auth": ("auth",),
    "botocore": ("auth", "service._s3"),
    "cryptography": ("testing.gcs_server._tls",),
    "azure": ("auth", "service._azure"),
}
"""Beginnings of the names of the modules that may load a foreign module."""

STANDALONE = {"cryptography", "httptools", "google_crc32c", "msgspec", "uvloop"}
"""What the server in testing/ may load beside the standard library: it must not share a mistake
with the code that it tests."""


@dataclass(frozen=True)
class Use:
    """One module named by one line."""

    name: str
    line: int
    runs: bool
    """Whether the line runs; False below `if TYPE_CHECKING:`."""


def uses(tree: ast.Module, module: str, *, is_package: bool, ours: set[str]) -> Iterator[Use]:
    """Every module that a module names in an import, in `import_module` or as a fork hook."""
    pending: list[tuple[ast.AST, bool]] = [(tree, True)]
    while pending:
        node, runs = pending.pop()
        for name in named_by(node, module, is_package=is_package, ours=ours):
            yield Use(name, node.lineno, runs)
        if isinstance(node, ast.If) and "TYPE_CHECKING" in {
            getattr(node.test, "id", None),
            getattr(node.test, "attr", None),
        }:
            pending += [(child, False) for child in node.body]
            pending += [(child, runs) for child in node.orelse]
        else:
            pending += [(child, runs) for child in ast.iter_child_nodes(node)]


def named_by(node: ast.AST, module: str, *, is_package: bool, ours: set[str]) -> list[str]:
    match node:
        case ast.Import(names=aliases):
            return [alias.name for alias in aliases]
        case ast.ImportFrom(names=aliases):
            base = absolute(node, module, is_package=is_package)
            return [
                f"{base}.{alias.name}"
                if base.split(".")[0] != "aioflux" or f"{base}.{alias.name}" in ours
                else base
                for alias in aliases
            ]
        case ast.Attribute(value=ast.Name(id="os"), attr="register_at_fork"):
            return ["os.register_at_fork"]
        case ast.Call(args=[ast.Constant(value=str(name)), *_]) if called(node) in {
            "import_module",
            "__import__",
        }:
            return [name]
    return []


def called(node: ast.Call) -> str:
    return getattr(node.func, "id", "") or getattr(node.func, "attr", "")


def absolute(node: ast.ImportFrom, module: str, *, is_package: bool) -> str:
    if not node.level:
        return node.module or ""
    parts = module.split(".")
    base = parts[: len(parts) - node.level + is_package]
    return ".".join([*base, *([node.module] if node.module else [])])


def room_of(module: str) -> str:
    """The room that a module of ours is in."""
    _, *parts = module.split(".")
    if not parts:
        return "aioflux"
    if parts[0] in GROUND:
        return "ground"
    if parts[0] == "__main__":
        return "cli"
    if parts[:2] == ["testing", "gcs_server"]:
        return "testing.gcs_server"
    return parts[0]


def is_below(name: str, ancestor: str) -> bool:
    return name == ancestor or name.startswith(f"{ancestor}.")


def complaints(module: str, use: Use) -> Iterator[str]:
    """What is wrong with one use of one module."""
    room, within = room_of(module), module.removeprefix("aioflux.")
    if is_below(use.name, "aioflux"):
        target = room_of(use.name)
        if target != room and target not in MAY_IMPORT[room]:
            yield f"{room} may not import {target} ({use.name})"
        return
    if not use.runs:
        return
    for foreign, rooms in ONLY_IN.items():
        if is_below(use.name, foreign) and not within.startswith(rooms):
            yield f"only {', '.join(rooms)} may load {foreign}"
    top = use.name.split(".")[0]
    if room == "testing.gcs_server" and top not in STANDALONE | sys.stdlib_module_names:
        yield f"the server may not load {top}"


def violations(package: Path) -> list[str]:
    """Lines below a package that break the plan, as `file:line: what`."""
    files = {}
    for file in sorted(package.rglob("*.py")):
        parts = ["aioflux", *file.relative_to(package).with_suffix("").parts]
        files[file] = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
    ours = set(files.values())
    found = []
    for file, module in files.items():
        where = file.relative_to(package.parent).as_posix()
        if room_of(module) not in MAY_IMPORT:
            found.append(f"{where}:1: no room of the plan has this module")
            continue
        tree = ast.parse(file.read_text(encoding="utf-8"))
        is_package = file.stem == "__init__"
        for use in uses(tree, module, is_package=is_package, ours=ours):
            found += [f"{where}:{use.line}: {text}" for text in complaints(module, use)]
    return sorted(found)


def test_no_import_points_up_or_sideways() -> None:
    assert violations(PACKAGE) == []


@pytest.fixture
def plant(tmp_path: Path) -> Plant:
    """Return a function that writes one module into an empty house and says what is wrong."""

    package = tmp_path / "aioflux"

    def write(name: str, source: str) -> list[str]:
        for path in ("__init__.py", "_errors.py", "store.py", "sync.py", "http/_pool.py", name):
            (package / path).parent.mkdir(parents=True, exist_ok=True)
            (package / path).touch()
        (package / name).write_text(source, encoding="utf-8")
        return violations(package)

    return write


@pytest.mark.parametrize(
    ("name", "source", "says"),
    [
        ("_uri.py", "import aioflux.store", "ground may not import store"),
        ("http/_pool.py", "from aioflux.auth._google import x", "http may not import auth"),
        ("auth/_google.py", "from aioflux.http import Pool", "auth may not import http"),
        ("service/_gcs.py", "from aioflux.transfer import x", "service may not import transfer"),
        ("store.py", "from aioflux import sync", "store may not import sync"),
        ("store.py", "from aioflux import Store", "store may not import aioflux"),
        ("store.py", "from . import sync", "store may not import sync"),
        ("http/_pool.py", "from ..store import Store", "http may not import store"),
        ("http/__init__.py", "from ..store import Store", "http may not import store"),
        ("store.py", "def f():\n    from aioflux.sync import g", "store may not import sync"),
        ("store.py", "import_module('aioflux.sync')", "store may not import sync"),
        ("store.py", "importlib.import_module('aioflux.sync')", "store may not import sync"),
        (
            "store.py",
            "if TYPE_CHECKING:\n    from aioflux.sync import SyncStore",
            "store may not import sync",
        ),
        ("data/_map.py", "import aioflux.checkpoint", "data may not import checkpoint"),
        ("checkpoint/_dcp.py", "import aioflux.transfer", "checkpoint may not import transfer"),
        ("store.py", "import aioflux.testing", "store may not import testing"),
        ("testing/faults.py", "import aioflux.data", "testing may not import data"),
        (
            "testing/gcs_server/_app.py",
            "import aioflux.store",
            "testing.gcs_server may not import store",
        ),
        ("testing/gcs_server/_app.py", "import numpy", "the server may not load numpy"),
        ("sync.py", "import threading", "may load threading"),
        ("sync.py", "from threading import Lock", "may load threading"),
        ("sync.py", "def f():\n    import threading", "may load threading"),
        ("sync.py", "import os\nos.register_at_fork()", "may load os.register_at_fork"),
        ("sync.py", "from os import register_at_fork", "may load os.register_at_fork"),
        ("store.py", "import torch.utils", "may load torch"),
        ("service/_s3.py", "import aiohttp", "may load aiohttp"),
        ("http/_pool.py", "from gcloud.aio.storage import Storage", "may load gcloud"),
        ("store.py", "from google import auth", "may load google.auth"),
        ("plumbing.py", "", "no room of the plan has this module"),
    ],
)
def test_the_reading_catches(plant: Plant, name: str, source: str, says: str) -> None:
    found = plant(name, source)
    assert len(found) == 1
    assert found[0].startswith(f"aioflux/{name}:")
    assert says in found[0]


@pytest.mark.parametrize(
    ("name", "source"),
    [
        ("__init__.py", "if TYPE_CHECKING:\n    from aioflux.store import Store"),
        ("store.py", "from aioflux._errors import StorageError\nimport aioflux.http._pool"),
        ("store.py", "from aioflux import _errors"),
        ("http/_pool.py", "from aioflux.http import _codec\nfrom . import _codec"),
        ("store.py", "if TYPE_CHECKING:\n    import threading"),
        ("bridge.py", "import os, threading\nos.register_at_fork()"),
        ("service/_gcs_control.py", "import aiohttp\nimport gcloud.aio.storage"),
        ("compat/nebula.py", "import torch\nimport aioflux.integrations"),
        ("testing/gcs_server/_app.py", "import httptools, threading\nimport google_crc32c"),
        ("cli.py", "import aioflux\nfrom aioflux.testing import GCSServer"),
        ("__main__.py", "from aioflux.cli import main"),
    ],
)
def test_the_reading_lets_pass(plant: Plant, name: str, source: str) -> None:
    assert plant(name, source) == []
