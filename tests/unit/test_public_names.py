"""The public names are exactly those listed, and every public module lists its own."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

import aioflux

if TYPE_CHECKING:
    from types import ModuleType

PUBLIC = {
    "AiofluxError",
    "AlreadyExistsError",
    "CheckpointCorruptError",
    "CheckpointError",
    "CheckpointNotFoundError",
    "ChecksumError",
    "CleanResult",
    "CleanupTimeouts",
    "CredentialsError",
    "DeleteResult",
    "GCSAccess",
    "LatencyHistogram",
    "Listing",
    "NotFoundError",
    "ObjectMeta",
    "OpenUpload",
    "PermissionDeniedError",
    "PreconditionFailedError",
    "Progress",
    "ProgressHook",
    "RecordError",
    "RetryPolicy",
    "S3Access",
    "StorageError",
    "Store",
    "StoreStats",
    "Timeouts",
    "TransferOptions",
    "TransientError",
    "UnsupportedError",
    "__version__",
    "open_store",
}

PACKAGE = Path(aioflux.__file__).parent


def public_modules() -> list[str]:
    """Names of all modules whose path has no underscore in front; found without importing any."""
    found = []
    for file in sorted(PACKAGE.rglob("*.py")):
        parts = ("aioflux", *file.relative_to(PACKAGE).with_suffix("").parts)
        parts = parts[:-1] if parts[-1] == "__init__" else parts
        if not any(part.startswith("_") for part in parts):
            found.append(".".join(parts))
    return found


def in_order(name: str) -> tuple[int, str]:
    """Constants, then classes, then the rest: the order that ruff keeps."""
    return (0 if name.isupper() else 1 if name[0].isupper() else 2, name)


def load(name: str) -> ModuleType:
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is None or error.name.split(".")[0] == "aioflux":
            raise
        pytest.skip(f"{error.name}, which an extra brings, is not installed")


def test_the_public_names_are_exactly_these() -> None:
    assert set(aioflux.__all__) == PUBLIC


def test_a_name_that_is_not_there_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="'aioflux' has no attribute 'open_shop'"):
        _ = aioflux.open_shop


def test_dir_shows_what_loads_on_first_use() -> None:
    assert {"Store", "open_store", "checkpoint", "data", "sync", "testing"} <= set(dir(aioflux))


@pytest.mark.parametrize("name", ["checkpoint", "data", "sync", "testing"])
def test_a_room_is_an_attribute_of_the_package(name: str) -> None:
    module = load(f"aioflux.{name}")
    assert getattr(aioflux, name) is module


@pytest.mark.parametrize("name", public_modules())
def test_all_is_sorted_and_resolves(name: str) -> None:
    module = load(name)
    listed = getattr(module, "__all__", None)
    if listed is None:
        assert [key for key, value in vars(module).items() if is_public(key, value, name)] == []
        return
    assert list(listed) == sorted(listed, key=in_order)
    assert [key for key in listed if not hasattr(module, key)] == []


def is_public(key: str, value: object, module: str) -> bool:
    return not key.startswith("_") and getattr(value, "__module__", None) == module
