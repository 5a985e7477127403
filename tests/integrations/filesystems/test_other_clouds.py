"""S3 and Azure through fsspec: by url, by protocol, in a pickle, and for checkpoints."""

from __future__ import annotations

import pickle
import urllib.request
from typing import TYPE_CHECKING, Any

import fsspec
import pytest
import torch
import torch.distributed.checkpoint as dcp
from fsspec.registry import _registry as registry
from torch.distributed.checkpoint._fsspec_filesystem import FsspecReader, FsspecWriter

from aioflux.integrations.fsspec import AzureFileSystem, S3FileSystem, register

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from tests.servers.azurite import Azurite
    from tests.servers.seaweedfs import SeaweedFS

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


@pytest.fixture
def registered() -> Iterator[None]:
    before = dict(registry)
    register(replace=("s3", "s3a", "az"))
    yield
    registry.clear()
    registry.update(before)


@pytest.fixture(
    params=[
        pytest.param("s3", marks=pytest.mark.more, id="seaweedfs"),
        pytest.param("az", marks=pytest.mark.more, id="azurite"),
    ]
)
def root(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> tuple[str, dict[str, Any]]:
    """The url of a prefix, and the storage options that lead to its server; keys are around."""
    if request.param == "s3":
        server: SeaweedFS = request.getfixturevalue("seaweedfs")
        monkeypatch.setenv("AWS_ACCESS_KEY_ID", server.access_key)
        monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", server.secret_key)
        bucket, url = "bucket", server.url
    else:
        other: Azurite = request.getfixturevalue("azurite")
        monkeypatch.setenv("AZURE_STORAGE_ACCOUNT", other.account)
        monkeypatch.setenv("AZURE_STORAGE_KEY", other.key)
        bucket, url = f"{other.account}/container", other.url
    path = f"{bucket}/users/{tmp_path.parent.name}/{tmp_path.name}"
    return f"{request.param}://{path}", {"endpoint_url": url}


def test_a_url_is_opened_by_either_protocol(
    registered: None, root: tuple[str, dict[str, Any]]
) -> None:
    url, options = root
    with fsspec.open(f"{url}/a", "wb", **options) as file:
        file.write(b"data")
    with fsspec.open(f"aio{url}/a", **options) as file:
        assert file.read() == b"data"
    fs, path = fsspec.url_to_fs(url, **options)
    looks = [path, f"{path}/a", f"{path}/none"]
    assert [fs.isdir(each) for each in looks] == [True, False, False]
    assert [fs.isfile(each) for each in looks] == [False, True, False]
    assert fs.cat_ranges([f"{path}/a"] * 2, [0, -1], [2, None]) == [b"da", b"a"]
    assert isinstance(fs, (S3FileSystem, AzureFileSystem))
    assert fs.find(path) == [f"{path}/a"]
    assert fs.unstrip_protocol(f"{path}/a") == f"{url}/a"
    again = pickle.loads(pickle.dumps(fs))
    assert again.cat_file(f"{path}/a", start=1, end=3) == b"at"
    assert options["endpoint_url"] in fs.fsid
    with urllib.request.urlopen(fs.sign(f"{path}/a", expiration=60)) as response:
        assert response.read() == b"data"


def test_torch_saves_and_loads(registered: None, root: tuple[str, dict[str, Any]]) -> None:
    url, options = root
    state = {"weight": torch.arange(1000.0)}
    with fsspec.open(f"{url}/state.pt", "wb", **options) as file:
        torch.save(state, file)
    with fsspec.open(f"{url}/state.pt", "rb", **options) as file:
        assert torch.equal(torch.load(file, weights_only=True)["weight"], state["weight"])


def test_a_distributed_checkpoint_is_saved_and_loaded(
    registered: None, root: tuple[str, dict[str, Any]]
) -> None:
    url, options = root
    state = {"weight": torch.arange(1000.0)}
    writer = FsspecWriter(f"{url}/step", sync_files=False, **options)
    dcp.save(state, storage_writer=writer, no_dist=True)
    found = {"weight": torch.zeros(1000)}
    dcp.load(found, storage_reader=FsspecReader(f"{url}/step", **options), no_dist=True)
    assert torch.equal(found["weight"], state["weight"])


@pytest.mark.parametrize("path", ["", "account", "account/"])
def test_an_account_without_a_container_is_rejected(path: str) -> None:
    with pytest.raises(ValueError, match="write account/container/prefix"):
        AzureFileSystem().ls(path)
