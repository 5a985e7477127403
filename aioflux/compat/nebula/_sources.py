"""Where a tag can be loaded from, the nearest first: memory of the node, its disk, the bucket."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from aioflux import _bridge
from aioflux.checkpoint._maintain.tags import is_valid, list_tags, read_part, read_tag
from aioflux.checkpoint._store.commits import uri_below
from aioflux.errors import CheckpointCorruptError, CheckpointNotFoundError

if TYPE_CHECKING:
    from collections.abc import Iterable

    from aioflux.checkpoint._maintain.tags import StoredTag
    from aioflux.compat.nebula._client import Client
    from aioflux.store import Store

__all__ = ["Found", "find_all", "find_tag", "newest_valid"]


class Source(Protocol):
    """One place that has a tag."""

    @property
    def place(self) -> str:
        """`memory`, `disk` or `storage`."""

    @property
    def names(self) -> list[str]:
        """Names of the parts."""

    @property
    def size_bytes(self) -> int:
        """Bytes of them all."""

    def is_valid(self) -> bool:
        """Tell whether all of it is there."""

    def load(self, name: str, *, map_location: Any, weights_only: Any) -> Any:
        """Load one part.

        Raises:
            KeyError: There is no such part.
            CheckpointCorruptError: It is gone, or not what was saved.
        """


@dataclass(frozen=True, slots=True)
class _InMemory:
    client: Client
    told: dict[str, Any]
    """What the keeper says of it."""

    place = "memory"

    @property
    def names(self) -> list[str]:
        return list(self.told["names"])

    @property
    def size_bytes(self) -> int:
        return int(self.told["size_bytes"])

    def is_valid(self) -> bool:
        return True

    def load(self, name: str, *, map_location: Any, weights_only: Any) -> Any:
        from aioflux.compat.nebula._snapshot import load_piece

        tag = self.told["tag"]
        lent, fds = self.client.ask("fetch", tag, self.told["save_id"], name)
        if lent is None:
            if name not in self.names:
                raise KeyError(name)
            raise CheckpointCorruptError(f"{tag} is not in memory any more")
        number, size, checksum = lent
        (fd,) = fds
        try:
            return load_piece(
                fd,
                size,
                checksum,
                f"{name} of {tag}",
                map_location=map_location,
                weights_only=weights_only,
            )
        finally:
            os.close(fd)
            self.client.ask("done", number)


@dataclass(frozen=True, slots=True)
class _InStore:
    store: Store
    stored: StoredTag
    place: str

    @property
    def names(self) -> list[str]:
        return self.stored.names

    @property
    def size_bytes(self) -> int:
        return self.stored.commit.num_bytes

    def is_valid(self) -> bool:
        return _bridge.run(is_valid(self.store, self.stored))

    def load(self, name: str, *, map_location: Any, weights_only: Any) -> Any:
        import torch

        file = _bridge.run(read_part(self.store, self.stored, name))
        try:
            return torch.load(
                file.path, map_location=map_location, weights_only=weights_only, mmap=True
            )
        except Exception as exc:
            uri = uri_below(self.store, self.stored.prefix)
            exc.add_note(f"while {name} of {uri} was loaded, whose bytes are as they were stored")
            raise
        finally:
            file.close()


@dataclass(slots=True)
class Found:
    """A save of a tag, and where it is."""

    tag: str
    """The tag."""
    save_id: str
    """Names the save; sorts by time."""
    sources: list[Source] = field(default_factory=list)
    """Where it is, the nearest first."""

    @property
    def names(self) -> list[str]:
        """Names of the parts; memory has those of its node alone."""
        return sorted({name for source in self.sources for name in source.names})

    @property
    def size_bytes(self) -> int:
        """Bytes of all parts."""
        return max(source.size_bytes for source in self.sources)

    def is_valid(self) -> bool:
        """Tell whether all of it is in one place at least; those that lack something are left."""
        self.sources = [source for source in self.sources if source.is_valid()]
        return bool(self.sources)

    def load(self, name: str, *, map_location: Any, weights_only: Any) -> Any:
        """Load one part from the nearest place that has it whole.

        Raises:
            CheckpointNotFoundError: There is no such part.
            CheckpointCorruptError: In no place is it what was saved.
        """
        failures: list[CheckpointCorruptError] = []
        for source in self.sources:
            try:
                return source.load(name, map_location=map_location, weights_only=weights_only)
            except KeyError:
                continue  # memory of a node that has others
            except CheckpointCorruptError as exc:
                failures.append(exc)
        if not failures:
            raise CheckpointNotFoundError(
                f"{self.tag} has no {name!r}; it has {', '.join(self.names)}"
            )
        error = CheckpointCorruptError(
            f"{name!r} of {self.tag} can be loaded from nowhere; load an earlier tag"
        )
        for failure in failures:
            error.add_note(str(failure))
        raise error


def find_all(client: Client | None, stores: Iterable[tuple[str, Store]]) -> list[Found]:
    """Return all saves that there are, the newest first; they are not verified.

    Args:
        client: Who asks the keeper; None where there is none to ask.
        stores: The stores to look in with the names of their places, the nearest first.
    """
    told = _told(client)
    stored = {place: (store, _bridge.run(list_tags(store))) for place, store in stores}
    return _merge(client, told, stored)


def find_tag(client: Client | None, stores: Iterable[tuple[str, Store]], tag: str) -> list[Found]:
    """Return the saves of one tag, the newest first; they are not verified."""
    told = _told(client)
    stored = {}
    for place, store in stores:
        found = _bridge.run(read_tag(store, tag))
        stored[place] = (store, [found] if found is not None else [])
    return [each for each in _merge(client, told, stored) if each.tag == tag]


def _told(client: Client | None) -> list[dict[str, Any]]:
    """Return what is in memory; asked before stores are looked at, which then have what it says."""
    return (client.ask("tags")[0] if client is not None else None) or []


def _merge(
    client: Client | None,
    told: list[dict[str, Any]],
    stored: dict[str, tuple[Store, list[StoredTag]]],
) -> list[Found]:
    found: dict[str, Found] = {}
    committed = {
        place: {each.commit.save_id for each in tags} for place, (_, tags) in stored.items()
    }
    for each in told:
        if _is_believed(each, committed):
            save = found.setdefault(each["save_id"], Found(each["tag"], each["save_id"]))
            save.sources.append(_InMemory(_given(client), each))
    for place, (store, tags) in stored.items():
        for tag in tags:
            save_id = tag.commit.save_id
            save = found.setdefault(save_id, Found(tag.tag, save_id))
            save.sources.append(_InStore(store, tag, place))
    return sorted(found.values(), key=lambda each: each.save_id, reverse=True)


def _given(client: Client | None) -> Client:
    assert client is not None
    return client


def _is_believed(told: dict[str, Any], committed: dict[str, set[str]]) -> bool:
    """Tell whether what is in memory counts.

    What was saved and is not there any more, somebody has removed: memory must not bring it back.
    What several nodes saved is in the memory of each, unless one was replaced since: until it is
    saved, nobody knows.
    """
    is_stored = told["save_id"] in committed.get("storage", set())
    if "storage" in told["places"] and "storage" in committed:
        return is_stored
    return told["num_nodes"] == 1 or is_stored


def newest_valid(found: Iterable[Found]) -> Found | None:
    """Return the first of several saves that is all there."""
    return next((each for each in found if each.is_valid()), None)
