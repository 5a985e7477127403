"""ModelCheckpoint in a bucket, under a trainer."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from fsspec import AbstractFileSystem, register_implementation
from fsspec.registry import _registry as registry
from lightning.fabric.plugins import TorchCheckpointIO
from lightning.pytorch.plugins.io import AsyncCheckpointIO
from lightning.pytorch.utilities.exceptions import SIGTERMException

import aioflux
from aioflux import RetryPolicy
from aioflux.integrations.lightning import AiofluxCheckpointIO, ModelCheckpoint
from aioflux.testing import GCSServer
from tests.integrations.lightning.tiny import OF_LIGHTNING, At, Tiny, fit
from tests.integrations.lightning.watch import Watch
from tests.servers.clouds import open_bucket

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from tests.integrations.lightning.fork_server import ForkServer

RUN = "gs://bucket/run"
KEEP_TRYING = RetryPolicy(max_attempts=10_000, initial_seconds=0.01, max_seconds=0.02)

pytestmark = OF_LIGHTNING


class OtherFileSystem(AbstractFileSystem):
    """A filesystem of another library, which cannot be opened."""

    error: Exception = AssertionError("another filesystem was opened")

    def __init__(self, *_: object, **__: object) -> None:
        raise self.error


@pytest.fixture(autouse=True)
def _other_filesystems(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(OtherFileSystem, "error", OtherFileSystem.error)
    before = dict(registry)
    for name in ("gs", "gcs", "s3", "az", "memory"):
        register_implementation(name, OtherFileSystem, clobber=True)
    yield
    registry.clear()
    registry.update(before)


def every(num_steps: int, dirpath: Any = RUN, **options: Any) -> ModelCheckpoint:
    return ModelCheckpoint(dirpath, every_n_train_steps=num_steps, **options)


def assert_equal(one: Tiny, other: Tiny) -> None:
    for name, value in one.state_dict().items():
        assert torch.equal(value, other.state_dict()[name])


@pytest.mark.more
def test_a_killed_run_resumes_from_the_bucket_and_ends_as_an_unbroken_one(
    server: GCSServer, fork_server: ForkServer, tmp_path: Path
) -> None:
    """Killed while a save is under way in the background."""
    log = tmp_path / "log"
    ended = fork_server.run("killed", RUN, log=log, STORAGE_EMULATOR_HOST=server.url)
    assert ended == [-signal.SIGKILL], log.read_text()
    begun: list[int] = []
    noting = At(None, lambda trainer: begun.append(trainer.global_step))
    plugin = AiofluxCheckpointIO(background=True)
    _, resumed = fit(12, plugin, [every(2, save_last=True), noting], ckpt_path="last")
    assert begun[0] in {2, 4, 6}
    assert begun[-1] == 11
    assert_equal(fit(12, AiofluxCheckpointIO(), [], enable_checkpointing=False)[1], resumed)
    assert "run/last-v1.ckpt" not in server.keys("bucket")


@pytest.mark.parametrize("is_background", [False, True], ids=["foreground", "background"])
def test_there_is_always_a_checkpoint(server: GCSServer, is_background: bool) -> None:
    """The bucket as it is behind every request, with a service that refuses half of them."""
    server.faults.add("*insert*", status=503, probability=0.7)
    watch = Watch(server)
    plugin = AiofluxCheckpointIO(background=is_background, retry=KEEP_TRYING)
    fit(8, plugin, [every(1)])
    with_one = [keys for keys in watch.seen if keys]
    assert watch.seen[0] == set()
    assert watch.seen[1:] == with_one
    assert len(with_one) > 8
    assert server.keys("bucket") == ["run/epoch=0-step=8.ckpt"]


def test_a_failed_save_ends_the_run_and_keeps_the_older_checkpoint(
    server: GCSServer,
) -> None:
    plugin = AiofluxCheckpointIO(background=True)

    def refuse(_: object) -> None:
        plugin.wait()
        server.faults.add("*insert*", status=403)

    with pytest.raises(aioflux.PermissionDeniedError, match=r"step=4\.ckpt"):
        fit(8, plugin, [every(2), At(3, refuse)])
    assert server.keys("bucket") == ["run/epoch=0-step=2.ckpt"]


def test_the_last_checkpoint_is_copied_on_the_service_and_keeps_its_name(
    server: GCSServer,
) -> None:
    plugin = AiofluxCheckpointIO()
    fit(2, plugin, [every(2, save_last=True)])
    assert server.keys("bucket") == ["run/epoch=0-step=2.ckpt", "run/last.ckpt"]
    assert server.stats.operation("objects.insert").requests == 1
    assert plugin.load_checkpoint(f"{RUN}/last.ckpt")["global_step"] == 2
    fit(6, plugin, [every(2, save_last=True)], ckpt_path="last")
    assert server.keys("bucket") == ["run/epoch=0-step=6.ckpt", "run/last.ckpt"]
    assert plugin.load_checkpoint(f"{RUN}/last.ckpt")["global_step"] == 6


@pytest.mark.filterwarnings("ignore:The dirpath has changed from")
def test_a_resumed_checkpoint_and_those_outside_dirpath_stay(server: GCSServer) -> None:
    fit(2, AiofluxCheckpointIO(), [every(2)])
    source = f"{RUN}/epoch=0-step=2.ckpt"
    fit(6, AiofluxCheckpointIO(), [every(2)], ckpt_path=source)
    assert server.keys("bucket") == ["run/epoch=0-step=2.ckpt", "run/epoch=0-step=6.ckpt"]
    other = f"{RUN}/epoch=0-step=6.ckpt"
    fit(10, AiofluxCheckpointIO(), [every(2, "gs://bucket/run2")], ckpt_path=other)
    assert server.keys("bucket") == [
        "run/epoch=0-step=2.ckpt",
        "run/epoch=0-step=6.ckpt",
        "run2/epoch=1-step=10.ckpt",
    ]


def terminate(_: object) -> None:
    os.kill(os.getpid(), signal.SIGTERM)


def fail(_: object) -> None:
    raise ArithmeticError("in step 4")


@pytest.fixture
def plain_sigterm() -> Iterator[None]:
    """Coverage measures with a handler of its own, which Lightning calls, and which ends all."""
    before = signal.signal(signal.SIGTERM, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGTERM, before)


@pytest.mark.usefixtures("plain_sigterm")
@pytest.mark.parametrize(
    ("action", "error", "num_done"),
    [(terminate, SIGTERMException, 4), (fail, ArithmeticError, 3)],
    ids=["sigterm", "exception"],
)
def test_a_run_that_ends_early_is_saved(
    server: GCSServer, action: Callable[[Any], None], error: type[BaseException], num_done: int
) -> None:
    """After SIGTERM a step is finished first; of a step that fails, the batch is lost."""
    plugin = AiofluxCheckpointIO(background=True)
    saving = every(100, save_on_exception=True, save_last=True)
    with pytest.raises(error):
        fit(8, plugin, [saving, At(3, action)])
    assert server.keys("bucket") == [f"run/epoch=0-step={num_done}.ckpt", "run/last.ckpt"]
    running, resumed = fit(8, plugin, [every(100, save_last=True)], ckpt_path="last")
    assert running.global_step == 8
    if num_done == 4:
        assert_equal(fit(8, AiofluxCheckpointIO(), [], enable_checkpointing=False)[1], resumed)
    assert "run/last-v1.ckpt" not in server.keys("bucket")


@pytest.mark.more
def test_a_run_in_forked_processes_returns_its_weights(
    server: GCSServer, fork_server: ForkServer, tmp_path: Path
) -> None:
    """Lightning hands them over through the plugin, after its end, in a file that must be whole."""
    log = tmp_path / "log"
    args = (RUN, str(tmp_path))
    assert fork_server.run("forked", *args, log=log, STORAGE_EMULATOR_HOST=server.url) == [0], (
        log.read_text()
    )
    assert server.keys("bucket") == ["run/epoch=0-step=4.ckpt", "run/last.ckpt"]
    _, unbroken = fit(4, AiofluxCheckpointIO(), [], enable_checkpointing=False)
    at_home = torch.load(tmp_path / "home.pt")
    assert all(torch.equal(at_home[name], each) for name, each in unbroken.state_dict().items())


def test_storage_options_reach_the_plugin_through_the_trainer(server: GCSServer) -> None:
    running, _ = fit(1, AiofluxCheckpointIO(), [], enable_checkpointing=False)
    running.save_checkpoint(f"{RUN}/x.ckpt", storage_options={"metadata": {"run": "7"}})
    with aioflux.sync.open_store(RUN) as store:
        assert store.head("x.ckpt").metadata == {"run": "7"}


@pytest.fixture
def anywhere(
    cloud: str, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Any]:
    with open_bucket(cloud, request, monkeypatch) as bucket:
        yield bucket


@pytest.mark.clouds("gs", "s3", "az")
def test_a_run_on_any_cloud_resumes_whatever_fsspec_has_for_it(anywhere: Any) -> None:
    for max_steps, ckpt_path in ((2, None), (4, "last")):
        saving = every(2, f"{anywhere.root}/run", save_last=True)
        running, _ = fit(max_steps, AiofluxCheckpointIO(), [saving], ckpt_path)
    assert running.global_step == 4
    assert anywhere.keys("bucket") == ["run/epoch=0-step=4.ckpt", "run/last.ckpt"]
    saving.to_yaml()
    assert anywhere.get("bucket", "run/best_k_models.yaml")


@pytest.mark.parametrize("error", [ImportError("Install s3fs"), OSError("in gcsfs")], ids=str)
@pytest.mark.parametrize(
    "uri", ["gs://b/run", "gcs://b/run", "s3://b/run", "az://a/c/run", "memory://b/run"]
)
def test_no_other_filesystem_is_opened_for_a_dirpath(uri: str, error: Exception) -> None:
    OtherFileSystem.error = error
    assert ModelCheckpoint(uri).dirpath == uri


def test_the_endpoint_of_the_plugin_applies_to_the_last_checkpoint(
    server: GCSServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    plugin = AiofluxCheckpointIO(endpoint_url=server.url)
    with GCSServer(buckets=("bucket",)) as elsewhere:
        monkeypatch.setenv("STORAGE_EMULATOR_HOST", elsewhere.url)
        fit(2, plugin, [every(1, save_last=True)])
        running, _ = fit(3, plugin, [every(1, save_last=True)], ckpt_path="last")
        assert elsewhere.stats.total.requests == 0
    assert running.global_step == 3
    assert server.keys("bucket") == ["run/epoch=0-step=3.ckpt", "run/last.ckpt"]


@pytest.mark.filterwarnings("ignore:The dirpath has changed from")
def test_the_newest_of_the_last_checkpoints_is_resumed(server: GCSServer) -> None:
    for max_steps, dirpath in ((1, "gs://bucket/a"), (3, "gs://bucket/b"), (2, "gs://bucket/c")):
        fit(max_steps, AiofluxCheckpointIO(), [every(1, dirpath, save_last=True)])
    begun: list[int] = []
    noting = At(None, lambda trainer: begun.append(trainer.global_step))
    savings = [
        every(1, "gs://bucket/b", save_last=True),
        every(2, "gs://bucket/c", save_last=True),
    ]
    fit(4, AiofluxCheckpointIO(), [*savings, noting], ckpt_path="last")
    assert begun == [2, 3]


def test_a_bucket_needs_the_plugin(server: GCSServer) -> None:
    """Lightning's own plugin would fail at the first save, by another filesystem."""
    with pytest.raises(TypeError, match=r"cannot save to gs://bucket/run; pass Trainer\(plugins="):
        fit(1, TorchCheckpointIO(), [every(1)])


@pytest.mark.filterwarnings("ignore:.*there is no last checkpoint available")
def test_the_first_run_may_resume_from_the_last_checkpoint(server: GCSServer) -> None:
    running, _ = fit(1, AiofluxCheckpointIO(), [every(1, save_last=True)], ckpt_path="last")
    assert running.global_step == 1


def test_a_plugin_that_removes_too_early_is_rejected(server: GCSServer) -> None:
    with pytest.raises(TypeError, match=r"AiofluxCheckpointIO\(background=True"):
        fit(1, AsyncCheckpointIO(AiofluxCheckpointIO()), [every(1)])


@pytest.mark.parametrize("form", ["path", "uri"])
def test_a_local_dirpath_works_as_path_and_as_uri(form: str, tmp_path: Path) -> None:
    dirpath = tmp_path / "run" if form == "path" else f"file://{tmp_path}/run"
    fit(2, AiofluxCheckpointIO(), [every(1, dirpath, save_last=True)])
    names = sorted(path.name for path in (tmp_path / "run").iterdir())
    assert names == ["epoch=0-step=2.ckpt", "last.ckpt"]
    running, _ = fit(3, AiofluxCheckpointIO(), [every(1, dirpath, save_last=True)], "last")
    assert running.global_step == 3


def test_a_dirpath_without_a_slash_is_rejected() -> None:
    with pytest.raises(ValueError, match="pass uris as strings"):
        ModelCheckpoint(Path(RUN))
