"""A server that repeats a request in its response puts no secret into errors, logs and pickles."""

from __future__ import annotations

import json
import logging
import pickle
import re
import traceback
from contextlib import suppress
from typing import TYPE_CHECKING, Any
from xml.sax.saxutils import escape

import pytest
from botocore.credentials import Credentials

import aioflux
from aioflux import AiofluxError, RetryPolicy, S3Access
from aioflux._auth.redaction import add_secret, redact, redact_error
from tests.http.scripted import Peer, ok, serving
from tests.service.opening import opened_service
from tests.service.operations import ALL

if TYPE_CHECKING:
    from collections.abc import Callable

NUM = 12
"""Number of consecutive characters of a secret that may not be shown."""
TOKEN = "ya29.planted-access-token-0123456789/ABCDEFGHIJ+klmnop"
SESSION = "planted+session/token==0123456789ABCDEFGHIJKLMNOP"
SIGNATURE = "cGxhbnRlZC1zaWduYXR1cmUtMDEyMzQ1Njc4OQ=="
SAS = f"sv=2023-11-03&sp=rl&sig={SIGNATURE.replace('=', '%3D')}"
KEY = "cGxhbnRlZC1hY2NvdW50LWtleS0wMTIzNDU2Nzg5MDEyMzQ1Njc4OTAxMjM0NTY3ODk="
ACCOUNTS: dict[str, tuple[str, Any]] = {
    "gs": ("gs://bucket/p/", lambda: TOKEN),
    "s3": (
        "s3://bucket/p/",
        S3Access(credentials=Credentials("AKID", "planted-secret-key-0123456789", SESSION)),
    ),
    "az-token": ("az://account/container/p/", lambda: TOKEN),
    "az-sas": ("az://account/container/p/", SAS),
    "az-key": ("az://account/container/p/", KEY),
}


def secrets_of(head: str) -> set[str]:
    """Return the secrets in the head of a request."""
    found = re.findall(r"(?i)(?:bearer |signature=|sharedkey \w+:|security-token: )(\S+)", head)
    return {*found, *re.findall(r"sig=([^&\s]+)", head), *re.findall(re.escape(SIGNATURE), head)}


def credentials_in(head: str) -> bytes:
    """Return the last value of a header, or the query, that has a secret."""
    values = [line.partition(": ")[2] or line.partition("?")[2] for line in head.split("\r\n")]
    return [text for text in values if any(map(text.__contains__, secrets_of(head)))][-1].encode()


def xml_error(head: str, *, status: bytes = b"403 Forbidden", code: str = "Denied") -> bytes:
    body = f"<Error><Code>{escape(code)}</Code><Message>{escape(head)}</Message></Error>"
    return ok(body.encode(), b"Content-Type: application/xml", status=status)


def json_error(head: str) -> bytes:
    body = json.dumps({"error": {"code": 403, "message": head}}).encode()
    return ok(body, b"Content-Type: application/json", status=b"403 Forbidden")


def page_of(head: str) -> bytes:
    """Return listings in each form whose fields are parts of the request."""
    texts = [*re.split(r"[\s,]+", head), head]
    return ok(
        json.dumps(
            {
                "kind": "storage#objects",
                "items": [{"name": text, "size": "1"} for text in texts],
            }
        ).encode()
    )


def xml_page_of(head: str) -> bytes:
    text = escape(head)
    row = f"<Contents><Key>{text}</Key><Size>{text}</Size></Contents><KeyCount>{text}</KeyCount>"
    return ok(f"<ListBucketResult>{row}</ListBucketResult>".encode())


def blobs_of(head: str) -> bytes:
    text = escape(head)
    row = f"<Blob><Name>{text}</Name><Properties><Content-Length>{text}</Content-Length>"
    return ok(
        f"<EnumerationResults><Blobs>{row}</Properties></Blob></Blobs></EnumerationResults>".encode()
    )


def headers_of(head: str, *, status: bytes) -> bytes:
    """Return a response with the headers of the request, and its secrets in other headers."""
    lines = [
        line.encode()
        for line in head.split("\r\n")[1:]
        if line and line.split(":")[0].lower() not in {"host", "content-length"}
    ]
    secret = " ".join(sorted(secrets_of(head))).encode()
    names = (
        b"content-range", b"etag", b"x-goog-generation", b"x-goog-hash", b"x-ms-error-code",
        b"x-ms-request-id", b"content-encoding", b"x-amz-checksum-crc32c", b"content-md5",
        b"x-ms-copy-status", b"x-ms-copy-status-description",
    )  # fmt: skip
    return ok(b"hello", *lines, *(b"%b: %b" % (name, secret) for name in names), status=status)


ECHOES: dict[str, Callable[[str], bytes]] = {
    "json": json_error,
    "json far behind": lambda head: json_error("x" * 270 + " " + head),
    "xml": xml_error,
    "xml code": lambda head: xml_error("", code=head),
    "xml in a success": lambda head: xml_error(head, status=b"200 OK", code="InternalError"),
    "xml of an unavailable service": lambda head: xml_error(head, status=b"503 Busy"),
    "root of xml": lambda head: ok(b"<%b/>" % re.search(rb"ya29[\w.-]+|$", head.encode())[0]),
    "text": lambda head: ok(head.encode(), status=b"400 Bad"),
    "the request itself": str.encode,
    "status line": lambda head: b"HTTP/1.1 2x" + head.encode(),
    "authorization first": lambda head: credentials_in(head) + b"\r\n\r\n",
    "header without a colon": lambda head: (
        b"HTTP/1.1 200 OK\r\n" + credentials_in(head) + b"\r\n\r\n"
    ),
    "content length": lambda head: (
        b"HTTP/1.1 200 OK\r\nContent-Length: " + credentials_in(head)
        + b"\r\n\r\n"
    ),
    "chunk": lambda head: (
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"
        + credentials_in(head) + b"\r\n"
    ),
    "page": page_of,
    "page of xml": xml_page_of,
    "page of blobs": blobs_of,
    "kind of a page": lambda head: ok(json.dumps({"kind": head}).encode()),
    "resource": lambda head: ok(json.dumps({"name": head, "size": "1"}).encode()),
    "size of a resource": lambda head: ok(json.dumps({"name": "p/a", "size": head}).encode()),
    "bytes that are no text": lambda head: ok(b"\xff" + head.encode()),
    "headers of an error": lambda head: headers_of(head, status=b"403 Forbidden"),
    "headers of a success": lambda head: headers_of(head, status=b"200 OK"),
    "headers of a range": lambda head: headers_of(head, status=b"206 Partial"),
    "etag": lambda head: ok(b"", b"ETag: " + credentials_in(head), b"x-ms-request-id: 1"),
    "headers of a redirect": lambda head: headers_of(head, status=b"307 Moved"),
}  # fmt: skip


def text_of(error: BaseException) -> str:
    """Return all text of an error: its traceback with causes, fields, notes and pickle."""
    text = "".join(traceback.format_exception(error))
    while error is not None:
        text += repr(error) + repr(vars(error)) + repr(error.args)
        text += repr(pickle.dumps(error)) if isinstance(error, AiofluxError) else ""
        error = error.__cause__ or error.__context__  # type: ignore[assignment]
    return text


def assert_no_secret(text: str, heads: list[str]) -> None:
    assert heads
    for secret in set().union(*map(secrets_of, heads)):
        for index in range(len(secret) - NUM + 1):
            assert secret[index : index + NUM] not in text


class Echo:
    """A server that repeats requests, and the heads that it received."""

    def __init__(self, form: Callable[[str], bytes]) -> None:
        self.heads: list[str] = []
        self._form = form

    async def script(self, peer: Peer) -> None:
        head, _ = await peer.read_request()
        text = head.decode()
        self.heads.append(text)
        await peer.send(self._form(text))


@pytest.mark.parametrize("form", ECHOES.values(), ids=ECHOES)
@pytest.mark.parametrize("account", ACCOUNTS)
async def test_no_error_has_a_secret_that_a_server_repeats(
    account: str, form: Callable[[str], bytes]
) -> None:
    echo = Echo(form)
    uri, credentials = ACCOUNTS[account]
    text = ""
    async with serving(echo.script) as (_, origin):
        settings = {"credentials": credentials, "endpoint_url": f"http://127.0.0.1:{origin.port}"}
        async with opened_service(uri, **settings) as service:
            for call in ALL.values():
                try:
                    await call(service)
                except AiofluxError as exc:
                    text += text_of(exc)
                except NotImplementedError:
                    continue
    assert "could not" in text
    assert_no_secret(text, echo.heads)


@pytest.mark.parametrize("form", ["json", "xml", "the request itself", "headers of a success"])
@pytest.mark.parametrize("account", ACCOUNTS)
async def test_no_log_has_a_secret_that_a_server_repeats(
    account: str, form: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    echo = Echo(ECHOES[form])
    uri, credentials = ACCOUNTS[account]
    text = ""
    async with serving(echo.script) as (_, origin):
        store = aioflux.open_store(
            uri,
            credentials=credentials,
            endpoint_url=f"http://127.0.0.1:{origin.port}",
            retry=RetryPolicy(max_attempts=2, initial_seconds=1e-3, max_seconds=1e-3),
        )
        async with store:
            for call in (store.head("a"), store.put("a", b"1"), store.list_all(), store.get("a")):
                with suppress(AiofluxError):
                    await call
            text = repr(store) + repr(store.stats)
    assert_no_secret(caplog.text + text, echo.heads)


def test_parts_of_a_secret_are_removed() -> None:
    """A text may be truncated, or have an escaped character in the middle of a secret."""
    add_secret("0123456789planted")
    assert redact("(token 0123456789planted)") == "(token ***)"
    assert redact("token '0123456789pl'") == "token '***'"
    assert redact("456789planted%2B0123456789") == "***%2B***"
    assert redact("the answer is 42") == "the answer is 42"


def test_short_texts_are_words_and_longer_ones_secrets() -> None:
    add_secret("abc")
    add_secret("hunter2")
    assert redact("abc hunter2 hunter") == "abc *** hunter"


@pytest.mark.parametrize(
    "text",
    [
        "Signature=" + "0f" * 32,
        "Authorization: Bearer opaque-0123456789",
        "SharedKey account:" + "A" * 43 + "=",
        "eyJhbGciOiJSUzI1NiJ9.eyJpc3MiOiJ4In0.c2lnbmF0dXJl",
        "grant_type=x&assertion=opaque0123456789&y=1",
        "refresh_token=1//0abcdefghijkl",
        "client_secret=GOCSPX-0123456789",
    ],
)
def test_the_forms_of_secrets_are_removed_without_knowing_them(text: str) -> None:
    *_, secret = re.findall(r"[\w./+=-]{10,}", text.replace("=", "= ", 1).replace("y= 1", ""))
    assert "***" in redact(f"it is {text} there")
    assert secret not in redact(f"it is {text} there")


def test_the_latest_secrets_are_remembered() -> None:
    for number in range(33):
        add_secret(f"{number:08}of-many")
    assert redact("00000000 00000032") == "00000000 ***"


def test_an_error_of_decoding_loses_the_text_that_it_holds() -> None:
    add_secret("0123456789planted")
    with pytest.raises(UnicodeDecodeError) as caught:
        b"0123456789planted\xff".decode()
    redact_error(caught.value)
    assert "planted" not in str(caught.value) + repr(caught.value) + repr(vars(caught.value))


def test_a_cause_with_a_secret_is_dropped() -> None:
    add_secret("0123456789planted")
    error = ValueError("no JSON")
    error.__cause__ = KeyError("0123456789planted")
    assert redact_error(error) == "no JSON"
    assert error.__cause__ is None
