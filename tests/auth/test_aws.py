"""AWS keys: found by botocore in a thread, renewed before they expire, one renewal at a time."""

from __future__ import annotations

import asyncio
import threading
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

import pytest
from botocore import UNSIGNED
from botocore.credentials import Credentials, RefreshableCredentials
from botocore.exceptions import (
    CredentialRetrievalError,
    EndpointConnectionError,
    NoCredentialsError,
)
from botocore.session import Session

from aioflux import CredentialsError, S3Access, TransientError
from aioflux._auth.access_token import NOT_READY
from aioflux._auth.aws import AWSSource
from aioflux._auth.sigv4 import Keys

if TYPE_CHECKING:
    from pathlib import Path


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


class Renewed:
    """Credentials that expire on a fake clock, and are renewed by the thread that reads them."""

    def __init__(self, clock: Clock, *, seconds: float = 3600.0) -> None:
        self.clock = clock
        self.ends_at = clock.now + seconds
        self.num_renewed = 0
        self.failure: Exception | None = None
        self.threads: set[int] = set()
        self.may_end = threading.Event()
        self.may_end.set()

    def refresh_needed(self, refresh_in: float) -> bool:
        return self.ends_at - self.clock.now < refresh_in

    def get_frozen_credentials(self) -> Credentials:
        self.threads.add(threading.get_ident())
        assert self.may_end.wait(100)
        if self.failure is not None:
            raise self.failure
        if self.refresh_needed(15 * 60):
            self.num_renewed += 1
            self.ends_at = self.clock.now + 3600
        return Credentials("id", f"secret-{self.num_renewed}", "token")


def source_of(credentials: object, clock: Clock | None = None) -> AWSSource:
    return AWSSource(S3Access(credentials=credentials), clock=clock or Clock())


async def renewed(source: AWSSource, keys: Keys) -> None:
    """Wait, as requests do, until the renewal in the background has ended."""
    async with asyncio.timeout(100):
        while await source.get() != keys:  # noqa: ASYNC110  a thread ends it
            await asyncio.sleep(0)


async def test_keys_are_found_once_and_off_the_loop() -> None:
    clock = Clock()
    credentials = Renewed(clock)
    source = source_of(credentials, clock)
    assert source.get_nowait() is NOT_READY
    found = await asyncio.gather(*[source.get() for _ in range(5)])
    assert found[0] == Keys("id", "secret-0", "token")
    assert all(each is found[0] for each in found)
    assert source.get_nowait() is found[0]
    assert threading.get_ident() not in credentials.threads


async def test_keys_are_renewed_in_the_background_before_they_expire() -> None:
    clock = Clock()
    credentials = Renewed(clock)
    source = source_of(credentials, clock)
    first = await source.get()
    clock.now = credentials.ends_at - 300
    credentials.may_end.clear()
    assert await source.get() is first  # no wait while they are valid
    credentials.may_end.set()
    await renewed(source, Keys("id", "secret-1", "token"))
    await source.close()


async def test_the_renewal_of_expired_keys_is_awaited() -> None:
    clock = Clock()
    credentials = Renewed(clock)
    source = source_of(credentials, clock)
    await source.get()
    clock.now = credentials.ends_at - 30
    assert await source.get() == Keys("id", "secret-1", "token")


async def test_rejected_keys_are_found_again() -> None:
    clock = Clock()
    credentials = Renewed(clock)
    source = source_of(credentials, clock)
    first = await source.get()
    assert isinstance(first, Keys)
    credentials.ends_at = clock.now
    source.invalidate(first)
    assert source.get_nowait() is NOT_READY
    second = await source.get()
    assert second == Keys("id", "secret-1", "token")
    source.invalidate(first)  # replaced since
    assert source.get_nowait() is second


@pytest.mark.parametrize(
    ("failure", "expected"),
    [
        (EndpointConnectionError(endpoint_url="http://hush"), TransientError),
        (CredentialRetrievalError(provider="process", error_msg="hush"), CredentialsError),
        (NoCredentialsError(), CredentialsError),
        (RuntimeError("hush"), CredentialsError),
    ],
)
async def test_failures_name_their_class_and_nothing_else(
    failure: Exception, expected: type[Exception]
) -> None:
    """The text of a failure may contain a secret."""
    credentials = Renewed(Clock())
    credentials.failure = failure
    with pytest.raises(expected) as error:
        await source_of(credentials).get()
    assert type(failure).__name__ in str(error.value)
    assert "hush" not in str(error.value)
    assert error.value.__cause__ is None


async def test_a_function_is_called_again_after_a_while() -> None:
    clock = Clock()
    given = iter([("id", "1"), ("id", "2")])
    source = source_of(lambda: next(given), clock)
    first = await source.get()
    assert source.get_nowait() is first
    clock.now += 5
    assert source.get_nowait() is NOT_READY
    assert await source.get() == Keys("id", "2")


async def as_awaitable() -> tuple[str, str]:
    return "id", "secret"


@pytest.mark.parametrize(
    "provider",
    [
        lambda: ("id", "secret"),
        lambda: ("id", "secret", ""),
        lambda: Credentials("id", "secret"),
        as_awaitable,
    ],
)
async def test_a_function_may_return_keys_in_several_forms(provider: Any) -> None:
    source = source_of(provider)
    first = await source.get()
    assert first == Keys("id", "secret")
    assert await source.get() is first


@pytest.mark.parametrize("given", [None, "text", ("id",), ("id", ""), ("id", 5), {}])
async def test_a_function_that_returns_no_keys_is_an_error(given: object) -> None:
    with pytest.raises(CredentialsError, match="must return botocore credentials"):
        await source_of(lambda: given).get()


async def test_keys_that_no_header_accepts_are_rejected() -> None:
    with pytest.raises(CredentialsError, match="copy it again") as error:
        await source_of(lambda: ("id\r\nX: y", "secret")).get()
    assert "X: y" not in str(error.value)


def test_other_types_are_a_type_error() -> None:
    with pytest.raises(TypeError, match="not int"):
        source_of(5)


def test_settings_that_exclude_each_other_are_rejected() -> None:
    with pytest.raises(ValueError, match="neither credentials nor a profile"):
        S3Access(anonymous=True, profile="p")
    with pytest.raises(ValueError, match="not both"):
        S3Access(credentials=lambda: None, profile="p")
    with pytest.raises(ValueError, match="needs signed requests"):
        S3Access(anonymous=True, requester_pays=True)
    with pytest.raises(ValueError, match="addressing"):
        S3Access(addressing="dns")  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="anonymous"):
        S3Access(anonymous="no")  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="region"):
        S3Access(region=None)  # type: ignore[arg-type]


@pytest.fixture
def no_aws(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An environment in which botocore finds nothing."""
    import os

    for name in tuple(os.environ):
        if name.startswith("AWS_"):
            monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "config"))
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "credentials"))
    return tmp_path


async def test_a_profile_has_keys_region_endpoint_and_addressing(no_aws: Path) -> None:
    (no_aws / "config").write_text(
        "[profile work]\nregion = eu-west-3\nendpoint_url = http://there\n"
        "s3 =\n  addressing_style = virtual\n"
    )
    (no_aws / "credentials").write_text(
        "[work]\naws_access_key_id = id\naws_secret_access_key = secret\n"
    )
    source = AWSSource(S3Access(profile="work"))
    settings = await source.settings()
    assert (settings.region, settings.endpoint_url) == ("eu-west-3", "http://there")
    assert settings.addressing == "virtual"
    assert await source.get() == Keys("id", "secret")


async def test_the_environment_precedes_the_profile(
    no_aws: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (no_aws / "config").write_text("[default]\nregion = eu-west-3\n")
    monkeypatch.setenv("AWS_REGION", "us-west-1")
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "id")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "secret")
    monkeypatch.setenv("AWS_SESSION_TOKEN", "token")
    source = AWSSource(S3Access())
    assert (await source.settings()).region == "us-west-1"
    assert await source.get() == Keys("id", "secret", "token")


async def test_a_profile_that_does_not_exist_is_an_error(no_aws: Path) -> None:
    with pytest.raises(CredentialsError, match="profile"):
        await AWSSource(S3Access(profile="nobody")).settings()


async def test_no_credentials_say_how_to_sign_in(no_aws: Path) -> None:
    with pytest.raises(CredentialsError, match="aws sso login"):
        await AWSSource(S3Access()).get()


async def test_anonymous_access_has_no_keys(no_aws: Path) -> None:
    source = AWSSource(S3Access(anonymous=True))
    assert source.get_nowait() is None
    assert await source.get() is None


@pytest.mark.parametrize("is_named", [False, True], ids=["no-profile", "profile"])
async def test_keys_of_the_environment_come_before_a_profile_that_is_not_named(
    is_named: bool, no_aws: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (no_aws / "credentials").write_text(
        "[default]\naws_access_key_id = d\naws_secret_access_key = s\n"
        "[work]\naws_access_key_id = w\naws_secret_access_key = s\n"
    )
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "e")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "s")
    monkeypatch.setenv("AWS_SESSION_TOKEN", "t")
    keys = await AWSSource(S3Access(profile="work" if is_named else "")).get()
    assert keys == (Keys("w", "s", "") if is_named else Keys("e", "s", "t"))


async def test_the_older_name_of_the_session_token_comes_first_as_in_botocore(
    no_aws: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = ("ACCESS_KEY_ID", "SECRET_ACCESS_KEY", "SESSION_TOKEN", "SECURITY_TOKEN")
    for name in names:
        monkeypatch.setenv(f"AWS_{name}", name.lower())
    found = Session().get_credentials()
    assert found is not None
    expected = Keys(found.access_key, found.secret_key, found.token)
    assert await AWSSource(S3Access()).get() == expected
    assert expected.token == "security_token"


async def test_stores_share_the_event_handlers_of_botocore_and_nothing_else(
    no_aws: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Handlers that one session adds stay its own, and keys are found for each."""
    events, keys = [], []
    (no_aws / "credentials").write_text(
        "".join(
            f"[{name}]\naws_access_key_id = {name}\naws_secret_access_key = s\n"
            for name in ("one", "other")
        )
    )
    for name in ("one", "other"):
        monkeypatch.setenv("AWS_PROFILE", name)
        source = AWSSource(S3Access())
        keys.append(await source.get())
        events.append(source._session.get_component("event_emitter"))
    assert [each and each.access_key for each in keys] == ["one", "other"]
    one, other = events
    one.register("mine", lambda **_: "heard")
    assert [response for _, response in one.emit("mine")] == ["heard"]
    assert other.emit("mine") == []
    builtin = "choose-signer.sts.AssumeRoleWithSAML"
    _, response = other.emit_until_response(builtin)
    _, expected = Session().get_component("event_emitter").emit_until_response(builtin)
    assert response is expected is UNSIGNED


async def test_a_session_of_the_caller_is_used_by_one_thread_at_a_time() -> None:
    """Each event loop of a store has a source of its own, with the same session."""
    inside: list[int] = []
    most = 0

    class OneSession:
        def get_credentials(self) -> Credentials:
            nonlocal most
            inside.append(threading.get_ident())
            most = max(most, len(inside))
            threading.Event().wait(0.05)  # another thread would come in meanwhile
            inside.pop()
            return Credentials("id", "secret")

    session = OneSession()
    keys = await asyncio.gather(*(source_of(session).get() for _ in range(3)))
    assert keys == [Keys("id", "secret", "")] * 3
    assert most == 1


async def test_sources_renew_at_different_times() -> None:
    """Ranks that started together have keys that expire together."""
    clock = Clock()
    sources = [source_of(Renewed(clock), clock) for _ in range(40)]
    for source in sources:
        await source.get()
    renewed_at = []
    for minutes in (44, 46, 49, 53):
        clock.now = 1000.0 + 60 * minutes
        for source in sources:
            await source.get()
        async with asyncio.timeout(100):
            while any(source._renewal.is_running for source in sources):  # noqa: ASYNC110
                await asyncio.sleep(0)
        renewed_at.append(sum(source._credentials.num_renewed for source in sources))
    assert renewed_at[0] == 0
    assert 0 < renewed_at[2] < 40
    assert renewed_at[3] == 40


async def test_the_identity_has_the_ends_of_the_key_id_and_no_secret(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    credentials = Credentials("AKIA0123456789ABCDEF", "planted", "planted", method="sso")
    monkeypatch.setenv("AWS_PROFILE", "work")
    identity = await source_of(credentials).identity()
    assert identity == ("sso of botocore, profile work, key AKIA...CDEF", None)
    identity = await source_of(lambda: ("short", "planted")).identity()
    assert identity == ("the function given as credentials=, key ...", None)


async def test_the_identity_of_temporary_keys_has_their_expiry() -> None:
    until = datetime(2030, 1, 1, tzinfo=UTC)
    credentials = RefreshableCredentials("id", "planted", "planted", until, dict, method="iam-role")
    _, expires_at = await source_of(credentials).identity()
    assert expires_at == until.timestamp()
