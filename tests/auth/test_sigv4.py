"""Signatures are those that botocore makes of the same requests."""

from __future__ import annotations

import hashlib
import hmac
import pickle
from datetime import UTC, datetime
from types import SimpleNamespace
from unittest import mock
from urllib.parse import quote

import botocore.auth
import pytest
from botocore.awsrequest import AWSRequest
from botocore.credentials import Credentials
from hypothesis import given
from hypothesis import strategies as st

from aioflux._auth.sigv4 import EMPTY_HASH, UNSIGNED, KeyedHash, Keys, Signer, canonical_query

NOW = 1_790_000_000.0
HOST = "bucket.s3.eu-central-1.amazonaws.com"

names = st.text(st.characters(codec="utf-8", exclude_characters="\r\n"), min_size=1, max_size=40)
values = st.text(st.characters(min_codepoint=32, max_codepoint=126), max_size=30)
header_names = st.sampled_from(
    ["Content-Type", "If-Match", "If-None-Match", "Range", "x-amz-meta-label", "x-amz-acl"]
)
queries = st.dictionaries(
    st.sampled_from(["uploads", "partNumber", "uploadId", "prefix", "list-type", "versionId"]),
    values,
    max_size=4,
)


def by_botocore(
    method: str,
    target: str,
    headers: dict[str, str],
    body: bytes,
    keys: Keys,
    *,
    signs_body: bool,
) -> str:
    """Return the Authorization header of botocore."""
    request = AWSRequest(method=method, url=f"http://{HOST}{target}", data=body, headers=headers)
    settings = {"payload_signing_enabled": signs_body}
    request.context["client_config"] = SimpleNamespace(s3=settings)
    credentials = Credentials(keys.access_key, keys.secret_key, keys.token or None)
    signer = botocore.auth.S3SigV4Auth(credentials, "s3", "eu-central-1")
    moment = datetime.fromtimestamp(NOW, UTC)
    with mock.patch.object(botocore.auth, "get_current_datetime", return_value=moment):
        signer.add_auth(request)
    authorization: str = request.headers["Authorization"]
    return authorization


def signer_of(keys: Keys, **settings: object) -> Signer:
    return Signer(keys, region="eu-central-1", host=HOST.encode(), **settings)  # type: ignore[arg-type]


@given(
    method=st.sampled_from(["GET", "PUT", "POST", "DELETE", "HEAD"]),
    name=names,
    query=queries,
    headers=st.dictionaries(header_names, values, max_size=4),
    body=st.binary(max_size=50),
    token=st.sampled_from(["", "session/token+with=signs"]),
    signs_body=st.booleans(),
)
def test_a_signature_is_that_of_botocore(
    method: str,
    name: str,
    query: dict[str, str],
    headers: dict[str, str],
    body: bytes,
    token: str,
    *,
    signs_body: bool,
) -> None:
    keys = Keys("AKIDEXAMPLE", "wJalrXUtnFEMI/K7MDENG+bPxRfiCYEXAMPLEKEY", token)
    pairs = "&".join(f"{key}={quote(value, safe='-_.~')}" for key, value in query.items())
    target = "/" + quote(name, safe="/~") + (f"?{pairs}" if pairs else "")
    expected = by_botocore(method, target, headers, body, keys, signs_body=signs_body)
    payload = hashlib.sha256(body).hexdigest().encode() if signs_body else UNSIGNED
    given_headers = [(name.encode(), value.encode()) for name, value in headers.items()]
    signer = signer_of(keys)
    # The template of the canonical request is cached by the names of headers.
    signer.sign(b"GET", b"/", b"", [(name, b"x") for name, _ in given_headers], EMPTY_HASH, now=NOW)
    path, _, text = target.encode().partition(b"?")
    signed = signer.sign(
        method.encode(), path, canonical_query(text), given_headers, payload, now=NOW
    )
    sent = dict(signed)
    assert sent[b"Authorization"].decode() == expected


def test_many_sets_of_headers_are_signed_alike() -> None:
    """Templates of canonical requests are cached, and dropped when they are too many."""
    signer = signer_of(Keys("AKIDEXAMPLE", "secret"))
    headers = [(b"x-amz-meta-a", b"1")]
    first = dict(signer.sign(b"PUT", b"/a", b"", headers, EMPTY_HASH, now=NOW))
    for number in range(100):
        signer.sign(b"PUT", b"/a", b"", [(b"x-amz-meta-%d" % number, b"1")], EMPTY_HASH, now=NOW)
    assert dict(signer.sign(b"PUT", b"/a", b"", headers, EMPTY_HASH, now=NOW)) == first


def test_a_day_that_ends_changes_the_key() -> None:
    signer = signer_of(Keys("AKIDEXAMPLE", "secret"))
    before = dict(signer.sign(b"GET", b"/a", b"", [], EMPTY_HASH, now=NOW))
    after = dict(signer.sign(b"GET", b"/a", b"", [], EMPTY_HASH, now=NOW + 86_400))
    fresh = signer_of(Keys("AKIDEXAMPLE", "secret"))
    assert before[b"Authorization"] != after[b"Authorization"]
    assert after == dict(fresh.sign(b"GET", b"/a", b"", [], EMPTY_HASH, now=NOW + 86_400))


def test_a_wrong_clock_is_corrected() -> None:
    ahead = signer_of(Keys("AKIDEXAMPLE", "secret"), skew_seconds=3600.0)
    right = signer_of(Keys("AKIDEXAMPLE", "secret"))
    assert ahead.sign(b"GET", b"/a", b"", [], EMPTY_HASH, now=NOW) == right.sign(
        b"GET", b"/a", b"", [], EMPTY_HASH, now=NOW + 3600
    )


@pytest.mark.parametrize(
    ("query", "expected"),
    [
        (b"", b""),
        (b"uploads", b"uploads="),
        (b"b=2&a=1", b"a=1&b=2"),
        (b"uploads&prefix=x%2Fy", b"prefix=x%2Fy&uploads="),
        (b"a=2&a=1", b"a=1&a=2"),
        (b"a-b=1&a=1", b"a=1&a-b=1"),
    ],
)
def test_a_query_is_signed_sorted_by_name(query: bytes, expected: bytes) -> None:
    assert canonical_query(query) == expected


def test_keys_show_no_secret_and_do_not_pickle() -> None:
    keys = Keys("AKIDEXAMPLE", "hush-hush", "token-hush")
    signer = signer_of(keys)
    for each in (keys, signer):
        assert "hush" not in repr(each)
        with pytest.raises(TypeError, match="holds credentials and cannot be pickled"):
            pickle.dumps(each)


@pytest.mark.parametrize("size", [0, 20, 64, 65, 200])
def test_a_keyed_hash_is_an_hmac(size: int) -> None:
    key = bytes(range(size))
    assert KeyedHash(key).sign(b"text").digest() == hmac.digest(key, b"text", "sha256")
