"""The functions of Nebula: `init`, list, find, flush, `shutdown`."""

from __future__ import annotations

import sys
from datetime import datetime
from importlib import import_module
from typing import TYPE_CHECKING, Any, Final

from aioflux.compat.nebula import _training_run
from aioflux.compat.nebula._checkpoint import Checkpoint
from aioflux.compat.nebula._settings import parse_storage_path, path_or_uri, to_uri
from aioflux.compat.nebula._sources import StoreSource, find_all, find_tag, newest_valid
from aioflux.compat.nebula._storage_tier import STORAGE
from aioflux.errors import AiofluxError

if TYPE_CHECKING:
    import os
    from typing import Unpack

    from aioflux.compat.nebula._training_run import TrainingRun
    from aioflux.options import StoreOptions

    Path = str | os.PathLike[str] | tuple[str] | None

__all__ = [
    "flush_persistence",
    "get_checkpoint",
    "get_latest_checkpoint",
    "get_latest_checkpoint_path",
    "init",
    "install_alias",
    "list_checkpoints",
    "shutdown",
]


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
    """Set the storage of checkpoints; all processes of a training call it with equal arguments.

    Starts a daemon on each node, unless it is running. The daemon keeps checkpoints in memory and
    saves them; it exits ten minutes after the training, which may be restarted meanwhile.

    Args:
        persistent_storage_path: A uri such as `gs://bucket/run-7`, or a path of the local disk or
            of NFS; the environment variable NEBULA_PERSISTENT_STORAGE_PATH by default. Without any
            of them checkpoints are kept in memory alone.
        persistent_time_interval: Least seconds between two checkpoints that are saved there; those
            in between are kept in memory until a newer one is complete. Default:
            NEBULA_PERSISTENT_TIME_INTERVAL, or 100; 0 saves all.
        num_of_version_in_retention: Complete tags to keep in memory; 2 by default.
        local_storage_path: A directory of the node's own disk, which keeps as many tags, and is
            searched before the persistent storage. Default: NEBULA_LOCAL_STORAGE_PATH, or none.
        memory_buffer_size: Bytes of memory of all processes of the node together. Default:
            NEBULA_MEMORY_BUFFER_SIZE, or four fifths of the node's memory. A part that does not
            fit is copied to the disk.
        commit_seconds: How long ranks and nodes wait for each other; 600 by default.
        options: `transfer`, `retry`, `timeouts`, `credentials`, `endpoint_url` and `ssl_context`,
            as `aioflux.open_store`; they must pickle.

    Raises:
        ValueError: A value is not a number, or a storage cannot be opened.
        TypeError: Credentials do not pickle.
    """
    given = {
        "persistent_storage_path": persistent_storage_path,
        "persistent_time_interval": persistent_time_interval,
        "num_of_version_in_retention": num_of_version_in_retention,
        "local_storage_path": local_storage_path,
        "memory_buffer_size": memory_buffer_size,
        "commit_seconds": commit_seconds,
    }
    _training_run.start(given, options).client.call("list_tags")


def list_checkpoints(persist_path: Path = None) -> dict[str, dict[str, Any]]:
    """Return all complete tags, the newest first, as JSON values.

    Args:
        persist_path: Another storage than that of `init`.

    Returns:
        By tag: `tag`, `time` (RFC 3339), `size_bytes`, `files` (names of the parts) and `places`
        (`memory`, `disk`, `storage`).
    """
    run = _run_of(persist_path)
    listed: dict[str, dict[str, Any]] = {}
    for found in find_all(run.client, run.stores()):
        moment = datetime.fromisoformat(f"{found.save_id.partition('Z')[0]}Z")
        description = {
            "tag": found.tag,
            "time": moment.isoformat().replace("+00:00", "Z"),
            "size_bytes": found.size_bytes,
            "files": found.names,
            "places": [source.tier for source in found.sources],
        }
        listed.setdefault(found.tag, description)
    return listed


def get_checkpoint(tag: str, persist_path: Path = None) -> Checkpoint | None:
    """Return the checkpoint of a tag; None if there is no complete one.

    Args:
        tag: The tag.
        persist_path: Another storage than that of `init`.
    """
    run = _run_of(persist_path)
    found = newest_valid(find_tag(run.client, run.stores(), tag))
    return Checkpoint.of(run, found) if found is not None else None


def get_latest_checkpoint(persist_path: Path = None) -> Checkpoint | None:
    """Return the newest complete checkpoint in memory or storage; None if there is none.

    Args:
        persist_path: Another storage than that of `init`.
    """
    run = _run_of(persist_path)
    found = newest_valid(find_all(run.client, run.stores()))
    return Checkpoint.of(run, found) if found is not None else None


def get_latest_checkpoint_path(name: str, persist_path: Path = None) -> str | None:
    """Return the path of the newest part of this name in the storage; None if there is none.

    The newest checkpoint in memory is saved first.

    Args:
        name: Name of the part; `checkpoint` for those of `NebulaCheckpointIO`.
        persist_path: Another storage than that of `init`.

    Returns:
        A path of the local disk, for `torch.load`, or a uri, for `aioflux.checkpoint.load`.
    """
    run = _run_of(persist_path)
    run.client.call_if_running("flush", "")
    for found in find_all(None, [each for each in run.stores() if each[0] == STORAGE]):
        if found.is_valid() and name in found.names:
            (source,) = found.sources
            assert isinstance(source, StoreSource)
            return path_or_uri(source.uri(name))
    return None


def flush_persistence(tag: str | None = None) -> None:
    """Save a tag, by default the newest, to the persistent storage, and wait for it.

    Args:
        tag: The tag.

    Raises:
        CheckpointError: It could not be saved, or is not in memory.
    """
    _training_run.current().client.call("flush", tag or "")


def shutdown() -> None:
    """Save the newest checkpoint, wait for it, and free the memory of the node.

    Without this call the node daemon exits ten minutes after the last trainer.

    Raises:
        CheckpointError: It could not be saved.
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
    """Return the run of a storage path; the current run without one."""
    path = parse_storage_path(persist_path)
    run = _training_run.current()
    return _training_run.run_at(path) if path and to_uri(path) != run.settings.uri else run


ALIASES: Final = ("torch_nebula", "nebulaml")
"""Names by which DeepSpeed and Nebula's own manual import it."""


def install_alias(*names: str) -> None:
    """Let `import torch_nebula` and `import nebulaml` import `aioflux.compat.nebula`.

    Call it before DeepSpeed builds its engine, which then finds its `torch_nebula`. If no line of
    the program can be changed, install the distribution `torch_nebula` of the source tree.

    Args:
        names: The names; both by default.

    Raises:
        ImportError: Another package of that name is imported already.
    """
    module = import_module("aioflux.compat.nebula")
    for name in names or ALIASES:
        existing = sys.modules.setdefault(name, module)
        if existing is not module:
            raise ImportError(f"{name} is imported already, from {existing!r}")
