"""Forged and old commits: the bounds of their objects, tensors and values."""

from __future__ import annotations

import dataclasses
import io
import pickle
import zipfile

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

from aioflux import CheckpointCorruptError
from aioflux.checkpoint._format.commit import (
    Commit,
    StoredObject,
    decode_commit,
    decode_index,
    encode_commit,
)
from aioflux.checkpoint._load.decode_metadata import decode_metadata
from aioflux.checkpoint.dcp import StorageWriter, load_state
from aioflux.checkpoint.dcp._object_plan import WriteKind, plan_ranks

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")

SAVE_ID = "20261122T031500.123Z-3f9a12cd"


def save(uri, **settings):
    dcp.save({"w": torch.arange(9)}, storage_writer=StorageWriter(uri, **settings), no_dist=True)


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
    with pytest.raises(CheckpointCorruptError, match="is not the key of a data object"):
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


def test_a_value_is_no_larger_than_its_bytes(tmp_path):
    dcp.save({"w": "x" * 100_000}, checkpoint_id=tmp_path, no_dist=True)
    metadata = pickle.loads((tmp_path / ".metadata").read_bytes())
    ((index, info),) = metadata.storage_data.items()
    data = (tmp_path / info.relative_path).read_bytes()[info.offset : info.offset + info.length]
    packed = io.BytesIO()
    with (
        zipfile.ZipFile(io.BytesIO(data)) as source,
        zipfile.ZipFile(packed, "w", zipfile.ZIP_DEFLATED) as target,
    ):
        for entry in source.infolist():
            target.writestr(entry.filename, source.read(entry))
    assert load_state(tmp_path.as_uri()) == {"w": "x" * 100_000}
    (tmp_path / info.relative_path).write_bytes(packed.getvalue())
    changed = dataclasses.replace(info, offset=0, length=len(packed.getvalue()))
    metadata.storage_data = {index: changed}
    (tmp_path / ".metadata").write_bytes(pickle.dumps(metadata))
    with pytest.raises(CheckpointCorruptError, match="compressed"):
        load_state(tmp_path.as_uri())


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
