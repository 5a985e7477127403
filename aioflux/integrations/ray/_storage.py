"""Storage of a run of Ray Train or Ray Tune: a pyarrow filesystem over aioflux, and its uri."""

from __future__ import annotations

from typing import Any, Unpack

import ray.train
from pyarrow.fs import FSSpecHandler, PyFileSystem  # type: ignore[import-untyped]

from aioflux._values.uri import local_uri, parse_uri
from aioflux.integrations.fsspec import (
    AiofluxFileSystem,
    AzureFileSystem,
    GSFileSystem,
    LocalFileSystem,
    S3FileSystem,
)
from aioflux.options import StoreOptions

_KINDS = {
    kind.scheme: kind for kind in (GSFileSystem, S3FileSystem, AzureFileSystem, LocalFileSystem)
}
_ARROW_SCHEMES = {"gcs": "gs", "s3": "s3", "local": "file"}
"""Schemes of the filesystems of pyarrow itself, by their type name."""


def storage_filesystem(uri: str, **options: Unpack[StoreOptions]) -> PyFileSystem:
    """Return a filesystem for `RunConfig(storage_filesystem=)` of Ray Train and Ray Tune.

        RunConfig(
            storage_path="bucket/runs",  # without "gs://"
            storage_filesystem=storage_filesystem("gs://bucket/runs"),
        )

    A file becomes visible as a whole when it is closed, by pyarrow also after an exception. Ray
    sends the filesystem to all nodes, without credentials: each node finds its own.

    Args:
        uri: Any uri with the scheme of the storage. The filesystem has paths such as `bucket/runs`,
            in all buckets.
        options: As for `aioflux.open_store`.

    Raises:
        ValueError: The uri is `memory://`, which no other process can read.
        TypeError: The options contain credentials, which are never pickled. Pass a function of a
            module that returns them.
    """
    kind = _KINDS.get(parse_uri(uri).scheme)
    if kind is None:
        raise ValueError(
            f"{uri!r} cannot be the storage of a run: use a uri with one of the schemes "
            f"{', '.join(_KINDS)}"
        )
    filesystem = kind(**options)
    filesystem.__reduce__()  # raises here, and not in Ray, if the options contain credentials
    return PyFileSystem(FSSpecHandler(filesystem))


def run_storage() -> Any:
    """Return the storage of the run; None in Ray's local mode."""
    try:
        return ray.train.get_context().get_storage()
    except NotImplementedError:
        return None


def find_storage(uri: str | None, settings: dict[str, Any]) -> tuple[str, Any, dict[str, Any]]:
    """Return the uri of the checkpoints, the filesystem by which Ray deletes them, and settings.

    Raises:
        ValueError: Ray does not accept checkpoints at `uri`.
    """
    if (storage := run_storage()) is None:
        if uri is None:
            raise ValueError("a run in Ray's local mode has no storage: pass RayCheckpointer(uri)")
        names = StoreOptions.__optional_keys__
        options: Any = {name: each for name, each in settings.items() if name in names}
        return uri, storage_filesystem(uri, **options), settings
    filesystem, path = storage.storage_filesystem, storage.experiment_fs_path
    inner = getattr(getattr(filesystem, "handler", None), "fs", None)
    ours = inner if isinstance(inner, AiofluxFileSystem) else None
    if ours is not None:
        settings = {**ours.options, **settings}
    scheme = ours.scheme if ours else _ARROW_SCHEMES.get(filesystem.type_name)
    if uri is None:
        if scheme is None:
            raise ValueError(
                f"the uri of {path!r} in the filesystem {filesystem.type_name!r} of the run is "
                "unknown: pass RayCheckpointer(uri), or set "
                "RunConfig(storage_filesystem=aioflux.integrations.ray.storage_filesystem(uri))"
            )
        uri = local_uri(path) if scheme == "file" else f"{scheme}://{path}"
    elif scheme not in {None, parse_uri(uri).scheme} or not f"{path_of(uri)}/".startswith(
        f"{path}/"
    ):
        directory = f"{scheme}://{path}" if scheme else path
        raise ValueError(
            f"Ray accepts only checkpoints below the directory of the run, {directory}, not {uri}: "
            "leave uri out, and set RunConfig(storage_path=..., "
            "storage_filesystem=aioflux.integrations.ray.storage_filesystem(...))"
        )
    return uri, filesystem, settings


def path_of(uri: str) -> str:
    """Return the path of a uri in its filesystem, without a slash at its end."""
    location = parse_uri(uri)
    bucket = f"{location.bucket}/" if location.bucket else ""
    return f"{bucket}{location.key}".rstrip("/")
