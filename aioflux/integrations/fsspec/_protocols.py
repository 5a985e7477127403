"""Filesystems by scheme, and their registration with fsspec."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fsspec.registry import register_implementation  # type: ignore[import-untyped]

from aioflux.integrations.fsspec._filesystem import AiofluxFileSystem

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = [
    "AzureFileSystem",
    "GSFileSystem",
    "LocalFileSystem",
    "MemoryFileSystem",
    "S3FileSystem",
    "register",
]


class GSFileSystem(AiofluxFileSystem):
    """`aiogs://bucket/key`: Google Cloud Storage."""

    scheme = "gs"
    protocol = ("aiogs", "aioflux+gs", "gs", "gcs")


class S3FileSystem(AiofluxFileSystem):
    """`aios3://bucket/key`: S3, and services that speak its protocol at an `endpoint_url`."""

    scheme = "s3"
    protocol = ("aios3", "aioflux+s3", "s3", "s3a")


class AzureFileSystem(AiofluxFileSystem):
    """`aioaz://account/container/key`: Azure Blob Storage."""

    scheme = "az"
    protocol = ("aioaz", "aioflux+az", "az")


class LocalFileSystem(AiofluxFileSystem):
    """`aiofile:///directory/key`: local files, which appear whole as objects do."""

    scheme = "file"
    protocol = ("aiofile", "aioflux+file", "file")
    root_marker = "/"


class MemoryFileSystem(AiofluxFileSystem):
    """`aiomemory://bucket/key`: objects in the memory of this process."""

    scheme = "memory"
    protocol = ("aiomemory", "aioflux+memory", "memory")


_CLOUDS = (GSFileSystem, S3FileSystem, AzureFileSystem)

_REPLACEABLE = {name: kind for kind in _CLOUDS for name in kind.protocol[2:]}
"""Plain protocols that aioflux may replace; its `az` urls name the account first. fsspec relies on
its own `file` and `memory`, whose directories exist by themselves."""


def register(*, replace: Sequence[str] = ()) -> None:
    """Register `aiogs`, `aios3`, `aioaz`, `aiofile` and `aiomemory` with fsspec.

    fsspec finds these in an installed aioflux without this call. `aioflux+gs` and the others with
    a `+` are registered, too, but some libraries take only letters and digits for a scheme.

    Args:
        replace: Plain protocols to be served by aioflux from now on, of "gs", "gcs", "s3", "s3a"
            and "az": any library of this process that opens such urls through fsspec then uses it.

    Raises:
        TypeError: `replace` is one string.
        ValueError: A protocol cannot be replaced; nothing is registered then.
    """
    if isinstance(replace, str):
        raise TypeError(f'replace takes several protocols; write ("{replace}",)')
    unknown = [name for name in replace if name not in _REPLACEABLE]
    if unknown:
        known = ", ".join(_REPLACEABLE)
        raise ValueError(f"aioflux can replace {known}, not {unknown[0]!r}")
    for kind in (*_CLOUDS, LocalFileSystem, MemoryFileSystem):
        for name in kind.protocol[:2]:
            register_implementation(name, kind, clobber=True)
    for name in replace:
        register_implementation(name, _REPLACEABLE[name], clobber=True)
