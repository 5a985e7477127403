"""Sources from which a tag can be loaded: memory, local disk, persistent storage."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from aioflux import _bridge
from aioflux.checkpoint._tag_checkpoints import is_valid, list_tags, read_part, read_tag
from aioflux.compat.nebula._storage_tier import STORAGE
from aioflux.errors import CheckpointCorruptError, CheckpointNotFoundError

if TYPE_CHECKING:
    from collections.abc import Iterable

    from aioflux.checkpoint._tag_checkpoints import StoredTag
    from aioflux.compat.nebula._daemon_client import DaemonClient
    from aioflux.store import Store

__all__ = ["SavedTag", "StoreSource", "find_all", "find_tag", "newest_valid"]


@dataclass(frozen=True, slots=True)
class _MemorySource:
    client: DaemonClient
    description: dict[str, Any]
    """The tag in the answer to `list_tags`."""

    tier = "memory"

    @property
    def names(self) -> list[str]:
        return list(self.description["names"])

    @property
    def size_bytes(self) -> int:
        return int(self.description["size_bytes"])

    def is_valid(self) -> bool:
        return True

    def load(self, name: str, *, map_location: Any, weights_only: Any) -> Any:
        from aioflux.compat.nebula._snapshot import load_segment

        tag = self.description["tag"]
        found, fds = self.client.call_if_running(
            "open_part", tag, self.description["save_id"], name
        )
        if found is None:
            if name not in self.names:
                raise KeyError(name)
            raise CheckpointCorruptError(f"{tag} is no longer in memory")
        number, size, checksum = found
        (fd,) = fds
        try:
            return load_segment(
                fd,
                size,
                checksum,
                f"{name} of {tag}",
                map_location=map_location,
                weights_only=weights_only,
            )
        finally:
            os.close(fd)
            self.client.call_if_running("close_part", number)


@dataclass(frozen=True, slots=True)
class StoreSource:
    """A tag in a store."""

    store: Store
    stored: StoredTag
    tier: str

    @property
    def names(self) -> list[str]:
        return self.stored.names

    @property
    def size_bytes(self) -> int:
        return self.stored.commit.num_bytes

    def is_valid(self) -> bool:
        return _bridge.run(is_valid(self.store, self.stored))

    def uri(self, name: str) -> str:
        return self.stored.part_uri(self.store, name)

    def load(self, name: str, *, map_location: Any, weights_only: Any) -> Any:
        import torch

        file = _bridge.run(read_part(self.store, self.stored, name))
        try:
            return torch.load(
                file.path, map_location=map_location, weights_only=weights_only, mmap=True
            )
        except Exception as exc:
            exc.add_note(f"while loading {self.uri(name)}, whose bytes are as they were saved")
            raise
        finally:
            file.close()


@dataclass(slots=True)
class SavedTag:
    """One save of a tag, and its sources."""

    tag: str
    """The tag."""
    save_id: str
    """Id of the save; sorts by time."""
    sources: list[_MemorySource | StoreSource] = field(default_factory=list)
    """Its sources, the nearest first."""

    @property
    def names(self) -> list[str]:
        """Names of the parts; memory has only those of its own node."""
        return sorted({name for source in self.sources for name in source.names})

    @property
    def size_bytes(self) -> int:
        return max(source.size_bytes for source in self.sources)

    def is_valid(self) -> bool:
        """Return whether a source is complete; drop the others."""
        self.sources = [source for source in self.sources if source.is_valid()]
        return bool(self.sources)

    def load(self, name: str, *, map_location: Any, weights_only: Any) -> Any:
        """Load one part from the nearest source that has it undamaged.

        Raises:
            CheckpointNotFoundError: There is no such part.
            CheckpointCorruptError: It is damaged in every source.
        """
        failures: list[CheckpointCorruptError] = []
        for source in self.sources:
            try:
                return source.load(name, map_location=map_location, weights_only=weights_only)
            except KeyError:
                continue  # in the memory of another node
            except CheckpointCorruptError as exc:
                failures.append(exc)
        if not failures:
            raise CheckpointNotFoundError(
                f"{self.tag} has no {name!r}; it has {', '.join(self.names)}"
            )
        error = CheckpointCorruptError(
            f"{name!r} of {self.tag} cannot be loaded from any source; load an earlier tag"
        )
        for failure in failures:
            error.add_note(str(failure))
        raise error


def find_all(client: DaemonClient | None, stores: Iterable[tuple[str, Store]]) -> list[SavedTag]:
    """Return all saves, the newest first, without verifying them; None leaves memory out."""
    in_memory = _list_memory(client)
    stored = {tier: (store, _bridge.run(list_tags(store))) for tier, store in stores}
    return _merge(in_memory, stored)


def find_tag(
    client: DaemonClient | None, stores: Iterable[tuple[str, Store]], tag: str
) -> list[SavedTag]:
    """Return the saves of one tag, the newest first, without verifying them."""
    in_memory = _list_memory(client)
    stored = {}
    for tier, store in stores:
        found = _bridge.run(read_tag(store, tag))
        stored[tier] = (store, [found] if found is not None else [])
    return [each for each in _merge(in_memory, stored) if each.tag == tag]


def _list_memory(client: DaemonClient | None) -> list[_MemorySource]:
    """Return the tags in memory, before the stores are read: a tag that leaves it is in those."""
    if client is None:
        return []
    return [_MemorySource(client, each) for each in client.call_if_running("list_tags")[0] or []]


def _merge(
    in_memory: list[_MemorySource], stored: dict[str, tuple[Store, list[StoredTag]]]
) -> list[SavedTag]:
    found: dict[str, SavedTag] = {}
    committed = {tier: {each.commit.save_id for each in tags} for tier, (_, tags) in stored.items()}
    for source in in_memory:
        if _is_current(source.description, committed):
            tag, save_id = source.description["tag"], source.description["save_id"]
            found.setdefault(save_id, SavedTag(tag, save_id)).sources.append(source)
    for tier, (store, tags) in stored.items():
        for each in tags:
            save_id = each.commit.save_id
            save = found.setdefault(save_id, SavedTag(each.tag, save_id))
            save.sources.append(StoreSource(store, each, tier))
    return sorted(found.values(), key=lambda each: each.save_id, reverse=True)


def _is_current(in_memory: dict[str, Any], committed: dict[str, set[str]]) -> bool:
    """Return whether a tag in memory counts.

    A tag that was saved to the storage and is not there any more was deleted: memory must not bring
    it back. A tag of several nodes is in the memory of each, and one of them may have died since:
    it counts once it is in the storage.
    """
    is_stored = in_memory["save_id"] in committed.get(STORAGE, set())
    if STORAGE in in_memory["saved_in"] and STORAGE in committed:
        return is_stored
    return in_memory["num_nodes"] == 1 or is_stored


def newest_valid(found: Iterable[SavedTag]) -> SavedTag | None:
    """Return the first valid one of several saves."""
    return next((each for each in found if each.is_valid()), None)
