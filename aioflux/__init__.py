"""Object storage for asyncio, with PyTorch datasets and checkpoints on top.

    async with aioflux.open_store("gs://bucket/prefix") as store:
        data = await store.get("a.bin")

Stores for blocking code are in `aioflux.sync`, datasets in `aioflux.data`, checkpoints in
`aioflux.checkpoint`, and servers for tests in `aioflux.testing`. These modules and the store are
imported on first use: `import aioflux` imports neither torch nor a cloud SDK.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

from aioflux._values.meta import CleanResult, DeleteResult, ObjectMeta, OpenUpload
from aioflux.errors import (
    AiofluxError,
    AlreadyExistsError,
    CheckpointCorruptError,
    CheckpointError,
    CheckpointNotFoundError,
    ChecksumError,
    CredentialsError,
    NotFoundError,
    PermissionDeniedError,
    PreconditionFailedError,
    RecordError,
    StorageError,
    TransientError,
    UnsupportedError,
)
from aioflux.options import (
    CleanupTimeouts,
    GCSAccess,
    RetryPolicy,
    S3Access,
    Timeouts,
    TransferOptions,
)

if TYPE_CHECKING:
    from aioflux import checkpoint as checkpoint
    from aioflux import data as data
    from aioflux import sync as sync
    from aioflux import testing as testing
    from aioflux._values.listing import Listing
    from aioflux._values.stats import LatencyHistogram, Progress, ProgressHook, StoreStats
    from aioflux.store import Store, open_store

__all__ = [
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
]

__version__ = "0.1.0"

_LAZY_NAMES = {
    "LatencyHistogram": "aioflux._values.stats",
    "Listing": "aioflux._values.listing",
    "Progress": "aioflux._values.stats",
    "ProgressHook": "aioflux._values.stats",
    "Store": "aioflux.store",
    "StoreStats": "aioflux._values.stats",
    "open_store": "aioflux.store",
}
_LAZY_MODULES = ("checkpoint", "data", "sync", "testing")

# `__getattr__` is hidden from type checkers, which would otherwise accept every name.
if not TYPE_CHECKING:

    def __getattr__(name: str) -> object:
        if name in _LAZY_NAMES:
            value = getattr(import_module(_LAZY_NAMES[name]), name)
        elif name in _LAZY_MODULES:
            value = import_module(f"aioflux.{name}")
        else:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}", name=name)
        globals()[name] = value
        return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__, *_LAZY_MODULES})
