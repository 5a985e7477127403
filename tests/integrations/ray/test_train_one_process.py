"""RayCheckpointer and storage_filesystem in one process, with a fake of the functions of Ray."""

from __future__ import annotations

import dataclasses
import pickle
import time
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

import fsspec
import msgspec
import pytest
import torch
from pyarrow.fs import FSSpecHandler, LocalFileSystem, PyFileSystem
from ray.train import Checkpoint, CheckpointUploadMode, PreemptionInfo, ScalingConfig
from ray.train.torch import TorchTrainer
from ray.train.v2._internal.execution import train_fn_utils
from ray.train.v2._internal.execution.context import is_managed_checkpoint
from ray.train.v2._internal.execution.storage import StorageContext, delete_fs_path
from ray.train.v2._internal.execution.train_fn_utils import LocalTrainFnUtils

from aioflux.checkpoint import Checkpointer, TrainingState
from aioflux.checkpoint._store.retention_rules import Retention
from aioflux.checkpoint.compression import ZStandard
from aioflux.errors import CheckpointNotFoundError, PermissionDeniedError
from aioflux.integrations.ray import RayCheckpointer, storage_filesystem

if TYPE_CHECKING:
    from collections.abc import Iterator

    from aioflux import sync
    from aioflux.testing import GCSServer

URI = "gs://bucket/runs/run"
WRITE = "*insert*"
LONG = 1000.0


class FakeContext:
    def __init__(self, storage: StorageContext) -> None:
        self._storage = storage

    def get_world_size(self) -> int:
        return 1

    def get_storage(self) -> StorageContext:
        return self._storage


class FakeRay(LocalTrainFnUtils):
    """The functions that Ray Train provides to one worker, with the checks of the real ones."""

    def __init__(self, storage: StorageContext) -> None:
        super().__init__("run")
        self.storage = storage
        self.reports: list[tuple[dict[str, Any], str | None, CheckpointUploadMode]] = []
        self.preemption: PreemptionInfo | None = None
        self.latest: Checkpoint | None = None

    def get_context(self) -> Any:
        return FakeContext(self.storage)

    def get_checkpoint(self) -> Checkpoint | None:
        return self.latest

    def get_preemption_info(self) -> PreemptionInfo | None:
        return self.preemption

    def report(
        self,
        metrics: dict[str, Any],
        checkpoint: Checkpoint | None = None,
        checkpoint_dir_name: str | None = None,
        checkpoint_upload_mode: CheckpointUploadMode = CheckpointUploadMode.SYNC,
        delete_local_checkpoint_after_upload: bool | None = None,
        checkpoint_upload_fn: Any = None,
        validation: Any = False,
    ) -> None:
        if checkpoint is not None:
            if checkpoint_upload_mode is not CheckpointUploadMode.NO_UPLOAD:
                checkpoint = checkpoint_upload_fn(checkpoint, "any-name")
            assert is_managed_checkpoint(self.storage, checkpoint)
            if delete_local_checkpoint_after_upload:
                delete_fs_path(checkpoint.filesystem, checkpoint.path)
            self.latest = checkpoint
        path = None if checkpoint is None else checkpoint.path
        self.reports.append((metrics, path, checkpoint_upload_mode))


@pytest.fixture
def fake(server: GCSServer, bucket: sync.Store, monkeypatch: pytest.MonkeyPatch) -> FakeRay:
    filesystem = storage_filesystem("gs://bucket", endpoint_url=server.url)
    fake = FakeRay(StorageContext("bucket/runs", "run", filesystem))
    monkeypatch.setattr(train_fn_utils, "_train_fn_utils", fake)
    return fake


@pytest.fixture
def checkpoints(fake: FakeRay) -> Iterator[RayCheckpointer]:
    with RayCheckpointer(every=10) as checkpoints:
        yield checkpoints


def state_of(value: float) -> dict[str, Any]:
    return {"model": {"w": torch.full((3,), value)}, "optimizer": torch.full((100,), value)}


def preempted(seconds: float | None, node: str = "node-1") -> PreemptionInfo:
    deadline_ms = None if seconds is None else int((time.time() + seconds) * 1000)
    return PreemptionInfo(deadline_ms=deadline_ms, preempted_node_to_ranks={node: [0]})


# --- saving and restoring ---------------------


def test_a_committed_step_is_reported_and_restored(
    fake: FakeRay, checkpoints: RayCheckpointer
) -> None:
    assert checkpoints.uri == f"{URI}/"
    assert checkpoints.restore(state_of(0.0)) is None
    checkpoints.report(10, state_of(1.0), {"loss": 0.5, "note": "text"})
    metrics, path, mode = fake.reports[-1]
    assert metrics == {"loss": 0.5, "note": "text"}
    assert path == "bucket/runs/run/step-00000010"
    assert mode is CheckpointUploadMode.ASYNC
    state = state_of(0.0)
    assert checkpoints.restore(state) == 10
    assert state["optimizer"][0] == 1.0
    assert len(fake.reports) == 1


def test_a_failed_save_fails_the_report_and_is_not_visible(
    fake: FakeRay, checkpoints: RayCheckpointer, server: GCSServer
) -> None:
    server.faults.add(WRITE, key="*step-*", status=403)
    with pytest.raises(PermissionDeniedError):
        checkpoints.report(10, state_of(1.0))
    server.faults.clear()
    assert fake.reports == []
    assert checkpoints.steps() == []


def test_steps_committed_before_a_worker_died_are_reported(
    fake: FakeRay, checkpoints: RayCheckpointer
) -> None:
    checkpoints.report(10, state_of(1.0), {"loss": 0.3})
    known = fake.latest
    checkpoints.report(20, state_of(2.0), {"loss": 0.2})
    checkpoints.report(30, state_of(3.0), {"loss": 0.1})
    fake.latest, fake.reports = known, []  # the controller has only the first report
    with RayCheckpointer() as restarted:
        assert restarted.restore(state_of(0.0)) == 30
        restarted.report(40, state_of(4.0))
    assert [(metrics, path and path[-2:]) for metrics, path, _ in fake.reports] == [
        ({"loss": 0.2}, "20"),
        ({"loss": 0.1}, "30"),
        ({}, "40"),
    ]


def test_a_step_is_reported_to_ray_once(fake: FakeRay, checkpoints: RayCheckpointer) -> None:
    """Otherwise the retention of Ray would delete the second checkpoint with the first one."""
    checkpoints.report(10, state_of(1.0))
    mode = CheckpointUploadMode.SYNC
    checkpoints.report(10, state_of(2.0), {"loss": 0.5}, checkpoint_upload_mode=mode)
    assert fake.reports[-1] == ({"loss": 0.5}, None, mode)
    checkpoints.restore(state := state_of(0.0))
    assert state["optimizer"][0] == 2.0


def test_a_step_below_the_last_one_is_reported_to_ray(
    fake: FakeRay, checkpoints: RayCheckpointer
) -> None:
    """Otherwise no one would delete it. Ray has the steps of earlier attempts already."""

    def steps() -> list[str | None]:
        return [path and path[-2:] for _, path, _ in fake.reports]

    for step in (50, 30, 30, 60):
        checkpoints.report(step, state_of(1.0))
    assert steps() == ["50", "30", None, "60"]
    with RayCheckpointer() as restarted:
        restarted.restore(state_of(0.0))
        restarted.report(40, state_of(1.0))
        restarted.report(30, state_of(1.0))
    assert steps()[4:] == ["40", None]


def test_missing_checkpoints_are_an_error(
    fake: FakeRay, checkpoints: RayCheckpointer, bucket: sync.Store
) -> None:
    """Training does not silently start again."""
    checkpoints.report(10, state_of(1.0))
    bucket.delete_many([meta.key for meta in bucket.list_all("runs/run/step-")])
    with pytest.raises(CheckpointNotFoundError, match="no checkpoint below gs://bucket/runs/run"):
        checkpoints.restore(state_of(0.0))


@pytest.mark.parametrize("mode", [CheckpointUploadMode.NO_UPLOAD, "sync"])
def test_another_upload_mode_is_rejected_before_the_save(
    checkpoints: RayCheckpointer, mode: Any
) -> None:
    with pytest.raises(ValueError, match="ASYNC or SYNC"):
        checkpoints.report(1, state_of(1.0), checkpoint_upload_mode=mode)
    assert checkpoints.steps() == []


def test_a_run_with_the_name_of_another_must_restore(
    fake: FakeRay, checkpoints: RayCheckpointer
) -> None:
    """Otherwise a worker's death would continue from a step of the earlier run."""
    checkpoints.report(10, state_of(1.0))
    with RayCheckpointer() as restarted:
        for step in (5, 10):
            with pytest.raises(ValueError, match=r"step 10 of this run.*call restore"):
                restarted.report(step, state_of(2.0))
        assert restarted.steps() == [10]
        restarted.report(11, state_of(2.0))  # the caller has loaded the step of Ray himself
        restarted.restore(state_of(0.0))
        restarted.report(10, state_of(2.0))


# --- settings ---------------------------------


@pytest.mark.parametrize("rule", [field.name for field in dataclasses.fields(Retention)])
def test_retention_belongs_to_ray(fake: FakeRay, rule: str) -> None:
    settings: dict[str, Any] = {rule: 1}
    with pytest.raises(ValueError, match=rf"{rule}.*CheckpointConfig\(num_to_keep"):
        RayCheckpointer(**settings)


def test_ray_deletes_a_step(
    fake: FakeRay, checkpoints: RayCheckpointer, bucket: sync.Store
) -> None:
    checkpoints.report(10, state_of(1.0))
    first = fake.latest
    assert first is not None
    checkpoints.report(20, state_of(2.0))
    delete_fs_path(first.filesystem, first.path)  # as the controller does
    assert checkpoints.steps() == [20]
    assert not bucket.list_all("runs/run/step-00000010")


@pytest.mark.parametrize("uri", [f"{URI}/inner", "gs://bucket/runs/run"])
def test_a_uri_below_the_run(fake: FakeRay, uri: str) -> None:
    with RayCheckpointer(uri) as checkpoints:
        checkpoints.report(1, state_of(1.0))
    assert fake.reports[-1][1] == f"{uri.removeprefix('gs://')}/step-00000001"


@pytest.mark.parametrize(
    "uri", ["gs://bucket/runs/run-2", "gs://other/runs/run", "s3://bucket/runs/run"]
)
def test_a_uri_that_ray_rejects(fake: FakeRay, uri: str) -> None:
    with pytest.raises(ValueError, match="below the directory of the run, gs://bucket/runs/run"):
        RayCheckpointer(uri)


def test_a_filesystem_without_a_scheme(fake: FakeRay, tmp_path: Any) -> None:
    foreign = PyFileSystem(FSSpecHandler(fsspec.filesystem("file")))
    fake.storage = StorageContext(str(tmp_path), "run", foreign)
    with pytest.raises(ValueError, match="storage_filesystem"):
        RayCheckpointer()
    with RayCheckpointer(f"file://{tmp_path}/run") as checkpoints:
        checkpoints.report(1, state_of(1.0))
    assert fake.reports[-1][1] == f"{tmp_path}/run/step-00000001"


def test_a_local_directory(fake: FakeRay, tmp_path: Any) -> None:
    fake.storage = StorageContext(f"{tmp_path}/100%", "run", LocalFileSystem())
    with RayCheckpointer() as checkpoints:
        checkpoints.report(1, state_of(1.0))
    assert fake.reports[-1][1] == f"{tmp_path}/100%/run/step-00000001"
    with RayCheckpointer() as checkpoints:
        assert checkpoints.restore(state_of(0.0)) == 1


def test_workers_that_are_not_ranks(fake: FakeRay, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each would write the whole step."""
    monkeypatch.setattr(FakeContext, "get_world_size", lambda self: 2)
    with pytest.raises(ValueError, match="the run has 2 workers"):
        RayCheckpointer()


def test_a_preemption_is_not_asked_for_in_every_step(
    fake: FakeRay, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []
    monkeypatch.setattr(fake, "get_preemption_info", lambda: asked.append(1))
    with RayCheckpointer(preemption_every=5) as checkpoints:
        for step in range(1, 11):
            checkpoints.should_save(step)
    assert len(asked) == 2
    with pytest.raises(ValueError, match="preemption_every"):
        RayCheckpointer(preemption_every=0)


def test_the_keys_of_the_weights_are_a_list(fake: FakeRay) -> None:
    with pytest.raises(TypeError, match=r"such as \['model'\]"):
        RayCheckpointer(weights="model")


def test_local_mode(server: GCSServer, bucket: sync.Store) -> None:
    def train() -> None:
        with pytest.raises(ValueError, match="local mode"):
            RayCheckpointer()
        with RayCheckpointer("gs://bucket/local", endpoint_url=server.url) as checkpoints:
            assert not checkpoints.should_save(1)
            checkpoints.report(1, state_of(1.0), {"loss": 0.5})
            assert checkpoints.steps() == [1]

    result = TorchTrainer(train, scaling_config=ScalingConfig(num_workers=0)).fit()
    assert result.metrics == {"loss": 0.5}
    assert result.checkpoint is not None
    assert result.checkpoint.path == "bucket/local/step-00000001"


# --- preemption -------------------------------


@pytest.mark.parametrize(
    ("seconds", "has_rate"),
    [(3600, True), (None, True), (-1, False)],
    ids=["rate-fits", "no-deadline", "no-rate"],
)
def test_a_preemption_is_answered_by_a_whole_save(
    fake: FakeRay, checkpoints: RayCheckpointer, seconds: float | None, has_rate: bool
) -> None:
    if has_rate:
        checkpoints.report(10, state_of(1.0))
    fake.preemption = preempted(seconds)
    assert checkpoints.should_save(13)
    checkpoints.report(13, state_of(1.3))
    assert fake.reports[-1] == ({}, "bucket/runs/run/step-00000013", CheckpointUploadMode.SYNC)
    assert not checkpoints.should_save(14)
    fake.preemption = preempted(seconds, node="node-2")
    assert checkpoints.should_save(15)


def test_only_the_weights_are_saved_if_a_whole_save_does_not_fit(
    fake: FakeRay, checkpoints: RayCheckpointer, server: GCSServer
) -> None:
    model = torch.nn.Linear(3, 1)
    training = TrainingState(model, torch.optim.SGD(model.parameters()))
    training.values = {"step": 10}
    checkpoints.report(10, training)
    torch.nn.init.constant_(model.weight, 7.0)
    training.values = {"step": 13}
    fake.preemption = preempted(-1)
    assert checkpoints.should_save(13)
    checkpoints.report(13, training, {"loss": 0.5})
    assert fake.reports[-1][:2] == ({"loss": 0.5}, None)
    assert checkpoints.steps() == [10]
    assert checkpoints.restore(training) == 10
    with Checkpointer(checkpoints.weights_uri, endpoint_url=server.url) as weights:
        state = weights.load()
    assert state["model"]["weight"].eq(7.0).all()
    assert state["values"] == ({"step": 13},)
    assert state.keys() == {"model", "values"}


def put_record(
    bucket: sync.Store, step: int, num_bytes: int, seconds: float, outcome: str = "committed"
) -> None:
    """Store the record of a save in the history of the run."""
    record_id = f"20990101T000000.000Z-{step:08x}"
    record = {
        "record_id": record_id,
        "time": datetime.now(UTC),
        "step": step,
        "outcome": outcome,
        "num_bytes": num_bytes,
        "staged_seconds": seconds / 4,
        "upload_seconds": seconds * 3 / 4,
    }
    key = f"runs/run/.checkpoint-history/record-{record_id}.json"
    bucket.put(key, msgspec.json.encode(record))


def saves_whole(fake: FakeRay, checkpoints: RayCheckpointer, step: int, node: str = "node") -> bool:
    """Return whether the save of a preempted worker is of the whole state, not of the weights."""
    fake.preemption = preempted(None, node=node)
    assert checkpoints.should_save(step)
    checkpoints.report(step, state_of(1.0))
    return step in checkpoints.steps()


def test_without_a_deadline_ray_ends_the_workers_after_two_minutes(
    fake: FakeRay, checkpoints: RayCheckpointer, bucket: sync.Store
) -> None:
    for step, (seconds, is_whole) in enumerate([(100.0, True), (130.0, False)]):
        put_record(bucket, step, 1000, seconds)
        assert saves_whole(fake, checkpoints, step, f"node-{step}") is is_whole


@pytest.mark.parametrize(
    ("saves", "is_whole"),
    [
        pytest.param([(1, 10_000.0), *[(1000, 100.0)] * 5], True, id="old"),
        pytest.param([(1000, 130.0), *[(1000, 100.0)] * 4], False, id="slowest"),
        pytest.param([(1000, 130.0), (500, 50.0)], True, id="smaller"),
    ],
)
@pytest.mark.parametrize("has_failed", [False, True], ids=["saves", "saves and a failure"])
def test_the_slowest_rate_of_the_last_five_saves_counts(
    fake: FakeRay,
    checkpoints: RayCheckpointer,
    bucket: sync.Store,
    saves: list[tuple[int, float]],
    *,
    is_whole: bool,
    has_failed: bool,
) -> None:
    for step, (num_bytes, seconds) in enumerate(saves):
        put_record(bucket, step, num_bytes, seconds)
    if has_failed:
        put_record(bucket, len(saves), 0, 5000.0, outcome="failed")
    assert saves_whole(fake, checkpoints, 10) is is_whole


def test_weights_are_saved_with_the_settings_of_the_checkpointer(
    fake: FakeRay, bucket: sync.Store
) -> None:
    with RayCheckpointer(compression=ZStandard(), commit_seconds=60) as checkpoints:
        state = {"model": torch.zeros(1_000_000), "optimizer": torch.zeros(1)}
        checkpoints.report(1, state)
        fake.preemption = preempted(-1)
        checkpoints.should_save(2)
        checkpoints.report(2, state)
    saved = bucket.list_all("runs/run/weights/step-00000002/")
    assert 0 < sum(meta.size for meta in saved) < 100_000


def test_a_save_before_a_deadline_does_not_wait_for_earlier_saves(
    fake: FakeRay, checkpoints: RayCheckpointer, server: GCSServer
) -> None:
    server.faults.add(WRITE, key="*step-00000010/*", delay_seconds=LONG)
    earlier = checkpoints.save_async(10, state_of(1.0))
    fake.preemption = preempted(3600)
    checkpoints.should_save(13)
    checkpoints.report(13, state_of(1.3))
    assert checkpoints.steps() == [13]
    server.faults.clear()
    assert earlier.cancel()


def provide_token() -> str:
    return "token"


def test_the_filesystem_pickles_without_credentials(server: GCSServer, bucket: sync.Store) -> None:
    filesystem = storage_filesystem("gs://bucket/any", endpoint_url=server.url)
    copy = pickle.loads(pickle.dumps(filesystem))
    assert copy == filesystem
    with copy.open_output_stream("bucket/dir/a") as file:
        file.write(b"content")
    assert bucket.get("dir/a") == b"content"
    copy.delete_dir("bucket/dir")
    assert not bucket.list_all()
    pickle.dumps(storage_filesystem("gs://bucket", credentials=provide_token))


def test_credentials_are_not_pickled() -> None:
    with pytest.raises(TypeError, match="credentials"):
        storage_filesystem("gs://bucket", credentials=lambda: "secret")


@pytest.mark.parametrize("url", ["http://user:secret@host", "http://host/?sig=secret"])
def test_an_endpoint_with_credentials_is_not_pickled(url: str) -> None:
    with pytest.raises(ValueError, match="endpoint_url"):
        storage_filesystem("gs://bucket", endpoint_url=url)


def test_memory_is_no_storage() -> None:
    with pytest.raises(ValueError, match="memory://bucket"):
        storage_filesystem("memory://bucket")
