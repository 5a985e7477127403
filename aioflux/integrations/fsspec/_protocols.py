"""One filesystem class for each scheme, and the registration of the classes with fsspec."""

from __future__ import annotations

from collections.abc import Sequence

from fsspec.registry import register_implementation  # type: ignore[import-untyped]

from aioflux.integrations.fsspec._filesystem import AiofluxFileSystem


class GSFileSystem(AiofluxFileSystem):
    """`aiogs://bucket/key`: Google Cloud Storage."""

    scheme = "gs"
    protocol = ("aiogs", "gs", "gcs")


class S3FileSystem(AiofluxFileSystem):
    """`aios3://bucket/key`: S3, and with `endpoint_url` any service with the S3 API."""

    scheme = "s3"
    protocol = ("aios3", "s3", "s3a")


class AzureFileSystem(AiofluxFileSystem):
    """`aioaz://account/container/key`: Azure Blob Storage."""

    scheme = "az"
    protocol = ("aioaz", "az")


class LocalFileSystem(AiofluxFileSystem):
    """`aiofile:///directory/key`: local files, which become visible whole, as objects do."""

    scheme = "file"
    protocol = ("aiofile", "file")
    root_marker = "/"


class MemoryFileSystem(AiofluxFileSystem):
    """`aiomemory://bucket/key`: objects in the memory of this process."""

    scheme = "memory"
    protocol = ("aiomemory", "memory")


_CLOUDS = (GSFileSystem, S3FileSystem, AzureFileSystem)

_REPLACEABLE = {name: kind for kind in _CLOUDS for name in kind.protocol[1:]}
"""Protocols of gcsfs, s3fs and adlfs that `register` can replace. `file` and `memory` cannot be
replaced: fsspec itself needs a filesystem that has empty directories."""


def register(*, replace: Sequence[str] = ()) -> None:
    """Register `aiogs`, `aios3`, `aioaz`, `aiofile` and `aiomemory` with fsspec.

    If aioflux is installed, fsspec finds these protocols without this call.

    Args:
        replace: Protocols of other filesystems that aioflux serves from now on: any of "gs", "gcs",
            "s3", "s3a" and "az". All libraries in this process that open their urls through fsspec
            then use aioflux. Urls of "az" must begin with the account.

    Raises:
        TypeError: `replace` is a string.
        ValueError: A protocol cannot be replaced. No protocol is registered then.
    """
    if isinstance(replace, str):
        raise TypeError(f'replace must be a tuple of protocols; write ("{replace}",)')
    unknown = [name for name in replace if name not in _REPLACEABLE]
    if unknown:
        known = ", ".join(_REPLACEABLE)
        raise ValueError(f"aioflux can replace {known}, not {unknown[0]!r}")
    for kind in (*_CLOUDS, LocalFileSystem, MemoryFileSystem):
        register_implementation(kind.protocol[0], kind, clobber=True)
    for name in replace:
        register_implementation(name, _REPLACEABLE[name], clobber=True)
