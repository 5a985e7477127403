"""Tokens of google-auth: one renewal at a time, before the old one expires."""

from __future__ import annotations

import asyncio
import random
import threading
from collections import Counter
from datetime import UTC, datetime

import google.auth.credentials
import pytest
from google.auth import exceptions
from hypothesis import given
from hypothesis import strategies as st

from aioflux import CredentialsError, TransientError
from aioflux._auth.access_token import NOT_READY, AnonymousToken, ProvidedToken, renewal_time
from aioflux._auth.google import GoogleToken, open_token

HOUR = 3600.0
START = 1_700_000_000.0


class Clock:
    def __init__(self) -> None:
        self.now = START

    def __call__(self) -> float:
        return self.now


class FakeCredentials(google.auth.credentials.Credentials):
    """Credentials on a fake clock, whose refresh the test controls."""

    def __init__(self, clock: Clock, *, token: str | None = None, seconds: float = HOUR) -> None:
        super().__init__()
        self.clock = clock
        self.token = token
        self.seconds = seconds
        self.failures: list[Exception] = []
        self.num_refreshed = 0
        self.under_way = 0
        self.most_under_way = 0
        self.may_end = threading.Event()
        self.may_end.set()
        self._until(clock.now + seconds if token else clock.now)

    def _until(self, moment: float) -> None:
        self.expiry = datetime.fromtimestamp(moment, UTC).replace(tzinfo=None)

    @property
    def expired(self) -> bool:
        return self.expiry is not None and (
            self.clock.now >= self.expiry.replace(tzinfo=UTC).timestamp() - 225
        )

    @property
    def valid(self) -> bool:
        return self.token is not None and not self.expired

    def refresh(self, request: object) -> None:
        self.under_way += 1
        self.most_under_way = max(self.most_under_way, self.under_way)
        assert self.may_end.wait(100)
        self.under_way -= 1
        if self.failures:
            raise self.failures.pop(0)
        self.num_refreshed += 1
        self.token = f"token-{self.num_refreshed}"
        self._until(self.clock.now + self.seconds)


@pytest.fixture
def clock() -> Clock:
    return Clock()


async def renewed(token: GoogleToken, value: str) -> None:
    """Wait, as requests do, until the renewal in the background has ended."""
    async with asyncio.timeout(100):
        while await token.get() != value:  # noqa: ASYNC110  a thread ends it
            await asyncio.sleep(0)


async def test_many_at_once_wait_for_one_refresh(clock: Clock) -> None:
    credentials = FakeCredentials(clock)
    credentials.may_end.clear()
    token = GoogleToken(credentials, clock=clock)
    waiting = [asyncio.create_task(token.get()) for _ in range(50)]
    for _ in range(5):
        await asyncio.sleep(0)
    assert not any(task.done() for task in waiting)
    credentials.may_end.set()
    assert await asyncio.gather(*waiting) == ["token-1"] * 50
    assert (credentials.num_refreshed, credentials.most_under_way) == (1, 1)


async def test_a_token_is_used_until_shortly_before_it_expires(clock: Clock) -> None:
    credentials = FakeCredentials(clock)
    token = GoogleToken(credentials, clock=clock)
    assert await token.get() == "token-1"
    clock.now += HOUR - 300
    assert await token.get() == "token-1"
    assert credentials.num_refreshed == 1


async def test_it_is_renewed_in_the_background_while_it_is_valid(clock: Clock) -> None:
    credentials = FakeCredentials(clock)
    token = GoogleToken(credentials, clock=clock)
    await token.get()
    clock.now += HOUR - 100
    credentials.may_end.clear()
    assert await token.get() == "token-1"  # the renewal is not awaited
    credentials.may_end.set()
    clock.now += 20
    await renewed(token, "token-2")
    await token.close()


async def test_an_expired_token_is_never_returned(clock: Clock) -> None:
    credentials = FakeCredentials(clock)
    token = GoogleToken(credentials, clock=clock)
    await token.get()
    clock.now += HOUR + 1
    assert await token.get() == "token-2"


async def test_a_renewal_that_fails_while_the_token_is_valid_is_repeated(clock: Clock) -> None:
    credentials = FakeCredentials(clock)
    token = GoogleToken(credentials, clock=clock)
    await token.get()
    credentials.failures = [exceptions.TransportError("no network")]
    clock.now += HOUR - 100
    for _ in range(100):
        assert await token.get() == "token-1"
    async with asyncio.timeout(100):
        while credentials.failures:  # noqa: ASYNC110  a thread ends it
            await asyncio.sleep(0)
    clock.now += 11
    await token.get()
    await renewed(token, "token-2")


async def test_failures_do_not_hammer_the_server(clock: Clock) -> None:
    credentials = FakeCredentials(clock)
    token = GoogleToken(credentials, clock=clock)
    await token.get()
    credentials.failures = [exceptions.TransportError("no network") for _ in range(50)]
    clock.now += HOUR - 100
    async with asyncio.timeout(100):
        while len(credentials.failures) == 50:
            await token.get()
            await asyncio.sleep(0)
    for _ in range(50):
        await token.get()
        await asyncio.sleep(0)
    assert len(credentials.failures) == 49
    await token.close()


async def test_a_token_that_expired_during_failures_is_not_returned(clock: Clock) -> None:
    credentials = FakeCredentials(clock)
    token = GoogleToken(credentials, clock=clock)
    await token.get()
    credentials.failures = [exceptions.TransportError("no network") for _ in range(5)]
    clock.now += HOUR - 5
    await token.get()
    clock.now += 6
    for _ in range(2):  # the running renewal, and another one
        with pytest.raises(TransientError, match="could not be refreshed"):
            await token.get()


async def test_an_error_says_what_to_do_and_contains_no_secret(clock: Clock) -> None:
    credentials = FakeCredentials(clock)
    credentials.failures = [exceptions.RefreshError("response: refresh_token=SECRET")]
    token = GoogleToken(credentials, clock=clock)
    with pytest.raises(CredentialsError, match="gcloud auth application-default login") as raised:
        await token.get()
    assert "SECRET" not in str(raised.value)
    assert "RefreshError" in str(raised.value)
    assert await token.get() == "token-1"


async def test_no_credentials_at_all_say_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GOOGLE_APPLICATION_CREDENTIALS", "/nowhere/key.json")
    says = (
        r"\(File /nowhere/key\.json was not found\): .*GOOGLE_APPLICATION_CREDENTIALS"
        r'.*for a public bucket pass credentials="anonymous"$'
    )
    with pytest.raises(CredentialsError, match=says):
        await GoogleToken().get()


async def test_a_token_that_is_valid_is_used_without_a_refresh(clock: Clock) -> None:
    credentials = FakeCredentials(clock, token="given")
    token = GoogleToken(credentials, clock=clock)
    assert await token.get() == "given"
    assert credentials.num_refreshed == 0


async def test_a_token_without_an_expiry_is_always_used(clock: Clock) -> None:
    credentials = FakeCredentials(clock, token="given")
    credentials.expiry = None
    token = GoogleToken(credentials, clock=clock)
    for _ in range(5):
        assert await token.get() == "given"
        clock.now += HOUR
    assert credentials.num_refreshed == 0


async def test_closing_cancels_a_renewal(clock: Clock) -> None:
    credentials = FakeCredentials(clock)
    credentials.may_end.clear()
    token = GoogleToken(credentials, clock=clock)
    waiting = asyncio.create_task(token.get())
    await asyncio.sleep(0)
    await token.close()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    credentials.may_end.set()


async def test_a_provider_may_be_a_function_or_a_coroutine_function() -> None:
    async def later() -> str:
        return "later"

    assert await ProvidedToken(lambda: "now").get() == "now"
    assert await ProvidedToken(later).get() == "later"


def test_the_token_source_of_credentials(clock: Clock) -> None:
    anonymous = google.auth.credentials.AnonymousCredentials()
    assert isinstance(open_token(None, emulator=True), AnonymousToken)
    assert isinstance(open_token(None, emulator=False), GoogleToken)
    assert isinstance(open_token(anonymous, emulator=False), AnonymousToken)
    assert isinstance(open_token(FakeCredentials(clock), emulator=True), GoogleToken)
    assert isinstance(open_token(lambda: "x", emulator=False), ProvidedToken)
    with pytest.raises(TypeError, match="not int"):
        open_token(1, emulator=False)
    with pytest.raises(CredentialsError, match="nor the path of a key file") as raised:
        open_token("ya29.secret", emulator=False)
    assert "ya29" not in str(raised.value)


class ScopedCredentials(FakeCredentials, google.auth.credentials.Scoped):
    """Credentials that need scopes."""

    requested: tuple[str, ...] = ()

    @property
    def requires_scopes(self) -> bool:
        return True

    def with_scopes(self, scopes: tuple[str, ...], default_scopes: object = None) -> object:
        made = ScopedCredentials(self.clock)
        made.requested = tuple(scopes)
        ScopedCredentials.latest = made
        return made


async def test_credentials_are_scoped_to_storage(clock: Clock) -> None:
    token = open_token(ScopedCredentials(clock), emulator=False)
    assert await token.get() == "token-1"
    assert ScopedCredentials.latest.requested[0].endswith("/devstorage.full_control")


async def test_an_anonymous_token_is_none() -> None:
    token = AnonymousToken()
    assert await token.get() is None
    await token.close()


async def test_many_rejections_of_one_token_cause_one_renewal(clock: Clock) -> None:
    credentials = FakeCredentials(clock)
    token = GoogleToken(credentials, clock=clock)

    async def use() -> str | None:
        value = await token.get()
        await asyncio.sleep(0)
        if value == "token-1":
            token.invalidate(value)
        return await token.get()

    assert set(await asyncio.gather(*(use() for _ in range(100)))) == {"token-2"}
    assert (credentials.num_refreshed, credentials.most_under_way) == (2, 1)
    token.invalidate("token-1")  # replaced since
    assert await token.get() == "token-2"


async def test_a_token_without_an_expiry_is_renewed_when_it_is_rejected(clock: Clock) -> None:
    credentials = FakeCredentials(clock, token="given")
    credentials.expiry = None
    token = GoogleToken(credentials, clock=clock)
    assert await token.get() == "given"
    token.invalidate("given")
    assert await token.get() == "token-1"


async def test_a_renewal_that_fails_after_a_rejection_returns_nothing(clock: Clock) -> None:
    credentials = FakeCredentials(clock)
    token = GoogleToken(credentials, clock=clock)
    token.invalidate(await token.get())
    credentials.failures = [exceptions.RefreshError("revoked") for _ in range(2)]
    for _ in range(2):
        with pytest.raises(CredentialsError, match="gcloud auth"):
            await token.get()
    assert await token.get() == "token-2"


@pytest.mark.parametrize(
    "failure",
    [
        exceptions.TransportError("no network"),
        exceptions.RefreshError("busy", retryable=True),
        exceptions.RefreshError("its cause is another"),
    ],
)
async def test_a_failure_of_the_network_is_transient(clock: Clock, failure: Exception) -> None:
    if not (isinstance(failure, exceptions.TransportError) or failure.retryable):
        failure.__cause__ = exceptions.TransportError("no network")
    credentials = FakeCredentials(clock)
    credentials.failures = [failure]
    token = GoogleToken(credentials, clock=clock)
    with pytest.raises(TransientError, match="this time"):
        await token.get()
    assert await token.get() == "token-1"


@pytest.mark.parametrize(
    ("value", "says"),
    [
        ("", "an empty string"),
        (None, "NoneType"),
        (b"token", "bytes"),
        ("token\n", "visible ASCII characters"),
        (" token", "visible ASCII characters"),
        ("tökén", "visible ASCII characters"),
    ],
)
async def test_an_error_about_a_token_that_cannot_be_sent_does_not_contain_it(
    value: object, says: str
) -> None:
    token = ProvidedToken(lambda: value)
    with pytest.raises(CredentialsError, match=says) as caught:
        await token.get()
    assert "oken\n" not in str(caught.value)
    assert "tökén" not in str(caught.value)


async def test_sources_without_renewal_accept_rejections() -> None:
    anonymous, provided = AnonymousToken(), ProvidedToken(lambda: "token")
    anonymous.invalidate("token")
    provided.invalidate("token")
    assert (await anonymous.get(), await provided.get()) == (None, "token")


async def test_the_token_of_a_function_is_used_for_a_while(clock: Clock) -> None:
    tokens = iter(["first", "second"])
    token = ProvidedToken(lambda: next(tokens), clock=clock)
    assert token.get_nowait() is NOT_READY
    assert [await token.get() for _ in range(3)] == ["first"] * 3
    assert token.get_nowait() == "first"
    clock.now += 5
    assert token.get_nowait() is NOT_READY
    assert await token.get() == "second"
    clock.now += 5
    with pytest.raises(RuntimeError, match="StopIteration"):
        await token.get()


async def test_a_function_is_called_again_when_its_token_is_rejected(clock: Clock) -> None:
    tokens = iter(["first", "second"])
    token = ProvidedToken(lambda: next(tokens), clock=clock)
    for _ in range(2):
        assert await token.get() == "first"
    token.invalidate("another")
    assert token.get_nowait() == "first"
    token.invalidate("first")
    assert token.get_nowait() is NOT_READY
    assert await token.get() == "second"
    token.invalidate("first")  # replaced since
    assert token.get_nowait() == "second"


async def test_many_requests_share_one_call_that_does_not_block_the_loop() -> None:
    threads: list[int] = []
    may_end = threading.Event()

    def provide() -> str:
        threads.append(threading.get_ident())
        assert may_end.wait(60)
        return "token"

    token = ProvidedToken(provide)
    waiting = [asyncio.create_task(token.get()) for _ in range(20)]
    await asyncio.sleep(0)
    may_end.set()  # set on the loop: a function that blocked it would never return
    assert await asyncio.gather(*waiting) == ["token"] * 20
    assert len(threads) == 1
    assert threads[0] != threading.get_ident()


async def test_requests_that_wait_for_one_call_share_its_failure() -> None:
    error = OSError("away")
    num_calls = 0

    async def provide() -> str:
        nonlocal num_calls
        num_calls += 1
        await asyncio.sleep(0)
        raise error

    token = ProvidedToken(provide)
    waiting = [asyncio.create_task(token.get()) for _ in range(20)]
    outcomes = await asyncio.gather(*waiting, return_exceptions=True)
    assert (outcomes, num_calls) == ([error] * 20, 1)


async def test_a_caller_that_is_cancelled_does_not_cancel_the_call_for_others() -> None:
    may_end = asyncio.Event()

    async def provide() -> str:
        await may_end.wait()
        return "token"

    token = ProvidedToken(provide)
    first, second = (asyncio.create_task(token.get()) for _ in range(2))
    await asyncio.sleep(0)
    first.cancel()
    may_end.set()
    assert await second == "token"
    assert first.cancelled()


async def test_a_provider_may_be_awaited() -> None:
    async def later() -> str:
        return "later"

    for token in (ProvidedToken(later), ProvidedToken(lambda: later())):
        assert token.get_nowait() is NOT_READY
        assert await token.get() == "later"
        assert token.get_nowait() == "later"


async def test_what_is_ready_of_each_kind_of_token() -> None:
    from google.oauth2.credentials import Credentials

    assert AnonymousToken().get_nowait() is None
    provided = ProvidedToken(lambda: "t")
    assert provided.get_nowait() is NOT_READY
    assert await provided.get() == "t" == provided.get_nowait()
    now = [1000.0]
    token = GoogleToken(Credentials("t"), clock=lambda: now[0])
    assert token.get_nowait() is NOT_READY
    assert await token.get() == "t" == token.get_nowait()
    now[0] += 10_000
    assert token.get_nowait() is NOT_READY
    await token.close()


def test_a_mapping_is_a_key_file_and_no_error_shows_it() -> None:
    user = {
        "type": "authorized_user",
        "client_id": "id",
        "client_secret": "s3cret",
        "refresh_token": "r3fresh",
    }
    assert isinstance(open_token(user, emulator=False), GoogleToken)
    assert isinstance(open_token("anonymous", emulator=False), AnonymousToken)
    for damaged in ({"type": "authorized_user"}, {"type": "service_account"}, {"type": "other"}):
        with pytest.raises(CredentialsError, match="the mapping given as credentials=") as failure:
            open_token({**damaged, "private_key": "s3cret"}, emulator=False)
        assert "s3cret" not in repr(failure.value)


# --- many ranks -------------------------------


@given(st.floats(1, 100_000), st.floats(0, 1, exclude_max=True))
def test_a_token_is_renewed_between_its_half_life_and_its_expiry(
    seconds: float, fraction: float
) -> None:
    renewed_at = renewal_time(seconds, 0.0, fraction)
    assert max(seconds - 240, seconds / 2) <= renewed_at < seconds


def test_ranks_that_started_together_renew_over_two_minutes() -> None:
    """8,000 ranks: no second has more than twice the mean number of renewals."""
    draw = random.Random(0)
    seconds = Counter(int(renewal_time(HOUR, 0.0, draw.random())) for _ in range(8000))
    assert len(seconds) == 120
    assert max(seconds.values()) < 2 * 8000 / 120


async def test_two_sources_renew_at_different_times(clock: Clock) -> None:
    """Each source of tokens draws its own time, without the module `random`, which is seeded."""
    times = set()
    for _ in range(8):
        random.seed(0)
        token = GoogleToken(FakeCredentials(clock), clock=clock)
        await token.get()
        times.add(token._renew_at)
        await token.close()
    assert len(times) == 8


async def test_the_identity_has_the_class_and_the_expiry_and_no_token(clock: Clock) -> None:
    identity = await GoogleToken(FakeCredentials(clock), clock=clock).identity()
    assert identity == ("FakeCredentials", START + HOUR)
    provided = await ProvidedToken(lambda: "planted-token").identity()
    assert provided == ("the function given as credentials=", None)
