"""StorageReader and load_state, in one process: what is read is what was saved, or an error."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import pytest
import torch
import torch.distributed.checkpoint as dcp
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.checkpoint import DefaultLoadPlanner, FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint._extension import ExtensionRegistry
from torch.distributed.checkpoint._extension import ZStandard as StockZStandard
from torch.distributed.checkpoint._nested_dict import flatten_state_dict
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.planner import LoadPlan

from aioflux import (
    CheckpointCorruptError,
    CheckpointError,
    CheckpointNotFoundError,
    PermissionDeniedError,
    RetryPolicy,
    TransferOptions,
    sync,
)
from aioflux.checkpoint._format.commit import Commit, decode_commit, encode_commit
from aioflux.checkpoint._format.nesting import (
    CONTAINERS,
    describe_containers,
    merge_containers,
    nest,
)
from aioflux.checkpoint.compression import ZStandard
from aioflux.checkpoint.dcp import StorageReader, StorageWriter, load_state
from aioflux.testing import GCSServer
from tests.checkpoint.dcp.states import (
    assert_equal,
    blank,
    copy_down,
    no_warnings,
    save,
    small_state,
    state_of_all_kinds,
)
from tests.checkpoint.replaced import ReplacedOnce
from tests.patience import PATIENT

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch.distributed.checkpoint.metadata import Metadata

pytestmark = pytest.mark.clouds("gs", "s3", "az")

URI = "gs://bucket/run/step-1"
QUICK = RetryPolicy(max_attempts=2, initial_seconds=0.01, max_seconds=0.02)
MIB = 1024 * 1024


def load(like: Any, reader: StorageReader, **options: Any) -> Any:
    """Load into zeros of the shapes of a state."""
    loaded = blank(like)
    with no_warnings():
        dcp.load(loaded, storage_reader=reader, **options)
    return loaded


def error_of(reader: StorageReader, like: Any | None = None) -> BaseException:
    """The error of the only rank that fails to load."""
    with pytest.raises(CheckpointException) as caught:
        load(like or small_state(), reader)
    ((error, _),) = caught.value.failures.values()
    pickle.loads(pickle.dumps(error))
    return error


def copy_up(server: GCSServer, folder: Path, prefix: str = "run/step-1") -> None:
    """Copy what stock DCP wrote to a bucket, by the back door of the server."""
    for path in folder.rglob("*"):
        if path.is_file():
            key = f"{prefix}/{path.relative_to(folder).as_posix()}"
            server.put("bucket", key, path.read_bytes())


def stock_save(state: Any, folder: Path, **options: Any) -> None:
    with no_warnings():
        dcp.save(state, storage_writer=FileSystemWriter(folder, **options))


def keys(server: GCSServer) -> list[str]:
    return [key for key in server.keys("bucket", "run/step-1") if not key.endswith(".metadata")]


# --- what is read ------------------------------------------------------------------------


@pytest.mark.parametrize("compression", [None, ZStandard()], ids=["plain", "compressed"])
def test_all_kinds_of_tensors_and_values_come_back(
    server: GCSServer, compression: ZStandard | None
) -> None:
    state = state_of_all_kinds(3)
    state["large"] = torch.arange(300_000).reshape(300, 1000)
    save(state, StorageWriter(URI, compression=compression, objects_per_rank=2))
    assert_equal(state, load(state, StorageReader(URI)))
    assert_equal(state, load_state(URI))


def test_checkpoints_of_stock_dcp_load(server: GCSServer, tmp_path: Path) -> None:
    state = state_of_all_kinds(4)
    state["large"] = torch.arange(300_000).reshape(300, 1000)
    state["large turned"] = torch.arange(300_000).reshape(300, 1000).t()
    stock_save(state, tmp_path, thread_count=2)
    copy_up(server, tmp_path)
    assert_equal(state, load(state, StorageReader(URI)))
    assert_equal(state, load_state(URI))
    assert_equal(state, load_state(f"file://{tmp_path}"))


def test_ranks_that_read_different_commits_load_nothing(server: GCSServer) -> None:
    plans = []
    for seed in (1, 2):
        save(small_state(seed), StorageWriter(URI))
        reader = StorageReader(URI)
        reader.read_metadata()
        plans.append(reader.prepare_local_plan(LoadPlan([])))
    assert reader.prepare_global_plan([plans[1], plans[1]]) == [plans[1], plans[1]]
    with pytest.raises(CheckpointError, match="was replaced while the ranks read its metadata"):
        reader.prepare_global_plan(plans)


def test_stock_dcp_loads_checkpoints_of_ours(server: GCSServer, tmp_path: Path) -> None:
    state = state_of_all_kinds(5)
    save(state, StorageWriter(URI))
    folder = copy_down(server, "run/step-1", tmp_path)
    loaded = blank(state)
    with no_warnings():
        dcp.load(loaded, storage_reader=FileSystemReader(folder))
    assert_equal(state, loaded)
    # Moved, it has other generations; checksums decide.
    assert_equal(state, load_state(f"file://{folder}"))


def test_items_that_stock_transformed_come_back(server: GCSServer, tmp_path: Path) -> None:
    state = small_state(6)
    stock_save(state, tmp_path / "zstd", _extensions=[StockZStandard()])
    stock_save(state, tmp_path / "ours", _extensions=[ZStandard()])
    for name in ("zstd", "ours"):
        assert_equal(state, load(state, StorageReader(f"file://{tmp_path}/{name}")))


def test_a_transform_that_is_not_known_is_named(tmp_path: Path) -> None:
    stock_save(small_state(), tmp_path, _extensions=[StockZStandard()])
    registry = ExtensionRegistry()
    registry.extensions.clear()
    error = error_of(StorageReader(f"file://{tmp_path}", extension_registry=registry))
    assert type(error) is CheckpointError
    assert "stream.zstd" in str(error)


def test_the_layout_of_safetensors_comes_back(server: GCSServer) -> None:
    state = state_of_all_kinds(7)
    save(state, StorageWriter(URI, layout="safetensors"))
    assert_equal(state, load(state, StorageReader(URI)))
    assert_equal(state, load_state(URI))


def test_tensors_are_loaded_in_place_with_any_strides(server: GCSServer) -> None:
    state = {name: torch.randn(40, 30) for name in ("dtype", "turned", "strided", "leaf")}
    save(state, StorageWriter(URI))
    turned, wide = torch.zeros(30, 40), torch.zeros(80, 60)
    leaf = torch.zeros(40, 30, requires_grad=True)
    into = {
        "dtype": torch.zeros(40, 30, dtype=torch.float64),
        "turned": turned.t(),
        "strided": wide[::2, ::2],
        "leaf": leaf,
    }
    with no_warnings():
        dcp.load(into, storage_reader=StorageReader(URI))
    assert torch.equal(into["dtype"], state["dtype"].double())
    assert torch.equal(turned.t(), state["turned"])
    assert torch.equal(wide[::2, ::2], state["strided"])
    assert wide[1::2].eq(0).all()
    assert torch.equal(leaf, state["leaf"])


def test_tensors_are_loaded_in_place(server: GCSServer) -> None:
    state = {"w": torch.randn(300, 1000)}
    save(state, StorageWriter(URI))
    into = {"w": torch.zeros(300, 1000)}
    tensor = into["w"]
    with no_warnings():
        dcp.load(into, storage_reader=StorageReader(URI))
    assert into["w"] is tensor
    assert torch.equal(tensor, state["w"])


class Collecting(DefaultLoadPlanner):
    """Gives memory of its own for each tensor, and takes it back when it is filled."""

    def __init__(self) -> None:
        super().__init__()
        self.committed: dict[str, torch.Tensor] = {}

    def resolve_tensor(self, read_item: Any) -> torch.Tensor:
        return torch.empty_like(super().resolve_tensor(read_item))

    def commit_tensor(self, read_item: Any, tensor: torch.Tensor) -> None:
        assert read_item.dest_index.fqn not in self.committed
        self.committed[read_item.dest_index.fqn] = tensor.clone()


def test_each_tensor_is_committed_to_the_planner_once_and_complete(server: GCSServer) -> None:
    state = {"a": torch.randn(300, 1000), "b": torch.randn(3), "c": torch.randn(5, 2).t()}
    save(state, StorageWriter(URI))
    planner = Collecting()
    load(state, StorageReader(URI), planner=planner)
    assert_equal(state, planner.committed)


@pytest.mark.clouds("gs")
def test_many_small_tensors_are_few_requests(server: GCSServer) -> None:
    state = {f"{number:03}": torch.randn(64) for number in range(200)}
    save(state, StorageWriter(URI))
    server.stats.reset()
    assert_equal(state, load(state, StorageReader(URI, timeouts=PATIENT)))
    assert server.stats.total.requests <= 4


@pytest.mark.clouds("gs")
def test_a_third_of_rows_reads_a_third_of_bytes(server: GCSServer, tmp_path: Path) -> None:
    state = {"w": torch.randn(6000, 1000)}
    save(state, StorageWriter(URI))
    stock_save(state, tmp_path)
    copy_up(server, tmp_path, "stock")
    for uri in (URI, f"{server.root}/stock"):
        server.stats.reset()
        part = rows_of(uri, "w", 2000, 4000)
        assert torch.equal(part, state["w"][2000:4000])
        metadata = len(server.get("bucket", f"{uri.removeprefix(f'{server.root}/')}/.metadata"))
        assert server.stats.total.bytes_out - metadata <= 1.05 * part.nbytes + 2048


def rows_of(uri: str, name: str, start: int, end: int) -> torch.Tensor:
    """Read some rows of a tensor as a planner asks for them that shards it so."""

    class Rows(DefaultLoadPlanner):
        def create_local_plan(self) -> Any:
            plan = super().create_local_plan()
            (item,) = plan.items
            offsets, lengths = list(item.storage_offsets), list(item.lengths)
            offsets[0], lengths[0] = start, end - start
            object.__setattr__(item, "storage_offsets", torch.Size(offsets))
            object.__setattr__(item, "dest_offsets", torch.Size([start, 0]))
            object.__setattr__(item, "lengths", torch.Size(lengths))
            return plan

    into = {name: torch.zeros(6000, 1000)}
    with no_warnings():
        reader = StorageReader(uri, timeouts=PATIENT)
        dcp.load(into, storage_reader=reader, planner=Rows())
    return into[name][start:end]


# --- what load_state adds ----------------------------------------------------------------


def test_numbers_as_keys_and_empty_dictionaries_load_by_the_containers_of_the_commit() -> None:
    state = {
        "optimizer": {"state": {0: {"m": torch.ones(1)}, 1: {}}, "groups": [{"lr": 1}, {}]},
        "lists": [[torch.ones(1)], [1, 2], [{"a": []}]],
        "none": {},
    }
    flat, ways = flatten_state_dict(state)
    assert nest(flat, ways, describe_containers(state)) == state
    assert nest({}, {}, describe_containers({})) == {}


def test_keys_that_are_no_text_come_back_as_they_were() -> None:
    state = {
        "mixed": {1: 2, "a": {None: 3, (1, "b"): {True: 4, -2.5: 5}}},
        "bytes": {b"x": {0: 6}},
        7: {"c": 8},
    }
    flat, ways = flatten_state_dict(state)
    again = nest(flat, ways, describe_containers(state))
    assert again == state
    assert repr(again) == repr(state)  # 1 and True are equal


class One:
    """Looks like a number, and is none."""

    def __repr__(self) -> str:
        return "1"


def test_keys_that_are_equal_as_text_are_refused() -> None:
    with pytest.raises(TypeError, match="keys that are the same as text"):
        describe_containers({"x": {0: torch.ones(1), "0": torch.ones(1)}})


def test_containers_of_parts_of_a_state_are_joined() -> None:
    whole = describe_containers({"a": {0: {}}, "b": {1: {}}})
    parts = [describe_containers({"a": {0: {}}}), describe_containers({"b": {1: {}}})]
    assert merge_containers([whole, whole]) == whole
    assert merge_containers(parts) == whole


@pytest.mark.parametrize(
    "key",
    [object(), torch.float32, float("nan"), (1, object()), One()],
    ids=["object", "dtype", "nan", "tuple", "repr"],
)
def test_keys_that_no_load_could_bring_back_are_refused(key: Any) -> None:
    with pytest.raises(TypeError, match=r"\['x'\]\[0\] has a key of type "):
        describe_containers({"x": [{key: torch.ones(1)}]})


def test_values_are_in_the_order_of_the_paths() -> None:
    """Several ranks write equal values by turns, so that their order is lost."""
    paths = {"b": ("b",), "a.y": ("a", "y"), "a.x": ("a", "x")}
    assert str(nest({"a.x": 1, "b": 2, "a.y": 3}, paths)) == "{'b': 2, 'a': {'y': 3, 'x': 1}}"
    assert str(nest({"c": 1, "b": 2}, {"b": ("b",), "gone": ("gone",)})) == "{'b': 2, 'c': 1}"


def test_load_state_nests_by_the_containers_of_the_commit(server: GCSServer) -> None:
    state = {"state": {0: {"m": torch.ones(2)}, 7: {"m": torch.zeros(2)}}, "none": {}}
    save(state, StorageWriter(URI))
    pickled, commit = decode_commit(server.get("bucket", "run/step-1/.metadata"), uri="")
    assert commit is not None
    text = msgspec.structs.replace(commit, extra={CONTAINERS: describe_containers(state)})
    server.put("bucket", "run/step-1/.metadata", encode_commit(pickled, text))
    assert_equal(state, load_state(URI))


WAYS = {
    "a place in a dictionary": {"a": ("x", 0), "b": ("x", "y")},
    "through a value": {"a": ("x",), "b": ("x", "y")},
    "the same twice": {"a": ("x",), "b": ("x",)},
    "a place far away": {"a": ("x", 2**40)},
    "before the first": {"a": ("x", -1)},
    "nowhere": {"a": ()},
    "no way": {"a": "x"},
    "a float": {"a": (1.5,)},
}


@pytest.mark.parametrize("ways", WAYS.values(), ids=WAYS)
def test_paths_that_contradict_each_other_are_rejected(ways: Any) -> None:
    with pytest.raises(ValueError, match=r"path|value|dictionary|list"):
        nest(dict.fromkeys(ways, 1), ways)


def test_invalid_paths_of_values_are_damage(server: GCSServer) -> None:
    save({"a": torch.ones(2)}, StorageWriter(URI))
    pickled, commit = decode_commit(server.get("bucket", "run/step-1/.metadata"), uri="")
    assert commit is not None
    metadata = pickle.loads(pickled)
    metadata.planner_data = {"a": ("x", 2**40)}
    forged = encode_commit(pickle.dumps(metadata), commit)
    server.put("bucket", "run/step-1/.metadata", forged)
    with pytest.raises(CheckpointCorruptError, match="cannot be nested"):
        load_state(URI)


@pytest.mark.parametrize(
    "text",
    [
        '{"integers": [["a"]]}',
        "{",
        "[1]",
        '{"integers": [["no"]]}',
        '{"empty": [[1.5]]}',
        '{"orders": 1}',
        '{"orders": [[[], "a"]]}',
        '{"orders": [[[], [1]]]}',
        '{"orders": [[["no"], ["a"]]]}',
        '{"orders": [[[], ["no", "a"]]]}',
    ],
)
def test_invalid_containers_are_rejected_or_ignored(text: str) -> None:
    try:
        assert nest({"a": 1}, None, text) == {"a": 1}
    except ValueError:
        assert text != "[1]"


@pytest.mark.parametrize(
    "text", ["5", "[5]", '[[[], {"a": 1}]]', '[[[], {"a": "f()"}]]', '[[[], {"a": "[1]"}]]']
)
def test_keys_that_are_no_constants_are_rejected(text: str) -> None:
    with pytest.raises(ValueError, match="the description of dictionary keys"):
        nest({"a": 1}, None, f'{{"literals": {text}}}')


def test_tensors_go_to_the_device_of_map_location(server: GCSServer) -> None:
    save(small_state(), StorageWriter(URI))
    loaded = load_state(URI, map_location="meta")
    assert loaded["model"]["weight"].is_meta
    assert loaded["step"] == 0


# --- the rules of the interface ----------------------------------------------------------


def test_reset_goes_to_another_uri_and_keeps_settings(server: GCSServer) -> None:
    for number in (1, 2):
        save(small_state(number), StorageWriter(f"{server.root}/run/step-{number}"))
    reader = StorageReader(URI, endpoint_url=server.url, retry=QUICK)
    assert_equal(small_state(1), load(small_state(1), reader))
    other = load(small_state(2), reader, checkpoint_id=f"{server.root}/run/step-2")
    assert_equal(small_state(2), other)
    assert reader.checkpoint_id == f"{server.root}/run/step-2"
    assert reader._store.retry == QUICK
    assert_equal(small_state(2), load(small_state(2), reader))


@pytest.mark.clouds("gs")
@pytest.mark.parametrize("wrong", [Path("gs://bucket/c"), "/tmp/c", "http://bucket/c", "step-2"])
def test_reset_rejects_anything_but_a_whole_uri(server: GCSServer, wrong: Any) -> None:
    reader = StorageReader(URI)
    assert not reader.validate_checkpoint_id(wrong)
    with pytest.raises(ValueError, match="a string with a uri"):
        reader.reset(wrong)


def test_a_reader_pickles_without_its_metadata(server: GCSServer) -> None:
    save(small_state(1), StorageWriter(URI))
    reader = StorageReader(URI, retry=QUICK)
    load(small_state(1), reader)
    again = pickle.loads(pickle.dumps(reader))
    assert again.checkpoint_id == URI
    assert_equal(small_state(1), load(small_state(1), again))


def test_metadata_of_one_rank_is_read_if_there_is_no_other(server: GCSServer) -> None:
    save(small_state(3), StorageWriter(URI), use_collectives=False)
    assert [key for key in server.keys("bucket", "run/step-1") if key.endswith("metadata")] == [
        "run/step-1/__0.metadata"
    ]
    assert_equal(small_state(3), load(small_state(3), StorageReader(URI)))


def test_no_checkpoint_is_not_found(server: GCSServer) -> None:
    error = error_of(StorageReader(URI))
    assert type(error) is CheckpointNotFoundError
    assert URI in str(error)
    with pytest.raises(CheckpointNotFoundError, match=URI):
        load_state(URI)
    with pytest.raises(CheckpointNotFoundError, match=URI):
        StorageReader(URI).read_metadata()


@pytest.mark.clouds("gs")
def test_an_error_of_the_service_is_no_missing_checkpoint(server: GCSServer) -> None:
    save(small_state(), StorageWriter(URI))
    with server.faults.inject("objects.get", status=403):
        error = error_of(StorageReader(URI, retry=QUICK))
        with pytest.raises(PermissionDeniedError):
            load_state(URI, retry=QUICK)
    assert type(error) is PermissionDeniedError


class Replacing(DefaultLoadPlanner):
    """Saves another state to the same uri when a load begins to read, once for each state."""

    def __init__(self, *states: Any) -> None:
        super().__init__()
        self.states = list(states)

    def resolve_tensor(self, read_item: Any) -> torch.Tensor:
        if self.states and read_item.dest_index.fqn == "model.weight":
            save(self.states.pop(0), StorageWriter(URI))
        return super().resolve_tensor(read_item)


def test_a_load_whose_checkpoint_is_replaced_meanwhile_reads_the_new_one(
    server: GCSServer,
) -> None:
    save(small_state(1), StorageWriter(URI))
    planner = Replacing(small_state(2), small_state(3))
    assert_equal(load(small_state(), StorageReader(URI), planner=planner), small_state(3))


def test_a_load_whose_checkpoint_gets_another_structure_meanwhile_says_so(
    server: GCSServer,
) -> None:
    save(small_state(1), StorageWriter(URI))
    with pytest.raises(CheckpointException, match="replaced by a checkpoint of another structure"):
        load(small_state(), StorageReader(URI), planner=Replacing({"w": torch.ones(3)}))


def test_ranks_without_a_group_load_nothing_from_a_checkpoint_that_is_replaced(
    server: GCSServer,
) -> None:
    """They cannot agree on a commit: another rank may have read all of its part."""
    save(small_state(1), StorageWriter(URI))
    reader = StorageReader(URI)
    metadata = reader.read_metadata()
    reader.set_up_storage_reader(metadata, is_coordinator=False)
    planner = DefaultLoadPlanner()
    planner.set_up_planner(blank(small_state()), metadata, is_coordinator=False)
    plan = reader.prepare_local_plan(planner.create_local_plan())
    save(small_state(2), StorageWriter(URI))
    with pytest.raises(CheckpointCorruptError, match="was deleted or replaced"):
        reader.read_data(plan, planner)


@pytest.mark.clouds("gs")
def test_a_whole_load_whose_checkpoint_is_replaced_meanwhile_reads_the_new_one(
    server: GCSServer,
) -> None:
    save(small_state(1), StorageWriter(URI))
    save({"w": torch.ones(3)}, StorageWriter("gs://bucket/other/step-1"))
    hook = ReplacedOnce(server, "run/", "other/")
    assert_equal(load_state(URI, retry=QUICK), {"w": torch.ones(3)})
    assert hook.is_done


@pytest.mark.clouds("gs")
def test_a_whole_load_of_a_checkpoint_that_is_deleted_meanwhile_is_not_found(
    server: GCSServer,
) -> None:
    save(small_state(1), StorageWriter(URI))
    ReplacedOnce(server, "run/", "other/")
    with pytest.raises(CheckpointNotFoundError):
        load_state(URI, retry=QUICK)


@pytest.mark.clouds("gs")
def test_a_load_from_another_shape_says_so(server: GCSServer) -> None:
    save({"w": torch.ones(3)}, StorageWriter(URI))
    with pytest.raises(CheckpointException, match="Size mismatch"):
        load({"w": torch.ones(4)}, StorageReader(URI))


def test_importing_the_package_loads_no_torch() -> None:
    code = (
        "import sys, aioflux.checkpoint, aioflux.checkpoint.dcp; assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


# --- damage ------------------------------------------------------------------------------


class Copied:
    """A checkpoint that was moved, so that only its bytes show damage."""

    def __init__(self, server: GCSServer, name: str, **options: Any) -> None:
        self.server = server
        self.prefix = f"copy-{name}"
        self.uri = f"gs://bucket/{self.prefix}"
        self.state = small_state(8)
        home = f"home-{name}"
        save(
            self.state,
            StorageWriter(f"gs://bucket/{home}", endpoint_url=server.url, **options),
        )
        self.objects = {
            key.replace(home, self.prefix, 1): server.get("bucket", key)
            for key in server.keys("bucket", home)
        }
        self.put_right()

    @property
    def data_key(self) -> str:
        return next(key for key in self.objects if key.endswith(".distcp"))

    @property
    def commit(self) -> tuple[bytes, Commit]:
        pickled, commit = decode_commit(self.objects[f"{self.prefix}/.metadata"], uri="")
        assert commit is not None
        return pickled, commit

    def put(self, key: str, data: bytes) -> None:
        self.server.put("bucket", key, data)

    def forge(self, pickled: bytes, commit: Commit) -> None:
        """Put a commit object whose checksum is right."""
        self.put(f"{self.prefix}/.metadata", encode_commit(pickled, commit))

    def put_right(self) -> None:
        for key, data in self.objects.items():
            self.put(key, data)

    def load(self) -> Any:
        return load_state(self.uri, endpoint_url=self.server.url, retry=QUICK)

    def refuse(self, kind: type[CheckpointError] = CheckpointCorruptError) -> str:
        with pytest.raises(kind) as caught:
            self.load()
        assert self.uri in str(caught.value)
        reader = StorageReader(self.uri, endpoint_url=self.server.url, retry=QUICK)
        error = error_of(reader, self.state)
        assert isinstance(error, kind)
        return str(error)


@pytest.fixture(scope="module")
def place() -> Iterator[GCSServer]:
    with GCSServer(buckets=("bucket",)) as server:
        yield server


@pytest.fixture(scope="module")
def copies(place: GCSServer) -> dict[str, Copied]:
    return {
        "dcp": Copied(place, "dcp"),
        "safetensors": Copied(place, "safetensors", layout="safetensors"),
    }


@pytest.fixture
def copied(copies: dict[str, Copied]) -> Iterator[Copied]:
    yield copies["dcp"]
    copies["dcp"].put_right()


@settings(max_examples=30, deadline=None)
@given(data=st.data(), layout=st.sampled_from(["dcp", "safetensors"]))
def test_one_flipped_bit_in_any_object_is_an_error(
    copies: dict[str, Copied], data: st.DataObject, layout: str
) -> None:
    copied = copies[layout]
    key = data.draw(st.sampled_from(sorted(copied.objects)))
    damaged = bytearray(copied.objects[key])
    at, bit = data.draw(st.integers(0, len(damaged) - 1)), data.draw(st.integers(0, 7))
    damaged[at] ^= 1 << bit
    copied.put(key, bytes(damaged))
    with pytest.raises(CheckpointError) as caught:
        copied.load()
    assert copied.uri in str(caught.value)
    copied.put_right()
    assert_equal(copied.state, copied.load())


@settings(max_examples=20, deadline=None)
@given(data=st.data(), layout=st.sampled_from(["dcp", "safetensors"]))
def test_an_object_that_was_cut_off_is_an_error(
    copies: dict[str, Copied], data: st.DataObject, layout: str
) -> None:
    copied = copies[layout]
    key = data.draw(st.sampled_from(sorted(copied.objects)))
    copied.put(key, copied.objects[key][: data.draw(st.integers(0, len(copied.objects[key]) - 1))])
    with pytest.raises(CheckpointError):
        copied.load()
    copied.put_right()


def test_metadata_truncated_after_its_pickle_is_damage(copied: Copied) -> None:
    pickled, _ = copied.commit
    copied.put(f"{copied.prefix}/.metadata", pickled)
    assert "truncated" in copied.refuse()


def test_bytes_damaged_in_transit_are_read_again(copied: Copied) -> None:
    with copied.server.faults.inject("objects.media", flip_at=5, key="*.distcp", times=2):
        assert_equal(copied.state, copied.load())


def test_a_missing_object_is_an_error(copied: Copied) -> None:
    with sync.open_store("gs://bucket", endpoint_url=copied.server.url) as store:
        store.delete(copied.data_key)
    assert copied.data_key in copied.refuse()


def test_an_object_of_another_save_is_an_error(copied: Copied, place: GCSServer) -> None:
    other = Copied(place, "other")
    copied.put(copied.data_key, other.objects[other.data_key].replace(b"8", b"9"))
    assert "not those that were saved" in copied.refuse()


@pytest.mark.clouds("gs", "az")
def test_an_object_that_was_replaced_since_the_save_is_an_error(server: GCSServer) -> None:
    save(small_state(), StorageWriter(URI))
    (key,) = keys(server)
    server.put("bucket", key, server.get("bucket", key))
    error = error_of(StorageReader(URI))
    assert type(error) is CheckpointCorruptError
    assert key in str(error)


def object_of(commit: Commit, **changes: Any) -> Commit:
    (only,) = commit.objects
    return msgspec.structs.replace(commit, objects=(msgspec.structs.replace(only, **changes),))


def item_of(commit: Commit, **changes: Any) -> Commit:
    items = tuple(msgspec.structs.replace(each, **changes) for each in commit.objects[0].items)
    return object_of(commit, items=items)


FORGED = {
    "no objects": lambda commit: msgspec.structs.replace(commit, objects=()),
    "no items": lambda commit: object_of(commit, items=()),
    "another key": lambda commit: object_of(commit, key="elsewhere"),
    "items elsewhere": lambda commit: item_of(commit, length=1),
    "memory elsewhere": lambda commit: item_of(commit, data_start=2**40),
    "memory before": lambda commit: item_of(commit, data_start=-8),
    "more memory": lambda commit: item_of(commit, data_size=2**40),
    "frames": lambda commit: item_of(commit, frame_size=2**40, frame_ends=(1,)),
    "many frames": lambda commit: item_of(commit, frame_size=1, frame_ends=(1, 2)),
    "frames behind": lambda commit: item_of(commit, frame_size=4096, frame_ends=(2**40,)),
}


@pytest.mark.parametrize("forge", FORGED.values(), ids=FORGED)
def test_a_forged_commit_is_an_error(copied: Copied, forge: Any) -> None:
    pickled, commit = copied.commit
    copied.forge(pickled, forge(commit))
    copied.refuse()


class Runs:
    """Pickles as a call that leaves a mark."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> Any:
        return os.system, (f"touch {self.mark}",)


@pytest.mark.parametrize("where", ["state_dict_metadata", "planner_data", "storage_data"])
def test_metadata_that_tries_to_run_code_is_refused(
    copied: Copied, where: str, tmp_path: Path
) -> None:
    pickled, commit = copied.commit
    hostile = pickle.loads(pickled)
    setattr(hostile, where, Runs(tmp_path / "ran"))
    copied.forge(pickle.dumps(hostile), commit)
    assert "no code was run" in copied.refuse()
    copied.put(f"{copied.prefix}/.metadata", pickle.dumps(hostile))  # as stock would have written
    copied.refuse()
    assert not (tmp_path / "ran").exists()


def claimed(metadata: Metadata, **changes: Any) -> Metadata:
    tensor = metadata.state_dict_metadata["model.weight"]
    for name, value in changes.items():
        setattr(tensor, name, value)
    return metadata


@pytest.mark.parametrize("size", [(64, 48_000_000), (2**31, 2**31), (64, 49), (65, 48)], ids=str)
def test_tensors_of_which_parts_are_missing_are_refused(
    copied: Copied, size: tuple[int, ...]
) -> None:
    pickled, commit = copied.commit
    hostile = claimed(pickle.loads(pickled), size=torch.Size(size))
    copied.forge(pickle.dumps(hostile), commit)
    with pytest.raises(CheckpointCorruptError, match=r"missing|larger"):
        copied.load()


def test_a_tensor_larger_than_its_stored_bytes_allocates_no_memory(copied: Copied) -> None:
    pickled, commit = copied.commit
    hostile = pickle.loads(pickled)
    tensor = hostile.state_dict_metadata["model.weight"]
    tensor.size = tensor.chunks[0].sizes = torch.Size((2**20, 2**20))
    copied.forge(pickle.dumps(hostile), commit)
    with pytest.raises(CheckpointCorruptError, match="larger than its stored bytes"):
        copied.load()


# --- values ------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["ours", "stock"])
def test_a_value_that_tries_to_run_code_is_refused_and_not_run(
    server: GCSServer, tmp_path: Path, kind: str
) -> None:
    state = {"hostile": Runs(tmp_path / "ran"), "w": torch.ones(3)}
    if kind == "ours":
        save(state, StorageWriter(URI))
    else:
        stock_save(state, tmp_path / "stock")
        copy_up(server, tmp_path / "stock")
    error = error_of(StorageReader(URI), state)
    assert type(error) is CheckpointError
    assert "'hostile'" in str(error)
    with pytest.raises(CheckpointError, match="weights_only"):
        load_state(URI)
    assert not (tmp_path / "ran").exists()


class Own:
    """A class of the caller."""

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Own)

    __hash__ = None  # type: ignore[assignment]


def test_values_of_own_classes_load_without_weights_only(server: GCSServer) -> None:
    state = {"own": Own()}
    save(state, StorageWriter(URI))
    assert type(error_of(StorageReader(URI), state)) is CheckpointError
    assert load(state, StorageReader(URI, weights_only=False)) == state
    assert load_state(URI, weights_only=False) == state
    with torch.serialization.safe_globals([Own]):
        assert load_state(URI) == state


def test_a_damaged_pickle_is_not_a_rejected_class(tmp_path: Path) -> None:
    stock_save({"own": Own()}, tmp_path)
    [path] = tmp_path.glob("*.distcp")
    whole = path.read_bytes()
    assert whole.count(f"c{__name__}\nOwn".encode()) == 1
    path.write_bytes(whole.replace(f"c{__name__}\nOwn".encode(), f"\x01{__name__}\nOwn".encode()))
    with pytest.raises(CheckpointCorruptError, match="'own' cannot be read"):
        load_state(f"file://{tmp_path}", weights_only=False)


# --- stock checkpoints, without checksums ------------------------------------------------


@pytest.fixture(scope="module")
def stock(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("stock")
    state = small_state(9)
    state["large"] = torch.arange(20_000).reshape(100, 200)
    stock_save(state, folder)
    return folder


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_damage_to_a_stock_checkpoint_is_a_typed_error_or_other_numbers(
    stock: Path, data: st.DataObject
) -> None:
    name = data.draw(st.sampled_from([".metadata", "__0_0.distcp"]))
    whole = (stock / name).read_bytes()
    at = data.draw(st.integers(0, len(whole) - 1))
    new = data.draw(st.binary(min_size=1, max_size=20))
    cut = data.draw(st.sampled_from([len(whole), data.draw(st.integers(0, len(whole)))]))
    (stock / name).write_bytes((whole[:at] + new + whole[at + len(new) :])[:cut])
    try:
        loaded: Any = load_state(f"file://{stock}")
    except CheckpointError as exc:
        loaded = exc
    finally:
        (stock / name).write_bytes(whole)
    assert isinstance(loaded, dict | CheckpointError)


@pytest.mark.parametrize("name", ["__0_0.distcp", "large"])
def test_a_stock_object_that_is_missing_or_cut_off_is_an_error(
    server: GCSServer, tmp_path: Path, name: str
) -> None:
    stock_save({"w": torch.randn(300, 1000)}, tmp_path)
    copy_up(server, tmp_path)
    key = "run/step-1/__0_0.distcp"
    if name == "large":
        server.put("bucket", key, server.get("bucket", key)[:-5000])
    else:
        with sync.open_store(server.root) as store:
            store.delete(key)
    with pytest.raises(CheckpointCorruptError, match=r"missing|truncated") as caught:
        load_state(URI)
    assert key in str(caught.value)


def test_a_stock_item_that_is_another_tensor_is_an_error(tmp_path: Path) -> None:
    for kind in (torch.float32, torch.int32):
        stock_save({"w": torch.ones(300, 1000, dtype=kind)}, tmp_path / str(kind))
    data = (tmp_path / "torch.int32" / "__0_0.distcp").read_bytes()
    (tmp_path / "torch.float32" / "__0_0.distcp").write_bytes(data)
    with pytest.raises(CheckpointCorruptError, match="differs from the metadata"):
        load_state(f"file://{tmp_path}/torch.float32")


def test_the_result_of_a_transform_is_bounded(tmp_path: Path) -> None:
    import zstandard

    stock_save({"w": torch.ones(100)}, tmp_path, _extensions=[StockZStandard()])
    metadata = pickle.loads((tmp_path / ".metadata").read_bytes())
    (info,) = metadata.storage_data.values()
    bomb = zstandard.ZstdCompressor().compress(bytes(64 * MIB))
    (tmp_path / "__0_0.distcp").write_bytes(bomb)
    info.offset, info.length = 0, len(bomb)
    (tmp_path / ".metadata").write_bytes(pickle.dumps(metadata))
    with pytest.raises(CheckpointCorruptError, match="is longer than"):
        load_state(f"file://{tmp_path}")


@pytest.mark.clouds("gs")
def test_without_verification_ranges_are_exact_and_generations_pinned(server: GCSServer) -> None:
    state = {"w": torch.randn(300, 1000)}
    save(state, StorageWriter(URI))
    server.stats.reset()
    assert_equal(state, load_state(URI, verify=False, timeouts=PATIENT))
    metadata = len(server.get("bucket", "run/step-1/.metadata"))
    assert server.stats.total.bytes_out - metadata - state["w"].nbytes < 1024
    (key,) = keys(server)
    server.put("bucket", key, server.get("bucket", key))
    with pytest.raises(CheckpointCorruptError, match="missing, or was replaced"):
        load_state(URI, verify=False)


def test_small_buffers_are_enough(server: GCSServer) -> None:
    state = {f"{number}": torch.randn(500, 700).t() for number in range(8)}
    save(state, StorageWriter(URI, compression=ZStandard()))
    tight = TransferOptions(max_in_flight=2, max_in_flight_bytes=MIB)
    into = {name: torch.zeros(700, 500, dtype=torch.float64) for name in state}
    with no_warnings():
        dcp.load(into, storage_reader=StorageReader(URI, transfer=tight))
    assert all(torch.equal(into[name], state[name].double()) for name in state)
