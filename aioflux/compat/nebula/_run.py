"""The run of this process: what `init` was told, and who carries it out."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any, cast

from aioflux import _bridge
from aioflux.checkpoint._store.objects import open_checkpoint
from aioflux.compat.nebula._client import Client
from aioflux.compat.nebula._settings import settings_of
from aioflux.compat.nebula._uris import scheme_of, to_uri

if TYPE_CHECKING:
    from aioflux.checkpoint._save.ranks import Ranks
    from aioflux.compat.nebula._settings import Settings
    from aioflux.compat.nebula._snapshot import Snapshots
    from aioflux.options import StoreOptions
    from aioflux.store import Store

__all__ = ["Run", "all_runs", "begin", "current", "forget", "run_at"]


_ANYWHERE = ("transfer", "retry", "timeouts")
"""Options that mean the same at all places."""


class Run:
    """Saves and loads below one place."""

    def __init__(self, settings: Settings, options: StoreOptions) -> None:
        self.settings = settings
        self.options = options
        self.client = Client(settings)
        self._snapshots: Snapshots | None = None
        self._ranks: Ranks | None = None

    @property
    def snapshots(self) -> Snapshots:
        """What copies to memory."""
        if self._snapshots is None:
            from aioflux.compat.nebula._snapshot import Snapshots

            local = self.settings.local
            self._snapshots = Snapshots(self.client, _directory(local))
        return self._snapshots

    @property
    def ranks(self) -> Ranks:
        """The ranks of the training; every rank asks for it at the same time."""
        if self._ranks is None:
            from aioflux.checkpoint._save.ranks import open_ranks

            self._ranks = open_ranks(None, self.settings.commit_seconds)
        return self._ranks

    def stores(self, path: str = "") -> list[tuple[str, Store]]:
        """Return where to look for what is not in memory, the nearest first.

        Args:
            path: Another place than that of this run.
        """
        uri = to_uri(path) if path else self.settings.uri
        found: list[tuple[str, Store]] = []
        if self.settings.local is not None and uri == self.settings.uri:
            found.append(("disk", open_checkpoint(self.settings.local.uri)))
        if uri:
            found.append(("storage", open_checkpoint(uri, **self.options_at(uri))))
        for _, store in found:
            _bridge.close_when_dropped(store)
        return found

    def options_at(self, path: str) -> StoreOptions:
        """Return what a store at another place is opened with: credentials are for one cloud."""
        scheme, ours = scheme_of(path), scheme_of(self.settings.uri)
        if scheme == ours or (not ours and scheme != "file"):
            return self.options
        kept = {name: value for name, value in self.options.items() if name in _ANYWHERE}
        return cast("StoreOptions", kept)

    def close(self) -> None:
        """Leave the keeper to itself."""
        if self._snapshots is not None:
            self._snapshots.close()
        if self._ranks is not None:
            self._ranks.close()
        self.client.close()


def _directory(store: Store | None) -> str:
    if store is None:
        return ""
    from aioflux._values.uri import parse_uri

    path = parse_uri(store.uri).key
    os.makedirs(path, exist_ok=True)
    return path


_runs: dict[str, Run] = {}
"""By the uri that they save below; the one begun last is the current one."""


def begin(given: dict[str, Any], options: StoreOptions) -> Run:
    """Begin a run, which is the current one then; an earlier one at its place ends."""
    run = Run(settings_of(given, options, os.environ), options)
    earlier = _runs.pop(run.settings.uri, None)
    if earlier is not None:
        earlier.close()
    _runs[run.settings.uri] = run
    return run


def current() -> Run:
    """Return the run that was begun last; one by the environment where there was none."""
    return next(reversed(_runs.values())) if _runs else begin({}, {})


def run_at(path: str) -> Run:
    """Return the run at a place, which has the settings of the current one else."""
    uri = to_uri(path)
    if uri in _runs:
        return _runs[uri]
    before = current()
    options = before.options_at(path)
    run = Run(
        settings_of(
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
    # Behind the current one, which stays the current one.
    others = dict(_runs)
    _runs.clear()
    _runs.update({uri: run, **others})
    return run


def forget(run: Run) -> None:
    """Know a run no more."""
    _runs.pop(run.settings.uri, None)
    run.close()


def all_runs() -> list[Run]:
    """Return the runs of this process."""
    return list(_runs.values())
