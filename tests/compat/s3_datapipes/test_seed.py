"""The examples of the announcement of S3 IO DataPipes run, with nothing but the import changed."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from aioflux import sync

if TYPE_CHECKING:
    from tests.servers.seaweedfs import SeaweedFS

# As it stands there, but for the place of `s3://bucket/prefix/`.
EXAMPLE = """
from torch.utils.data import DataLoader
from torchdata.datapipes.iter import IterableWrapper

s3_shard_urls = IterableWrapper(["s3://bucket/prefix/",]).list_files_by_s3()
s3_shards = s3_shard_urls.load_files_by_s3()
# text data
training_data = s3_shards.readlines(return_path=False)
data_loader = DataLoader(
        training_data,
        batch_size=batch_size,
        num_workers=num_workers,
)
# training loop
for epoch in range(epochs):
    # training step
    for batch_data in data_loader:
        # forward pass, backward pass, model update
        seen.extend(batch_data)
"""

LISTED = """
from torchdata.datapipes.iter import IterableWrapper, S3FileLister

s3_prefixes = IterableWrapper(['s3://bucket/prefix/a', 's3://bucket/prefix/b'])
dp_s3_urls = S3FileLister(s3_prefixes)
for d in dp_s3_urls:
    seen.append(d)
# functional API
dp_s3_urls = s3_prefixes.list_files_by_s3(request_timeout_ms=100000)
for d in dp_s3_urls:
    seen.append(d)
"""

LOADED = """
from torchdata.datapipes.iter import IterableWrapper, S3FileLoader

dp_s3_urls = IterableWrapper(['s3://bucket/prefix/a', 's3://bucket/prefix/b']).list_files_by_s3()
# In order to make sure data are shuffled and sharded in the
# distributed environment, `shuffle`  and `sharding_filter`
# are required.
sharded_s3_urls = dp_s3_urls.shuffle().sharding_filter()
dp_s3_files = S3FileLoader(sharded_s3_urls)
for url, fd in dp_s3_files: # Start loading data
    data = fd.read()
    seen.append((url, data))
# Functional API
dp_s3_files = sharded_s3_urls.load_files_by_s3(buffer_size=256)
for url, fd in dp_s3_files:
    data = fd.read()
    seen.append((url, data))
"""
LINES = [f"line {number}".encode() for number in range(8)]
BODIES = {"a": b"\n".join(LINES[:5]) + b"\n", "b": b"\n".join(LINES[5:])}


def run(example: str, prefix: str, **names: Any) -> list[Any]:
    seen: list[Any] = []
    text = example.replace("torchdata.datapipes.iter", "aioflux.compat.s3_datapipes")
    exec(text.replace("s3://bucket/prefix/", prefix), {"seen": seen, **names})
    return seen


@pytest.fixture(
    params=["gs", pytest.param("s3", marks=pytest.mark.more)], ids=["embedded", "seaweedfs"]
)
def prefix(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> str:
    """A prefix with two objects in a bucket that the environment leads to."""
    if request.param == "gs":
        request.getfixturevalue("bucket")
        found = "gs://bucket/prefix/"
    else:
        server: SeaweedFS = request.getfixturevalue("seaweedfs")
        monkeypatch.setenv("AWS_ACCESS_KEY_ID", server.access_key)
        monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", server.secret_key)
        monkeypatch.setenv("AWS_REGION", "us-east-1")
        monkeypatch.setenv("AWS_ENDPOINT_URL", server.url)
        found = f"s3://bucket/{tmp_path.name}/"
    with sync.open_store(found) as store:
        assert len(store.put_many(BODIES.items())) == len(BODIES)
    return found


@pytest.mark.parametrize("num_workers", [0, 1])
def test_lines_are_trained_on_epoch_after_epoch(prefix: str, num_workers: int) -> None:
    seen = run(EXAMPLE, prefix, batch_size=3, num_workers=num_workers, epochs=2)
    assert seen == 2 * LINES


def test_urls_are_listed_by_either_name(prefix: str) -> None:
    assert run(LISTED, prefix) == 2 * [f"{prefix}a", f"{prefix}b"]


def test_files_are_loaded_by_either_name(prefix: str) -> None:
    seen = run(LOADED, prefix)
    expected = {(f"{prefix}{name}", body) for name, body in BODIES.items()}
    assert set(seen[:2]) == set(seen[2:]) == expected
