"""gcsfs, imported with the settings of the benchmarks."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

# Read when gcsfs is imported. Without it, gcsfs requests the bucket type over gRPC, for a minute.
os.environ["GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT"] = "false"

import gcsfs  # type: ignore[import-untyped]

if TYPE_CHECKING:
    from perf.work import Work

__all__ = ["open_filesystem"]


def open_filesystem(work: Work, **options: Any) -> Any:
    """Return a file system with the address of the server, without credentials."""
    return gcsfs.GCSFileSystem(token="anon", endpoint_url=work.url, cache_timeout=0, **options)  # noqa: S106
