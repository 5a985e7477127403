"""The checkpoint plugins, writer, reader and strategy with the old names."""

from __future__ import annotations

import pickle
import re
from argparse import Namespace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from google.oauth2.credentials import Credentials
from torch.distributed.checkpoint.api import CheckpointException

import aioflux
from aioflux.compat.dataflux.lightning import (
    DatafluxLightningAsyncCheckpoint,
    DatafluxLightningCheckpoint,
    GCSDistributedReader,
    GCSDistributedWriter,
)
from aioflux.compat.dataflux.lightning._uris import gcs_uri, uri_of

if TYPE_CHECKING:
    from tests.compat.conftest import Bucket

PLUGINS = [DatafluxLightningCheckpoint, DatafluxLightningAsyncCheckpoint]

# What Lightning and DCP warn of, who are not tested here.
pytestmark = [
    pytest.mark.filterwarnings("ignore::UserWarning:lightning"),
    pytest.mark.filterwarnings("ignore:.*LeafSpec"),
    pytest.mark.filterwarnings("ignore:torch.distributed is disabled"),
]

LIGHTNING = """
import torch
from lightning import Trainer
from lightning.pytorch.demos import LightningTransformer
from torch.utils.data import DataLoader
from dataflux_pytorch.lightning import {kind}

CKPT = "gcs://bucket/checkpoints/ckpt.ckpt"
dataflux_ckpt = {kind}(project_name="project")

class Words(LightningTransformer):
    def prepare_data(self):
        pass  # its own fetches a book

words = torch.arange(35) % 32
dataloader = DataLoader([(words, words)] * 12)
model = Words(vocab_size=32)
trainer = Trainer(
    default_root_dir=ROOT,
    plugins=[dataflux_ckpt],
    min_epochs=4,
    max_epochs=5,
    max_steps=3,
    accelerator="cpu",
    logger=False,
    enable_progress_bar=False,
    enable_model_summary=False,
)
trainer.fit(model, dataloader)
trainer.save_checkpoint(CKPT)
dataflux_ckpt.teardown()
"""

RESUME = """
other = Words(vocab_size=32)
resumed = Trainer(
    default_root_dir=ROOT,
    plugins=[dataflux_ckpt],
    max_steps=3,
    accelerator="cpu",
    logger=False,
    enable_progress_bar=False,
    enable_model_summary=False,
)
resumed.fit(other, dataloader, ckpt_path=CKPT)
same = all(torch.equal(a, b) for a, b in zip(model.parameters(), other.parameters()))
"""


def changed(program: str) -> str:
    """The program with its import line changed."""
    text, num_lines = re.subn(
        r"^from dataflux_pytorch\.", "from aioflux.compat.dataflux.", program, flags=re.MULTILINE
    )
    assert num_lines == 1
    return text


@pytest.mark.parametrize("kind", [each.__name__ for each in PLUGINS])
def test_a_program_trains_and_saves_with_lightning(
    bucket: Bucket, tmp_path: Path, kind: str
) -> None:
    """It gives no `dirpath`, so that Lightning saves on the local disk, too, by the plugin."""
    left: dict[str, Any] = {"ROOT": tmp_path}
    torch.set_num_threads(1)
    exec(changed(LIGHTNING.format(kind=kind)), left)
    assert bucket.server.keys("bucket") == ["checkpoints/ckpt.ckpt"]
    exec(RESUME, left)
    assert left["same"]
    assert left["resumed"].global_step == 3


@pytest.mark.parametrize("kind", PLUGINS)
@pytest.mark.parametrize("path", ["gs://bucket/a/b.ckpt", Path("gs://bucket/a/b.ckpt")])
def test_a_checkpoint_makes_the_round_trip_through_a_client(
    guarded: Bucket, kind: type[DatafluxLightningCheckpoint], path: str | Path
) -> None:
    """With the client's endpoint and credentials; a Path has lost a slash."""
    client = guarded.client(Credentials("secret"))
    plugin = kind("project", storage_client=client)
    assert plugin.storage_client is client
    plugin.save_checkpoint({"w": torch.arange(9.0)}, path)
    assert torch.equal(plugin.load_checkpoint(path)["w"], torch.arange(9.0))
    assert guarded.server.keys("bucket") == ["a/b.ckpt"]
    plugin.remove_checkpoint(path)
    plugin.remove_checkpoint(path)
    plugin.teardown()
    assert guarded.server.keys("bucket") == []


def test_load_passes_weights_only_on(bucket: Bucket) -> None:
    """The old class took no such argument, which Lightning gives now."""
    plugin = DatafluxLightningCheckpoint("project")
    plugin.save_checkpoint({"x": Namespace(a=1)}, "gs://bucket/a")
    with pytest.raises(pickle.UnpicklingError):
        plugin.load_checkpoint("gs://bucket/a", weights_only=True)
    assert plugin.load_checkpoint("gs://bucket/a", weights_only=False)["x"].a == 1


class Unsaveable:
    def __reduce__(self) -> Any:
        raise ArithmeticError


def test_a_save_that_breaks_keeps_the_old_checkpoint(bucket: Bucket) -> None:
    plugin = DatafluxLightningCheckpoint("project")
    plugin.save_checkpoint({"x": 1}, "gs://bucket/a")
    with pytest.raises(ArithmeticError):
        plugin.save_checkpoint({"w": torch.zeros(1000), "x": Unsaveable()}, "gs://bucket/a")
    assert plugin.load_checkpoint("gs://bucket/a") == {"x": 1}


def test_an_asynchronous_save_that_fails_is_an_error(bucket: Bucket) -> None:
    plugin = DatafluxLightningAsyncCheckpoint("project")
    plugin.save_checkpoint({"x": 1}, "gs://no-such-bucket/a")
    with pytest.raises(aioflux.NotFoundError, match="no-such-bucket"):
        plugin.teardown()


@pytest.mark.parametrize(
    ("path", "error", "says"),
    [
        ("", ValueError, "is empty"),
        ("gs:///key", ValueError, "names no bucket"),
        ("gs://", ValueError, "names no bucket"),
        ("s3://bucket/key", ValueError, "does not begin with gs://"),
        ("https://host/key", ValueError, "does not begin with gs://"),
        (7, TypeError, "not int"),
        (None, TypeError, "not NoneType"),
    ],
)
def test_paths_of_something_else_are_rejected(path: Any, error: type[Exception], says: str) -> None:
    plugin = DatafluxLightningCheckpoint("project")
    for action in (plugin.remove_checkpoint, plugin.load_checkpoint):
        with pytest.raises(error, match=says):
            action(path)
    with pytest.raises(error, match=says):
        plugin.save_checkpoint({}, path)


@pytest.mark.parametrize(
    ("path", "uri"),
    [
        ("gs://b/a/c", "gs://b/a/c"),
        ("gcs://b/a//c", "gs://b/a//c"),
        (Path("gs://b/a/c"), "gs://b/a/c"),
        (Path("gcs://b/c.ckpt"), "gs://b/c.ckpt"),
        ("gs://b", "gs://b"),
        ("/tmp/a b", "file:///tmp/a b"),
        ("file:///x", "file:///x"),
    ],
)
def test_paths_as_uris(path: str | Path, uri: str) -> None:
    assert uri_of(path) == uri
    if uri.startswith("gs://"):
        assert gcs_uri(path) == uri
    else:
        with pytest.raises(ValueError, match="does not begin with gs://"):
            gcs_uri(path)


@pytest.mark.parametrize("kind", PLUGINS)
def test_a_pickle_keeps_the_endpoint(
    server: Bucket, kind: type[DatafluxLightningCheckpoint]
) -> None:
    plugin = kind("project", server.client(), disable_multipart=True)
    copy = pickle.loads(pickle.dumps(plugin))
    assert (type(copy), copy.project_name, copy.disable_multipart) == (kind, "project", True)
    assert copy.is_background is plugin.is_background
    copy.save_checkpoint({"x": 1}, "gs://bucket/a")
    assert copy.load_checkpoint("gs://bucket/a") == {"x": 1}
    copy.teardown()


def test_a_pickle_carries_no_secret(server: Bucket) -> None:
    plugin = DatafluxLightningCheckpoint("project", server.client(Credentials("secret")))
    with pytest.raises(TypeError, match="and for nothing else"):
        pickle.dumps(plugin)


def state(value: float) -> dict[str, Any]:
    return {"model": {"w": torch.full((100, 50), value), "b": torch.arange(7)}, "step": int(value)}


@pytest.mark.parametrize("path", ["gs://bucket/step", Path("gs://bucket/step")])
@pytest.mark.parametrize("options", [{}, {"thread_count": 2}, {"single_file_per_rank": False}])
def test_dcp_saves_and_loads_through_a_client(
    guarded: Bucket, path: str | Path, options: dict[str, Any]
) -> None:
    client = guarded.client(Credentials("secret"))
    writer = GCSDistributedWriter(path, "project", client, sync_files=False, **options)
    dcp.save(state(3), checkpoint_id=path, storage_writer=writer)
    reader = GCSDistributedReader(path, "project", client)
    target = state(0)
    dcp.load(target, checkpoint_id=path, storage_reader=reader)
    assert torch.equal(target["model"]["w"], state(3)["model"]["w"])
    assert target["step"] == 3
    num_data = sum(key.endswith(".distcp") for key in guarded.server.keys("bucket"))
    assert num_data == {"thread_count": 2, "single_file_per_rank": 3}.get(
        next(iter(options), ""), 1
    )


def test_a_checkpoint_is_replaced_only_where_it_may_be(bucket: Bucket) -> None:
    path = "gs://bucket/step"
    for value in (1, 2):
        dcp.save(state(value), storage_writer=GCSDistributedWriter(path, "project"))
    with pytest.raises(CheckpointException, match="exists"):
        dcp.save(state(3), storage_writer=GCSDistributedWriter(path, "project", overwrite=False))
    target = state(0)
    dcp.load(target, storage_reader=GCSDistributedReader(path, "project"))
    assert target["step"] == 2


def test_another_checkpoint_keeps_the_client(guarded: Bucket) -> None:
    client = guarded.client(Credentials("secret"))
    writer = GCSDistributedWriter("gs://bucket/one", "project", client)
    dcp.save(state(5), checkpoint_id=Path("gs://bucket/two"), storage_writer=writer)
    target = state(0)
    reader = GCSDistributedReader("gs://bucket/one", "project", client)
    dcp.load(target, checkpoint_id="gcs://bucket/two", storage_reader=reader)
    assert target["step"] == 5


def test_checkpoints_in_the_old_format_of_torch_are_read(bucket: Bucket, tmp_path: Path) -> None:
    """The old writer was torch's own, and so are the objects that it left."""
    dcp.save(state(4), storage_writer=dcp.FileSystemWriter(tmp_path))
    for file in tmp_path.iterdir():
        bucket.put(f"old/{file.name}", file.read_bytes())
    target = state(0)
    dcp.load(target, storage_reader=GCSDistributedReader("gs://bucket/old", "project"))
    assert torch.equal(target["model"]["w"], state(4)["model"]["w"])


def test_options_are_checked() -> None:
    with pytest.raises(TypeError, match="'threads'"):
        GCSDistributedWriter("gs://bucket/a", "project", threads=3)
    with pytest.raises(ValueError, match="compression"):
        GCSDistributedWriter("gs://bucket/a", "project", _extensions=[object()])
    for kind in (GCSDistributedWriter, GCSDistributedReader):
        with pytest.raises(ValueError, match="does not begin"):
            kind("/tmp/a", "project")
        assert kind.validate_checkpoint_id(Path("gs://bucket/a"))
        assert not kind.validate_checkpoint_id("/tmp/a")
        assert not kind.validate_checkpoint_id(7)
