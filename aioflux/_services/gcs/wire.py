"""Encodings of Google Cloud Storage: the `x-goog-` headers and the query of the JSON API. No I/O.

Source: cloud.google.com/storage/docs/xml-api/reference-headers.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import TYPE_CHECKING
from urllib.parse import quote

from aioflux._services import responses as _responses
from aioflux._services.responses import (
    attribute_headers,
    decode_crc32c,
    encode_crc32c,
    size_from_response,
)
from aioflux._values.uri import check_endpoint

if TYPE_CHECKING:
    from aioflux._http import Response
    from aioflux._services.base import Precondition, ReadRequest, WriteRequest
    from aioflux._values.meta import ObjectAttributes, ObjectMeta

_ENDPOINT = "https://storage.googleapis.com"
_USER_PREFIX = b"x-goog-meta-"
_CLASS_HEADER = b"x-goog-storage-class"
_HEADER_NAME = re.compile(r"[!#$%&'*+\-.^_`|~0-9A-Za-z]+")


def resolve_endpoint(endpoint_url: str | None, environ: Mapping[str, str]) -> tuple[str, bool]:
    """Return the endpoint, and whether it is an emulator, which needs no credentials.

    An `endpoint_url` is an emulator if it begins with http://. The endpoint in the environment is
    always an emulator.

    Environment:
        STORAGE_EMULATOR_HOST: Default endpoint, a url or host:port, as for Google's own clients.

    Raises:
        ValueError: The endpoint is not the url of a server.
    """
    if endpoint_url is not None:
        is_emulator = endpoint_url.strip().lower().startswith("http://")
        return check_endpoint(endpoint_url), is_emulator
    host = environ.get("STORAGE_EMULATOR_HOST", "")
    if not host:
        return _ENDPOINT, False
    return check_endpoint(host if "://" in host else f"http://{host}"), True


def generation_of(headers: Mapping[bytes, bytes]) -> str:
    """Return the generation in the headers of a response; empty if they have none."""
    return (headers.get(b"x-goog-generation") or b"").decode("latin-1")


def object_headers(attributes: ObjectAttributes, kms_key: str = "") -> list[tuple[bytes, bytes]]:
    """Return the attributes and the KMS key of an object as headers of the XML API.

    Raises:
        ValueError: A header cannot represent the metadata.
    """
    metadata = attributes.metadata or {}
    for name, value in metadata.items():
        if _HEADER_NAME.fullmatch(name) is None:
            raise ValueError(
                f"metadata cannot have the name {name!r}: it is sent as a header, so use ASCII "
                "letters, digits and -_.!#$%&'*+^`|~"
            )
        if value != value.strip() or not value.replace("\t", " ").isprintable():
            raise ValueError(
                f"metadata {name!r} cannot have the value {value!r}: it is sent as a header, so it "
                "cannot have line ends, unprintable characters, or space at either end"
            )
    headers = attribute_headers(attributes, _CLASS_HEADER)
    if kms_key:
        headers.append((b"x-goog-encryption-kms-key-name", kms_key.encode()))
    headers += [(_USER_PREFIX + name.encode(), value.encode()) for name, value in metadata.items()]
    return headers


def hash_headers(crc32c: int | None) -> list[tuple[bytes, bytes]]:
    """Return the header with the crc32c of the body, which the service compares; [] for None."""
    if crc32c is None:
        return []
    return [(b"x-goog-hash", f"crc32c={encode_crc32c(crc32c)}".encode())]


def quote_key(key: str) -> str:
    """Percent-encode a key, including slashes, for one segment of a path of the JSON API."""
    return quote(key, safe="")


def hash_crc32c(header: bytes | None) -> int | None:
    """Return the crc32c from the header `x-goog-hash`; None if the header or the crc32c is missing.

    The value of the header is `crc32c=...,md5=...`.

    Raises:
        ValueError: The crc32c is malformed.
    """
    if not header:
        return None
    if header.startswith(b"crc32c=") and (len(header) == 15 or header[15:16] == b","):
        return decode_crc32c(header[7:15])
    _, name, rest = header.partition(b"crc32c=")
    return decode_crc32c(rest.partition(b",")[0].strip()) if name else None


def meta_from_headers(
    headers: Mapping[bytes, bytes],
    *,
    key: str,
    uri: str,
    size: int,
    written: WriteRequest | None = None,
) -> ObjectMeta:
    """Build the metadata of an object from the headers of a response of the XML API.

    Raises:
        ValueError: The crc32c is malformed.
    """
    coding = headers.get(b"x-goog-stored-content-encoding", b"").decode("latin-1")
    return _responses.meta_from_headers(
        headers,
        key=key,
        uri=uri,
        size=size,
        generation=generation_of(headers),
        user_prefix=_USER_PREFIX,
        class_header=_CLASS_HEADER,
        # Responses for objects without a Cache-Control have the default of the service.
        cache_header=b"",
        crc32c=hash_crc32c(headers.get(b"x-goog-hash")),
        content_encoding="" if coding == "identity" else coding,
        written=written,
    )


def precondition_headers(precondition: Precondition) -> list[tuple[bytes, bytes]]:
    """Return a precondition as headers of the XML API.

    Raises:
        ValueError: The generation of the precondition is not a number.
    """
    expected = _expected_generation(precondition)
    return [] if expected is None else [(b"x-goog-if-generation-match", expected.encode())]


def precondition_params(precondition: Precondition) -> Mapping[str, str]:
    """Return a precondition as query parameters of the JSON API.

    Raises:
        ValueError: The generation of the precondition is not a number.
    """
    expected = _expected_generation(precondition)
    return {} if expected is None else {"ifGenerationMatch": expected}


def _expected_generation(precondition: Precondition) -> str | None:
    expected = "0" if precondition.if_absent else precondition.if_generation_match
    if expected is not None and not (expected.isascii() and expected.isdigit()):
        raise ValueError(
            f"{expected!r} is not a generation of Cloud Storage, which is a number; pass "
            "ObjectMeta.generation"
        )
    return expected


def object_size(request: ReadRequest, response: Response) -> int:
    """Return the size of the whole object, in bytes, from a response to a read.

    Raises:
        ValueError: The response does not match the request.
    """
    status, headers, num_bytes = response.status, response.headers, response.num_bytes
    generation, start, end = request.generation, request.start, request.end
    get = headers.get
    received = get(b"x-goog-generation")
    length = b"%d" % num_bytes
    if (
        status == 206
        and not start
        and end is not None
        and 0 < num_bytes <= end
        and get(b"content-range") == b"bytes 0-%d/%b" % (num_bytes - 1, length)
        and get(b"x-goog-stored-content-length", length) == length
        and received
        and (not generation or received == generation.encode())
        and b"content-encoding" not in headers
        and get(b"x-goog-stored-content-encoding", b"identity") == b"identity"
    ):
        # Fast path for the most frequent response, a whole object; the checks below accept it, too.
        return num_bytes
    _require_stored_bytes(headers)
    if not received:
        # The response is, for example, the login page of a public network.
        raise ValueError("the response has no generation: it is not from Cloud Storage")
    if generation and received != generation.encode():
        raise ValueError(
            f"the response has generation {received.decode('latin-1')}, not {generation}"
        )
    if status == 206 and not start and end is None:
        raise ValueError("the service returned a range in place of the whole object")
    size = size_from_response(request, response)
    stored = headers.get(b"x-goog-stored-content-length")
    if stored is not None and stored != b"%d" % size:
        # Otherwise a proxy that lowers the size in Content-Range would shorten the object.
        raise ValueError(
            f"the response is of an object of {size} bytes, but the object has "
            f"{stored.decode('latin-1')}"
        )
    return size


def _require_stored_bytes(headers: Mapping[bytes, bytes]) -> None:
    """Raise ValueError if a body was compressed or decompressed on its way."""
    coding = headers.get(b"content-encoding")
    stored = headers.get(b"x-goog-stored-content-encoding")
    if coding is None and (stored is None or stored == b"identity"):
        return
    received = _coding(coding)
    # Without the header of the stored encoding, the object may be stored as gzip, which requests
    # accept by `Accept-Encoding: gzip`.
    if received != _coding(stored) if stored is not None else received not in {"", "gzip"}:
        expected = "'gzip' or 'identity'" if stored is None else repr(_coding(stored) or "identity")
        raise ValueError(
            f"the bytes were changed on the way: the Content-Encoding is {received or 'identity'!r}"
            f", and the object is stored as {expected}"
        )


def _coding(value: bytes | None) -> str:
    text = (value or b"").decode("latin-1").strip().lower()
    return "" if text == "identity" else text
