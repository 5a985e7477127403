"""No secret of S3 is in a log, a repr, an error or a pickle."""

from __future__ import annotations

import logging
import pickle
import traceback
from typing import TYPE_CHECKING, Any

import pytest
from botocore.credentials import Credentials

import aioflux
from aioflux import RetryPolicy, S3Access
from aioflux._services.base import ReadRequest
from tests.service.s3_rig import asking, hello, service_error

if TYPE_CHECKING:
    from tests.servers.seaweedfs import SeaweedFS

TOKEN = "planted-session-token-0123456789"
SECRET = "planted-secret-key-0123456789"


def module_level() -> tuple[str, str, str]:
    return "AKIDPLANTED", SECRET, TOKEN


def told_by(error: BaseException) -> str:
    """Return all that an error says, its causes, notes and pickle included."""
    text = "".join(traceback.format_exception(error)) + repr(error) + repr(error.__dict__)
    return text + repr(pickle.dumps(error))


async def everything(store: aioflux.Store, said: list[str]) -> None:
    """Do every kind of request, and keep what is said of those that fail."""
    said += [repr(store), repr(store.stats)]
    for request in (
        lambda: store.put("a", b"1"),
        lambda: store.get("a"),
        lambda: store.head("a"),
        lambda: store.get("missing"),
        lambda: store.put("a", b"1", mode="create"),
        lambda: store.list_all(),
        lambda: store.copy("a", "b"),
        lambda: store.delete_many(["a", "b"]),
        lambda: store.clean(),
    ):
        try:
            said.append(repr(await request()))
        except aioflux.AiofluxError as exc:
            said.append(told_by(exc))


async def test_nothing_is_said_of_keys_that_work(
    seaweedfs: SeaweedFS, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    said: list[str] = []
    access = S3Access(credentials=Credentials(seaweedfs.access_key, seaweedfs.secret_key))
    async with aioflux.open_store(
        "s3://bucket/secrets/", endpoint_url=seaweedfs.url, credentials=access
    ) as store:
        await everything(store, said)
        for service in (session.service for _, session in store._sessions.open_sessions()):
            said += [repr(vars(service)), repr(vars(service._sender))]  # type: ignore[attr-defined]
    text = caplog.text + "".join(said) + repr(access)
    assert seaweedfs.secret_key not in text
    assert "Signature=" not in text


@pytest.mark.parametrize("status", [400, 403, 500])
async def test_nothing_is_said_of_keys_that_are_refused(
    status: int, caplog: pytest.LogCaptureFixture
) -> None:
    """Services may repeat what was signed; of that nothing goes on."""
    caplog.set_level(logging.DEBUG)
    said: list[str] = []
    fields = "<Message>no</Message><StringToSign>AWS4-HMAC-SHA256 x</StringToSign>"
    answers = service_error(status, "SignatureDoesNotMatch", fields=fields)
    async with asking(answers) as (service, _):
        endpoint_url = service._sender._endpoint_url
        async with aioflux.open_store(
            "s3://bucket/p/",
            endpoint_url=endpoint_url,
            credentials=module_level,
            retry=RetryPolicy(max_attempts=2, initial_seconds=1e-3, max_seconds=1e-3),
        ) as store:
            await everything(store, said)
    text = caplog.text + "".join(said)
    assert SECRET not in text
    assert TOKEN not in text
    assert "AWS4-HMAC-SHA256" not in text


async def test_the_keys_are_sent_only_as_a_signature() -> None:
    access = S3Access(credentials=module_level)
    async with asking(hello(), access=access) as (service, asked):
        await service.get(ReadRequest("a"))
    assert SECRET not in repr(asked)
    assert asked[0].headers["x-amz-security-token"] == TOKEN


@pytest.mark.parametrize(
    "credentials",
    [
        Credentials("AKIDPLANTED", SECRET, TOKEN),
        S3Access(credentials=Credentials("AKIDPLANTED", SECRET, TOKEN)),
        Credentials("AKIDPLANTED", SECRET).get_frozen_credentials,
        S3Access(credentials=Credentials("AKIDPLANTED", SECRET).get_frozen_credentials),
    ],
)
def test_a_store_with_keys_does_not_pickle(credentials: Any) -> None:
    store = aioflux.open_store("s3://bucket/p/", credentials=credentials)
    with pytest.raises(TypeError, match="holds credentials and cannot be pickled") as error:
        pickle.dumps(store)
    assert SECRET not in str(error.value)


@pytest.mark.parametrize(
    "credentials",
    [
        None,
        module_level,
        S3Access(profile="work", region="eu-west-3"),
        S3Access(credentials=module_level, requester_pays=True),
    ],
)
def test_a_store_that_says_where_keys_are_pickles(credentials: Any) -> None:
    store = aioflux.open_store("s3://bucket/p/", credentials=credentials, endpoint_url="http://e")
    data = pickle.dumps(store)
    again = pickle.loads(data)
    assert SECRET.encode() not in data
    assert again._config.credentials == credentials
    assert again._config.endpoint_url == "http://e"


def test_settings_with_keys_do_not_pickle() -> None:
    with pytest.raises(TypeError, match="holds credentials and cannot be pickled"):
        pickle.dumps(S3Access(credentials=Credentials("AKIDPLANTED", SECRET)))


def test_settings_tell_whose_keys_they_use_and_not_which() -> None:
    """Two of them differ in their texts, by which filesystems are kept."""
    one, other = (S3Access(credentials=Credentials("AKIDPLANTED", SECRET)) for _ in range(2))
    assert repr(one) != repr(other)
    assert SECRET not in repr(one)
    assert repr(S3Access(region="eu-west-3")) == "S3Access(region='eu-west-3')"
