"""The attributes of an object are those that the services' own libraries write and read."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

import pytest
from azure.storage.blob import ContentSettings, StandardBlobTier
from google.auth.credentials import AnonymousCredentials
from google.cloud import storage

import aioflux
from aioflux import UnsupportedError, sync
from aioflux.checkpoint import open_writer
from tests.store.azure_place import AzurePlace
from tests.store.places import GCSPlace, MotoPlace

if TYPE_CHECKING:
    from collections.abc import Iterator

    from aioflux.testing import GCSServer
    from tests.servers.azurite import Azurite
    from tests.servers.moto import Moto

LABELS = {"label": "cat"}
TEXTS = {
    "content_type": "text/csv",
    "content_encoding": "gzip",
    "content_disposition": 'attachment; filename="a b.csv"',
    "cache_control": "max-age=60",
}
PART = 5 * 1024**2


class Library(Protocol):
    """The library of a service, at the prefix of a store."""

    storage_class: str
    """Storage class that objects do not have by default."""
    lists_texts: bool
    """Listings of the service have all attributes."""

    def open(self, **settings: Any) -> aioflux.Store: ...

    def write(self, key: str) -> None:
        """Write an object with all attributes."""

    def read(self, key: str) -> dict[str, Any]:
        """Return the attributes of an object."""


class GoogleLibrary:
    storage_class = "NEARLINE"
    lists_texts = True

    def __init__(self, server: GCSServer) -> None:
        self._place = GCSPlace(server)
        self.open = self._place.open
        options = {"api_endpoint": server.url}
        client = storage.Client("p", AnonymousCredentials(), client_options=options)
        self._bucket = client.bucket("bucket")

    def _blob(self, key: str) -> storage.Blob:
        return self._bucket.blob(self._place._prefix + key)

    def write(self, key: str) -> None:
        blob = self._blob(key)
        for name, value in {**TEXTS, "metadata": LABELS}.items():
            setattr(blob, name, value)
        blob.storage_class = self.storage_class
        blob.upload_from_string(b"1", content_type=TEXTS["content_type"])

    def read(self, key: str) -> dict[str, Any]:
        blob = self._blob(key)
        blob.reload()
        return {name: getattr(blob, name) for name in (*TEXTS, "metadata", "storage_class")}


class AmazonLibrary:
    storage_class = "STANDARD_IA"
    lists_texts = False

    def __init__(self, moto: Moto) -> None:
        self._place = MotoPlace(moto)
        self.open = self._place.open
        self._client = moto.door()

    def write(self, key: str) -> None:
        self._client.put_object(
            Bucket="bucket",
            Key=self._place._prefix + key,
            Body=b"1",
            ContentType=TEXTS["content_type"],
            ContentEncoding=TEXTS["content_encoding"],
            ContentDisposition=TEXTS["content_disposition"],
            CacheControl=TEXTS["cache_control"],
            Metadata=LABELS,
            StorageClass=self.storage_class,
        )

    def read(self, key: str) -> dict[str, Any]:
        found = self._client.head_object(Bucket="bucket", Key=self._place._prefix + key)
        return {
            "content_type": found["ContentType"],
            "content_encoding": found["ContentEncoding"],
            "content_disposition": found["ContentDisposition"],
            "cache_control": found["CacheControl"],
            "metadata": found["Metadata"],
            "storage_class": found["StorageClass"],
        }


class MicrosoftLibrary:
    storage_class = "Cool"
    lists_texts = True

    def __init__(self, azurite: Azurite) -> None:
        self._place = AzurePlace(azurite)
        self.open = self._place.open
        self._container = azurite.door()

    def write(self, key: str) -> None:
        self._container.upload_blob(
            self._place._prefix + key,
            b"1",
            metadata=LABELS,
            content_settings=ContentSettings(**TEXTS),
            standard_blob_tier=StandardBlobTier.COOL,
        )

    def read(self, key: str) -> dict[str, Any]:
        found = self._container.get_blob_client(self._place._prefix + key).get_blob_properties()
        settings = {name: getattr(found.content_settings, name) for name in TEXTS}
        return {**settings, "metadata": found.metadata, "storage_class": found.blob_tier}


@pytest.fixture(params=["gs", "s3", "az"])
def library(request: pytest.FixtureRequest) -> Iterator[Library]:
    names = {"gs": "gcs_server", "s3": "moto", "az": "azurite"}
    classes = {"gs": GoogleLibrary, "s3": AmazonLibrary, "az": MicrosoftLibrary}
    made = classes[request.param](request.getfixturevalue(names[request.param]))
    yield made
    if close := getattr(made._place, "close", None):
        close()


def expected(library: Library) -> dict[str, Any]:
    return {**TEXTS, "metadata": LABELS, "storage_class": library.storage_class}


def of_meta(meta: aioflux.ObjectMeta) -> dict[str, Any]:
    return {name: getattr(meta, name) for name in (*TEXTS, "metadata", "storage_class")}


@pytest.mark.parametrize("mode", ["overwrite", "create"])
@pytest.mark.parametrize("size", [1, PART + 1], ids=["small", "parts"])
async def test_the_library_reads_what_the_store_wrote(
    library: Library, size: int, mode: Any
) -> None:
    transfer = aioflux.TransferOptions(part_size_bytes=PART)
    attributes: Any = expected(library)
    async with library.open(transfer=transfer) as store:
        put = await store.put("a", bytes(size), mode=mode, **attributes)
        async with store.open_writer("b", mode=mode, **attributes) as writer:
            await writer.write(bytes(size))
    assert library.read("a") == library.read("b") == attributes
    assert of_meta(put) == of_meta(writer.meta) == attributes


async def test_the_store_reads_what_the_library_wrote(library: Library) -> None:
    library.write("a")
    async with library.open() as store:
        [listed] = await store.list_all()
        assert of_meta(await store.head("a")) == expected(library)
        assert await store.get("a") == b"1"
    if library.lists_texts:
        assert of_meta(listed) == expected(library)
    else:
        assert of_meta(listed) == {
            **dict.fromkeys(TEXTS, ""),
            "metadata": {},
            "storage_class": library.storage_class,
        }


async def test_a_copy_has_all_attributes(library: Library) -> None:
    attributes: Any = {**expected(library), "content_encoding": "zstd"}
    async with library.open() as store:
        await store.put("a", b"1", **attributes)
        copied = await store.copy("a", "b")
        moved = await store.move("a", "c")
    assert library.read("b") == library.read("c") == attributes
    assert of_meta(copied) == of_meta(moved) == attributes


async def test_nothing_is_set_by_default(library: Library) -> None:
    async with library.open() as store:
        stored = await store.put("a", b"1")
        head = await store.head("a")
    assert of_meta(stored) | {"storage_class": ""} == {
        **dict.fromkeys(TEXTS, ""),
        "content_type": "application/octet-stream",
        "metadata": {},
        "storage_class": "",
    }
    assert (head.cache_control, head.content_disposition, head.content_encoding) == ("", "", "")


async def test_a_composed_object_has_its_own_attributes(gcs_server: GCSServer) -> None:
    library = GoogleLibrary(gcs_server)
    attributes: Any = expected(library)
    async with library.open() as store:
        await store.put("a", b"1", storage_class="NEARLINE")
        composed = await store.compose("b", ["a"], **attributes)
    assert library.read("b") == of_meta(composed) == attributes


def test_the_blocking_store_and_checkpoint_files_set_attributes(gcs_server: GCSServer) -> None:
    library = GoogleLibrary(gcs_server)
    attributes: Any = expected(library)
    store = library.open()
    with sync.Store(store) as blocking:
        blocking.put("a", b"1", **attributes)
        with blocking.open_writer("b", **attributes) as writer:
            writer.write(b"1")
        blocking.compose("c", ["a", "b"], **attributes)
    with open_writer(f"{store.uri}d", endpoint_url=gcs_server.url, **attributes) as file:
        file.write(b"1")
    for key in "abcd":
        assert library.read(key) == attributes


async def test_a_file_keeps_none(tmp_path: Any) -> None:
    async with aioflux.open_store(f"file://{tmp_path}") as store:
        with pytest.raises(
            UnsupportedError,
            match=r"stores no cache_control and storage_class; write it without cache_control and",
        ):
            await store.put("a", b"1", cache_control="no-store", storage_class="COLD")
        assert not await store.exists("a")
        assert (await store.put("a", b"1", content_type="text/csv")).content_type == ""
