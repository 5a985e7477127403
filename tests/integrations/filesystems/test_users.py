"""Libraries that open `gs://` urls through fsspec, with aioflux in the place of gcsfs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import fsspec
import numpy as np
import pyarrow as pa
import pyarrow.dataset as pads
import pyarrow.parquet as pq
import pytest
import torch
import torch.distributed.checkpoint as dcp
from fsspec.registry import _registry as registry
from pyarrow.fs import FSSpecHandler, PyFileSystem
from torch.distributed.checkpoint._fsspec_filesystem import FsspecReader, FsspecWriter
from torch.distributed.checkpoint.api import CheckpointException

from aioflux.integrations.fsspec import GSFileSystem, register

if TYPE_CHECKING:
    from collections.abc import Iterator

    from aioflux.testing import GCSServer

pytestmark = [
    pytest.mark.filterwarnings("ignore:torch.distributed is disabled"),
    pytest.mark.filterwarnings("ignore:Detected an existing checkpoint"),
]

TABLE = pa.table({"x": np.arange(10_000), "y": [f"row {number}" for number in range(10_000)]})


@pytest.fixture(autouse=True)
def gs_is_ours(shared: GCSServer, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("STORAGE_EMULATOR_HOST", shared.url)
    before = dict(registry)
    register(replace=("gs",))
    GSFileSystem.clear_instance_cache()
    yield
    GSFileSystem.clear_instance_cache()
    registry.clear()
    registry.update(before)


def test_pyarrow_writes_and_reads_a_dataset(bucket: str, fs: GSFileSystem) -> None:
    system = PyFileSystem(FSSpecHandler(fs))
    parts = TABLE.append_column("part", pa.array([number % 3 for number in range(10_000)]))
    pads.write_dataset(
        parts, f"{bucket}/set", filesystem=system, format="parquet", partitioning=["part"]
    )
    assert len(fs.find(f"{bucket}/set")) == 3
    found = pads.dataset(f"{bucket}/set", filesystem=fs, partitioning=["part"])
    assert found.count_rows() == 10_000
    some = found.to_table(columns=["x"], filter=pads.field("part") == 1)
    assert sorted(some["x"].to_pylist()) == list(range(1, 10_000, 3))


def test_pyarrow_reads_columns_of_a_table(bucket: str, fs: GSFileSystem) -> None:
    pq.write_table(TABLE, f"{bucket}/t.parquet", filesystem=fs)
    table = pq.read_table(f"{bucket}/t.parquet", columns=["y"], filesystem=fs)
    assert table["y"].to_pylist() == TABLE["y"].to_pylist()
    selector = pa.fs.FileSelector(bucket, recursive=True)
    infos = PyFileSystem(FSSpecHandler(fs)).get_file_info(selector)
    assert [info.path for info in infos] == [f"{bucket}/t.parquet"]


def test_pandas_reads_and_writes(bucket: str, fs: GSFileSystem) -> None:
    pandas = pytest.importorskip("pandas")
    frame = pandas.DataFrame({"x": [1, 2, 3]})
    frame.to_parquet(f"aiogs://{bucket}/a.parquet")
    frame.to_csv(f"gs://{bucket}/a.csv.gz", index=False)
    assert pandas.read_parquet(f"aiogs://{bucket}/a.parquet").equals(frame)
    assert pandas.read_csv(f"gs://{bucket}/a.csv.gz").equals(frame)


def test_an_unfinished_table_is_not_stored(bucket: str, fs: GSFileSystem) -> None:
    def write() -> None:
        with pq.ParquetWriter(f"{bucket}/t.parquet", TABLE.schema, filesystem=fs) as writer:
            writer.write_table(TABLE)
            raise ArithmeticError

    with pytest.raises(ArithmeticError):
        write()
    assert fs.find(bucket) == []


def state(value: float) -> dict[str, Any]:
    return {
        "model": {"w": torch.full((300, 500), value), "b": torch.arange(7)},
        "step": int(value),
    }


def test_stock_dcp_saves_overwrites_and_loads(bucket: str, fs: GSFileSystem) -> None:
    """By its own writer and reader; with a thread for each object, too."""
    url = f"gs://{bucket}/run/step-1"
    for number, writer in enumerate((FsspecWriter(url), FsspecWriter(url, thread_count=3))):
        dcp.save(state(number), storage_writer=writer, no_dist=True)
        target = state(-1)
        dcp.load(target, storage_reader=FsspecReader(url), no_dist=True)
        assert torch.equal(target["model"]["w"], state(number)["model"]["w"])
        assert target["step"] == number
    assert fs.exists(f"{bucket}/run/step-1/.metadata")
    assert not fs.exists(f"{bucket}/run/step-1/.metadata.tmp")


def test_stock_dcp_loads_a_part(bucket: str) -> None:
    """One tensor of several, at its place in the object."""
    url = f"aiogs://{bucket}/run/step-3"
    dcp.save(state(3), storage_writer=FsspecWriter(url), no_dist=True)
    target = {"model": {"b": torch.zeros(7, dtype=torch.int64)}}
    dcp.load(target, storage_reader=FsspecReader(url), no_dist=True)
    assert target["model"]["b"].tolist() == list(range(7))


def test_stock_dcp_finds_a_writer_by_the_url(bucket: str) -> None:
    url = f"gs://{bucket}/run/step-2"
    dcp.save(state(2), checkpoint_id=url, no_dist=True)
    target = state(0)
    dcp.load(target, checkpoint_id=url, no_dist=True)
    assert target["model"]["w"][0, 0] == 2


def test_an_object_that_dcp_cannot_finish_is_not_stored(bucket: str, fs: GSFileSystem) -> None:
    class Unpicklable:
        def __reduce__(self) -> Any:
            raise ArithmeticError

    with pytest.raises(CheckpointException):
        dcp.save({"x": Unpicklable()}, checkpoint_id=f"gs://{bucket}/bad", no_dist=True)
    assert fs.find(bucket) == []


def test_fsspec_opens_many(bucket: str) -> None:
    with fsspec.open_files(f"gs://{bucket}/part-*.txt", "w", num=3) as files:
        for number, file in enumerate(files):
            file.write(str(number))
    with fsspec.open_files(f"gs://{bucket}/part-*.txt", "r") as files:
        assert [file.read() for file in files] == ["0", "1", "2"]
