"""Options of gcsfs, s3fs and adlfs mean the same here, and no secret of them leaves."""

from __future__ import annotations

import json
import pickle
from typing import TYPE_CHECKING, Any

import fsspec
import pytest
from google.auth.credentials import AnonymousCredentials

import aioflux
from aioflux.integrations.fsspec import (
    AzureFileSystem,
    GSFileSystem,
    LocalFileSystem,
    MemoryFileSystem,
    S3FileSystem,
)

if TYPE_CHECKING:
    from pathlib import Path

    from aioflux.testing import GCSServer
    from tests.servers.azurite import Azurite
    from tests.servers.seaweedfs import SeaweedFS

USER = {
    "type": "authorized_user",
    "client_id": "id",
    "client_secret": "s3cret",
    "refresh_token": "r3fresh",
}
CACHES: dict[str, Any] = {
    "block_size": 1000,
    "cache_timeout": 3,
    "consistency": "md5",
    "default_block_size": 2000,
    "default_cache_type": "readahead",
    "default_fill_cache": False,
    "listings_expiry_time": 3,
    "use_listings_cache": False,
}


@pytest.mark.parametrize("kind", [GSFileSystem, S3FileSystem, AzureFileSystem, MemoryFileSystem])
def test_options_of_caches_are_accepted(kind: Any) -> None:
    assert kind(**CACHES).default_block_size == 2000
    assert kind(blocksize=5).default_block_size == 5


def test_files_accept_the_keywords_of_caches(shared: GCSServer, fs: Any, bucket: str) -> None:
    shared.put(bucket, "a", b"data")
    keywords: dict[str, Any] = {
        "cache_options": {"trim": False},
        "cache_type": "readahead",
        "default_cache": "none",
        "fill_cache": False,
        "size": 4,
    }
    with fs.open(f"{bucket}/a", block_size=1000, **keywords) as file:
        assert file.blocksize == 1000
        assert file.read() == b"data"
    with fs.open(f"{bucket}/b", "wb", **keywords) as file:
        file.write(b"data")
    assert shared.get(bucket, "b") == b"data"
    other = GSFileSystem(endpoint_url=shared.url, default_block_size=77)
    with other.open(f"{bucket}/a") as file:
        assert file.blocksize == 77


def test_unknown_keywords_are_rejected(shared: GCSServer, fs: Any, bucket: str) -> None:
    shared.put(bucket, "a", b"data")
    with pytest.raises(TypeError, match="open has no keyword 'cache_tpye'"):
        fs.open(f"{bucket}/a", cache_tpye="none")


# --- gs ----------------------------------------------------------------------------------


@pytest.mark.parametrize("options", [{"token": "anon"}, {"anon": True}])
def test_anonymous_access_to_gs(shared: GCSServer, bucket: str, options: dict[str, Any]) -> None:
    shared.put(bucket, "a", b"data")
    fs = GSFileSystem(endpoint_url=shared.url, project="p", requester_pays=False, **options)
    assert fs.cat_file(f"{bucket}/a") == b"data"
    assert fs.options["credentials"] == "anonymous"
    assert pickle.loads(pickle.dumps(fs)).cat_file(f"{bucket}/a") == b"data"


def credentials_of(**options: Any) -> Any:
    return GSFileSystem(**options).options.get("credentials")


def test_tokens_of_gcsfs(tmp_path: Path) -> None:
    """A key file, what is in it, credentials, an access token, and the default."""
    file = tmp_path / "key.json"
    file.write_text(json.dumps(USER))
    assert credentials_of(token=str(file)) == USER
    assert credentials_of(token=USER) == USER
    anonymous = AnonymousCredentials()
    assert credentials_of(token=anonymous) is anonymous
    assert credentials_of(token="ya29.a/b")() == "ya29.a/b"
    assert credentials_of(token="google_default") is None
    assert credentials_of(token=None) is None


@pytest.mark.parametrize("token", ["cloud", "browser", "cache"])
def test_tokens_that_are_not_supported(token: str) -> None:
    with pytest.raises(ValueError, match=f"token='{token}'.*Application Default Credentials"):
        GSFileSystem(token=token)


def test_a_missing_or_damaged_key_file(tmp_path: Path) -> None:
    file = tmp_path / "key.json"
    with pytest.raises(FileNotFoundError, match="no key file with the name given as token="):
        GSFileSystem(token=str(file))
    file.write_text("s3cret")
    with pytest.raises(ValueError, match="is not JSON") as failure:
        GSFileSystem(token=str(file))
    assert "s3cret" not in repr(failure.value)


def test_requester_pays_of_gcsfs() -> None:
    """It is the project that is billed, or True for `project`."""
    assert credentials_of(requester_pays="p") == aioflux.GCSAccess(user_project="p")
    access = credentials_of(requester_pays=True, project="p", token="anon")
    assert access == aioflux.GCSAccess(user_project="p", credentials="anonymous")
    with pytest.raises(ValueError, match="requester_pays=True needs project="):
        GSFileSystem(requester_pays=True)


# --- s3 ----------------------------------------------------------------------------------


def access_of(**options: Any) -> aioflux.S3Access:
    found = S3FileSystem(**options).options["credentials"]
    assert isinstance(found, aioflux.S3Access)
    return found


def test_options_of_s3fs() -> None:
    assert access_of(anon=True).anonymous
    assert access_of(profile="p").profile == "p"
    assert access_of(requester_pays=True).requester_pays
    access = access_of(key="k", secret="s", token="t", client_kwargs={"region_name": "eu-west-3"})
    assert access.region == "eu-west-3"
    assert access.credentials() == ("k", "s", "t")
    names = {"aws_access_key_id": "k", "aws_secret_access_key": "s"}
    assert access_of(client_kwargs=names).credentials() == ("k", "s")
    fs = S3FileSystem(anon=False, client_kwargs={"endpoint_url": "http://localhost:1"})
    assert fs.options == {"endpoint_url": "http://localhost:1"}


def test_keys_as_options_read_and_write(seaweedfs: SeaweedFS, tmp_path: Path) -> None:
    options = {
        "key": seaweedfs.access_key,
        "secret": seaweedfs.secret_key,
        "client_kwargs": {"endpoint_url": seaweedfs.url, "region_name": "us-east-1"},
    }
    url = f"aios3://bucket/options/{tmp_path.parent.name}/{tmp_path.name}"
    with fsspec.open(url, "wb", **options) as file:
        file.write(b"data")
    with fsspec.open(url, **options) as file:
        assert file.read() == b"data"


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"key": "k"}, "key= and secret= must be given together"),
        ({"token": "t"}, "key= and secret= must be given together"),
        ({"client_kwargs": {"verify": False}}, "client_kwargs has 'verify'"),
        ({"config_kwargs": {}}, "instead of config_kwargs= give"),
        ({"anon": True, "credentials": aioflux.S3Access()}, "give credentials= or anon=, but not"),
        (
            {"endpoint_url": "http://a", "client_kwargs": {"endpoint_url": "http://b"}},
            "give endpoint_url= or client_kwargs=",
        ),
        ({"account_key": "k"}, "'account_key' is for az://, not for s3://"),
    ],
)
def test_options_that_s3_rejects(options: dict[str, Any], says: str) -> None:
    with pytest.raises(TypeError, match=says):
        S3FileSystem(**options)


# --- az ----------------------------------------------------------------------------------


def test_options_of_adlfs() -> None:
    for name in ("account_key", "sas_token", "connection_string", "credential"):
        assert AzureFileSystem(**{name: "c2VjcmV0"}).options == {"credentials": "c2VjcmV0"}
    assert AzureFileSystem(anon=True).options == {"credentials": "anonymous"}
    with pytest.raises(TypeError, match="give only one of account_key=, anon="):
        AzureFileSystem(anon=True, account_key="k")


def test_the_account_name_is_that_of_the_path(azurite: Azurite, tmp_path: Path) -> None:
    fs = AzureFileSystem(
        account_name=azurite.account, account_key=azurite.key, endpoint_url=azurite.url
    )
    path = f"{azurite.account}/container/options/{tmp_path.parent.name}/{tmp_path.name}"
    fs.pipe_file(path, b"data")
    assert fs.cat_file(path) == b"data"
    with pytest.raises(ValueError, match=f"write {azurite.account}/container/key"):
        fs.cat_file("other/container/a")


# --- secrets -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        (GSFileSystem, {"token": USER}),
        (GSFileSystem, {"token": "s3cret"}),
        (S3FileSystem, {"key": "k", "secret": "s3cret"}),
        (AzureFileSystem, {"account_key": "s3cretAA"}),  # a key is base64
        (AzureFileSystem, {"sas_token": "sig=s3cret"}),
    ],
)
def test_secrets_are_not_shown(kind: Any, options: dict[str, Any]) -> None:
    """In no text of the filesystem, and in no pickle or JSON of it."""
    fs = kind(**options)
    assert "s3cret" not in f"{fs} {fs!r} {fs.fsid} {fs._fs_token} {hash(fs)}"
    for carry in (pickle.dumps, lambda each: each.to_json(), lambda each: each.to_dict()):
        with pytest.raises(TypeError, match="cannot be pickled"):
            carry(fs)


def test_options_without_secrets_are_serialized() -> None:
    fs = S3FileSystem(anon=True, client_kwargs={"region_name": "r"})
    again = type(fs).from_json(fs.to_json())
    assert again is fs


@pytest.mark.parametrize("name", ["token", "key", "anon", "account_key", "project"])
@pytest.mark.parametrize("kind", [LocalFileSystem, MemoryFileSystem])
def test_local_filesystems_reject_credentials(kind: Any, name: str) -> None:
    with pytest.raises(TypeError, match=rf"'{name}' is for .*, not for {kind.scheme}://"):
        kind(**{name: "s3cret"})
