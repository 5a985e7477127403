"""Checkpoints without tensors: objects of random bytes, and a commit object as a save writes it."""

from __future__ import annotations

import pickle
import random
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from aioflux._values.checksums import crc32c
from aioflux._values.uri import join_uri
from aioflux.checkpoint._format.commit import (
    COMMIT_KEY,
    INDEX_KEY,
    BlockDigest,
    Commit,
    StoredObject,
    data_key,
    encode_commit,
    encode_index,
    new_save_id,
    step_prefix,
)

if TYPE_CHECKING:
    from aioflux._values.meta import ObjectMeta
    from aioflux.store import Store

METADATA = pickle.dumps({"what": "replaces the metadata of DCP"})


def save_id(number: int) -> str:
    """Return the id of a save; a higher number is a newer save."""
    moment = datetime.fromtimestamp(1_700_000_000 + number, UTC)
    return new_save_id(moment, f"{number:08x}")


@dataclass
class Saved:
    prefix: str
    commit: Commit
    meta: ObjectMeta
    contents: dict[str, bytes] = field(default_factory=dict)

    @property
    def keys(self) -> list[str]:
        return [self.prefix + each.key for each in self.commit.objects]


async def save(
    store: Store,
    prefix: str,
    *,
    number: int = 0,
    num_objects: int = 2,
    size: int = 100_000,
    step: int | None = None,
    created: float = 0.0,
    metrics: dict[str, float] | None = None,
    layout: str = "dcp",
) -> Saved:
    """Write a checkpoint, replacing an existing one."""
    name = save_id(number)
    rng = random.Random(number)
    stored, contents = [], {}
    for at in range(num_objects):
        key = data_key(name, at, 0)
        if layout == "safetensors":
            key = f"model-{name}-{at + 1:05d}-of-{num_objects:05d}.safetensors"
        data = rng.randbytes(size)
        stored.append(await _save_object(store, prefix, key, data, rank=at))
        contents[prefix + key] = data
    commit = Commit(
        save_id=name,
        uri=join_uri(store.uri, prefix),
        created=created,
        world_size=num_objects,
        step=step,
        layout=layout,
        objects=tuple(stored),
        metrics=metrics or {},
    )
    commit_key = prefix + (INDEX_KEY if layout == "safetensors" else COMMIT_KEY)
    old = [meta async for meta in store.list(commit_key) if meta.key == commit_key]
    condition: Any = {"if_generation_match": old[0].generation} if old else {"mode": "create"}
    meta = await store.put(commit_key, encode(commit), **condition)
    return Saved(prefix, commit, meta, contents)


def encode(commit: Commit) -> bytes:
    if commit.layout == "safetensors":
        return encode_index({"metadata": {}, "weight_map": {}}, commit)
    return encode_commit(METADATA, commit)


async def save_step(store: Store, step: int, *, number: int | None = None, **options) -> Saved:
    return await save(
        store,
        step_prefix(step),
        number=step if number is None else number,
        step=step,
        **options,
    )


async def _save_object(
    store: Store, prefix: str, key: str, data: bytes, *, rank: int
) -> StoredObject:
    meta = await store.put(prefix + key, data)
    digest = BlockDigest(64 * 1024)
    digest.update(memoryview(data))
    return StoredObject(
        key=key,
        size=len(data),
        crc32c=crc32c(data),
        generation=meta.generation,
        rank=rank,
        block_crcs=digest.finish()[1],
    )
