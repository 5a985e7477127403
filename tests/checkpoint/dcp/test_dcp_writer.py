"""StorageWriter keeps the rules of DCP's interface, on one process."""

from __future__ import annotations

import io
import logging
import os
import pickle
import re
import signal
import sys
import threading
from typing import TYPE_CHECKING, Any

import msgspec
import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint._extension import ExtensionRegistry
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.planner import SavePlan
from torch.distributed.checkpoint.staging import AsyncStager

from aioflux import (
    AlreadyExistsError,
    CheckpointError,
    RetryPolicy,
    TransferOptions,
    sync,
)
from aioflux.checkpoint._format.commit import Commit, decode_commit, encode_commit, find_save_id
from aioflux.checkpoint.compression import ZStandard
from aioflux.checkpoint.dcp import StorageWriter, load_state
from aioflux.testing.gcs_server import Hook, Response
from tests.checkpoint.dcp.states import (
    UnpicklableError,
    assert_equal,
    copy_down,
    forget_cached_plans,
    no_warnings,
    save,
    small_state,
    state_of_all_kinds,
    stock_load,
)
from tests.patience import PATIENCE_SECONDS, PATIENT, wait_until

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from torch.distributed.checkpoint.metadata import StorageMeta
    from torch.distributed.checkpoint.planner import WriteItem

    from aioflux.testing import GCSServer
    from aioflux.testing.gcs_server import Request

pytestmark = [pytest.mark.clouds("gs", "s3", "az"), pytest.mark.usefixtures("_patient")]

URI = "gs://bucket/run/step-1"
QUICK = RetryPolicy(max_attempts=2, initial_seconds=0.01, max_seconds=0.02)
MIB = 1024 * 1024


def commit_of(server: GCSServer, prefix: str = "run/step-1") -> Commit:
    _, commit = decode_commit(server.get("bucket", f"{prefix}/.metadata"), uri="")
    assert commit is not None
    return commit


def data_keys(server: GCSServer, prefix: str = "run/step-1") -> list[str]:
    return [key for key in server.keys("bucket", prefix) if not key.endswith(".metadata")]


def failure_of(writer: StorageWriter, state: dict[str, Any], **options: Any) -> CheckpointError:
    with pytest.raises(CheckpointException) as caught:
        save(state, writer, **options)
    error = caught.value.failures[0][0]
    assert isinstance(error, CheckpointError | AlreadyExistsError)
    assert pickle.loads(pickle.dumps(error)).message == error.message
    return error


@pytest.mark.parametrize("objects_per_rank", [1, 3])
def test_stock_dcp_loads_what_was_saved(
    server: GCSServer, tmp_path: Path, objects_per_rank: int
) -> None:
    state = state_of_all_kinds()
    save(state, StorageWriter(URI, objects_per_rank=objects_per_rank))
    assert len(data_keys(server)) == objects_per_rank
    assert_equal(stock_load(copy_down(server, "run/step-1", tmp_path), state), state)


@pytest.mark.clouds("gs")
def test_stock_dcp_needs_no_aioflux_to_load_it(server: GCSServer, tmp_path: Path) -> None:
    save(small_state(3), StorageWriter(URI))
    folder = copy_down(server, "run/step-1", tmp_path)
    with pytest.MonkeyPatch.context() as patch:
        for name in [each for each in sys.modules if each.partition(".")[0] == "aioflux"]:
            patch.setitem(sys.modules, name, None)  # an import of it fails
        with pytest.raises(ImportError):
            import aioflux  # noqa: F401
        loaded = stock_load(folder, small_state())
    assert_equal(loaded, small_state(3))


@pytest.mark.parametrize("scheme", ["file", "memory"])
def test_other_services_work_alike(scheme: str, tmp_path: Path) -> None:
    uri = f"file://{tmp_path}/c" if scheme == "file" else "memory://dcp-writer/c"
    writer = StorageWriter(uri, objects_per_rank=2)
    for seed in (1, 2):
        save(small_state(seed), writer)
    if scheme == "file":
        assert_equal(stock_load(tmp_path / "c", small_state(2)), small_state(2))
        assert len([each for each in (tmp_path / "c").rglob("*") if each.is_file()]) == 3


def test_the_commit_holds_all_objects_as_the_service_does(server: GCSServer) -> None:
    save(small_state(), StorageWriter(URI, objects_per_rank=2, step=7, metrics={"loss": 2}))
    commit = commit_of(server)
    assert (commit.step, commit.metrics, commit.world_size) == (7, {"loss": 2.0}, 1)
    assert commit.uri == URI
    assert [f"run/step-1/{each.key}" for each in commit.objects] == data_keys(server)
    assert {find_save_id(each.key) for each in commit.objects} == {commit.save_id}
    for each in commit.objects:
        assert len(server.get("bucket", f"run/step-1/{each.key}")) == each.size
        assert each.generation
        assert each.items
    assert len(commit.objects[0].items) + len(commit.objects[1].items) == 5


def test_the_commit_holds_the_offsets_of_tensors(server: GCSServer) -> None:
    state = small_state()
    metadata = save(state, StorageWriter(URI))
    stored = commit_of(server).objects[0]
    data = server.get("bucket", f"run/step-1/{stored.key}")
    at = {item.offset: item for item in stored.items}
    for index, info in metadata.storage_data.items():
        item = at[info.offset]
        assert item.length == info.length
        assert item.offset % 64 == 0
        if index.fqn.startswith("model."):
            tensor = state["model"][index.fqn.removeprefix("model.")]
            memory = data[item.data_start : item.data_start + item.data_size]
            assert memory == tensor.numpy().tobytes()
            assert item.data_start % 64 == 0
        else:
            assert (item.data_start, item.data_size) == (0, 0)


def test_objects_are_balanced_by_size(server: GCSServer) -> None:
    state = {f"{at}": torch.zeros(size) for at, size in enumerate([90_000, 30_000, 31_000, 29_000])}
    save(state, StorageWriter(URI, objects_per_rank=2))
    sizes = [each.size for each in commit_of(server).objects]
    assert max(sizes) / min(sizes) < 1.02


def test_there_are_no_empty_objects(server: GCSServer) -> None:
    save({"a": torch.ones(3)}, StorageWriter(URI, objects_per_rank=9))
    assert len(data_keys(server)) == 1


def test_an_empty_state_is_a_checkpoint(server: GCSServer) -> None:
    save({}, StorageWriter(URI))
    assert commit_of(server).objects == ()
    assert commit_of(server).save_id


def test_compressed_tensors_load_through_the_registry_of_stock_dcp(
    server: GCSServer, tmp_path: Path
) -> None:
    state = {"weights": torch.randn(300, 1000).to(torch.bfloat16), "small": torch.ones(3), "n": 1}
    save(state, StorageWriter(URI, compression=ZStandard(), objects_per_rank=2))
    assert commit_of(server).num_bytes < 0.75 * state["weights"].nbytes
    registry = ExtensionRegistry()
    registry.register(ZStandard)
    folder = copy_down(server, "run/step-1", tmp_path)
    assert_equal(stock_load(folder, state, _extension_registry=registry), state)


def test_metadata_that_dcp_returns_is_complete(server: GCSServer) -> None:
    metadata = save(small_state(), StorageWriter(URI))
    assert metadata.version == "1.0.0"
    assert len(metadata.storage_data) == 5
    assert metadata.storage_meta.checkpoint_id == URI
    assert metadata.storage_meta.save_id == commit_of(server).save_id
    stored = pickle.loads(server.get("bucket", "run/step-1/.metadata"))
    assert stored.storage_data == metadata.storage_data


def test_the_commit_object_comes_last(server: GCSServer) -> None:
    seen = []

    class Watching(StorageWriter):
        def finish(self, metadata: Any, results: Any) -> None:
            seen.extend(server.keys("bucket"))
            super().finish(metadata, results)

    save(small_state(), Watching(URI, objects_per_rank=2))
    assert seen == data_keys(server)
    assert len(seen) == 2


@pytest.mark.clouds("gs")
def test_a_commit_that_is_refused_leaves_nothing(server: GCSServer) -> None:
    with server.faults.inject("*insert*", status=403, key="*.metadata"):
        failure_of(StorageWriter(URI, retry=QUICK), small_state())
    assert server.keys("bucket") == []


@pytest.mark.clouds("gs")
def test_a_commit_without_any_answer_leaves_the_objects_it_may_name(server: GCSServer) -> None:
    """It may have been carried out; the next save looks, and deletes what is not in force."""
    writer = StorageWriter(URI, retry=QUICK)
    with server.faults.inject("*insert*", reset=True, key="*.metadata"):
        failure_of(writer, small_state())
    assert len(server.keys("bucket")) == 1
    save(small_state(2), writer)
    assert len(server.keys("bucket")) == 2


def test_an_overwrite_deletes_the_objects_of_the_old_commit_only(
    server: GCSServer, tmp_path: Path
) -> None:
    writer = StorageWriter(URI, objects_per_rank=2)
    save(small_state(1), writer)
    foreign = ["run/step-1/notes.txt", f"{data_keys(server)[0]}.bak", "run/step-10/x"]
    for key in foreign:
        server.put("bucket", key, b"mine")
    old = commit_of(server)
    save(small_state(2), writer)
    commit = commit_of(server)
    assert commit.save_id > old.save_id
    keys = [f"run/step-1/{each.key}" for each in commit.objects]
    assert set(server.keys("bucket")) == {*foreign, *keys, "run/step-1/.metadata"}
    folder = copy_down(server, "run/step-1", tmp_path)
    assert_equal(stock_load(folder, small_state(2)), small_state(2))


def test_a_commit_that_names_foreign_objects_does_not_get_them_deleted(server: GCSServer) -> None:
    writer = StorageWriter(URI)
    save(small_state(1), writer)
    pickled, old = decode_commit(server.get("bucket", "run/step-1/.metadata"), uri="")
    assert old is not None
    server.put("bucket", "run/step-1/precious.bin", b"mine")
    forged = msgspec.structs.replace(old.objects[0], key="precious.bin", generation="")
    forged_commit = msgspec.structs.replace(old, objects=(forged, *old.objects))
    server.put("bucket", "run/step-1/.metadata", encode_commit(pickled, forged_commit))
    save(small_state(2), writer)
    assert server.get("bucket", "run/step-1/precious.bin") == b"mine"


def test_a_damaged_commit_can_be_overwritten(server: GCSServer, tmp_path: Path) -> None:
    writer = StorageWriter(URI)
    save(small_state(1), writer)
    data = bytearray(server.get("bucket", "run/step-1/.metadata"))
    data[-20] ^= 1
    server.put("bucket", "run/step-1/.metadata", bytes(data))
    save(small_state(2), writer)
    folder = copy_down(server, "run/step-1", tmp_path)
    assert_equal(stock_load(folder, small_state(2)), small_state(2))


def test_a_stock_checkpoint_can_be_overwritten(server: GCSServer, tmp_path: Path) -> None:
    with no_warnings():
        dcp.save(small_state(1), checkpoint_id=tmp_path / "stock")
    for place in (tmp_path / "stock").iterdir():
        server.put("bucket", f"run/step-1/{place.name}", place.read_bytes())
    save(small_state(2), StorageWriter(URI))
    assert "run/step-1/__0_0.distcp" in server.keys("bucket")  # not ours
    folder = copy_down(server, "run/step-1", tmp_path / "new")
    assert_equal(stock_load(folder, small_state(2)), small_state(2))


@pytest.mark.clouds("gs")
def test_an_object_that_was_written_again_since_is_not_deleted(server: GCSServer) -> None:
    """Deletes are pinned to the generations of the commit that was replaced."""
    writer = StorageWriter(URI)
    save(small_state(1), writer)
    (again,) = data_keys(server)
    server.put("bucket", again, b"of a backup")
    save(small_state(2), writer)
    assert len(data_keys(server)) == 2
    assert server.get("bucket", again) == b"of a backup"


def test_a_commit_is_logged(server: GCSServer, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "aioflux"):
        save(small_state(1), StorageWriter(URI))
    commit = commit_of(server)
    (line,) = [each.getMessage() for each in caplog.records if "committed" in each.getMessage()]
    assert commit.save_id in line
    assert f"{commit.num_bytes} bytes" in line
    assert re.search(r" in \d+\.\d\d s: ", line)


@pytest.mark.clouds("gs")
def test_a_late_delete_is_no_failure(server: GCSServer) -> None:
    writer = StorageWriter(URI, retry=QUICK)
    save(small_state(1), writer)
    with server.faults.inject("*objects.delete", status=403):
        save(small_state(2), writer)
    assert commit_of(server).objects
    assert len(data_keys(server)) == 2


class _Interfering(StorageWriter):
    """Another job saves the same checkpoint between the beginning and the end of this save."""

    def finish(self, metadata: Any, results: Any) -> None:
        save(small_state(9), StorageWriter(self.checkpoint_id))
        super().finish(metadata, results)


@pytest.mark.parametrize("is_there", [False, True], ids=["created", "replaced"])
def test_a_save_that_another_one_overtook_leaves_the_other(
    server: GCSServer, tmp_path: Path, is_there: bool
) -> None:
    if is_there:
        save(small_state(0), StorageWriter(URI))
    error = failure_of(_Interfering(URI), small_state(1))
    assert "another save of this checkpoint was committed meanwhile" in str(error)
    assert len(data_keys(server)) == 1
    folder = copy_down(server, "run/step-1", tmp_path)
    assert_equal(stock_load(folder, small_state(9)), small_state(9))


@pytest.mark.parametrize("is_there", [False, True], ids=["created", "replaced"])
@pytest.mark.parametrize("scheme", ["file", "memory"])
def test_other_services_keep_the_faster_of_two_saves(
    scheme: str, is_there: bool, tmp_path: Path
) -> None:
    uri = f"file://{tmp_path}/c" if scheme == "file" else f"memory://overtaken-{is_there}/c"
    if is_there:
        save(small_state(0), StorageWriter(uri))
    error = failure_of(_Interfering(uri), small_state(1))
    assert "another save of this checkpoint was committed meanwhile" in str(error)
    assert_equal(load_state(uri), small_state(9))


@pytest.mark.clouds("gs")
def test_create_refuses_a_checkpoint_that_exists_before_it_uploads(server: GCSServer) -> None:
    save(small_state(1), StorageWriter(URI, mode="create"))
    keys = server.keys("bucket")
    server.stats.reset()
    writer = StorageWriter(URI, mode="create", timeouts=PATIENT)
    error = failure_of(writer, small_state(2))
    assert isinstance(error, AlreadyExistsError)
    assert error.uri == f"{URI}/.metadata"
    assert server.keys("bucket") == keys
    assert server.stats.total.bytes_in < 1000


@pytest.mark.clouds("gs")
def test_a_lost_answer_to_the_commit_is_no_failure(server: GCSServer) -> None:
    with server.faults.inject("*insert*", lost=True, key="*.metadata", times=1):
        save(small_state(1), StorageWriter(URI))
    assert commit_of(server).objects


@pytest.mark.clouds("gs")
def test_a_commit_without_an_answer_is_read(server: GCSServer) -> None:
    """The writes, and the looks at their metadata, have no answer: a read finds the commit."""
    writer = StorageWriter(URI, retry=QUICK, timeouts=PATIENT)
    with (
        server.faults.inject("*insert*", lost=True, key="*.metadata"),
        server.faults.inject("storage.objects.get", status=503, key="*.metadata"),
    ):
        save(small_state(1), writer)
    save(small_state(2), writer)
    assert len(server.keys("bucket")) == 2


@pytest.mark.clouds("gs")
def test_a_commit_without_an_answer_keeps_its_objects(server: GCSServer, tmp_path: Path) -> None:
    """Every answer after the write is lost, and so is every look at it."""
    writer = StorageWriter(URI, retry=QUICK, timeouts=PATIENT)
    with server.faults.inject("*", lost=True, key="*.metadata", skip=1):
        failure_of(writer, small_state(1))
    folder = copy_down(server, "run/step-1", tmp_path / "1")
    assert_equal(stock_load(folder, small_state(1)), small_state(1))
    with server.faults.inject("*", status=403, key="*/__0_0.distcp"):
        failure_of(writer, small_state(2))
    folder = copy_down(server, "run/step-1", tmp_path / "2")
    assert_equal(stock_load(folder, small_state(1)), small_state(1))
    save(small_state(3), writer)
    assert len(server.keys("bucket")) == 2


@pytest.mark.clouds("gs")
def test_an_object_of_a_failed_save_that_a_commit_names_is_kept(server: GCSServer) -> None:
    """Ranks that cache plans may count saves differently: one commit, two names of saves."""
    writer = StorageWriter(URI, objects_per_rank=2, retry=QUICK)
    save(small_state(1), StorageWriter(URI))
    pickled, commit = decode_commit(server.get("bucket", "run/step-1/.metadata"), uri="")
    assert commit is not None
    old = data_keys(server)
    with server.faults.inject("*insert*", reset=True, key="*.metadata"):
        failure_of(writer, small_state(2))
    named, _ = (key for key in data_keys(server) if key not in old)
    other = msgspec.structs.replace(
        commit.objects[0], key=named.removeprefix("run/step-1/"), generation=""
    )
    both = msgspec.structs.replace(commit, objects=(*commit.objects, other))
    server.put("bucket", "run/step-1/.metadata", encode_commit(pickled, both))
    with server.faults.inject("*insert*", status=403, key="*.distcp"):
        failure_of(writer, small_state(3))
    assert set(data_keys(server)) == {*old, named}
    save(small_state(4), StorageWriter(URI))
    assert len(data_keys(server)) == 1


@pytest.mark.clouds("gs")
def test_objects_of_a_failed_save_are_kept_beside_a_damaged_commit(server: GCSServer) -> None:
    """It may name them."""
    writer = StorageWriter(URI, retry=QUICK)
    save(small_state(1), StorageWriter(URI))
    with server.faults.inject("*insert*", reset=True, key="*.metadata"):
        failure_of(writer, small_state(2))
    before = server.keys("bucket")
    assert len(before) == 3
    data = bytearray(server.get("bucket", "run/step-1/.metadata"))
    data[-30] ^= 1
    server.put("bucket", "run/step-1/.metadata", bytes(data))
    with server.faults.inject("*insert*", status=403, key="*.distcp"):
        failure_of(writer, small_state(3))
    assert server.keys("bucket") == before


@pytest.mark.clouds("gs")
def test_objects_that_cannot_be_listed_are_left(server: GCSServer) -> None:
    """Clean-up that fails fails no save."""
    writer = StorageWriter(URI, retry=QUICK)
    with server.faults.inject("*insert*", reset=True, key="*.metadata"):
        failure_of(writer, small_state(1))
    with server.faults.inject("*objects.list", status=403):
        save(small_state(2), writer)
    assert len(data_keys(server)) == 2


def test_an_interrupted_save_leaves_nothing() -> None:
    uri, planner = "memory://interrupted/c", _Waiting()
    state = small_state()

    def interrupt() -> None:
        with sync.open_store(uri) as store:
            wait_until(lambda: len(store.list_all()) >= 4)
        os.kill(os.getpid(), signal.SIGINT)

    thread = threading.Thread(target=interrupt)
    thread.start()
    try:
        with pytest.raises(CheckpointException) as caught:
            save(state, StorageWriter(uri, objects_per_rank=5), planner=planner)
    finally:
        planner.may_go_on.set()
        thread.join()
    assert isinstance(caught.value.failures[0][0], KeyboardInterrupt)
    with sync.open_store(uri) as store:
        assert len(store.list_all()) == 0


@pytest.mark.clouds("gs")
def test_a_failed_upload_names_rank_and_object_and_leaves_nothing(server: GCSServer) -> None:
    writer = StorageWriter(URI, objects_per_rank=3, retry=QUICK)
    save(small_state(1), writer)
    keys = server.keys("bucket")
    with server.faults.inject("*", status=503, key="*/__0_1.distcp"):
        error = failure_of(writer, small_state(2))
    assert f"rank 0 could not save {server.root}/run/step-1/" in str(error)
    assert "__0_1.distcp" in str(error)
    assert server.keys("bucket") == keys
    assert server.stats.open_uploads == 0
    save(small_state(3), writer)
    assert commit_of(server).save_id not in keys[1]


class _SecondObjectFails(Hook):
    """Rejects the second object of a save once the first is stored; until then it is retried."""

    def __init__(self, server: GCSServer) -> None:
        self._server = server
        server.app.hooks = (self, *server.app.hooks)

    def before(self, request: Request) -> Response | None:
        if b"__0_1.distcp" not in request.target:
            return None
        return Response(status=403 if data_keys(self._server) else 503)


@pytest.mark.clouds("gs")
def test_objects_left_by_a_failure_are_deleted_before_the_next_save(
    server: GCSServer,
) -> None:
    retry = RetryPolicy(max_attempts=10_000, initial_seconds=0.01, max_seconds=0.02)
    writer = StorageWriter(URI, objects_per_rank=2, retry=retry)
    hooks = server.app.hooks
    _SecondObjectFails(server)
    with server.faults.inject("*objects.delete", status=403):
        error = failure_of(writer, small_state(1))
    server.app.hooks = hooks
    assert "could not be deleted" in error.__notes__[0]
    assert len(data_keys(server)) == 1
    save(small_state(2), writer, checkpoint_id=f"{server.root}/run/step-2")
    assert data_keys(server) == []
    assert len(data_keys(server, "run/step-2")) == 2


class _Watched(DefaultSavePlanner):
    """A planner whose tensors come into being when they are asked for."""

    num_resolved = 0
    most_unsent = 0

    def __init__(self, server: GCSServer) -> None:
        super().__init__()
        self.server = server
        self.storage_meta: StorageMeta | None = None

    def set_up_planner(self, state_dict: Any, storage_meta: Any = None, **kwargs: Any) -> None:
        self.storage_meta = storage_meta
        super().set_up_planner(state_dict, storage_meta, **kwargs)

    def resolve_data(self, write_item: WriteItem) -> torch.Tensor | io.BytesIO:
        self.num_resolved += 1
        num_sent = self.server.stats.total.bytes_in
        self.most_unsent = max(self.most_unsent, self.num_resolved * 8 * MIB - num_sent)
        return torch.ones(2 * MIB)


@pytest.mark.clouds("gs")
def test_tensors_are_resolved_as_they_are_sent(server: GCSServer) -> None:
    """160 MiB: not all of it is in memory at once."""
    planner = _Watched(server)
    state = {str(at): torch.empty(1).expand(2 * MIB) for at in range(20)}
    transfer = TransferOptions(max_in_flight_bytes=16 * MIB, part_size_bytes=8 * MIB)
    save(state, StorageWriter(URI, transfer=transfer, timeouts=PATIENT), planner=planner)
    assert planner.num_resolved == 20
    assert planner.most_unsent < 100 * MIB
    assert planner.storage_meta is not None
    assert planner.storage_meta.checkpoint_id == URI


class _Failing(DefaultSavePlanner):
    def __init__(self, failure: BaseException | None, result: Any = None) -> None:
        super().__init__()
        self.failure, self.result = failure, result

    def resolve_data(self, write_item: WriteItem) -> Any:
        if write_item.index.fqn == "model.bias":
            if self.failure is not None:
                raise self.failure
            return self.result
        return super().resolve_data(write_item)


@pytest.mark.clouds("gs")
@pytest.mark.parametrize(
    "failure",
    [UnpicklableError(3, io.StringIO()), OSError(28, "No space left on device"), KeyError("bias")],
    ids=["unpicklable", "enospc", "key"],
)
def test_any_error_of_a_planner_becomes_one_that_pickles(
    server: GCSServer, failure: Exception
) -> None:
    error = failure_of(StorageWriter(URI), small_state(), planner=_Failing(failure))
    assert "rank 0" in str(error)
    assert "'model.bias' of the state" in str(error)
    assert type(failure).__name__ in str(error)
    assert error.__cause__ is not None
    assert server.keys("bucket") == []


class _Reusing(DefaultSavePlanner):
    """A planner that writes all values to one file."""

    def __init__(self) -> None:
        super().__init__()
        self.file = io.BytesIO()

    def resolve_data(self, write_item: WriteItem) -> torch.Tensor | io.BytesIO:
        data = super().resolve_data(write_item)
        if isinstance(data, torch.Tensor):
            return data
        self.file.seek(0)
        self.file.truncate()
        self.file.write(data.getvalue())
        return self.file


@pytest.mark.clouds("gs")
def test_values_do_not_hold_the_file_that_a_planner_returns(server: GCSServer) -> None:
    """Python 3.13 prints an error if a `BytesIO` is collected while its buffer is exported."""
    state = {"a": [1] * 100, "b": "two", "c": {3}}
    save(state, StorageWriter(URI), planner=_Reusing())
    assert load_state(URI, weights_only=False) == state


@pytest.mark.parametrize("result", [io.BytesIO(b"x"), None, b"x"], ids=["bytesio", "none", "bytes"])
def test_a_planner_that_resolves_to_another_type_is_an_error(
    server: GCSServer, result: object
) -> None:
    error = failure_of(StorageWriter(URI), small_state(), planner=_Failing(None, result))
    assert "'model.bias' of the state is planned as TENSOR" in str(error)


def test_the_error_of_dcp_is_no_exception() -> None:
    """So the documentation says to catch it by name."""
    assert not issubclass(CheckpointException, Exception)
    assert "not an `Exception`" in (StorageWriter.__doc__ or "")


def test_metadata_that_does_not_pickle_fails_the_save(server: GCSServer) -> None:
    class Planner(DefaultSavePlanner):
        def create_global_plan(self, all_plans: Any) -> Any:
            plans, metadata = super().create_global_plan(all_plans)
            metadata.planner_data = lambda: None
            return plans, metadata

    error = failure_of(StorageWriter(URI), small_state(), planner=Planner())
    assert f"rank 0 could not commit {URI}" in str(error)


@pytest.fixture
def _no_cached_plans() -> Iterator[None]:
    forget_cached_plans()
    yield
    forget_cached_plans()


@pytest.mark.usefixtures("_no_cached_plans")
def test_plans_that_a_planner_caches_go_to_new_keys_each_time(
    server: GCSServer, tmp_path: Path
) -> None:
    planner = DefaultSavePlanner(enable_plan_caching=True)
    names = set()
    for seed in range(4):
        # A new writer each time, as who saves to a new uri each time has it.
        save(small_state(seed), StorageWriter(URI), planner=planner)
        names.add(commit_of(server).save_id)
        assert len(data_keys(server)) == 1
    assert len(names) == 4
    folder = copy_down(server, "run/step-1", tmp_path)
    assert_equal(stock_load(folder, small_state(3)), small_state(3))


@pytest.mark.usefixtures("_no_cached_plans")
def test_plans_that_were_made_for_another_writer_are_served(
    server: GCSServer, tmp_path: Path
) -> None:
    planner = DefaultSavePlanner(enable_plan_caching=True)
    save(small_state(0), dcp.FileSystemWriter(tmp_path / "stock"), planner=planner)
    save(small_state(1), StorageWriter(URI), planner=planner)
    folder = copy_down(server, "run/step-1", tmp_path / "ours")
    assert_equal(stock_load(folder, small_state(1)), small_state(1))


@pytest.mark.usefixtures("_no_cached_plans")
def test_plans_that_some_ranks_cached_are_no_layout_of_safetensors(server: GCSServer) -> None:
    writer = StorageWriter(URI, layout="safetensors")
    writer.set_up_storage_writer(True, rank=0, use_collectives=True)
    with pytest.raises(CheckpointError, match="changed on some ranks only"):
        writer.prepare_global_plan([SavePlan([], usable=False), SavePlan([])])


@pytest.mark.clouds("gs")
def test_reset_takes_a_whole_uri_and_keeps_all_settings(
    server: GCSServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("STORAGE_EMULATOR_HOST")
    tokens: list[str] = []

    def token() -> str:
        tokens.append("asked")
        return "token"

    writer = StorageWriter(URI, endpoint_url=server.url, credentials=token, objects_per_rank=2)
    writer.reset(f"{server.root}/run/step-2/")
    assert writer.checkpoint_id == f"{server.root}/run/step-2"
    save(small_state(), writer)
    assert len(data_keys(server, "run/step-2")) == 2
    writer.reset()
    assert writer.checkpoint_id == f"{server.root}/run/step-2"
    save(small_state(), writer, checkpoint_id=f"{server.root}/run/step-3")
    assert len(data_keys(server, "run/step-3")) == 2


def test_paths_are_refused_as_checkpoint_ids(tmp_path: Path) -> None:
    from pathlib import Path as AnyPath

    writer = StorageWriter(URI)
    wrongs = (
        AnyPath("gs://bucket/run"),
        tmp_path,
        str(tmp_path),
        "run/step-2",
        "http://b/c",
        "gs://",
    )
    for wrong in wrongs:
        assert not StorageWriter.validate_checkpoint_id(wrong)
        with pytest.raises(ValueError, match="checkpoint_id must be a string with a uri"):
            writer.reset(wrong)
    for right in (URI, "s3://b/c", "az://a/b/c", "file:///tmp/x", "memory://name/x"):
        assert StorageWriter.validate_checkpoint_id(right)


@pytest.mark.parametrize(
    "options",
    [{"objects_per_rank": 0}, {"mode": "append"}, {"metrics": {"loss": "low"}}],
    ids=["objects", "mode", "metrics"],
)
def test_settings_are_checked_when_they_are_given(options: Any) -> None:
    with pytest.raises((ValueError, TypeError)):
        StorageWriter(URI, **options)


@pytest.mark.clouds("gs")
def test_a_writer_pickles_with_its_settings(server: GCSServer, tmp_path: Path) -> None:
    writer = StorageWriter(
        URI,
        objects_per_rank=2,
        step=5,
        compression=ZStandard(),
        endpoint_url=server.url,
        progress=lambda _: None,
    )
    save(small_state(1), writer)
    again = pickle.loads(pickle.dumps(writer))
    save(small_state(2), again)
    assert commit_of(server).step == 5
    assert len(data_keys(server)) == 2


def test_a_writer_carries_no_credentials_to_another_process() -> None:
    with pytest.raises(TypeError, match="holds credentials and cannot be pickled"):
        pickle.dumps(StorageWriter(URI, credentials=lambda: "token"))


def test_dcp_stages_by_itself() -> None:
    """A writer that were a stager would be used as one, and block."""
    assert not isinstance(StorageWriter(URI), AsyncStager)
    assert repr(StorageWriter(URI)) == f"<StorageWriter {URI}>"


def test_async_saves_in_a_thread_upload_a_copy(server: GCSServer, tmp_path: Path) -> None:
    state = small_state(1)
    with no_warnings():
        future = dcp.async_save(state, storage_writer=StorageWriter(URI))
        state["model"]["weight"].zero_()
        future.result(PATIENCE_SECONDS)
    folder = copy_down(server, "run/step-1", tmp_path)
    assert_equal(stock_load(folder, small_state(1)), small_state(1))


@pytest.mark.clouds("gs")
def test_an_async_save_that_fails_sets_the_error_of_its_future(server: GCSServer) -> None:
    with server.faults.inject("*", status=403, key="*distcp"), no_warnings():
        future = dcp.async_save(small_state(), storage_writer=StorageWriter(URI, retry=QUICK))
        assert isinstance(future.exception(PATIENCE_SECONDS), CheckpointException)


class _Waiting(DefaultSavePlanner):
    """A planner that is stopped at one tensor until it may go on."""

    def __init__(self) -> None:
        super().__init__()
        self.may_go_on = threading.Event()

    def resolve_data(self, write_item: WriteItem) -> torch.Tensor | io.BytesIO:
        if write_item.index.fqn == "model.weight":
            assert self.may_go_on.wait(PATIENCE_SECONDS)
        return super().resolve_data(write_item)


@pytest.mark.parametrize("prefix", ["run/step-1", "run/step-2"], ids=["same", "another"])
def test_saves_of_one_writer_that_overlap_do_not_mix(
    server: GCSServer, tmp_path: Path, prefix: str
) -> None:
    """One is half uploaded when the other begins; to the same uri, only the faster one is saved."""
    uri = f"{server.root}/{prefix}"
    writer, planner = StorageWriter(URI, objects_per_rank=2), _Waiting()
    with no_warnings():
        first = dcp.async_save(
            small_state(1), storage_writer=writer, planner=planner, checkpoint_id=URI
        )
        try:
            wait_until(lambda: first.done() or server.keys("bucket"))
            assert not first.done(), first.exception()
            save(small_state(2), writer, checkpoint_id=uri)
            assert len(data_keys(server)) >= 1
        finally:
            planner.may_go_on.set()
        error = first.exception(PATIENCE_SECONDS)
    if uri == URI:
        assert isinstance(error, CheckpointException)
        assert "committed meanwhile" in str(error.failures[0][0])
        assert len(data_keys(server)) == 2
    else:
        assert error is None
        folder = copy_down(server, "run/step-1", tmp_path / "first")
        assert_equal(stock_load(folder, small_state(1)), small_state(1))
    folder = copy_down(server, prefix, tmp_path / "second")
    assert_equal(stock_load(folder, small_state(2)), small_state(2))
    assert writer.checkpoint_id == uri


def test_no_dist_saves_by_itself(server: GCSServer, tmp_path: Path) -> None:
    save(small_state(1), StorageWriter(URI), no_dist=True)
    folder = copy_down(server, "run/step-1", tmp_path)
    assert_equal(stock_load(folder, small_state(1)), small_state(1))


def test_without_collectives_the_metadata_is_the_ranks_own(server: GCSServer) -> None:
    writer = StorageWriter(URI)
    save(small_state(1), writer, use_collectives=False)
    save(small_state(2), writer, use_collectives=False)
    keys = server.keys("bucket")
    assert len(keys) == 2
    assert keys[1] == "run/step-1/__0.metadata"
    assert pickle.loads(server.get("bucket", keys[1])).storage_data


def test_callers_of_older_versions_give_no_rank(server: GCSServer, tmp_path: Path) -> None:
    class Older(StorageWriter):
        def set_up_storage_writer(self, is_coordinator: bool) -> None:  # type: ignore[override]
            super().set_up_storage_writer(is_coordinator)

    save(small_state(1), Older(URI))
    folder = copy_down(server, "run/step-1", tmp_path)
    assert_equal(stock_load(folder, small_state(1)), small_state(1))
