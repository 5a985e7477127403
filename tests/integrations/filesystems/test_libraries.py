"""Six libraries read and write through aioflux by `aiogs://`, with nothing left on the local disk.

docs/fsspec.md shows the same calls.
"""

from __future__ import annotations

import os
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import dask.dataframe as dd
import fsspec
import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.dataset as pads
import pyarrow.parquet as pq
import pytest
import xarray as xr
import zarr
from fsspec.registry import _registry as registry
from pyarrow.fs import FSSpecHandler, PyFileSystem
from zarr.abc.store import OffsetByteRequest, RangeByteRequest, SuffixByteRequest
from zarr.core.buffer import default_buffer_prototype
from zarr.storage import FsspecStore, StorePath

from aioflux.integrations.fsspec import GSFileSystem, register

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from aioflux.testing import GCSServer

pytestmark = [
    # A library that goes around aioflux waits for the real service.
    pytest.mark.timeout(120),
    # dask calls pandas so.
    pytest.mark.filterwarnings("ignore:The inplace keyword in DataFrame"),
]

FRAME = pd.DataFrame({"x": range(1000), "y": [f"row {number}" for number in range(1000)]})
GRID = xr.Dataset({"t": (("time", "x"), np.arange(20.0).reshape(4, 5))})


@pytest.fixture(scope="module")
def hugging_face(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Return datasets, imported where it finds no cache and no credentials of the user."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HF_HOME", str(tmp_path_factory.mktemp("hf")))
        patch.setenv("HF_UPDATE_DOWNLOAD_COUNTS", "0")
        import datasets
    datasets.disable_progress_bars()
    return datasets


@pytest.fixture(autouse=True)
def nothing_is_local(
    shared: GCSServer, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> Iterator[None]:
    """Nothing appears in the working directory: a url is nowhere taken for a local path."""
    monkeypatch.setenv("STORAGE_EMULATOR_HOST", shared.url)
    work = tmp_path / "work"
    work.mkdir()
    monkeypatch.chdir(work)
    GSFileSystem.clear_instance_cache()
    before = dict(registry)
    yield
    registry.clear()
    registry.update(before)
    for system in GSFileSystem._cache.values():
        zarr.core.sync.sync(system.aclose())  # connections on the loop of zarr
    GSFileSystem.clear_instance_cache()
    assert os.listdir() == []


@pytest.fixture(params=["aiogs", "gs"])
def url(request: pytest.FixtureRequest, bucket: str) -> str:
    register(replace=("gs",) if request.param == "gs" else ())
    return f"{request.param}://{bucket}"


@pytest.mark.parametrize("url", ["aiogs"], indirect=True)
def test_pandas_writes_and_reads_parquet(shared: GCSServer, url: str, bucket: str) -> None:
    FRAME.to_parquet(f"{url}/p.parquet")
    assert shared.keys(bucket) == ["p.parquet"]
    assert pd.read_parquet(f"{url}/p.parquet").equals(FRAME)


def test_pandas_writes_and_reads_csv(shared: GCSServer, url: str, bucket: str) -> None:
    FRAME.to_csv(f"{url}/p.csv.gz", index=False)
    assert shared.keys(bucket) == ["p.csv.gz"]
    assert pd.read_csv(f"{url}/p.csv.gz").equals(FRAME)


def test_pandas_reaches_a_replaced_protocol_by_storage_options(
    shared: GCSServer, bucket: str
) -> None:
    """Without storage options pandas gives `gs://` of Parquet to pyarrow's own client."""
    register(replace=("gs",))
    options = {"endpoint_url": shared.url}
    FRAME.to_parquet(f"gs://{bucket}/p.parquet", storage_options=options)
    assert shared.keys(bucket) == ["p.parquet"]
    assert pd.read_parquet(f"gs://{bucket}/p.parquet", storage_options=options).equals(FRAME)
    system = fsspec.filesystem("gs")
    assert pd.read_parquet(f"gs://{bucket}/p.parquet", filesystem=system).equals(FRAME)
    FRAME.to_csv(f"gs://{bucket}/p.csv", index=False)
    assert pd.read_csv(f"gs://{bucket}/p.csv").equals(FRAME)


def test_pyarrow_writes_and_reads_by_a_url(shared: GCSServer, url: str, bucket: str) -> None:
    table = pa.Table.from_pandas(FRAME)
    pq.write_table(table, f"fsspec+{url}/t.parquet")
    assert shared.keys(bucket) == ["t.parquet"]
    assert pq.read_table(f"fsspec+{url}/t.parquet").equals(table)


def test_pyarrow_writes_and_reads_by_a_filesystem(shared: GCSServer, url: str, bucket: str) -> None:
    table = pa.Table.from_pandas(FRAME)
    fs, root = fsspec.url_to_fs(f"{url}/set")
    system = PyFileSystem(FSSpecHandler(fs))
    pads.write_dataset(table, root, filesystem=system, format="parquet")
    assert shared.keys(bucket) == ["set/part-0.parquet"]
    found = pads.dataset(root, filesystem=system)
    assert found.count_rows() == 1000
    assert found.to_table(filter=pads.field("x") < 10)["x"].to_pylist() == list(range(10))


def test_dask_writes_reads_and_counts(shared: GCSServer, url: str, bucket: str) -> None:
    dd.from_pandas(FRAME, npartitions=3).to_parquet(f"{url}/d")
    assert len(shared.keys(bucket, "d/")) == 3
    found = dd.read_parquet(f"{url}/d")
    assert len(found) == 1000
    assert found.compute()["x"].tolist() == FRAME["x"].tolist()
    found.to_csv(f"{url}/c/*.csv", index=False)
    assert len(shared.keys(bucket, "c/")) == 3
    assert len(dd.read_csv(f"{url}/c/*.csv")) == 1000


def test_dask_takes_options_of_files(bucket: str) -> None:
    dd.from_pandas(FRAME, npartitions=1).to_parquet(f"aiogs://{bucket}/d")
    options = {"precache_options": {"method": "parquet"}}
    found = dd.read_parquet(f"aiogs://{bucket}/d", columns=["x"], open_file_options=options)
    assert found.compute()["x"].tolist() == FRAME["x"].tolist()


@pytest.mark.parametrize("url", ["aiogs", "gs"], indirect=True)
@pytest.mark.parametrize("zarr_format", [2, 3])
def test_xarray_writes_and_reads_zarr(
    shared: GCSServer, url: str, bucket: str, zarr_format: int
) -> None:
    url = f"{url}/x.zarr"
    GRID.to_zarr(url, zarr_format=zarr_format, consolidated=False)
    assert any(key.startswith("x.zarr/t/") for key in shared.keys(bucket))
    assert xr.open_zarr(url, consolidated=False).equals(GRID)
    GRID.to_zarr(url, append_dim="time", zarr_format=zarr_format, consolidated=False)
    assert xr.open_zarr(url, consolidated=False).sizes["time"] == 8


def test_zarr_writes_and_reads_a_group(shared: GCSServer, url: str, bucket: str) -> None:
    group = zarr.open_group(f"{url}/z.zarr", mode="w")
    array = group.create_array("a", shape=(100,), chunks=(10,), shards=(50,), dtype="i4")
    array[:] = np.arange(100)
    assert {"z.zarr/zarr.json", "z.zarr/a/c/0", "z.zarr/a/c/1"} <= set(shared.keys(bucket))
    found = zarr.open_group(f"{url}/z.zarr", mode="r")["a"]
    assert found[33:44].tolist() == list(range(33, 44))
    group.store_path.store.close()


async def test_zarr_reads_and_writes_in_coroutines(shared: GCSServer, bucket: str) -> None:
    store = FsspecStore.from_url(f"aiogs://{bucket}/z.zarr")
    try:
        array = await zarr.api.asynchronous.create_array(
            StorePath(store, "a"), shape=(100,), chunks=(10,), dtype="i4"
        )
        await array.setitem(slice(None), np.arange(100))
        assert len(shared.keys(bucket, "z.zarr/a/c/")) == 10
        assert (await array.getitem(slice(5, 25))).tolist() == list(range(5, 25))
        assert [each async for each in store.list_dir("a")] == ["c", "zarr.json"]
    finally:
        await store.fs.aclose()


async def test_zarr_reads_parts_of_objects_together(shared: GCSServer, bucket: str) -> None:
    """The ranges of one object take one request, and what is not there is None."""
    shared.put(bucket, "z/a", bytes(range(200)))
    options: dict[str, object] = {}
    store = FsspecStore.from_url(f"aiogs://{bucket}/z", storage_options=options)
    wanted = [
        ("a", RangeByteRequest(100, 110)),
        ("none", RangeByteRequest(0, 1)),
        ("a", RangeByteRequest(0, 3)),
    ]
    try:
        shared.stats.reset()
        found = await store.get_partial_values(default_buffer_prototype(), wanted)
        assert shared.stats.operation("objects.get").requests == 2
        assert [each and each.to_bytes() for each in found] == [
            bytes(range(100, 110)),
            None,
            b"\0\1\2",
        ]
        other = [("a", OffsetByteRequest(198)), ("a", SuffixByteRequest(1)), ("a", None)]
        found = await store.get_partial_values(default_buffer_prototype(), other)
        assert [each and each.to_bytes() for each in found] == [
            bytes([198, 199]),
            bytes([199]),
            bytes(range(200)),
        ]
    finally:
        await store.fs.aclose()


@pytest.mark.parametrize("kind", ["parquet", "json"])
def test_hugging_face_loads_tables(
    hugging_face: Any, shared: GCSServer, url: str, bucket: str, tmp_path: Path, kind: str
) -> None:
    fs, root = fsspec.url_to_fs(url)
    with fs.open(f"{root}/t.{kind}", "wb") as file:
        if kind == "parquet":
            FRAME.to_parquet(file)
        else:
            FRAME.to_json(file, orient="records", lines=True)
    settings = {"data_files": f"{url}/t.{kind}", "split": "train", "cache_dir": str(tmp_path / "c")}
    found = hugging_face.load_dataset(kind, **settings)
    assert found["x"][:] == FRAME["x"].tolist()
    rows = list(hugging_face.load_dataset(kind, streaming=True, **settings))
    assert [row["x"] for row in rows] == FRAME["x"].tolist()


def test_hugging_face_saves_and_loads(
    hugging_face: Any, shared: GCSServer, url: str, bucket: str
) -> None:
    hugging_face.Dataset.from_pandas(FRAME).save_to_disk(f"{url}/saved")
    assert "saved/state.json" in shared.keys(bucket)
    found = hugging_face.load_from_disk(f"{url}/saved")
    assert found["y"][:] == FRAME["y"].tolist()


@contextmanager
def cached(chain: str, url: str, storage: Path) -> Iterator[Any]:
    with fsspec.open(f"{chain}::{url}", **{chain: {"cache_storage": str(storage)}}) as file:
        yield file


# fsspec leaves the file of its blocks to the garbage collector.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.filterwarnings("ignore:unclosed file:ResourceWarning")
@pytest.mark.parametrize("chain", ["blockcache", "filecache", "simplecache"])
def test_caches_of_fsspec_keep_blocks(
    shared: GCSServer, bucket: str, tmp_path: Path, chain: str
) -> None:
    data = os.urandom(3 << 20)
    shared.put(bucket, "a", data)
    url = f"aiogs://{bucket}/a"
    with cached(chain, url, tmp_path / "c") as file:
        assert (file.seek(100), file.read(10)) == (100, data[100:110])
        file.seek(2 << 20)
        assert file.read(1000) == data[2 << 20 :][:1000]
    assert file.closed
    with cached(chain, url, tmp_path / "c") as file:
        shared.stats.reset()
        assert file.read(110) == data[:110]
        assert shared.stats.operation("xml.objects.get").requests == 0
        assert file.read() == data[110:]
