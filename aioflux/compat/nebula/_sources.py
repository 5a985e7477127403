"""Lookup and loads of saved tags in memory, on local disk and in the persistent storage."""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from aioflux import _bridge
from aioflux.checkpoint._tag_checkpoints import is_valid, list_tags, read_part, read_tag
from aioflux.compat.nebula._storage_tier import STORAGE
from aioflux.errors import CheckpointCorruptError, CheckpointNotFoundError

if TYPE_CHECKING:
    from aioflux.checkpoint._tag_checkpoints import StoredTag
    from aioflux.compat.nebula._daemon_client import DaemonClient
    from aioflux.store import Store


@dataclass(frozen=True, slots=True)
class _MemorySource:
    client: DaemonClient
    description: dict[str, Any]
    """Description of the tag from the response to `list_tags`."""

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
        part, fds = self.client.call_if_running("open_part", tag, self.description["save_id"], name)
        if part is None:
            if name not in self.names:
                raise KeyError(name)
            raise CheckpointCorruptError(f"{tag} is no longer in memory")
        number, size, checksum = part
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
            exc.add_note(f"while loading {self.uri(name)}, whose bytes match their checksum")
            raise
        finally:
            file.close()


@dataclass(slots=True)
class SavedTag:
    """One save of a tag, and the sources to load it from."""

    tag: str
    save_id: str
    """Id of the save; ids sort by time."""
    sources: list[_MemorySource | StoreSource] = field(default_factory=list)
    """Sources of the save in the order of loads: memory, disk, storage."""

    @property
    def names(self) -> list[str]:
        """Names of the parts of all sources. The memory has only the parts of its own node."""
        return sorted({name for source in self.sources for name in source.names})

    @property
    def size_bytes(self) -> int:
        return max(source.size_bytes for source in self.sources)

    def is_valid(self) -> bool:
        """Drop sources that are not complete, and return whether any source is complete."""
        self.sources = [source for source in self.sources if source.is_valid()]
        return bool(self.sources)

    def load(self, name: str, *, map_location: Any, weights_only: Any) -> Any:
        """Load one part from the first source that has an undamaged copy.

        Raises:
            CheckpointNotFoundError: There is no such part.
            CheckpointCorruptError: The part is damaged in every source.
        """
        failures: list[CheckpointCorruptError] = []
        for source in self.sources:
            try:
                return source.load(name, map_location=map_location, weights_only=weights_only)
            except KeyError:
                continue  # This source is memory, and another node has saved the part.
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
    """Return all saves, newest first, without verification; without a client, skip memory."""
    in_memory = _list_memory(client)
    stored = {tier: (store, _bridge.run(list_tags(store))) for tier, store in stores}
    return _merge(in_memory, stored)


def find_tag(
    client: DaemonClient | None, stores: Iterable[tuple[str, Store]], tag: str
) -> list[SavedTag]:
    """Return the saves of one tag, newest first, without verification."""
    in_memory = _list_memory(client)
    stored = {}
    for tier, store in stores:
        stored_tag = _bridge.run(read_tag(store, tag))
        stored[tier] = (store, [stored_tag] if stored_tag is not None else [])
    return [save for save in _merge(in_memory, stored) if save.tag == tag]


def _list_memory(client: DaemonClient | None) -> list[_MemorySource]:
    """Return the tags in memory. Called before the stores are listed, see `_merge`."""
    if client is None:
        return []
    descriptions = client.call_if_running("list_tags")[0] or []
    return [_MemorySource(client, description) for description in descriptions]


def _merge(
    in_memory: list[_MemorySource], stored: dict[str, tuple[Store, list[StoredTag]]]
) -> list[SavedTag]:
    # `in_memory` was listed first: a tag that was then saved and evicted is in `stored`.
    saves: dict[str, SavedTag] = {}
    committed = {tier: {tag.commit.save_id for tag in tags} for tier, (_, tags) in stored.items()}
    for source in in_memory:
        if _can_be_loaded(source.description, committed):
            tag, save_id = source.description["tag"], source.description["save_id"]
            saves.setdefault(save_id, SavedTag(tag, save_id)).sources.append(source)
    for tier, (store, tags) in stored.items():
        for stored_tag in tags:
            save_id = stored_tag.commit.save_id
            save = saves.setdefault(save_id, SavedTag(stored_tag.tag, save_id))
            save.sources.append(StoreSource(store, stored_tag, tier))
    return sorted(saves.values(), key=lambda save: save.save_id, reverse=True)


def _can_be_loaded(description: dict[str, Any], committed: dict[str, set[str]]) -> bool:
    """Return whether to use a tag in memory as a source.

    A tag that was saved to the persistent storage, and is missing there now, was deleted there, and
    must not be loaded from memory. A tag of several nodes must be in the persistent storage,
    because each memory has only the parts of its own node, and another node may have died.
    """
    is_stored = description["save_id"] in committed.get(STORAGE, set())
    if STORAGE in description["saved_in"] and STORAGE in committed:
        return is_stored
    return description["num_nodes"] == 1 or is_stored


def newest_valid(saves: Iterable[SavedTag]) -> SavedTag | None:
    """Return the first valid save of an iterable that begins with the newest, or None."""
    return next((save for save in saves if save.is_valid()), None)
