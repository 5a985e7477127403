"""The functions of Nebula: begin, list, find, flush."""

from __future__ import annotations

from datetime import datetime
from typing import TYPE_CHECKING, Any

from aioflux.checkpoint._format.commit import part_key
from aioflux.checkpoint._store.commits import uri_below
from aioflux.checkpoint._store.tag_names import quote_name
from aioflux.compat.nebula import _run
from aioflux.compat.nebula._checkpoint import Checkpoint
from aioflux.compat.nebula._sources import find_all, find_tag, newest_valid
from aioflux.compat.nebula._uris import name_of, place_of, to_uri
from aioflux.errors import AiofluxError

if TYPE_CHECKING:
    import os
    from typing import Unpack

    from aioflux.compat.nebula._client import Client
    from aioflux.compat.nebula._run import Run
    from aioflux.options import StoreOptions
    from aioflux.store import Store

    Path = str | os.PathLike[str] | tuple[str] | None

__all__ = [
    "flush_persistence",
    "get_checkpoint",
    "get_latest_checkpoint",
    "get_latest_checkpoint_path",
    "init",
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
    """Say where checkpoints are kept; every process of a training calls it with the same.

    Starts a process on each node, where there is none yet: it holds checkpoints in memory, saves
    them, and outlives the training by ten minutes, for the one that is started next.

    Args:
        persistent_storage_path: A uri such as `gs://bucket/run-7`, or a path of the local disk or
            of NFS; the environment variable NEBULA_PERSISTENT_STORAGE_PATH by default. Without any
            of them checkpoints are kept in memory alone.
        persistent_time_interval: Seconds between two checkpoints that are saved there; what comes
            between stays in memory until something newer does. NEBULA_PERSISTENT_TIME_INTERVAL,
            or 100, by default; 0 saves all.
        num_of_version_in_retention: Complete tags that memory keeps; 2 by default.
        local_storage_path: A directory of the node's own disk, which keeps as many, too, and is
            loaded from before the persistent storage; NEBULA_LOCAL_STORAGE_PATH by default, and no
            disk without.
        memory_buffer_size: Bytes of memory of all processes of the node together;
            NEBULA_MEMORY_BUFFER_SIZE, or 4 fifths of what the node has, by default. A part for
            which there is no room is copied to the disk.
        commit_seconds: How long ranks and nodes wait for each other; 600 by default.
        options: `transfer`, `retry`, `timeouts`, `credentials`, `endpoint_url` and `ssl_context`,
            as `aioflux.open_store`; they have to pickle.

    Raises:
        ValueError: A number is none, or a place cannot be opened.
        TypeError: Credentials that do not pickle.
    """
    given = {
        "persistent_storage_path": persistent_storage_path,
        "persistent_time_interval": persistent_time_interval,
        "num_of_version_in_retention": num_of_version_in_retention,
        "local_storage_path": local_storage_path,
        "memory_buffer_size": memory_buffer_size,
        "commit_seconds": commit_seconds,
    }
    _run.begin(given, options).client.call("tags")


def list_checkpoints(persist_path: Path = None) -> dict[str, dict[str, Any]]:
    """Return all complete tags, the newest first, as values that JSON has.

    Args:
        persist_path: Another place than that of `init`.

    Returns:
        By tag: `tag`, `time` (RFC 3339), `size_bytes`, `files` (names of the parts) and `places`
        (`memory`, `disk`, `storage`).
    """
    _, client, stores = _where(persist_path)
    listed: dict[str, dict[str, Any]] = {}
    for found in find_all(client, stores):
        moment = datetime.fromisoformat(f"{found.save_id.partition('Z')[0]}Z")
        told = {
            "tag": found.tag,
            "time": moment.isoformat().replace("+00:00", "Z"),
            "size_bytes": found.size_bytes,
            "files": found.names,
            "places": [source.place for source in found.sources],
        }
        listed.setdefault(found.tag, told)
    return listed


def get_checkpoint(tag: str, persist_path: Path = None) -> Checkpoint | None:
    """Return the checkpoint of a tag, None where there is none that is all there.

    Args:
        tag: The tag.
        persist_path: Another place than that of `init`.
    """
    run, client, stores = _where(persist_path)
    found = newest_valid(find_tag(client, stores, tag))
    return Checkpoint.of(run, found) if found is not None else None


def get_latest_checkpoint(persist_path: Path = None) -> Checkpoint | None:
    """Return the newest checkpoint that is all there, in memory or elsewhere; None without one.

    Args:
        persist_path: Another place than that of `init`.
    """
    run, client, stores = _where(persist_path)
    found = newest_valid(find_all(client, stores))
    return Checkpoint.of(run, found) if found is not None else None


def get_latest_checkpoint_path(name: str, persist_path: Path = None) -> str | None:
    """Return where the newest persistent part of a name is; None where there is none.

    What this run has in memory is saved first.

    Args:
        name: Name of the part; `checkpoint` for those of `NebulaCheckpointIO`.
        persist_path: Another place than that of `init`.

    Returns:
        A path of the local disk, for `torch.load`; or a uri, for `aioflux.checkpoint.load`.
    """
    run, _, stores = _where(persist_path)
    path = place_of(persist_path)
    if not path or to_uri(path) == run.settings.uri:
        run.client.ask("flush", "")
    key = quote_name(name)
    for found in find_all(None, [each for each in stores if each[0] == "storage"]):
        if found.is_valid() and name in found.names:
            store = stores[-1][1]
            prefix = f"{quote_name(found.tag)}/"
            return name_of(uri_below(store, prefix + part_key(found.save_id, key)))
    return None


def flush_persistence(tag: str | None = None) -> None:
    """Save a tag to the persistent storage, by default the newest, and wait for it.

    Args:
        tag: The tag.

    Raises:
        CheckpointError: It could not be saved, or it is not in memory.
    """
    _run.current().client.call("flush", tag or "")


def shutdown() -> None:
    """Save the newest checkpoint, wait for it, and give the memory of the node back.

    Without it the process that holds it ends ten minutes after the last trainer.

    Raises:
        CheckpointError: It could not be saved.
    """
    failure: AiofluxError | None = None
    for run in _run.all_runs():
        try:
            run.client.ask("flush", "")
        except AiofluxError as exc:
            failure = failure or exc
        try:
            run.client.stop()
        except AiofluxError as exc:
            failure = failure or exc
        _run.forget(run)
    if failure is not None:
        raise failure


def _where(persist_path: Path) -> tuple[Run, Client, list[tuple[str, Store]]]:
    """Return who is asked for what is saved at a place."""
    path = place_of(persist_path)
    run = _run.current()
    if path and to_uri(path) != run.settings.uri:
        run = _run.run_at(path)
    return run, run.client, run.stores()
