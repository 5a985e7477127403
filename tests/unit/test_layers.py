"""Imports point down: a reading of every `import` below aioflux/, function bodies included.

What only a type checker reads (`if TYPE_CHECKING:`) must not point up either, but costs nothing at
run time and may therefore name a foreign library that its package does not load.
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

# Modules of checkpoint that the command line may import: none of them imports torch.
CHECKPOINT_FILES = (
    "checkpoint._format.commit checkpoint._store.steps checkpoint._store.copy "
    "checkpoint._store.history checkpoint._store.orphans checkpoint._store.retention "
    "checkpoint._store.retention_rules checkpoint._store.verify"
)
# What every service on the data plane is made of.
SERVICE_PARTS = (
    "_auth.redaction _services.base _services.http _services.responses _services.sender "
    "_services.xml_multipart _services.xml_reader"
)
STORE = "errors options _values.* store"
BLOCKING = f"{STORE} sync _bridge _files _store_cache"

MAY_IMPORT: dict[str, str] = {
    # from the ground up
    "errors": "",
    "_values": "errors",
    "options": "_values.stats",
    "_concurrency": "",
    "_local_files": "",
    "_http": "options _values.checksums",
    "_auth": (
        "errors options _values.distribution _concurrency.fork_safe_lock _concurrency.single_flight"
    ),
    "_services": (
        "errors options _values.* _http _auth.access_token _auth.redaction "
        "_auth.google _auth.aws _auth.azure "
        "_services.gcs.service _services.s3.service _services.azure.service "
        "_services.local.service"
    ),
    "_services.gcs": f"errors options _values.* _http _auth.google {SERVICE_PARTS}",
    "_services.s3": f"errors options _values.* _http _auth.aws _auth.sigv4 {SERVICE_PARTS}",
    "_services.azure": f"errors options _values.* _http _auth.azure {SERVICE_PARTS}",
    "_services.local": "_local_files errors _values.* _http.memory _services.base",
    "_transfer": (
        "_local_files errors options _values.* _concurrency.* _http _http.memory _services.base"
    ),
    "store": ("errors options _values.* _concurrency.* _services.base _services.open _transfer.*"),
    "_bridge": "store _concurrency.* _transfer.session",
    "_files": "_bridge store _values.*",
    "_store_cache": "",
    "sync": f"{STORE} _bridge _transfer.read_plan",
    # upon the store
    "data": BLOCKING,
    "checkpoint._format": "errors _values.checksums _values.distribution",
    "checkpoint._store": f"{STORE} _concurrency.* _transfer.retry checkpoint._format.*",
    "checkpoint._save": (
        f"{BLOCKING} _concurrency.* _transfer.prefault checkpoint._require_torch "
        "checkpoint._format.* checkpoint._store.*"
    ),
    "checkpoint._load": (
        f"{BLOCKING} _concurrency.* _transfer.prefault checkpoint._require_torch "
        "checkpoint.compression checkpoint._format.* checkpoint._store.*"
    ),
    "checkpoint.dcp": (
        f"{BLOCKING} _concurrency.* checkpoint._require_torch checkpoint.compression "
        "checkpoint._format.* checkpoint._store.* checkpoint._save.* checkpoint._load.*"
    ),
    "checkpoint": (
        f"{BLOCKING} _concurrency.fan_out checkpoint._format.* checkpoint._store.* "
        "checkpoint._save.* checkpoint._load.* checkpoint.dcp.*"
    ),
    # over the interfaces of others
    "integrations": "",
    "integrations.fsspec": f"{BLOCKING} _concurrency.fan_out",
    "integrations.lightning": (
        f"{BLOCKING} checkpoint checkpoint.dcp checkpoint._tag_checkpoints integrations.fsspec"
    ),
    "integrations.deepspeed": f"{BLOCKING} checkpoint checkpoint._tag_checkpoints",
    "integrations.opentelemetry": (
        f"{STORE} aioflux _concurrency.async_iteration _http _transfer.get_many _transfer.read "
        "_transfer.session _transfer.small_read_loop"
    ),
    "integrations.ray": (
        f"{BLOCKING} data data._records.* data._sample checkpoint checkpoint._format.commit "
        "checkpoint._store.history checkpoint._store.steps integrations.fsspec"
    ),
    "compat": "",
    "compat.dataflux": (
        f"{BLOCKING} data data._store_reader checkpoint checkpoint.dcp integrations.lightning "
        "integrations.lightning._uris"
    ),
    "compat.nebula": (
        f"{BLOCKING} checkpoint checkpoint._tag_checkpoints checkpoint._save.process_uploader"
    ),
    "compat.s3_datapipes": f"{BLOCKING} data._error_policy data._object_stream data._store_reader",
    "testing": f"{STORE} sync _services.base _services.open testing.gcs_server.*",
    "testing.gcs_server": "errors _values.*",
    # the front door and the command line
    "aioflux": f"{STORE} sync data checkpoint testing",
    "cli": (
        f"{STORE} aioflux _concurrency.* _local_files {CHECKPOINT_FILES} testing testing._process "
        "testing.gcs_server.* _auth.access_token _services.http _services.sender"
    ),
}
"""What each package may import beside itself: a module, or with `.*` all of a package."""

ONLY_IN: dict[str, tuple[str, ...]] = {
    "threading": (
        "_bridge",
        "_concurrency.fork_safe_lock",
        "_concurrency.loop_threads",
        "checkpoint._save.staging",
        "testing",
        "cli",
    ),
    "_thread": ("_bridge", "testing", "cli"),
    "os.register_at_fork": ("_bridge", "testing.gcs_server._fork"),
    "ray": ("integrations.ray",),
    "torch": ("data", "checkpoint", "integrations", "compat", "cli"),
    "aiohttp": ("_auth",),
    "gcloud": ("_auth", "_services.gcs"),
    "google.auth": ("_auth",),
    "botocore": ("_auth", "_services.s3"),
    "cryptography": ("testing.gcs_server._tls",),
    "azure": ("_auth", "_services.azure"),
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


def package_of(module: str) -> str:
    """The entry of the table that a module of ours belongs to: the longest that it is below."""
    within = module.removeprefix("aioflux").lstrip(".")
    if not within:
        return "aioflux"
    if within == "__main__":
        return "cli"
    parts = within.split(".")
    names = (".".join(parts[:end]) for end in range(len(parts), 0, -1))
    return next((name for name in names if name in MAY_IMPORT), parts[0])


def may_import(package: str, name: str) -> bool:
    """Whether the table lets a package import a module of ours."""
    within = name.removeprefix("aioflux").lstrip(".") or "aioflux"
    for allowed in MAY_IMPORT[package].split():
        above = allowed.removesuffix(".*")
        if within == above or (allowed != above and is_below(within, above)):
            return True
    return False


def is_below(name: str, ancestor: str) -> bool:
    return name == ancestor or name.startswith(f"{ancestor}.")


def complaints(module: str, use: Use) -> Iterator[str]:
    """What is wrong with one use of one module."""
    package, within = package_of(module), module.removeprefix("aioflux.")
    if is_below(use.name, "aioflux"):
        if package_of(use.name) != package and not may_import(package, use.name):
            yield f"{package} may not import {use.name.removeprefix('aioflux.')}"
        return
    if not use.runs:
        return
    for foreign, packages in ONLY_IN.items():
        if is_below(use.name, foreign) and not within.startswith(packages):
            yield f"only {', '.join(packages)} may load {foreign}"
    top = use.name.split(".")[0]
    if package == "testing.gcs_server" and top not in STANDALONE | sys.stdlib_module_names:
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
        if package_of(module) not in MAY_IMPORT:
            found.append(f"{where}:1: the table has no package for this module")
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
    """Return a function that writes one module into an empty package and says what is wrong."""

    package = tmp_path / "aioflux"

    def write(name: str, source: str) -> list[str]:
        for path in ("__init__.py", "errors.py", "store.py", "sync.py", "_http/pool.py", name):
            (package / path).parent.mkdir(parents=True, exist_ok=True)
            (package / path).touch()
        (package / name).write_text(source, encoding="utf-8")
        return violations(package)

    return write


@pytest.mark.parametrize(
    ("name", "source", "says"),
    [
        ("_values/uri.py", "import aioflux.store", "_values may not import store"),
        (
            "_http/pool.py",
            "from aioflux._auth.google import x",
            "_http may not import _auth.google",
        ),
        ("_auth/google.py", "from aioflux._http import Pool", "_auth may not import _http"),
        (
            "_services/gcs/service.py",
            "from aioflux._transfer import x",
            "_services.gcs may not import _transfer",
        ),
        ("store.py", "from aioflux import sync", "store may not import sync"),
        ("store.py", "from aioflux import Store", "store may not import aioflux"),
        ("store.py", "from . import sync", "store may not import sync"),
        ("_http/pool.py", "from ..store import Store", "_http may not import store"),
        ("_http/__init__.py", "from ..store import Store", "_http may not import store"),
        ("store.py", "def f():\n    from aioflux.sync import g", "store may not import sync"),
        ("store.py", "import_module('aioflux.sync')", "store may not import sync"),
        ("store.py", "importlib.import_module('aioflux.sync')", "store may not import sync"),
        (
            "store.py",
            "if TYPE_CHECKING:\n    from aioflux.sync import SyncStore",
            "store may not import sync",
        ),
        ("data/_map_dataset.py", "import aioflux.checkpoint", "data may not import checkpoint"),
        ("checkpoint/_dcp.py", "import aioflux._transfer", "checkpoint may not import _transfer"),
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
        ("_services/s3/service.py", "import aiohttp", "may load aiohttp"),
        ("_http/pool.py", "from gcloud.aio.storage import Storage", "may load gcloud"),
        ("store.py", "from google import auth", "may load google.auth"),
        ("plumbing.py", "", "the table has no package for this module"),
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
        ("store.py", "from aioflux.errors import StorageError\nimport aioflux._transfer.list"),
        ("store.py", "from aioflux import errors"),
        ("_http/pool.py", "from aioflux._http import _codec\nfrom . import _codec"),
        ("store.py", "if TYPE_CHECKING:\n    import threading"),
        ("_bridge.py", "import os, threading\nos.register_at_fork()"),
        ("_services/gcs/control.py", "import gcloud.aio.storage"),
        ("compat/nebula.py", "import torch\nimport aioflux.checkpoint"),
        ("testing/gcs_server/_app.py", "import httptools, threading\nimport google_crc32c"),
        ("cli.py", "import aioflux\nfrom aioflux.testing import GCSServer"),
        ("__main__.py", "from aioflux.cli import main"),
    ],
)
def test_the_reading_lets_pass(plant: Plant, name: str, source: str) -> None:
    assert plant(name, source) == []


def test_no_module_imports_an_underscored_name_of_another() -> None:
    """What a module offers to others has no underscore; its private modules list no `__all__`."""
    found = [
        f"{path.relative_to(PACKAGE)}: {node.module}.{each.name}"
        for path in PACKAGE.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("aioflux")
        for each in node.names
        if each.name.startswith("_")
        and not each.name.endswith("__")
        and not is_module(f"{node.module}.{each.name}")
    ]
    assert found == []


def is_module(name: str) -> bool:
    path = PACKAGE.parent.joinpath(*name.split("."))
    return path.is_dir() or path.with_suffix(".py").exists()
