"""Azure credentials: every kind is accepted, signatures are the SDK's, and no secret leaks."""

from __future__ import annotations

import asyncio
import base64
import logging
import pickle
import subprocess
import sys
from types import SimpleNamespace
from typing import Any
from urllib.parse import quote

import pytest
from azure.core.credentials import AccessToken, AzureNamedKeyCredential, AzureSasCredential
from azure.core.exceptions import ClientAuthenticationError, ServiceRequestError
from azure.storage.blob._shared.authentication import SharedKeyCredentialPolicy
from hypothesis import given
from hypothesis import strategies as st

from aioflux import CredentialsError, TransientError
from aioflux._auth.access_token import NOT_READY, AnonymousToken, ProvidedToken
from aioflux._auth.azure import (
    ANONYMOUS,
    AzureToken,
    SharedKey,
    is_sas,
    open_access,
    parse_connection_string,
)

KEY = "cGxhbnRlZC1rZXktb2YtdGhlLXRlc3Qtb25seQ=="
SAS = "sv=2023-11-03&ss=b&srt=co&sp=rwdl&se=2030-01-01&sig=cGxhbnRlZA%3D%3D"
CONNECTION = f"DefaultEndpointsProtocol=https;AccountName=acct;AccountKey={KEY};EndpointSuffix=x.y"


def opened(credentials: Any = None, *, is_http: bool = False, **environ: str) -> Any:
    return open_access("acct", credentials, is_http=is_http, environ=environ)


# --- signatures --------------------------------------------------------------------------

names = st.from_regex(r"[A-Za-z_][A-Za-z0-9_]{0,12}", fullmatch=True)
values = st.text(st.characters(min_codepoint=33, max_codepoint=126), min_size=1, max_size=20)
segments = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=8)


@given(
    method=st.sampled_from(["GET", "PUT", "HEAD", "DELETE"]),
    path=segments,
    query=st.dictionaries(
        st.sampled_from(["comp", "restype", "blockid", "prefix", "marker", "delimiter"]), segments
    ),
    metadata=st.dictionaries(names, values, max_size=5),
    own=st.dictionaries(
        st.sampled_from(
            ["x-ms-range", "x-ms-blob-type", "x-ms-copy-source", "x-ms-source-if-match"]
        ),
        values,
    ),
    standard=st.dictionaries(
        st.sampled_from(["Content-MD5", "Content-Type", "If-Match", "If-None-Match"]), values
    ),
    num_bytes=st.integers(0, 1 << 30),
    secret=st.binary(min_size=1, max_size=100),
)
def test_signatures_are_those_of_the_sdk(
    method: str,
    path: str,
    query: dict[str, str],
    metadata: dict[str, str],
    own: dict[str, str],
    standard: dict[str, str],
    num_bytes: int,
    secret: bytes,
) -> None:
    text = base64.b64encode(secret).decode()
    lowered = {f"x-ms-meta-{name.lower()}": value for name, value in metadata.items()}
    headers = {"x-ms-version": "2023-11-03", **own, **standard, **lowered}
    target = f"/acct/container/{quote(path)}"
    key = SharedKey("acct", text, clock=lambda: 1_700_000_000.5)
    dated, authorization = key.sign(
        method.encode(),
        target.encode(),
        query,
        [(name.encode(), value.encode()) for name, value in headers.items()],
        num_bytes=num_bytes,
    )
    assert dated == (b"x-ms-date", b"Tue, 14 Nov 2023 22:13:20 GMT")
    request = SimpleNamespace(
        http_request=SimpleNamespace(
            method=method,
            url=f"http://host{target}",
            headers={**headers, "x-ms-date": dated[1].decode(), "Content-Length": str(num_bytes)},
            query={name: quote(value, safe="") for name, value in query.items()},
        ),
        context=SimpleNamespace(transport=None),
    )
    SharedKeyCredentialPolicy("acct", text).on_request(request)
    assert authorization == (
        b"Authorization",
        request.http_request.headers["Authorization"].encode(),
    )


def test_the_date_of_a_signature_follows_the_clock() -> None:
    now = [1.0]
    key = SharedKey("acct", KEY, clock=lambda: now[0])
    first = key.sign(b"GET", b"/a", {}, [])
    now[0] = 1.9
    assert key.sign(b"GET", b"/a", {}, []) == first
    now[0] = 2.0
    assert key.sign(b"GET", b"/a", {}, [])[0] != first[0]


# --- kinds -------------------------------------------------------------------------------


def kind(access: Any) -> str:
    if access.key is not None:
        return "key"
    if access.sas:
        assert access.sas == SAS
        return "sas"
    return {AnonymousToken: "none", ProvidedToken: "function", AzureToken: "token"}[
        type(access.token)
    ]


class Credential:
    """As one of azure-identity."""

    def __init__(self, *answers: Any) -> None:
        self.answers = list(answers)
        self.scopes: list[str] = []

    def get_token(self, scope: str) -> AccessToken:
        self.scopes.append(scope)
        answer = self.answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return AccessToken(*answer)


class AwaitedCredential(Credential):
    async def get_token(self, scope: str) -> AccessToken:  # type: ignore[override]
        await asyncio.sleep(0)
        return super().get_token(scope)


@pytest.mark.parametrize(
    ("credentials", "expected"),
    [
        (KEY, "key"),
        (SAS, "sas"),
        (f"?{SAS}", "sas"),
        (CONNECTION, "key"),
        (f"BlobEndpoint=https://b.example;SharedAccessSignature={SAS}", "sas"),
        (ANONYMOUS, "none"),
        (AzureNamedKeyCredential("acct", KEY), "key"),
        (AzureSasCredential(SAS), "sas"),
        (Credential(), "token"),
        (str, "function"),
    ],
    ids=lambda value: type(value).__name__,
)
def test_kinds_of_credentials(credentials: Any, expected: str) -> None:
    assert kind(opened(credentials)) == expected


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        ({}, "token"),
        ({"AZURE_STORAGE_CONNECTION_STRING": CONNECTION}, "key"),
        ({"AZURE_STORAGE_CONNECTION_STRING": CONNECTION.replace("acct", "other")}, "token"),
        ({"AZURE_STORAGE_ACCOUNT": "acct", "AZURE_STORAGE_KEY": KEY}, "key"),
        ({"AZURE_STORAGE_ACCOUNT": "acct", "AZURE_STORAGE_SAS_TOKEN": f"?{SAS}"}, "sas"),
        ({"AZURE_STORAGE_ACCOUNT": "acct"}, "token"),
        ({"AZURE_STORAGE_ACCOUNT": "other", "AZURE_STORAGE_KEY": KEY}, "token"),
        ({"AZURE_STORAGE_KEY": KEY}, "token"),
    ],
)
def test_credentials_of_the_environment(environ: dict[str, str], expected: str) -> None:
    assert kind(opened(**environ)) == expected


def test_without_tls_no_token_is_looked_for() -> None:
    assert kind(opened(is_http=True)) == "none"
    access = open_access("devstoreaccount1", None, is_http=True, environ={})
    assert kind(access) == "key"


@pytest.mark.parametrize(
    ("text", "endpoint"),
    [
        (CONNECTION, "https://acct.blob.x.y"),
        (f"AccountName=acct;AccountKey={KEY}", ""),
        (f"BlobEndpoint=http://h:1/acct;AccountName=acct;AccountKey={KEY}", "http://h:1/acct"),
    ],
)
def test_a_connection_string_has_the_endpoint(text: str, endpoint: str) -> None:
    assert opened(text).endpoint_url == endpoint


def test_the_development_account_is_the_emulators() -> None:
    text = "UseDevelopmentStorage=true"
    access = open_access("devstoreaccount1", text, is_http=False, environ={})
    assert (kind(access), access.endpoint_url) == (
        "key",
        "http://127.0.0.1:10000/devstoreaccount1",
    )
    environ = {"AZURE_STORAGE_CONNECTION_STRING": text}
    assert kind(open_access("devstoreaccount1", None, is_http=False, environ=environ)) == "key"


@pytest.mark.parametrize(
    ("credentials", "error", "says"),
    [
        ("planted, not base64!", CredentialsError, "not base64"),
        (CONNECTION.replace("acct", "other"), CredentialsError, "'other', not to 'acct'"),
        (AzureNamedKeyCredential("other", KEY), CredentialsError, "'other', not to 'acct'"),
        (f"AccountName=acct;{KEY[:4]}planted", CredentialsError, "a part without '='"),
        (5, TypeError, "not int"),
    ],
)
def test_an_error_about_invalid_credentials_does_not_contain_them(
    credentials: Any, error: type[Exception], says: str
) -> None:
    with pytest.raises(error, match=says) as raised:
        opened(credentials)
    assert "planted" not in str(raised.value)
    assert KEY not in str(raised.value)
    assert raised.value.__cause__ is None


@pytest.mark.parametrize(
    ("endpoint", "is_ours"),
    [
        ("https://acct.blob.core.windows.net/", True),
        ("https://acct-secondary.blob.core.windows.net", True),
        ("https://acct.z01.blob.storage.azure.net", True),
        ("http://127.0.0.1:10000/acct", True),
        ("https://data.example.com", True),
        ("https://other.blob.core.windows.net/", False),
        ("https://other.z01.blob.storage.azure.net", False),
        ("http://127.0.0.1:10000/other", False),
        ("http://azurite:10000/other", False),
    ],
)
def test_a_sas_token_of_another_account_is_not_used(endpoint: str, *, is_ours: bool) -> None:
    """Its connection string has no AccountName: objects of one account would go to another."""
    text = f"BlobEndpoint={endpoint};SharedAccessSignature={SAS}"
    told = opened(AZURE_STORAGE_CONNECTION_STRING=text)
    assert kind(told) == ("sas" if is_ours else "token")
    if is_ours:
        assert kind(opened(text)) == "sas"
    else:
        with pytest.raises(CredentialsError, match="'other', not to 'acct'"):
            opened(text)


@pytest.mark.parametrize("account", ["evil.example#", "evil.example?", "u@evil.example", "a b", ""])
def test_the_name_of_an_account_cannot_name_a_host(account: str) -> None:
    """A token would be sent to any host that a uri names."""
    with pytest.raises(ValueError, match="not a valid name of a storage account"):
        open_access(account, Credential(), is_http=False, environ={})


@pytest.mark.parametrize("text", [f"{KEY}\n", f" {SAS}\n", f"{CONNECTION}\r\n"])
def test_the_end_of_a_line_is_not_part_of_credentials(text: str) -> None:
    expected = "sas" if SAS in text else "key"
    assert kind(opened(text)) == expected
    name = {KEY: "AZURE_STORAGE_KEY", SAS: "AZURE_STORAGE_SAS_TOKEN"}.get(
        text.strip(), "AZURE_STORAGE_CONNECTION_STRING"
    )
    assert kind(opened(**{"AZURE_STORAGE_ACCOUNT": "acct", name: text})) == expected


@pytest.mark.parametrize("between", [" ", "\r\nHost: evil", "\u00e9"])
def test_a_sas_token_that_cannot_be_in_a_url_is_rejected(between: str) -> None:
    planted = f"se=2026{between}01&sig=planted"
    for credentials in (planted, AzureSasCredential(planted)):
        with pytest.raises(CredentialsError, match="cannot be sent") as raised:
            opened(credentials)
        assert "planted" not in str(raised.value)


def test_a_sas_token_is_distinguished_from_a_key() -> None:
    assert is_sas(SAS)
    assert not is_sas(KEY)
    assert parse_connection_string("A=b=c;D=") == {"a": "b=c", "d": ""}


# --- tokens ------------------------------------------------------------------------------


@pytest.mark.parametrize("credential", [Credential, AwaitedCredential])
async def test_a_token_is_renewed_before_it_expires(credential: type[Credential]) -> None:
    now = [1000.0]
    source = credential(("first", 2000), ("second", 3000))
    token = AzureToken(source, clock=lambda: now[0])
    assert token.get_nowait() is NOT_READY
    assert await token.get() == token.get_nowait() == "first"
    now[0] = 1900.0
    assert await token.get() == "first"  # still valid, while the next one is on its way
    while await token.get() == "first":  # noqa: ASYNC110  it is asked for as requests do
        await asyncio.sleep(0.001)
    assert token.get_nowait() == "second"
    assert source.scopes == ["https://storage.azure.com/.default"] * 2
    await token.close()


@pytest.mark.parametrize("credential", [Credential, AwaitedCredential])
@pytest.mark.parametrize(
    ("failure", "error", "says"),
    [
        (ClientAuthenticationError("no account.\nthe long story"), CredentialsError, "no account"),
        (ServiceRequestError("no route to host"), TransientError, "token endpoint failed"),
        (ZeroDivisionError("a bug"), ZeroDivisionError, "a bug"),
    ],
)
async def test_a_missing_token_is_explained(
    credential: type[Credential], failure: Exception, error: type[Exception], says: str
) -> None:
    with pytest.raises(error, match=says) as raised:
        await AzureToken(credential(failure)).get()
    assert "long story" not in str(raised.value)


async def test_a_token_endpoint_that_repeats_the_request_reveals_no_secret() -> None:
    """Neither in the message nor in the traceback, which would have the whole response."""
    assertion = "eyJhbGciOiJSUzI1NiJ9.eyJzdWIiOiJwbGFudGVkIn0.cGxhbnRlZA"
    failure = ClientAuthenticationError(f"AADSTS1: bad client_assertion={assertion}\n{assertion}")
    with pytest.raises(CredentialsError, match="AADSTS1: bad client_assertion=") as raised:
        await AzureToken(Credential(failure)).get()
    assert raised.value.__context__ is None
    assert "cGxhbnRlZA" not in str(raised.value)


async def test_a_missing_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "azure.identity", None)
    with pytest.raises(CredentialsError, match=r"pip install 'aioflux-storage\[azure\]'"):
        await AzureToken().get()


def test_nothing_of_azure_is_imported_before_a_token_is_needed() -> None:
    program = (
        "import sys, aioflux\n"
        "from aioflux._services.azure import service\n"
        "from aioflux._auth.azure import open_access\n"
        f"open_access('acct', {KEY!r}, is_http=False, environ={{}})\n"
        "open_access('acct', None, is_http=False, environ={})\n"
        "sys.exit(any(name.partition('.')[0] == 'azure' for name in sys.modules))\n"
    )
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0


# --- secrets -----------------------------------------------------------------------------


@pytest.mark.parametrize("credentials", [KEY, SAS, CONNECTION, lambda: KEY])
def test_no_credential_is_in_a_repr_or_a_pickle(credentials: Any) -> None:
    access = opened(credentials)
    for each in (access, access.key, access.token):
        for secret in (KEY, "sig=", "planted"):
            assert secret not in repr(each)
    for each in filter(None, (access, access.key)):
        with pytest.raises(TypeError, match="cannot be pickled"):
            pickle.dumps(each)


def test_signing_logs_nothing(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.DEBUG):
        SharedKey("acct", KEY).sign(b"GET", b"/a", {}, [])
    assert caplog.text == ""


@pytest.mark.parametrize(
    ("environ", "text"),
    [
        ({"AZURE_STORAGE_CONNECTION_STRING": CONNECTION}, "key of AZURE_STORAGE_CONNECTION_STRING"),
        ({"AZURE_STORAGE_KEY": KEY}, "account key of AZURE_STORAGE_KEY"),
        ({"AZURE_STORAGE_SAS_TOKEN": SAS}, "AZURE_STORAGE_SAS_TOKEN, valid until 2030-01-01"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
async def test_the_identity_names_the_variable(environ: dict[str, str], text: str) -> None:
    found = await opened(AZURE_STORAGE_ACCOUNT="acct", **environ).identity()
    assert found[0].endswith(text)
    assert found[1] is None


async def test_the_identity_of_a_token_is_that_of_its_source() -> None:
    credential = SimpleNamespace(get_token=lambda _: AccessToken("planted-token", 1_893_456_000))
    assert await opened(credential).identity() == ("SimpleNamespace", 1_893_456_000.0)
    assert await opened(ANONYMOUS).identity() == ("anonymous", None)
