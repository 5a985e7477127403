"""Checkpoints that an older version wrote load bit by bit.

`older/57c6bda.zip` was written by that commit: `python -m tests.checkpoint.test_older_checkpoints
DIRECTORY` writes the same checkpoints with the version in use.
"""

from __future__ import annotations

import math
import sys
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp

from aioflux import checkpoint
from aioflux.checkpoint import Checkpointer
from aioflux.checkpoint.compression import ZStandard
from aioflux.checkpoint.dcp import StorageReader, StorageWriter, load_state

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")

OLDER = sorted(Path(__file__).with_name("older").glob("*.zip"))
COMPRESSIONS = {"plain": None, "compressed": ZStandard()}
LAYOUTS = [("dcp", "plain"), ("dcp", "compressed"), ("safetensors", "plain")]


def values(count: int, dtype: torch.dtype) -> torch.Tensor:
    return (torch.arange(count) * 2654435761 % 8191 - 4095).to(dtype)


def model() -> dict[str, torch.Tensor]:
    return {
        "weight": values(3_000, torch.float32).reshape(10, 300),
        "half": values(500, torch.bfloat16).reshape(50, 10),
        "transposed": values(600, torch.float64).reshape(20, 30).t(),
        "empty": torch.empty(0, 3),
        "scalar": torch.tensor(7),
        "flags": values(100, torch.int8) > 0,
    }


def training(step: int) -> dict[str, Any]:
    tied = values(600, torch.float32)
    moments = {0: {"step": step, "exp_avg": values(300, torch.float32) / step}}
    return {
        "model": {**model(), "tied": tied, "tied too": tied},
        "optimizer": {"state": moments, "groups": [{"lr": 0.5, "betas": (0.9, 0.99)}]},
        "epoch": step,
        "name": "été",
        "nothing": None,
        "infinite": math.inf,
    }


def write(directory: Path) -> None:
    for name, compression in COMPRESSIONS.items():
        uri = (directory / f"run-{name}").as_uri()
        with Checkpointer(uri, compression=compression) as checkpointer:
            for step in (1, 2):
                checkpointer.save(step, training(step), {"loss": 1.0 / step})
    for layout, name in LAYOUTS:
        uri = (directory / f"{layout}-{name}").as_uri()
        writer = StorageWriter(uri, layout=layout, compression=COMPRESSIONS[name])
        dcp.save({"model": model(), "epoch": 9}, storage_writer=writer, no_dist=True)
    checkpoint.save(training(3), (directory / "state.pt").as_uri())


def assert_equal(got: Any, expected: Any) -> None:
    if isinstance(expected, torch.Tensor):
        assert got.dtype == expected.dtype
        assert torch.equal(got, expected)
    elif isinstance(expected, dict):
        assert got.keys() == expected.keys()
        for key, value in expected.items():
            assert_equal(got[key], value)
    elif isinstance(expected, list | tuple):
        assert type(got) is type(expected)
        for one, other in zip(got, expected, strict=True):
            assert_equal(one, other)
    else:
        assert got == expected


@pytest.fixture(params=OLDER, ids=lambda path: path.stem)
def written(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    with zipfile.ZipFile(request.param) as archive:
        archive.extractall(tmp_path)
    return tmp_path


def test_older_checkpoints_are_kept() -> None:
    assert [path.stem for path in OLDER] == ["57c6bda"]


@pytest.mark.parametrize("name", COMPRESSIONS)
def test_an_older_run_continues(written: Path, name: str) -> None:
    uri = (written / f"run-{name}").as_uri()
    with Checkpointer(uri, compression=COMPRESSIONS[name]) as checkpointer:
        assert checkpointer.steps() == [1, 2]
        for step in (1, 2):
            assert_equal(checkpointer.load(step), training(step))
        into = training(1)
        checkpointer.load(2, into=into)
        assert_equal(into["model"], training(2)["model"])
        checkpointer.save(3, training(3), {"loss": 0.1})
        assert_equal(checkpointer.load(), training(3))
        history = [(record.step, record.outcome) for record in checkpointer.history()]
    assert history == [(1, "committed"), (2, "committed"), (3, "committed")]
    for step in (1, 2, 3):
        checkpoint.verify(f"{uri}/step-{step:08d}")


@pytest.mark.parametrize(("layout", "name"), LAYOUTS)
def test_older_checkpoints_of_dcp_load(written: Path, layout: str, name: str) -> None:
    uri = (written / f"{layout}-{name}").as_uri()
    checkpoint.verify(uri)
    expected = {"model": model(), "epoch": 9}
    assert_equal(load_state(uri), expected)
    into = {"model": {key: torch.zeros_like(value) for key, value in model().items()}, "epoch": 0}
    dcp.load(into, storage_reader=StorageReader(uri), no_dist=True)
    assert_equal(into, expected)


def test_an_older_torch_file_loads(written: Path) -> None:
    uri = (written / "state.pt").as_uri()
    assert_equal(checkpoint.load(uri, weights_only=True), training(3))


if __name__ == "__main__":
    write(Path(sys.argv[1]).resolve())
