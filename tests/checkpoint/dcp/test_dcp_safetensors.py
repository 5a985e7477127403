"""The layout of safetensors: what the safetensors library and Hugging Face's index make of it."""

from __future__ import annotations

import dataclasses
import itertools
import json
import pickle
from typing import TYPE_CHECKING, Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import load as load_bytes
from safetensors.torch import load_file
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import (
    SavePlan,
    SavePlanner,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)

from aioflux import CheckpointCorruptError, CheckpointError, sync
from aioflux._values.checksums import crc32c
from aioflux.checkpoint._format.commit import Commit, decode_commit, decode_index
from aioflux.checkpoint._format.safetensors import (
    DTYPES,
    TensorSpec,
    plan_layout,
    unpack_metadata,
)
from aioflux.checkpoint.compression import ZStandard
from aioflux.checkpoint.dcp import StorageWriter, load_state
from aioflux.checkpoint.dcp._object_plan import WriteKind, plan_ranks
from tests.checkpoint.dcp.states import (
    assert_equal,
    copy_down,
    forget_cached_plans,
    raw,
    save,
    small_state,
    state_of_all_kinds,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from aioflux.testing import GCSServer

pytestmark = pytest.mark.clouds("gs", "s3", "az")

URI = "gs://bucket/c"
INDEX = "c/model.safetensors.index.json"


def writer(**options: Any) -> StorageWriter:
    return StorageWriter(URI, layout="safetensors", **options)


def index_of(server: GCSServer) -> tuple[dict[str, Any], Commit]:
    index, commit = decode_index(server.get("bucket", INDEX), uri=INDEX)
    assert commit is not None
    return index, commit


def model_keys(server: GCSServer) -> list[str]:
    return [key for key in server.keys("bucket", "c/") if key.endswith(".safetensors")]


def dtype_name(tensor: torch.Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def flat(state: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in state.items():
        name = f"{prefix}{key}"
        found |= flat(value, f"{name}.") if isinstance(value, dict) else {name: value}
    return found


def assert_holds(server: GCSServer, folder: Path, state: dict[str, Any]) -> None:
    """All tensors that fit are read by the safetensors library, through the index."""
    copy_down(server, "c", folder)
    index, commit = index_of(server)
    tensors = {
        name: value
        for name, value in flat(state).items()
        if isinstance(value, torch.Tensor) and dtype_name(value) in DTYPES
    }
    assert index["weight_map"].keys() == tensors.keys()
    for name, key in index["weight_map"].items():
        with safe_open(folder / key, framework="pt") as file:
            assert_equal(file.get_tensor(name), tensors[name].detach())
    assert index["metadata"]["total_size"] == sum(each.nbytes for each in tensors.values())
    for each in commit.objects:
        data = (folder / each.key).read_bytes()
        assert (len(data), crc32c(data)) == (each.size, each.crc32c)
        starts = range(0, len(data), each.block_size)
        blocks = [crc32c(data[at : at + each.block_size]) for at in starts]
        assert b"".join(block.to_bytes(4, "big") for block in blocks) == each.block_crcs


@pytest.mark.parametrize("objects_per_rank", [1, 3])
def test_the_library_reads_every_object(
    server: GCSServer, tmp_path: Path, objects_per_rank: int
) -> None:
    state = state_of_all_kinds()
    save(state, writer(objects_per_rank=objects_per_rank))
    assert len(model_keys(server)) == objects_per_rank
    assert_holds(server, tmp_path, state)


def test_one_object_is_loaded_as_a_state(server: GCSServer, tmp_path: Path) -> None:
    model = {"weight": torch.randn(5, 3), "ids": torch.arange(4)}
    save(model, writer())
    (key,) = model_keys(server)
    assert key.endswith("-00001-of-00001.safetensors")
    place = tmp_path / "model.safetensors"
    place.write_bytes(server.get("bucket", key))
    assert_equal(load_file(place), model)
    with safe_open(place, framework="pt") as file:
        assert file.metadata() == {"format": "pt"}


def test_what_safetensors_cannot_hold_lies_beside_it(server: GCSServer, tmp_path: Path) -> None:
    state = {"a": torch.ones(2), "wave": torch.ones(2, dtype=torch.complex128), "step": 7}
    save(state, writer())
    index, commit = index_of(server)
    assert list(index["weight_map"]) == ["a"]
    metadata = pickle.loads(unpack_metadata(commit, uri=INDEX))
    where = {each.fqn: info for each, info in metadata.storage_data.items()}
    assert where["a"].relative_path == index["weight_map"]["a"]
    data = server.get("bucket", f"c/{where['step'].relative_path}")
    for name in ("step", "wave"):
        at = where[name]
        place = tmp_path / name
        place.write_bytes(data[at.offset : at.offset + at.length])
        assert_equal(torch.load(place), state[name])


def test_the_metadata_reports_where_the_bytes_lie(server: GCSServer) -> None:
    state = state_of_all_kinds()
    metadata = save(state, writer(objects_per_rank=2))
    _, commit = index_of(server)
    assert commit.layout == "safetensors"
    items = {(each.key, item.offset, item.length) for each in commit.objects for item in each.items}
    for index, info in metadata.storage_data.items():
        assert (info.relative_path, info.offset, info.length) in items
        if info.relative_path.endswith(".safetensors"):
            data = server.get("bucket", f"c/{info.relative_path}")
            tensor = flat(state)[index.fqn]
            assert data[info.offset : info.offset + info.length] == raw(tensor).numpy().tobytes()


def test_no_tensor_without_bytes_lies_where_another_begins(server: GCSServer) -> None:
    save({"b": torch.ones(3), "none": torch.ones(0, 3), "a": torch.arange(2)}, writer())
    _, commit = index_of(server)
    (stored,) = commit.objects
    begins = [item.offset for item in stored.items]
    assert len(set(begins)) == 3
    assert stored.items[-1].length == 0


def test_a_state_without_tensors_has_an_index(server: GCSServer) -> None:
    save({"step": 7}, writer())
    index, commit = index_of(server)
    assert index["weight_map"] == {}
    assert len(commit.objects) == 1


def test_an_overwrite_leaves_the_new_objects_alone(server: GCSServer, tmp_path: Path) -> None:
    for seed in (1, 2):
        save(small_state(seed), writer(objects_per_rank=2))
    assert len(server.keys("bucket")) == 5
    assert_holds(server, tmp_path, small_state(2))


@pytest.mark.parametrize("first", ["dcp", "safetensors"])
def test_one_layout_replaces_the_other(server: GCSServer, first: Any) -> None:
    second: Any = {"dcp": "safetensors", "safetensors": "dcp"}[first]
    save(small_state(1), StorageWriter(URI, layout=first))
    save(small_state(2), StorageWriter(URI, layout=second))
    keys = server.keys("bucket")
    if second == "dcp":
        _, commit = decode_commit(server.get("bucket", "c/.metadata"), uri="")
        assert INDEX not in keys
    else:
        _, commit = index_of(server)
        assert "c/.metadata" not in keys
    assert commit is not None
    assert len(keys) == 1 + len(commit.objects)


@pytest.mark.clouds("gs")
def test_a_failure_leaves_nothing(server: GCSServer) -> None:
    with (
        server.faults.inject("*", status=403, key="c/model-*"),
        pytest.raises(CheckpointException, match=rf"rank 0 could not save {server.root}/c/model-"),
    ):
        save(small_state(1), writer())
    assert server.keys("bucket") == []


@pytest.fixture
def _no_cached_plans() -> Iterator[None]:
    forget_cached_plans()
    yield
    forget_cached_plans()


@pytest.mark.usefixtures("_no_cached_plans")
def test_cached_plans_are_served_where_they_were_made_for_this_layout(
    server: GCSServer, tmp_path: Path
) -> None:
    planner = DefaultSavePlanner(enable_plan_caching=True)
    for seed in (1, 2):
        save(small_state(seed), writer(), planner=planner)
    assert_holds(server, tmp_path, small_state(2))
    save(small_state(3), StorageWriter(f"{server.root}/d"), planner=planner)
    SavePlanner._cached_final_save_plan.clear()
    SavePlanner._cached_save_plan.clear()
    SavePlanner._cached_all_plans.clear()
    save(small_state(4), StorageWriter(f"{server.root}/d"), planner=planner)
    with pytest.raises(CheckpointException, match="cached for another layout"):
        save(small_state(5), writer(), planner=planner)


def test_settings_without_effect_are_refused(server: GCSServer) -> None:
    with pytest.raises(ValueError, match="do not support compression"):
        writer(compression=ZStandard())
    with pytest.raises(ValueError, match="layout must be"):
        StorageWriter(URI, layout="zip")  # type: ignore[arg-type]
    with pytest.raises(Exception, match="use_collectives=False"):
        save(small_state(), writer(), use_collectives=False)


def test_a_commit_without_metadata_is_corrupt() -> None:
    commit = Commit(save_id="x", uri="", created=0)
    with pytest.raises(CheckpointCorruptError, match="has no metadata of its tensors"):
        unpack_metadata(commit, uri=INDEX)


@given(
    st.lists(
        st.tuples(
            st.text(min_size=1, max_size=5),
            st.sampled_from(sorted(DTYPES)),
            st.lists(st.integers(0, 4), max_size=3).map(tuple),
        ),
        unique_by=lambda each: each[0],
        max_size=6,
    ).filter(lambda each: all(name != "__metadata__" for name, _, _ in each))
)
def test_any_header_is_one_that_the_library_takes(
    specs: list[tuple[str, str, tuple[int, ...]]],
) -> None:
    tensors = [TensorSpec(*each) for each in specs]
    layout = plan_layout(tensors)
    data = layout.header + bytes(layout.size - len(layout.header))
    loaded = load_bytes(data)
    assert {(name, dtype_name(each), tuple(each.shape)) for name, each in loaded.items()} == set(
        specs
    )
    told = json.loads(layout.header[8:])
    for each in tensors:
        assert told[each.name]["data_offsets"][0] + len(layout.header) == layout.offsets[each.name]
        assert not each.num_bytes or layout.offsets[each.name] % each.item_size == 0


def rows_of(name: str, tensor: torch.Tensor, first: int, last: int) -> WriteItem:
    sizes = torch.Size([last - first, *tensor.shape[1:]])
    offsets = torch.Size([first, *[0] * (tensor.dim() - 1)])
    data = TensorWriteData(
        chunk=ChunkStorageMetadata(offsets=offsets, sizes=sizes),
        properties=TensorProperties(dtype=tensor.dtype),
        size=tensor.shape,
    )
    return WriteItem(MetadataIndex(name, offsets), WriteItemType.SHARD, tensor_data=data)


class _Whole:
    """A planner that has the whole of every tensor, and gives the rows that are asked for."""

    def __init__(self, tensors: dict[str, torch.Tensor]) -> None:
        self.tensors = tensors

    def resolve_data(self, item: WriteItem) -> torch.Tensor:
        assert item.tensor_data is not None
        first = item.tensor_data.chunk.offsets[0]
        return self.tensors[item.index.fqn][first : first + item.tensor_data.chunk.sizes[0]]


def save_rows(
    uri: str,
    tensors: dict[str, torch.Tensor],
    edges: list[int],
    change: Callable[[Any], Any] = lambda part: part,
) -> None:
    """Save tensors of which each rank has the rows between two edges, as `dcp.save` does."""
    plans = [
        [rows_of(name, tensor, *edge) for name, tensor in tensors.items()]
        for edge in itertools.pairwise(edges)
    ]
    planner: Any = _Whole(tensors)
    writers = [StorageWriter(uri, layout="safetensors") for _ in plans]
    for rank, each in enumerate(writers):
        each.set_up_storage_writer(rank == 0, rank=rank, use_collectives=True)
    planned = writers[0].prepare_global_plan([SavePlan(items) for items in plans])
    results = [
        each.write_data(plan, planner).value() for each, plan in zip(writers, planned, strict=True)
    ]
    results[-1] = [
        dataclasses.replace(result, storage_data=change(result.storage_data))
        for result in results[-1]
    ]
    stored = {
        name: TensorStorageMetadata(
            TensorProperties(dtype=tensor.dtype),
            tensor.shape,
            [item.tensor_data.chunk for items in plans for item in items if item.index.fqn == name],
        )
        for name, tensor in tensors.items()
    }
    writers[0].finish(Metadata(stored), results)


def test_rows_of_many_ranks_are_composed_in_turns() -> None:
    """More than the service composes at once, and ranks that have no rows."""
    tensors = {
        "large": torch.randn(1003, 9000),
        "small": torch.randn(1003, 3),
        "smaller": torch.randn(1003, 2),
    }
    edges = [0, 0, 1, *range(30, 1003, 30), 1003, 1003]
    plans = [
        [rows_of(name, tensor, *edge) for name, tensor in tensors.items()]
        for edge in itertools.pairwise(edges)
    ]
    assert {each.kind for each in plan_ranks(plans, 1)[3].placements.values()} == {
        WriteKind.COMPOSED,
        WriteKind.ASSEMBLED,
    }
    uri = "memory://composed/c"
    save_rows(uri, tensors, edges)
    assert_equal(load_state(uri), tensors)  # each block is verified
    with sync.open_store(uri) as store:
        index, commit = decode_index(store.get(INDEX.removeprefix("c/")), uri=uri)
        assert commit is not None
        assert {meta.key for meta in store.list_all()} == {
            INDEX.removeprefix("c/"),
            *(stored.key for stored in commit.objects),
        }
        for stored in commit.objects:
            assert crc32c(store.get(stored.key)) == stored.crc32c
    assert index["weight_map"].keys() == tensors.keys()


def test_a_tensor_with_a_missing_part_is_refused() -> None:
    with pytest.raises(CheckpointError, match="27 of the 30 elements of 'small'"):
        save_rows("memory://missing/c", {"small": torch.randn(10, 3)}, [0, 4, 9])


@pytest.mark.parametrize(
    ("edges", "kind"),
    [
        ([0, 5, 10], WriteKind.COMPOSED),
        ([0, 5, 9], WriteKind.ASSEMBLED),
        ([1, 5, 10], WriteKind.ASSEMBLED),
    ],
    ids=["rows", "end-missing", "begin-missing"],
)
def test_only_all_rows_are_composed(edges: list[int], kind: WriteKind) -> None:
    tensor = torch.empty(1, dtype=torch.uint8).expand(10, 4 * 2**20)
    plans = [[rows_of("large", tensor, *edge)] for edge in itertools.pairwise(edges)]
    for layout in plan_ranks(plans, 1):
        assert [each.kind for each in layout.placements.values()] == [kind]
        assert layout.num_objects == 1


def test_columns_are_not_composed() -> None:
    halves = [
        WriteItem(
            MetadataIndex("large", at),
            WriteItemType.SHARD,
            tensor_data=TensorWriteData(
                ChunkStorageMetadata(offsets=torch.Size(at), sizes=torch.Size([10, 2**22])),
                TensorProperties(dtype=torch.uint8),
                torch.Size([10, 2**23]),
            ),
        )
        for at in ([0, 0], [0, 2**22])
    ]
    for layout in plan_ranks([[half] for half in halves], 1):
        assert [each.kind for each in layout.placements.values()] == [WriteKind.ASSEMBLED]


def test_a_planner_that_changes_a_dtype_in_secret_is_refused(server: GCSServer) -> None:
    class Halving(DefaultSavePlanner):
        def resolve_data(self, write_item: WriteItem) -> Any:
            data = super().resolve_data(write_item)
            return data.half() if isinstance(data, torch.Tensor) else data

    with pytest.raises(CheckpointException, match=r"planned as 12288 bytes of torch\.float32"):
        save(small_state(), writer(), planner=Halving())


def with_a_wrong_checksum(part: Any) -> Any:
    first, *others = part.checksums
    return dataclasses.replace(part, checksums=(first._replace(crc32c=1), *others))


def elsewhere(part: Any) -> Any:
    return dataclasses.replace(part, placement=part.placement._replace(offset=7))


@pytest.mark.parametrize(
    ("change", "says"),
    [(with_a_wrong_checksum, "the stored object has"), (elsewhere, "has a part at byte 7")],
    ids=["checksum", "offset"],
)
def test_composed_objects_are_verified(change: Callable[[Any], Any], says: str) -> None:
    """A rank that reports wrong checksums, or parts that do not follow each other."""
    tensors = {"large": torch.zeros(40, 2**20, dtype=torch.uint8)}
    with pytest.raises(CheckpointError, match=says):
        save_rows("memory://verified/c", tensors, [0, 20, 40], change)
    with sync.open_store("memory://verified/c") as store:
        assert INDEX.removeprefix("c/") not in {meta.key for meta in store.list_all()}
