"""Forged and old commits: the bounds of their objects, tensors and values."""

from __future__ import annotations

import io
import pickle
import zipfile

import msgspec
import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

import aioflux
from aioflux import CheckpointCorruptError
from aioflux.checkpoint._format.commit import (
    COMMIT_KEY,
    Commit,
    StoredObject,
    decode_commit,
    decode_index,
    encode_commit,
)
from aioflux.checkpoint._load.decode import load_value
from aioflux.checkpoint._load.decode_metadata import decode_metadata
from aioflux.checkpoint.dcp import StorageWriter, load_state
from aioflux.checkpoint.dcp._object_plan import WriteKind, plan_ranks
from aioflux.checkpoint.dcp._save_context import UnfinishedSave, delete_failed

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")

SAVE_ID = "20261122T031500.123Z-3f9a12cd"
OTHER_ID = "20261122T031501.123Z-aaaaaaaa"


def save(uri, **settings):
    dcp.save({"w": torch.arange(9)}, storage_writer=StorageWriter(uri, **settings), no_dist=True)


def read_commit(store):
    data = store.get(COMMIT_KEY)
    pickled, commit = decode_commit(data, uri="x")
    assert commit is not None
    return pickled, commit


def keys(store):
    return [meta.key for meta in store.list()]


@pytest.mark.parametrize(
    "key",
    [
        f"step-1/{SAVE_ID}/__0_0.distcp",
        f"../{SAVE_ID}/__0_0.distcp",
        f"{SAVE_ID}/other.bin",
        "important.bin",
        f"{SAVE_ID}/__0_0.distcp/x",
        f"a/model-{SAVE_ID}-00001-of-00001.safetensors",
    ],
)
def test_a_commit_names_data_objects_of_its_own_checkpoint_only(key):
    """They are deleted when the commit is replaced."""
    commit = Commit(
        save_id=SAVE_ID, uri="u", created=0, objects=(StoredObject(key=key, size=0, crc32c=0),)
    )
    with pytest.raises(CheckpointCorruptError, match="no data object"):
        decode_commit(encode_commit(b"", commit), uri="u")


@pytest.mark.parametrize("block_size", [-1, 0, 1 << 60])
def test_blocks_are_no_larger_than_memory(block_size):
    stored = StoredObject(
        key=f"{SAVE_ID}/__0_0.distcp",
        size=1 << 60,
        crc32c=0,
        block_size=block_size,
        block_crcs=b"0000",
    )
    commit = Commit(save_id=SAVE_ID, uri="u", created=0, objects=(stored,))
    with pytest.raises(CheckpointCorruptError, match="do not fit"):
        decode_commit(encode_commit(b"", commit), uri="u")


def test_lists_in_lists_are_no_index():
    with pytest.raises(CheckpointCorruptError):
        decode_index(b"[" * 200_000 + b"]" * 200_000, uri="u")


def test_objects_of_another_save_that_a_commit_names_are_kept():
    """Ranks that cache plans may count differently: one commit, two names of saves."""
    uri = "memory://dcp-bounds-delete_failed/a"
    save(uri)
    with aioflux.sync.open_store(uri) as store:
        pickled, commit = read_commit(store)
        (stored,) = commit.objects
        moved = f"{OTHER_ID}/__1_0.distcp"
        store.put(moved, store.get(stored.key))
        left = f"{OTHER_ID}/__0_0.distcp"
        store.put(left, b"of a save that failed")
        two = msgspec.structs.replace(stored, key=moved, generation=store.head(moved).generation)
        both = msgspec.structs.replace(commit, objects=(stored, two))
        store.put(COMMIT_KEY, encode_commit(pickled, both))
        unfinished(uri, OTHER_ID)
        assert moved in keys(store)
        assert left not in keys(store)
        # And the next save deletes all objects of the old commit.
        save(uri)
        assert len(keys(store)) == 2


def unfinished(uri, save_id):
    store = aioflux.open_store(uri)
    each = UnfinishedSave(store, [COMMIT_KEY], save_id, lambda: None)
    aioflux._bridge.run(delete_failed(each))
    aioflux._bridge.run(store.aclose())


def test_all_objects_beside_a_damaged_commit_are_kept():
    uri = "memory://dcp-bounds-damaged/a"
    save(uri)
    with aioflux.sync.open_store(uri) as store:
        data = bytearray(store.get(COMMIT_KEY))
        _, commit = read_commit(store)
        data[-30] ^= 1
        store.put(COMMIT_KEY, data)
        before = keys(store)
        unfinished(uri, commit.save_id)
        assert keys(store) == before


def tensor(size, *parts):
    return TensorStorageMetadata(
        TensorProperties(),
        torch.Size(size),
        [ChunkStorageMetadata(torch.Size(start), torch.Size(length)) for start, length in parts],
    )


def decode(tensor, **options):
    return decode_metadata(pickle.dumps(Metadata({"w": tensor}, {}, {})), uri="u", **options)


@pytest.mark.parametrize(
    ("size", "parts", "says"),
    [
        ((12,), [((0,), (8,)), ((1,), (8,))], "overlap"),
        ((12,), [((0,), (8,))], "missing"),
        ((4, 4), [((0, 0), (4, 2)), ((1, 1), (1, 2))], "overlap"),
        ((4, 4), [((0, 0), (2, 4)), ((2, 0), (2, 3))], "missing"),
        ((), [((), ()), ((), ())], None),
        ((4, 4), [((0, 0), (4, 2)), ((0, 2), (4, 2)), ((0, 0), (4, 2))], None),
        ((0, 4), [], None),
        ((0, 4), [((0, 0), (0, 4))], None),
        ((4,), [((0,), (4,)), ((4,), (0,))], None),
        ((4, 2), [((2, 0), (2, 2)), ((0, 0), (2, 1)), ((0, 1), (2, 1))], None),
    ],
)
def test_parts_cover_a_tensor_once(size, parts, says):
    if says is None:
        decode(tensor(size, *parts))
    else:
        with pytest.raises(CheckpointCorruptError, match=says):
            decode(tensor(size, *parts))


def test_metadata_of_one_rank_may_hold_parts_of_tensors():
    decode(tensor((12,), ((0,), (8,))), is_partial=True)
    with pytest.raises(CheckpointCorruptError, match="overlap"):
        decode(tensor((12,), ((0,), (8,)), ((1,), (8,))), is_partial=True)


def test_a_value_is_no_larger_than_its_bytes():
    plain = io.BytesIO()
    torch.save("x" * 100_000, plain)
    packed = io.BytesIO()
    with (
        zipfile.ZipFile(plain) as source,
        zipfile.ZipFile(packed, "w", zipfile.ZIP_DEFLATED) as target,
    ):
        for entry in source.infolist():
            target.writestr(entry.filename, source.read(entry))
    assert load_value(memoryview(plain.getvalue()), "w", "u") == "x" * 100_000
    with pytest.raises(CheckpointCorruptError, match="compressed"):
        load_value(memoryview(packed.getvalue()), "w", "u")


def test_a_valid_checkpoint_loads():
    save("memory://dcp-bounds-plain/a")
    assert torch.equal(load_state("memory://dcp-bounds-plain/a")["w"], torch.arange(9))


def shard(start, length, size):
    return WriteItem(
        MetadataIndex("one", torch.Size(start)),
        WriteItemType.SHARD,
        tensor_data=TensorWriteData(
            ChunkStorageMetadata(torch.Size(start), torch.Size(length)),
            TensorProperties(dtype=torch.float32),
            torch.Size(size),
        ),
    )


def test_a_tensor_with_fewer_rows_than_ranks_is_one_of_all():
    """One rank has all of it, and the others none: still one tensor of one object."""
    plans = [[shard((0, 0), (1, 9), (1, 9))], [shard((1, 0), (0, 9), (1, 9))]]
    layouts = plan_ranks(plans, objects_per_rank=1)
    placements = {each for layout in layouts for each in layout.placements.values()}
    assert {layout.num_objects for layout in layouts} == {1}
    assert [each.kind for each in placements] == [WriteKind.ASSEMBLED]
