"""Azure Blob Storage on azurite, and on scripted servers for what azurite never answers."""

from __future__ import annotations

import base64
import hashlib
import itertools
import json
import logging
import pickle
import random
import re
import time
import traceback
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import pytest
from azure.core.credentials import AccessToken
from azure.storage.blob import ContentSettings

import aioflux
from aioflux import (
    AlreadyExistsError,
    NotFoundError,
    PermissionDeniedError,
    PreconditionFailedError,
    RetryPolicy,
    StorageError,
    TransferOptions,
    TransientError,
)
from aioflux._services.azure.wire import root_path
from aioflux._services.base import PartRequest, Precondition, ReadRequest, Source, WriteRequest
from tests.http.authority import Authority
from tests.http.scripted import Peer, answering, ok, serving
from tests.service.opening import opened_service
from tests.service.operations import operations
from tests.service.test_gcs_begin_get import begin, told
from tests.store.azure_place import AzurePlace, account_sas

if TYPE_CHECKING:
    from collections.abc import Iterator
    from contextlib import AbstractAsyncContextManager
    from pathlib import Path

    from aioflux._services.base import Body
    from tests.servers.azurite import Azurite

ANY = Precondition()
ONCE = RetryPolicy(max_attempts=1)
KEY = base64.b64encode(b"planted key of the test").decode()
MIB = 1024 * 1024

OPERATIONS = operations("compose", "initiate", "permissions")
each_operation = pytest.mark.parametrize("operation", OPERATIONS)


def opened(url: str, *, account: str = "acct", **settings: Any) -> AbstractAsyncContextManager[Any]:
    settings = {"credentials": KEY, "endpoint_url": url, **settings}
    return opened_service(f"az://{account}/container/p/", **settings)


@pytest.fixture
def place(azurite: Azurite) -> Iterator[AzurePlace]:
    place = AzurePlace(azurite)
    yield place
    place.close()


def service_of(store: aioflux.Store) -> Any:
    return store._sessions.current().service


# --- reads -------------------------------------------------------------------------------


async def test_a_read_without_a_task_is_what_get_reads(place: AzurePlace) -> None:
    place.write("a", b"0123456789")
    async with place.open() as store:
        service = service_of(store)
        expected = await service.get(ReadRequest("a", start=0, end=20))
        for generation in ("", expected.generation):
            for end in (5, 10, 20):
                expected = await service.get(ReadRequest("a", start=0, end=end))
                body = await begin(service, "a", generation=generation, end=end).result
                assert body is not None
                assert told(body) == told(expected)


async def test_a_read_without_a_task_fails_as_get_does(place: AzurePlace) -> None:
    place.write("a", b"old")
    async with place.open() as store:
        service = service_of(store)
        seen = (await service.get(ReadRequest("a"))).generation
        place.write("a", b"new")
        with pytest.raises(NotFoundError, match="no longer has generation"):
            await begin(service, "a", generation=seen).result
        with pytest.raises(NotFoundError, match="BlobNotFound"):
            await begin(service, "none").result
        with pytest.raises(ValueError, match="ETag"):
            begin(service, "a", generation='a"b')


async def test_empty_objects_are_read(place: AzurePlace) -> None:
    place.write("a", b"")
    async with place.open() as store:
        service = service_of(store)
        for body in (
            await service.get(ReadRequest("a")),
            await service.get(ReadRequest("a", start=0, end=9)),
        ):
            assert (bytes(body.data), body.size) == (b"", 0)
            assert body.generation == (await service.head("a")).generation
        body = await service.get(ReadRequest("a", start=5, end=9))
        assert (bytes(body.data), body.size) == (b"", 0)


@pytest.mark.parametrize("size", [10, 300_000], ids=["at once", "in a thread"])
async def test_bytes_are_compared_with_the_md5_of_the_blob(
    azurite: Azurite, place: AzurePlace, size: int
) -> None:
    """Where there is one, and `verify` is set: a wrong one is told, and no bytes are given."""
    wrong = ContentSettings(content_md5=bytearray(hashlib.md5(b"other").digest()))
    place.write("a", bytes(size))
    name = place.uri.partition("/container/")[2] + "a"
    with azurite.client() as client:
        client.get_blob_client("container", name).set_http_headers(wrong)
    async with place.open(retry=ONCE) as store:
        with pytest.raises(TransientError, match="MD5"):
            await store.get("a")
        with pytest.raises(TransientError, match="MD5"):
            await begin(service_of(store), "a", end=size).result
        assert await store.get_range("a", start=0, end=5) == bytes(5)
    async with place.open(retry=ONCE, transfer=TransferOptions(verify=False)) as store:
        assert await store.get("a") == bytes(size)


@pytest.mark.parametrize("verify", [True, False])
async def test_bytes_travel_with_their_md5(*, verify: bool) -> None:
    """Puts and parts, unless `verify` is off; the service compares."""
    heads: list[bytes] = []

    async def script(peer: Peer) -> None:
        while True:
            head, _ = await peer.read_request()
            heads.append(head)
            created = (b'ETag: "0x1"', b"x-ms-request-id: 1")
            await peer.send(ok(b"", *created, status=b"201 Created"))

    async with serving(script) as (_, origin), opened(f"http://127.0.0.1:{origin.port}") as service:
        crc32c = 1 if verify else None
        await service.put(WriteRequest("a"), [b"12", b"3"], crc32c=crc32c)
        large = [b"1" * MIB, b"2" * MIB]
        await service.put_part(PartRequest("a", "0" * 32, 1, large, crc32c=crc32c))
    for head, data in zip(heads, (b"123", b"".join(large)), strict=True):
        header = b"Content-MD5: " + base64.b64encode(hashlib.md5(data).digest())
        assert (header in head) is verify


@pytest.mark.parametrize("is_small_read", [False, True])
async def test_whether_bytes_match_their_md5_is_recorded(*, is_small_read: bool) -> None:
    """Also of a read without a task: right bytes are verified, wrong ones are damaged."""

    def answer(body: bytes) -> bytes:
        digest = base64.b64encode(hashlib.md5(b"hello").digest())
        return ok(body, b'ETag: "0x1"', b"x-ms-request-id: 1", b"Content-MD5: " + digest)

    answers = [answer(body) for body in (b"hello", b"hello", b"wrong")]
    async with (
        serving(answering(*answers)) as (_, origin),
        opened(f"http://127.0.0.1:{origin.port}") as service,
    ):
        await service.get(ReadRequest("a"))

        async def read() -> Body:
            if is_small_read:
                return await begin(service, "a", end=100).result
            return await service.get(ReadRequest("a"))

        assert (await read()).is_verified
        with pytest.raises(TransientError, match="MD5") as raised:
            await read()
    error = raised.value
    assert (error.is_damaged, error.num_bytes_received, error.generation) == (True, 5, "")


@pytest.mark.parametrize("is_wrong", [False, True])
async def test_a_range_is_compared_with_its_md5(*, is_wrong: bool) -> None:
    """If ranges are verified: one request instead of two; wrong bytes are requested again."""
    data, heads = bytes(range(100)), list[bytes]()

    async def script(peer: Peer) -> None:
        while True:
            head, _ = await peer.read_request()
            heads.append(head)
            body = b"wrong" if is_wrong and len(heads) == 1 else data[10:15]
            await peer.send(
                ok(
                    body,
                    b'ETag: "0x1"',
                    b"x-ms-request-id: 1",
                    b"Content-Range: bytes 10-14/100",
                    b"Content-MD5: " + base64.b64encode(hashlib.md5(data[10:15]).digest()),
                    status=b"206 Partial Content",
                )
            )

    retry = RetryPolicy(initial_seconds=1e-4, max_seconds=1e-3)
    settings = {"retry": retry, "transfer": TransferOptions(verify_ranges=True)}
    async with serving(script) as (_, origin):
        url = f"http://127.0.0.1:{origin.port}"
        async with aioflux.open_store(
            "az://acct/c", endpoint_url=url, credentials=KEY, **settings
        ) as store:
            assert await store.get_range("a", start=10, end=15) == data[10:15]
            assert store.stats.num_checksum_mismatches == is_wrong
    assert len(heads) == 1 + is_wrong
    assert all(b"x-ms-range-get-content-md5: true" in head for head in heads)


@pytest.mark.parametrize("size", [1000, 5 * MIB])
async def test_ranges_are_verified(place: AzurePlace, size: int) -> None:
    """By their MD5 up to 4 MiB, and otherwise by a second copy."""
    data = random.randbytes(size + 10)
    place.write("a", data)
    async with place.open(transfer=TransferOptions(verify_ranges=True)) as store:
        assert await store.get_range("a", start=5, end=size) == data[5:size]
        [meta] = await store.list_all()
        assert await store.get_range(meta, start=5, end=size) == data[5:size]
        assert store.stats.num_checksum_mismatches == 0


async def test_a_directory_is_no_object(azurite: Azurite, place: AzurePlace) -> None:
    name = place.uri.partition("/container/")[2] + "d"
    with azurite.client() as client:
        blob = client.get_blob_client("container", name)
        blob.upload_blob(b"", metadata={"hdi_isfolder": "true"})
    place.write("d/a", b"1")
    async with place.open() as store:
        assert [meta.key for meta in await store.list_all()] == ["d/a"]
        for call in (store.get("d"), store.head("d"), store.get_range("d", start=0, end=1)):
            with pytest.raises(NotFoundError, match="directory"):
                await call


# --- writes ------------------------------------------------------------------------------


async def test_metadata_may_be_hyphenated_nowhere_and_underscored_anywhere(
    place: AzurePlace,
) -> None:
    """Signatures sort headers in an order of their own, which `_` shows."""
    metadata = {"a": "1", "a_b": "2", "ab": "3", "_a": "4", "A1": "5"}
    async with place.open() as store:
        await store.put("a", b"1", metadata=metadata)
        lowered = {name.lower(): value for name, value in metadata.items()}
        assert dict((await store.head("a")).metadata) == lowered
        [meta] = await store.list_all()
        assert dict(meta.metadata) == lowered


async def test_a_copy_that_takes_its_time_is_waited_for() -> None:
    told = (b'ETag: "0x2"', b"x-ms-copy-id: c", b"x-ms-request-id: 1")
    source = ok(b"", b'ETag: "0x1"', b"Content-Type: a/b").replace(b"Length: 0", b"Length: 7")
    pending = (*told, b"x-ms-copy-status: pending")
    script = answering(
        source,
        ok(b"", *pending, status=b"202 Accepted"),
        ok(b"", *pending),
        ok(b"", *told, b"x-ms-copy-status: success"),
    )
    async with serving(script) as (_, origin), opened(f"http://127.0.0.1:{origin.port}") as service:
        meta = await service.copy(Source(key="a"), "b", precondition=ANY)
    assert (meta.key, meta.size, meta.generation) == ("b", 7, "0x2")
    assert meta.content_type == "a/b"


@pytest.mark.parametrize(
    ("last", "error", "says"),
    [
        (b"x-ms-copy-id: c\r\nx-ms-copy-status: failed", TransientError, "the copy is failed"),
        (
            b"x-ms-copy-id: other\r\nx-ms-copy-status: success",
            PreconditionFailedError,
            "another writer",
        ),
    ],
)
async def test_a_copy_that_does_not_end_well_is_reported(
    last: bytes, error: type[Exception], says: str
) -> None:
    source = ok(b"", b'ETag: "0x1"')
    begun = ok(b"", b'ETag: "0x2"', b"x-ms-copy-id: c", b"x-ms-copy-status: pending")
    script = answering(source, begun, ok(b"", b'ETag: "0x3"', last))
    async with serving(script) as (_, origin), opened(f"http://127.0.0.1:{origin.port}") as service:
        with pytest.raises(error, match=says):
            await service.copy(Source(key="a"), "b", precondition=ANY)


@pytest.mark.parametrize("precondition", [ANY, Precondition(if_absent=True)], ids=["any", "new"])
async def test_a_named_source_that_is_replaced_before_it_is_copied_is_copied_anew(
    precondition: Precondition,
) -> None:
    """A copy that must be new is not told that its target exists."""
    source = ok(b"", b'ETag: "0x1"')
    unmet = ok(b"", b"x-ms-error-code: SourceConditionNotMet", status=b"412 Unmet")
    gone = ok(b"", b"x-ms-error-code: ConditionNotMet", status=b"412 Unmet")
    script = answering(source, unmet, gone)
    async with serving(script) as (_, origin), opened(f"http://127.0.0.1:{origin.port}") as service:
        with pytest.raises(TransientError, match="replaced during the copy") as error:
            await service.copy(Source(key="a"), "b", precondition=precondition)
        assert not error.value.maybe_done


# --- uploads -----------------------------------------------------------------------------


async def upload(place: AzurePlace, key: str) -> str:
    """Begin an upload and leave it, as a killed process does."""
    async with place.open() as store:
        service = service_of(store)
        upload_id = await service.initiate_upload(WriteRequest(key))
        await service.put_part(PartRequest(key, upload_id, 1, [b"1" * 100]))
    return upload_id


async def test_what_a_killed_process_left_is_found_and_cleaned(place: AzurePlace) -> None:
    async with place.open() as store:
        service = service_of(store)
        ids = {key: await upload(place, key) for key in ("d/a", "d/b")}
        place.write("d/empty", b"")
        assert [meta.key for meta in await store.list_all()] == ["d/empty"]
        found = await service.list_uploads("d/")
        assert {each.key: each.upload_id for each in found} == ids
        assert all(abs(each.initiated.timestamp() - time.time()) < 60 for each in found)
        assert (await store.clean()).aborted == ()  # not a day old
        cleaned = await store.clean(older_than_seconds=0)
        assert [each.key for each in cleaned.aborted] == ["d/a", "d/b"]
        assert not cleaned.errors
        assert await service.list_uploads("") == []
        assert [meta.key for meta in await store.list_all()] == ["d/empty"]


async def test_an_upload_of_another_client_is_left_alone(
    azurite: Azurite, place: AzurePlace
) -> None:
    """Blocks of a key can be dropped together only."""
    async with place.open() as store:
        service = service_of(store)
        mine = await upload(place, "a")
        other = await upload(place, "a")
        assert {each.upload_id for each in await service.list_uploads("a")} == {mine, other}
        await service.abort_upload("a", mine)
        assert len(await service.list_uploads("a")) == 2
        name = place.uri.partition("/container/")[2] + "b"
        with azurite.client() as client:
            client.get_blob_client("container", name).stage_block("YWJj", b"1")
        assert await service.list_uploads("b") == []
        await service.abort_upload("b", mine)
        await service.abort_upload("none", mine)
        place.write("a", b"written")  # which drops the blocks
        await service.abort_upload("a", mine)
        assert await store.get("a") == b"written"


async def _write_and_fail(store: aioflux.Store) -> None:
    async with store.open_writer("a") as writer:
        await writer.write(bytes(11 * MIB))
        raise ZeroDivisionError


async def test_an_aborted_writer_is_never_seen(place: AzurePlace) -> None:
    async with place.open(transfer=TransferOptions(part_size_bytes=5 * MIB)) as store:
        with pytest.raises(ZeroDivisionError):
            await _write_and_fail(store)
        with pytest.raises(NotFoundError):
            await store.head("a")
        left = await service_of(store).list_uploads("")
        assert [each.key for each in left] in ([], ["a"])  # blocks go by themselves, after a week
        await store.clean(older_than_seconds=0)
        assert await store.list_all() == []


async def test_compose_is_refused_with_what_to_do(place: AzurePlace) -> None:
    async with place.open() as store:
        with pytest.raises(StorageError, match="open_writer"):
            await store.compose("a", ["b"])


# --- faults on the wire ------------------------------------------------------------------


async def test_a_body_that_breaks_off_is_resumed_in_its_generation() -> None:
    data = bytes(range(256)) * 8192  # 2 MiB: of smaller ones nothing is kept
    heads: list[bytes] = []

    async def script(peer: Peer) -> None:
        while True:
            head, _ = await peer.read_request()
            heads.append(head)
            first, _, last = head.partition(b"bytes=")[2].partition(b"\r\n")[0].partition(b"-")
            start, end = int(first), min(int(last) + 1, len(data))
            answer = ok(
                data[start:end],
                b'ETag: "0x1"',
                b"x-ms-request-id: 1",
                b"Content-Range: bytes %d-%d/%d" % (start, end - 1, len(data)),
                status=b"206 Partial Content",
            )
            if len(heads) == 1:
                await peer.send(answer[: len(answer) // 2])
                peer.reset()
                return
            await peer.send(answer)

    retry = RetryPolicy(initial_seconds=1e-4, max_seconds=1e-3)
    never = TransferOptions(verify_ranges=False)
    async with serving(script) as (_, origin):
        url = f"http://127.0.0.1:{origin.port}"
        settings = {"credentials": KEY, "retry": retry, "transfer": never}
        async with aioflux.open_store("az://acct/c", endpoint_url=url, **settings) as store:
            assert await store.get("a") == data
            assert store.stats.num_retries == 1
    assert all(b'If-Match: "0x1"' in head for head in heads[1:])


async def test_a_busy_service_is_given_its_time() -> None:
    busy = ok(b"", b"x-ms-error-code: ServerBusy", b"Retry-After: 0", status=b"503 Busy")
    script = answering(busy, ok(b"", b'ETag: "0x1"', status=b"201 Created"))
    retry = RetryPolicy(initial_seconds=1e-4, max_seconds=1e-3)
    async with serving(script) as (_, origin):
        url = f"http://127.0.0.1:{origin.port}"
        async with aioflux.open_store(
            "az://acct/c", endpoint_url=url, credentials=KEY, retry=retry
        ) as store:
            assert (await store.put("a", b"1")).generation == "0x1"
            assert (store.stats.num_throttled, store.stats.num_retries) == (1, 1)


@pytest.mark.parametrize(
    ("answers", "error", "says"),
    [
        ([ok(status=b"416 Range"), ok(b"", b'ETag: "0x1"')], None, ""),
        (
            [ok(status=b"416 Range"), ok(b"", b'ETag: "0x1"').replace(b"th: 0", b"th: 9")],
            TransientError,
            "the object has 9 bytes",
        ),
        (
            [ok(b"x", b'ETag: "0x1"', b"x-ms-request-id: 1", b"Content-MD5: x")],
            TransientError,
            "could not parse the response",
        ),
        ([ok(b"toolong", b'ETag: "0x1"', b"x-ms-request-id: 1")], StorageError, "az://acct"),
    ],
)
async def test_answers_to_reads_are_not_believed_blindly(
    answers: list[bytes], error: type[Exception] | None, says: str
) -> None:
    async with (
        serving(answering(*answers)) as (_, origin),
        opened(f"http://127.0.0.1:{origin.port}") as service,
    ):
        if error is None:
            assert (await service.get(ReadRequest("a", start=0, end=5))).size == 0
        else:
            with pytest.raises(error, match=says):
                await service.get(ReadRequest("a", start=0, end=5))


async def test_a_closed_service_says_so(azurite: Azurite) -> None:
    async with opened(azurite.url, account=azurite.account) as service:
        pass
    with pytest.raises(StorageError, match="the store was closed"):
        await service.head("a")


# --- many deletes ------------------------------------------------------------------------


async def test_one_request_deletes_many(place: AzurePlace) -> None:
    """Each in the generation that was seen; what was missing or replaced is told."""
    keys = [f"d/{at:02}" for at in range(20)]
    for key in [*keys, "e/e\u0301 %20"]:
        place.write(key, b"1")
    async with place.open() as store:
        metas = await store.list_all()
        place.write("d/07", b"other")
        before = store.stats.num_requests
        result = await store.delete_many([*metas, "none"])
        assert store.stats.num_requests == before + 2  # a listing, and the batch
        assert (len(result.deleted), result.missing) == (20, ("none",))
        assert set(result.errors) == {"d/07"}
        assert isinstance(result.errors["d/07"], PreconditionFailedError)
        assert [meta.key for meta in await store.list_all()] == ["d/07"]
        service = service_of(store)
        seen = (await store.head("d/07")).generation
        failed = await service.delete_page(
            [Source(key="none"), Source(key="d/07", generation="0x1"), Source(key="x")]
        )
        assert isinstance(failed["none"], NotFoundError)
        assert isinstance(failed["d/07"], PreconditionFailedError)
        assert await service.delete_page([Source(key="d/07", generation=seen)]) == {}


async def test_with_a_sas_token_many_are_deleted_one_by_one(azurite: Azurite) -> None:
    place = AzurePlace(azurite, credentials=account_sas(azurite))
    keys = [f"{at:02}" for at in range(12)]
    for key in keys:
        place.write(key, b"1")
    async with place.open() as store:
        assert (await store.delete_many(await store.list_all())).deleted == tuple(keys)
    place.close()


# --- other answers -----------------------------------------------------------------------


@each_operation
async def test_an_answer_that_is_not_azures_is_refused(operation: str) -> None:
    """Such as the page that a hotel's network sends for every url."""
    script = answering(ok(b"<html>sign in</html>", b"Content-Type: text/html"))
    async with serving(script) as (_, origin), opened(f"http://127.0.0.1:{origin.port}") as service:
        with pytest.raises(StorageError, match="az://acct/container/p/"):
            await OPERATIONS[operation](service)


# Requests are counted, and a small read opens a connection by another read.
@pytest.mark.parametrize("operation", sorted(OPERATIONS.keys() - {"small_read"}))
async def test_a_token_that_is_refused_is_renewed_once(operation: str) -> None:
    class Credential:
        num = 0

        def get_token(self, scope: str) -> AccessToken:
            self.num += 1
            return AccessToken(f"token-{self.num}", int(time.time()) + 3600)

    tokens: list[bytes] = []

    async def script(peer: Peer) -> None:
        while True:
            head, _ = await peer.read_request()
            tokens.append(head.partition(b"Bearer ")[2].partition(b"\r\n")[0])
            refused = tokens[-1] == b"token-1"
            status = b"401 Unauthorized" if refused else b"404 Not Found"
            await peer.send(ok(b"", b"x-ms-error-code: BlobNotFound", status=status))

    async with serving(script) as (_, origin):
        url = f"http://127.0.0.1:{origin.port}"
        async with opened(url, credentials=Credential()) as service:
            with suppress(NotFoundError):
                await OPERATIONS[operation](service)
    assert tokens == [b"token-1", b"token-2"]


# --- signing in --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("url", "expected"),
    [
        ("https://acct.blob.core.windows.net", ""),
        ("https://ACCT.blob.core.windows.net/", ""),
        ("http://127.0.0.1:10000", "/acct"),
        ("http://127.0.0.1:10000/other/", "/other"),
        ("https://storage.example", "/acct"),
    ],
)
def test_the_account_is_in_the_host_or_in_the_path(url: str, expected: str) -> None:
    assert root_path(url, "acct") == expected


async def test_a_function_may_give_sas_tokens(azurite: Azurite, place: AzurePlace) -> None:
    place.write("a", b"1")
    given: list[str] = []

    async def sas() -> str:
        given.append("?" + account_sas(azurite))
        return given[-1]

    async with aioflux.open_store(place.uri, endpoint_url=azurite.url, credentials=sas) as store:
        assert await store.get("a") == b"1"
        await store.copy("a", "b")
        assert [meta.key for meta in await store.list_all()] == ["a", "b"]
    assert given


async def test_a_connection_string_is_all_that_is_needed(
    azurite: Azurite, place: AzurePlace, monkeypatch: pytest.MonkeyPatch
) -> None:
    place.write("a", b"1")
    monkeypatch.setenv(
        "AZURE_STORAGE_CONNECTION_STRING",
        f"AccountName={azurite.account};AccountKey={azurite.key};"
        f"BlobEndpoint={azurite.url}/{azurite.account};",
    )
    async with aioflux.open_store(place.uri) as store:
        assert await store.get("a") == b"1"
        assert pickle.loads(pickle.dumps(store)).uri == store.uri


async def test_public_containers_are_read_without_credentials(
    azurite: Azurite,
) -> None:
    with azurite.client() as client:
        container = client.create_container("public", public_access="container")
        container.upload_blob("a", b"1")
    settings = {"endpoint_url": azurite.url, "retry": ONCE}
    root = f"az://{azurite.account}"
    async with aioflux.open_store(f"{root}/public", credentials="anonymous", **settings) as store:
        assert await store.get("a") == b"1"
        assert [meta.key for meta in await store.list_all()] == ["a"]
        with pytest.raises((PermissionDeniedError, NotFoundError)):
            await store.put("b", b"1")
    async with aioflux.open_store(
        f"{root}/container", credentials="anonymous", **settings
    ) as store:
        with pytest.raises((PermissionDeniedError, NotFoundError)):
            await store.get("a")


async def test_a_container_that_is_not_there_is_named(azurite: Azurite) -> None:
    async with aioflux.open_store(
        f"az://{azurite.account}/missing", endpoint_url=azurite.url, credentials=azurite.key
    ) as store:
        for call in (store.list_all(), store.put("a", b"1")):
            with pytest.raises(
                NotFoundError,
                match="no such container.*az storage container create",  # noqa: RUF043
            ):
                await call


def jwt(azurite: Azurite) -> str:
    """Return an access token as azurite takes it, which looks at all but its signature."""
    now = int(time.time())
    claims = {
        "aud": "https://storage.azure.com",
        "iss": "https://sts.windows.net/tenant/",
        "iat": now - 60,
        "nbf": now - 60,
        "exp": now + 3600,
    }
    parts = ({"alg": "RS256", "typ": "JWT"}, claims)
    texts = [base64.urlsafe_b64encode(json.dumps(part).encode()).rstrip(b"=") for part in parts]
    return b".".join((*texts, b"c2lnbmVk")).decode()


async def test_the_first_request_of_a_store_with_a_token_may_delete_many() -> None:
    """Each request of the batch has the token, too, which nothing has asked for before."""
    bodies: list[bytes] = []

    async def script(peer: Peer) -> None:
        _, body = await peer.read_request()
        bodies.append(body)
        await peer.send(ok(b"", status=b"500 Out Of Order"))

    async with serving(script) as (_, origin):
        url = f"http://127.0.0.1:{origin.port}"
        async with opened(url, credentials=planted_token) as service:
            with pytest.raises(TransientError):
                await service.delete_page([Source(key="a"), Source(key="b")])
    assert bodies[0].count(b"Authorization: Bearer planted.access.token\r\n") == 2


def batch_answer(*statuses: int) -> bytes:
    parts = [
        b"--b\r\nContent-Type: application/http\r\nContent-ID: %d\r\n\r\nHTTP/1.1 %d x\r\n\r\n"
        % (number, status)
        for number, status in enumerate(statuses)
    ]
    body = b"\r\n".join([*parts, b"--b--\r\n"])
    return ok(body, b"Content-Type: multipart/mixed; boundary=b", status=b"202 Accepted")


async def test_deletes_whose_token_was_refused_are_retried_with_another() -> None:
    """It may expire between a batch and the requests in it; only once, as for any request."""
    tokens = (f"planted.access.{number}" for number in itertools.count())
    bodies: list[bytes] = []

    async def script(peer: Peer) -> None:
        for statuses in ((202, 401, 404, 401), (202, 401)):
            _, body = await peer.read_request()
            bodies.append(body)
            await peer.send(batch_answer(*statuses))

    async with serving(script) as (_, origin):
        url = f"http://127.0.0.1:{origin.port}"
        async with opened(url, credentials=lambda: next(tokens)) as service:
            told = await service.delete_page([Source(key=key) for key in "abcd"])
    assert {key: type(error) for key, error in told.items()} == {
        "c": NotFoundError,
        "d": PermissionDeniedError,
    }
    asked = [re.findall(rb"DELETE (\S+) HTTP", body) for body in bodies]
    assert [len(each) for each in asked] == [4, 2]
    assert asked[1] == [asked[0][1], asked[0][3]]
    first, second = (set(re.findall(rb"planted\S+", body)) for body in bodies)
    assert len(first) == len(second) == 1
    assert first != second


async def test_deletes_that_are_retried_without_success_may_be_done() -> None:
    """What the first batch has deleted is not missing when all are asked for once more."""

    async def script(peer: Peer) -> None:
        await peer.read_request()
        await peer.send(batch_answer(202, 401))
        await peer.read_request()
        await peer.send(ok(b"", status=b"503 Server Busy"))

    async with serving(script) as (_, origin):
        url = f"http://127.0.0.1:{origin.port}"
        async with opened(url, credentials=lambda: "planted.access.token") as service:
            with pytest.raises(TransientError) as caught:
                await service.delete_page([Source(key=key) for key in "ab"])
    assert caught.value.maybe_done


async def test_access_tokens_are_taken_over_tls(tmp_path: Path) -> None:
    """By a credential, as azure-identity has them, and by a function; copies too."""
    from tests.servers.azurite import Azurite

    certificates = Authority(tmp_path)

    class Credential:
        def get_token(self, scope: str) -> AccessToken:
            return AccessToken(jwt(server), int(time.time()) + 3600)

    with Azurite(tls=certificates) as server:
        for credentials in (Credential(), lambda: jwt(server)):
            async with aioflux.open_store(
                f"az://{server.account}/container/p",
                endpoint_url=server.url,
                credentials=credentials,
                ssl_context=certificates.client_context(),
            ) as store:
                assert service_of(store).capabilities.guarded_transport
                await store.put("a", b"1")
                assert await store.get("a") == b"1"
                await store.delete("a")
        async with aioflux.open_store(
            f"az://{server.account}/container/p",
            endpoint_url=server.url,
            credentials=lambda: "planted.token.none",
            ssl_context=certificates.client_context(),
            retry=ONCE,
        ) as store:
            with pytest.raises(PermissionDeniedError, match="does not accept"):
                await store.get("a")


# --- secrets -----------------------------------------------------------------------------


def planted_token() -> str:
    return "planted.access.token"


PLANTED_SAS = "sv=2023-11-03&ss=b&srt=co&sp=rwdl&se=2030-01-01&sig=cGxhbnRlZHNpZw%3D%3D"
SECRETS: dict[str, tuple[Any, list[str]]] = {
    "key": (KEY, [KEY, "planted key"]),
    "sas": (PLANTED_SAS, ["sig=", "cGxhbnRlZHNpZw"]),
    "connection string": (f"AccountName={{}};AccountKey={KEY};", [KEY, "planted key"]),
    "token": (planted_token, ["planted.access.token"]),
}


@pytest.mark.parametrize("kind", SECRETS)
async def test_no_credential_appears_anywhere(
    azurite: Azurite, caplog: pytest.LogCaptureFixture, kind: str
) -> None:
    """Not in logs at debug level, errors, their causes and notes, reprs, or pickles."""
    credentials, secrets = SECRETS[kind]
    said: list[str] = []

    def hear(error: BaseException) -> None:
        said.extend(traceback.format_exception(error))
        said.append(repr(error))
        if isinstance(error, aioflux.AiofluxError):
            said.append(repr(pickle.dumps(error)))
            said.append(repr(vars(error)))

    with caplog.at_level(logging.DEBUG):
        for url in (azurite.url, "http://127.0.0.1:1"):
            account = "acct" if url.endswith("127.0.0.1:1") else azurite.account
            if isinstance(credentials, str):
                credentials = SECRETS[kind][0].format(account)
            store = aioflux.open_store(
                f"az://{account}/container", endpoint_url=url, credentials=credentials, retry=ONCE
            )
            said.append(repr(store))
            async with store:
                service = service_of(store)
                said += [repr(service), repr(service._sender._access), repr(service._sender._token)]
                for call in (
                    store.get("a"),
                    store.head("a"),
                    store.put("a", b"1"),
                    store.list_all(),
                    store.copy("a", "b"),
                    store.delete("a"),
                    store.clean(older_than_seconds=0),
                ):
                    with pytest.raises(aioflux.AiofluxError) as raised:
                        await call
                    hear(raised.value)
            try:
                said.append(repr(pickle.dumps(store)))
            except TypeError as refused:
                hear(refused)
    said.append(caplog.text)
    for secret in secrets:
        assert not any(secret in text for text in said), secret


# --- conditions --------------------------------------------------------------------------


async def test_an_upload_may_be_conditional(place: AzurePlace) -> None:
    """Without a detour: the request that makes the blob honours the condition."""
    data = bytes(11 * MIB)
    async with place.open(transfer=TransferOptions(part_size_bytes=5 * MIB)) as store:
        assert service_of(store).capabilities.conditional_complete
        await store.put("a", data, mode="create")
        with pytest.raises(AlreadyExistsError):
            await store.put("a", data, mode="create")
        assert [meta.key for meta in await store.list_all()] == ["a"]
        assert store.stats.num_requests <= 2 * (3 + 1 + 1) + 2
