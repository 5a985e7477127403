"""Checkpoints, data sets and the command line on az://, as on other services."""

from __future__ import annotations

import uuid
from typing import TYPE_CHECKING

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.utils.data import DataLoader

import aioflux.sync
from aioflux.checkpoint import Checkpointer, load, open_reader, open_writer, save
from aioflux.checkpoint.dcp import StorageReader, StorageWriter
from aioflux.cli._app import run_app
from aioflux.data import IterableDataset, MapDataset

if TYPE_CHECKING:
    from pathlib import Path

    from tests.servers.azurite import Azurite


@pytest.fixture
def root(azurite: Azurite, monkeypatch: pytest.MonkeyPatch) -> str:
    """Where to write; the environment tells how to sign in."""
    monkeypatch.setenv(
        "AZURE_STORAGE_CONNECTION_STRING",
        f"AccountName={azurite.account};AccountKey={azurite.key};"
        f"BlobEndpoint={azurite.url}/{azurite.account}",
    )
    return f"az://{azurite.account}/container/{uuid.uuid4().hex}"


@pytest.fixture
def keys(root: str) -> list[str]:
    """Keys of a data set."""
    keys = [f"{at:02}" for at in range(20)]
    with aioflux.sync.open_store(f"{root}/data") as store:
        list(store.put_many((key, key.encode()) for key in keys))
    return keys


def state() -> dict[str, object]:
    return {"w": torch.arange(50_000.0), "step": 3}


def test_a_state_comes_back(root: str) -> None:
    save(state(), f"{root}/m.pt")
    assert torch.equal(load(f"{root}/m.pt")["w"], state()["w"])
    with open_writer(f"{root}/n.pt") as file:
        torch.save(state(), file)
    with open_reader(f"{root}/n.pt") as file:
        assert torch.load(file)["step"] == 3


def test_a_run_keeps_its_last_steps(root: str) -> None:
    with Checkpointer(f"{root}/run", keep_last=2) as checkpointer:
        for step in (1, 2):
            checkpointer.save(step, state())
        checkpointer.save_async(3, state()).result(60)
        assert checkpointer.steps() == [2, 3]
        assert checkpointer.verify(3).is_valid
        assert torch.equal(checkpointer.load()["w"], state()["w"])


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_dcp_saves_and_loads(root: str) -> None:
    saved = {"w": torch.arange(50_000.0)}
    dcp.save(saved, storage_writer=StorageWriter(f"{root}/dcp"), no_dist=True)
    loaded = {"w": torch.zeros(50_000)}
    dcp.load(loaded, storage_reader=StorageReader(f"{root}/dcp"), no_dist=True)
    assert torch.equal(loaded["w"], saved["w"])


@pytest.mark.parametrize("num_workers", [0, 2])
def test_samples_are_read(root: str, keys: list[str], num_workers: int) -> None:
    uri = f"{root}/data"
    dataset = IterableDataset(uri, shuffle=True, seed=0)
    read = [sample.key for sample in DataLoader(dataset, None, num_workers=num_workers)]
    assert sorted(read) == keys
    assert read != keys
    whole = MapDataset(uri)
    assert [whole[at].data for at in (0, len(keys) - 1)] == [b"00", b"19"]


def test_the_command_line_copies_and_removes(
    root: str, keys: list[str], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert run_app(["cp", "-r", f"{root}/data", f"{tmp_path}/data"]) == 0
    assert sorted(path.name for path in (tmp_path / "data").iterdir()) == keys
    assert run_app(["cp", f"{root}/data/07", f"{root}/seven"]) == 0
    capfd.readouterr()
    assert run_app(["ls", f"{root}/"]) == 0
    assert capfd.readouterr().out.split() == [f"{root}/data/", f"{root}/seven"]
    assert run_app(["clean", root]) == 0
    assert run_app(["rm", "-r", f"{root}/"]) == 0
    with aioflux.sync.open_store(root) as store:
        assert store.list_all() == []


def test_the_command_reads_public_containers(
    azurite: Azurite, capfd: pytest.CaptureFixture[str]
) -> None:
    name = f"c{uuid.uuid4().hex}"
    with azurite.client() as client:
        client.create_container(name, public_access="container").upload_blob("a", b"1")
    options = ["--anonymous", "--endpoint-url", azurite.url]
    assert run_app(["cat", *options, f"az://{azurite.account}/{name}/a"]) == 0
    assert capfd.readouterr().out == "1"
