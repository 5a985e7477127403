"""The functions of Nebula's API, from `init` to `shutdown`."""

from __future__ import annotations

import sys
from datetime import datetime
from importlib import import_module
from typing import TYPE_CHECKING, Any, Final, Unpack

from aioflux.compat.nebula import _training_run
from aioflux.compat.nebula._checkpoint import Checkpoint
from aioflux.compat.nebula._settings import parse_storage_path, path_or_uri, to_uri
from aioflux.compat.nebula._sources import StoreSource, find_all, find_tag, newest_valid
from aioflux.compat.nebula._storage_tier import STORAGE
from aioflux.errors import AiofluxError

if TYPE_CHECKING:
    import os

    from aioflux.compat.nebula._training_run import TrainingRun
    from aioflux.options import StoreOptions

    Path = str | os.PathLike[str] | tuple[str] | None


def init(
    persistent_storage_path: Path = None,
    persistent_time_interval: float | None = None,
    num_of_version_in_retention: int | None = None,
    *,
    local_storage_path: Path = None,
    memory_buffer_size: int | None = None,
    commit_seconds: float | None = None,
    **options: Unpack[StoreOptions],
) -> None:
    """Set the storage of checkpoints; all processes of a training pass the same arguments.

    The first call on a node starts the node daemon, which keeps checkpoints in memory and uploads
    them. The daemon exits ten minutes after the last process of the training, so that a training
    that is restarted earlier can load from the memory of the daemon.

    Args:
        persistent_storage_path: A uri such as `gs://bucket/run-7`, or a directory of the local disk
            or of NFS. Default: the environment variable NEBULA_PERSISTENT_STORAGE_PATH; if that is
            not set, checkpoints are only kept in memory.
        persistent_time_interval: Minimum number of seconds between two checkpoints that are saved
            to the persistent storage; 0 saves all. A checkpoint in between is kept only in memory
            and in `local_storage_path`, until newer checkpoints replace it. Default:
            NEBULA_PERSISTENT_TIME_INTERVAL, or 100.
        num_of_version_in_retention: Number of complete tags to keep in memory; 2 by default.
        local_storage_path: A directory of the node's own disk, in which the same number of tags is
            kept. Loads try it before the persistent storage. Default: NEBULA_LOCAL_STORAGE_PATH, or
            no directory.
        memory_buffer_size: Maximum memory for checkpoints of all processes of the node, in bytes. A
            part that does not fit is copied to disk. Default: NEBULA_MEMORY_BUFFER_SIZE, or 80 % of
            the node's memory.
        commit_seconds: Maximum time that ranks and nodes wait for each other; 600 by default.
        options: Options of `aioflux.open_store`: `transfer`, `retry`, `timeouts`, `credentials`,
            `endpoint_url` and `ssl_context`. It must be possible to pickle them.

    Raises:
        ValueError: A value is not a number, or a storage cannot be opened.
        TypeError: The credentials cannot be pickled.
    """
    arguments = {
        "persistent_storage_path": persistent_storage_path,
        "persistent_time_interval": persistent_time_interval,
        "num_of_version_in_retention": num_of_version_in_retention,
        "local_storage_path": local_storage_path,
        "memory_buffer_size": memory_buffer_size,
        "commit_seconds": commit_seconds,
    }
    _training_run.start(arguments, options).client.call("list_tags")


def list_checkpoints(persist_path: Path = None) -> dict[str, dict[str, Any]]:
    """Return a description of each complete tag, the newest first.

    Args:
        persist_path: Persistent storage to use instead of the one of `init`.

    Returns:
        The descriptions by tag. Each has the JSON values `tag`, `time` (RFC 3339), `size_bytes`,
        `files` (names of the parts) and `places` (the tiers that have the tag: `memory`, `disk`,
        `storage`).
    """
    run = _run_of(persist_path)
    listed: dict[str, dict[str, Any]] = {}
    for saved_tag in find_all(run.client, run.stores()):
        time = datetime.fromisoformat(f"{saved_tag.save_id.partition('Z')[0]}Z")
        description = {
            "tag": saved_tag.tag,
            "time": time.isoformat().replace("+00:00", "Z"),
            "size_bytes": saved_tag.size_bytes,
            "files": saved_tag.names,
            "places": [source.tier for source in saved_tag.sources],
        }
        listed.setdefault(saved_tag.tag, description)
    return listed


def get_checkpoint(tag: str, persist_path: Path = None) -> Checkpoint | None:
    """Return the checkpoint of a tag, or None if the tag has no complete checkpoint.

    Args:
        tag: Name of the checkpoint.
        persist_path: Persistent storage to use instead of the one of `init`.
    """
    run = _run_of(persist_path)
    saved_tag = newest_valid(find_tag(run.client, run.stores(), tag))
    return Checkpoint.of(run, saved_tag) if saved_tag is not None else None


def get_latest_checkpoint(persist_path: Path = None) -> Checkpoint | None:
    """Return the newest complete checkpoint of all tiers, or None if there is none.

    Args:
        persist_path: Persistent storage to use instead of the one of `init`.
    """
    run = _run_of(persist_path)
    saved_tag = newest_valid(find_all(run.client, run.stores()))
    return Checkpoint.of(run, saved_tag) if saved_tag is not None else None


def get_latest_checkpoint_path(name: str, persist_path: Path = None) -> str | None:
    """Return the path of the newest part of a given name in the persistent storage, or None.

    Before that, the newest checkpoint in memory is saved to the persistent storage.

    Args:
        name: Name of the part. `NebulaCheckpointIO` names its parts `checkpoint`.
        persist_path: Persistent storage to use instead of the one of `init`.

    Returns:
        A local path, for `torch.load`, or a uri, for `aioflux.checkpoint.load`.
    """
    run = _run_of(persist_path)
    run.client.call_if_running("flush", "")
    stores = [(tier, store) for tier, store in run.stores() if tier == STORAGE]
    for saved_tag in find_all(None, stores):
        if saved_tag.is_valid() and name in saved_tag.names:
            (source,) = saved_tag.sources
            assert isinstance(source, StoreSource)
            return path_or_uri(source.uri(name))
    return None


def flush_persistence(tag: str | None = None) -> None:
    """Save a tag to the persistent storage and the local disk, and wait until it is saved.

    Args:
        tag: Tag in memory; by default the newest.

    Raises:
        CheckpointError: The tag could not be saved, or is not in memory.
    """
    _training_run.current().client.call("flush", tag or "")


def shutdown() -> None:
    """Wait until the newest checkpoint is saved, and let the node daemon free its memory and exit.

    Without this call the node daemon exits ten minutes after the last trainer disconnects.

    Raises:
        CheckpointError: The newest checkpoint could not be saved.
    """
    failure: AiofluxError | None = None
    for run in _training_run.all_runs():
        try:
            run.client.call_if_running("flush", "")
        except AiofluxError as exc:
            failure = failure or exc
        try:
            run.client.stop()
        except AiofluxError as exc:
            failure = failure or exc
        _training_run.remove(run)
    if failure is not None:
        raise failure


def _run_of(persist_path: Path) -> TrainingRun:
    """Return the run of a storage path; for None, the current run."""
    path = parse_storage_path(persist_path)
    run = _training_run.current()
    return _training_run.run_at(path) if path and to_uri(path) != run.settings.uri else run


ALIASES: Final = ("torch_nebula", "nebulaml")
"""Names by which DeepSpeed and Nebula's manual import Nebula."""


def install_alias(*names: str) -> None:
    """Make `import torch_nebula` and `import nebulaml` import `aioflux.compat.nebula`.

    Call it before `deepspeed.initialize`, which imports `torch_nebula`.

    Args:
        names: Module names to install; both by default.

    Raises:
        ImportError: Another module of this name is already imported.
    """
    module = import_module("aioflux.compat.nebula")
    for name in names or ALIASES:
        existing = sys.modules.setdefault(name, module)
        if existing is not module:
            raise ImportError(f"{name} is imported already, from {existing!r}")
