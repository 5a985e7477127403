"""Training runs of this process: settings, daemon connection and stores for each storage."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any, cast

from aioflux import _bridge
from aioflux._store_cache import StoreCache
from aioflux._values.uri import parse_uri
from aioflux.compat.nebula._daemon_client import DaemonClient
from aioflux.compat.nebula._settings import parse_settings, to_uri
from aioflux.compat.nebula._storage_tier import DISK, STORAGE
from aioflux.store import open_store

if TYPE_CHECKING:
    from aioflux.checkpoint._tag_checkpoints import Ranks
    from aioflux.compat.nebula._settings import Settings
    from aioflux.compat.nebula._snapshot import SnapshotWriter
    from aioflux.options import StoreOptions
    from aioflux.store import Store

_CLOUD_INDEPENDENT = ("transfer", "retry", "timeouts")
"""Options that apply to stores of every cloud."""


class TrainingRun:
    """Settings and open connections for the saves and loads of one persistent storage."""

    def __init__(self, settings: Settings, options: StoreOptions) -> None:
        self.settings = settings
        self.options = options
        self.client = DaemonClient(settings)
        self._stores = StoreCache(self._open_store)
        self._snapshot_writer: SnapshotWriter | None = None
        self._ranks: Ranks | None = None

    @property
    def snapshot_writer(self) -> SnapshotWriter:
        """Writer of snapshots to the memory of the node daemon."""
        if self._snapshot_writer is None:
            from aioflux.compat.nebula._snapshot import SnapshotWriter

            directory = ""
            if (local := self.settings.local) is not None:
                directory = parse_uri(local.uri).key
                os.makedirs(directory, exist_ok=True)
            self._snapshot_writer = SnapshotWriter(self.client, directory)
        return self._snapshot_writer

    @property
    def ranks(self) -> Ranks:
        """The ranks of the training.

        The first access creates a process group, which all ranks must do together.
        """
        if self._ranks is None:
            from aioflux.checkpoint._tag_checkpoints import open_ranks

            self._ranks = open_ranks(None, self.settings.commit_seconds)
        return self._ranks

    def stores(self) -> list[tuple[str, Store]]:
        """Return the names of the tiers and their stores, in the order of loads."""
        local, uri = self.settings.local, self.settings.uri
        tiers = [(DISK, local.uri)] if local is not None else []
        tiers += [(STORAGE, uri)] if uri else []
        return [(tier, self._stores[uri]) for tier, uri in tiers]

    def _open_store(self, uri: str) -> Store:
        options: StoreOptions = self.options if uri == self.settings.uri else {}
        return _bridge.close_when_dropped(open_store(uri, **options))

    def options_at(self, path: str) -> StoreOptions:
        """Return the options for a storage; for another cloud, only `_CLOUD_INDEPENDENT` ones."""
        scheme = parse_uri(to_uri(path)).scheme
        own_scheme = parse_uri(self.settings.uri).scheme if self.settings.uri else ""
        if scheme == own_scheme or (not own_scheme and scheme != "file"):
            return self.options
        options = {
            name: value for name, value in self.options.items() if name in _CLOUD_INDEPENDENT
        }
        return cast("StoreOptions", options)

    def close(self) -> None:
        """Close the stores, and disconnect from the node daemon."""
        self._stores.clear()
        if self._snapshot_writer is not None:
            self._snapshot_writer.close()
        if self._ranks is not None:
            self._ranks.close()
        self.client.close()


_runs: dict[str, TrainingRun] = {}
"""Runs by the uri of their storage. The last run is the current run."""


def start(arguments: dict[str, Any], options: StoreOptions) -> TrainingRun:
    """Start a run, make it the current run, and close an earlier run of the same storage."""
    run = TrainingRun(parse_settings(arguments, options, os.environ), options)
    earlier = _runs.pop(run.settings.uri, None)
    if earlier is not None:
        earlier.close()
    _runs[run.settings.uri] = run
    return run


def current() -> TrainingRun:
    """Return the current run; if there is none, start one with the environment's settings."""
    return next(reversed(_runs.values())) if _runs else start({}, {})


def run_at(path: str) -> TrainingRun:
    """Return the run of a storage, and start it if there is none.

    A new run has the interval and retention of the current run, which remains the current run.
    """
    uri = to_uri(path)
    if uri in _runs:
        return _runs[uri]
    current_run = current()
    options = current_run.options_at(path)
    run = TrainingRun(
        parse_settings(
            {
                "persistent_storage_path": path,
                "persistent_time_interval": current_run.settings.interval_seconds,
                "num_of_version_in_retention": current_run.settings.retention,
            },
            options,
            os.environ,
        ),
        options,
    )
    # Insert the new run before the others, so that the current run remains the last.
    others = dict(_runs)
    _runs.clear()
    _runs.update({uri: run, **others})
    return run


def remove(run: TrainingRun) -> None:
    _runs.pop(run.settings.uri, None)
    run.close()


def all_runs() -> list[TrainingRun]:
    return list(_runs.values())
