"""TrainingRun: settings, daemon connection and stores of one storage, by `init`."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any, cast

from aioflux import _bridge
from aioflux._store_cache import StoreCache
from aioflux._values.uri import parse_uri
from aioflux.checkpoint._tag_checkpoints import open_checkpoint
from aioflux.compat.nebula._daemon_client import DaemonClient
from aioflux.compat.nebula._settings import parse_settings, to_uri
from aioflux.compat.nebula._storage_tier import DISK, STORAGE

if TYPE_CHECKING:
    from aioflux.checkpoint._tag_checkpoints import Ranks
    from aioflux.compat.nebula._settings import Settings
    from aioflux.compat.nebula._snapshot import Snapshots
    from aioflux.options import StoreOptions
    from aioflux.store import Store

__all__ = ["TrainingRun", "all_runs", "current", "remove", "run_at", "start"]

_CLOUD_INDEPENDENT = ("transfer", "retry", "timeouts")
"""Options that apply to stores of every cloud."""


class TrainingRun:
    """Saves to and loads from one persistent storage."""

    def __init__(self, settings: Settings, options: StoreOptions) -> None:
        self.settings = settings
        self.options = options
        self.client = DaemonClient(settings)
        self._stores = StoreCache(self._open_store)
        self._snapshots: Snapshots | None = None
        self._ranks: Ranks | None = None

    @property
    def snapshots(self) -> Snapshots:
        """Copies objects to memory."""
        if self._snapshots is None:
            from aioflux.compat.nebula._snapshot import Snapshots

            directory = ""
            if (local := self.settings.local) is not None:
                directory = parse_uri(local.uri).key
                os.makedirs(directory, exist_ok=True)
            self._snapshots = Snapshots(self.client, directory)
        return self._snapshots

    @property
    def ranks(self) -> Ranks:
        """The ranks of the training; all ranks must get this property at the same time."""
        if self._ranks is None:
            from aioflux.checkpoint._tag_checkpoints import open_ranks

            self._ranks = open_ranks(None, self.settings.commit_seconds)
        return self._ranks

    def stores(self) -> list[tuple[str, Store]]:
        """Return the stores to search, by the name of their tier, the nearest first."""
        local, uri = self.settings.local, self.settings.uri
        tiers = [(DISK, local.uri)] if local is not None else []
        tiers += [(STORAGE, uri)] if uri else []
        return [(tier, self._stores[uri]) for tier, uri in tiers]

    def _open_store(self, uri: str) -> Store:
        options: StoreOptions = self.options if uri == self.settings.uri else {}
        return _bridge.close_when_dropped(open_checkpoint(uri, **options))

    def options_at(self, path: str) -> StoreOptions:
        """Return the options for another storage: credentials are for one cloud only."""
        scheme = parse_uri(to_uri(path)).scheme
        ours = parse_uri(self.settings.uri).scheme if self.settings.uri else ""
        if scheme == ours or (not ours and scheme != "file"):
            return self.options
        kept = {name: value for name, value in self.options.items() if name in _CLOUD_INDEPENDENT}
        return cast("StoreOptions", kept)

    def close(self) -> None:
        """Disconnect from the node daemon."""
        self._stores.clear()
        if self._snapshots is not None:
            self._snapshots.close()
        if self._ranks is not None:
            self._ranks.close()
        self.client.close()


_runs: dict[str, TrainingRun] = {}
"""By the uri of the storage; the last one is the current one."""


def start(given: dict[str, Any], options: StoreOptions) -> TrainingRun:
    """Start a run and make it the current one; it replaces an earlier one of its storage."""
    run = TrainingRun(parse_settings(given, options, os.environ), options)
    earlier = _runs.pop(run.settings.uri, None)
    if earlier is not None:
        earlier.close()
    _runs[run.settings.uri] = run
    return run


def current() -> TrainingRun:
    """Return the run that was started last; without one, start one from the environment."""
    return next(reversed(_runs.values())) if _runs else start({}, {})


def run_at(path: str) -> TrainingRun:
    """Return the run of another storage, with the other settings of the current run."""
    uri = to_uri(path)
    if uri in _runs:
        return _runs[uri]
    before = current()
    options = before.options_at(path)
    run = TrainingRun(
        parse_settings(
            {
                "persistent_storage_path": path,
                "persistent_time_interval": before.settings.interval_seconds,
                "num_of_version_in_retention": before.settings.retention,
            },
            options,
            os.environ,
        ),
        options,
    )
    # First, so that the current run stays the last one.
    others = dict(_runs)
    _runs.clear()
    _runs.update({uri: run, **others})
    return run


def remove(run: TrainingRun) -> None:
    _runs.pop(run.settings.uri, None)
    run.close()


def all_runs() -> list[TrainingRun]:
    return list(_runs.values())
