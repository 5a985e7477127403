"""Connections compared with h11: what it rejects is rejected, what both read reads the same.

Ours rejects more only by a rule that `oracle.stricter_by` names.
"""

from __future__ import annotations

import asyncio
import random
from typing import TYPE_CHECKING

import h11
import pytest
from hypothesis import event, given, settings
from hypothesis import strategies as st

from aioflux._http.codec import MAX_HEAD_BYTES, encode_head
from aioflux._http.errors import ProtocolError
from tests.http.oracle import (
    H11,
    MAX_BODY_BYTES,
    FedConnection,
    Reading,
    Stream,
    damage,
    damaged,
    responses,
    stricter_by,
)

if TYPE_CHECKING:
    from collections.abc import Iterator

methods = st.sampled_from([b"GET", b"GET", b"GET", b"HEAD", b"PUT"])
destinations = st.sampled_from(["memory", "bytes", "function", "none"])
places = st.lists(st.floats(0, 1), max_size=6)


@pytest.fixture(scope="module", autouse=True)
def running_loop() -> Iterator[None]:
    """A loop for the futures; nothing here waits, the tests feed every byte."""
    loop = asyncio.new_event_loop()
    asyncio._set_running_loop(loop)
    yield
    asyncio._set_running_loop(None)
    loop.close()


def ways_to_cut(length: int, somewhere: list[float]) -> list[list[int]]:
    """Whole, byte by byte, and at some places."""
    bytewise = list(range(length)) if length < 2000 else list(range(0, length, 997))
    return [[], bytewise, [int(place * length) for place in somewhere]]


def check_alike(stream: Stream, theirs: Reading, ours: Reading) -> str:
    """Both read the same, both reject, or ours rejects by a rule; return which."""
    if ours.error is None:
        assert theirs.error is None, f"h11 rejects: {theirs.error}"
        assert ours.as_tuple() == theirs.as_tuple()
        assert ours.is_reusable == theirs.is_reusable
        return "read alike"
    rules = list(stricter_by(stream.data))
    if len(theirs.payload) > MAX_BODY_BYTES:
        rules.append("a body longer than its destination")
    if theirs.error is None:
        assert rules, f"rejected without a rule: {ours.error}"
        return f"rejected for {rules[0]}"
    # The payload before a failure is that of h11, for a caller who resumes there.
    assert rules or theirs.payload.startswith(ours.payload)
    return "rejected alike"


@given(responses(), methods, destinations, places)
@settings(max_examples=max(20, settings().max_examples // 2))
def test_a_valid_response_is_read_as_h11_reads_it(
    stream: Stream, method: bytes, into: str, somewhere: list[float]
) -> None:
    assert set(stricter_by(stream.data)) <= {"a head of over 64 KiB"}
    theirs = H11().read(method, stream)
    for cuts in ways_to_cut(len(stream.data), somewhere):
        outcome = check_alike(
            stream, theirs, FedConnection().read(method, stream, cuts=cuts, into=into)
        )
        assert outcome in {"read alike", "rejected for a head of over 64 KiB"}
    event(outcome)


@given(damaged(), methods, destinations, places)
@settings(max_examples=max(20, settings().max_examples // 2))
def test_a_damaged_response_is_rejected_or_read_as_h11_reads_it(
    stream: Stream, method: bytes, into: str, somewhere: list[float]
) -> None:
    theirs = H11().read(method, stream)
    for cuts in ways_to_cut(len(stream.data), somewhere):
        outcome = check_alike(
            stream, theirs, FedConnection().read(method, stream, cuts=cuts, into=into)
        )
    event(outcome)


@given(responses(), st.integers(0, 2**64 - 1))
@settings(max_examples=max(20, settings().max_examples // 4))
def test_many_ways_to_damage_a_response_are_rejected_or_read_as_h11_reads_them(
    valid: Stream, seed: int
) -> None:
    rng = random.Random(seed)
    for _ in range(20):
        stream = Stream(damage(valid.data, rng))
        method = rng.choice([b"GET", b"GET", b"HEAD", b"PUT"])
        into = rng.choice(["memory", "bytes", "function", "none"])
        theirs = H11().read(method, stream)
        cuts = [rng.randrange(len(stream.data) + 1) for _ in range(rng.randrange(4))]
        check_alike(stream, theirs, FedConnection().read(method, stream, cuts=cuts, into=into))


@given(st.one_of(responses(), damaged()), methods, destinations)
@settings(max_examples=max(20, settings().max_examples // 20))
def test_a_response_cut_in_two_at_any_byte_is_the_same_response(
    stream: Stream, method: bytes, into: str
) -> None:
    whole = FedConnection().read(method, stream, cuts=[], into=into)
    length = len(stream.data)
    for cut in range(1, length) if length < 2000 else range(length - 40, length):
        halves = FedConnection().read(method, stream, cuts=[cut], into=into)
        assert halves.as_tuple() == whole.as_tuple()
        assert type(halves.error) is type(whole.error)
        assert halves.is_reusable == whole.is_reusable


@given(st.lists(st.tuples(responses(), methods), min_size=2, max_size=4), destinations)
@settings(max_examples=max(20, settings().max_examples // 2))
def test_responses_on_one_connection_are_read_as_h11_reads_them(
    pairs: list[tuple[Stream, bytes]], into: str
) -> None:
    connection, oracle = FedConnection(), H11()
    for stream, method in pairs:
        theirs = oracle.read(method, stream)
        ours = connection.read(method, stream, cuts=[], into=into)
        check_alike(stream, theirs, ours)
        if ours.error is not None or not ours.is_reusable:
            break


@given(responses(), methods, places)
@settings(max_examples=max(20, settings().max_examples // 4))
def test_a_response_is_the_same_for_every_destination(
    stream: Stream, method: bytes, somewhere: list[float]
) -> None:
    """Also in one piece, and after others like it."""
    expected = FedConnection().read(method, stream, cuts=range(len(stream.data)), into="memory")
    for cuts in ways_to_cut(len(stream.data), somewhere):
        connection = FedConnection()
        for _ in range(12 if expected.is_reusable and not cuts else 1):
            reading = connection.read(method, stream, cuts=cuts, into="bytes")
            assert reading.as_tuple() == expected.as_tuple()
            assert type(reading.error) is type(expected.error)
            assert reading.is_reusable == expected.is_reusable


@given(st.lists(st.binary(max_size=50), max_size=4), st.booleans())
def test_a_request_is_received_as_it_was_sent(pieces: list[bytes], is_tls: bool) -> None:
    connection = FedConnection(is_tls=is_tls)
    length = len(b"".join(pieces))
    head = encode_head(b"PUT", b"/k", fixed=b"Host: a\r\nContent-Length: %d\r\n" % length)
    connection.send(head, pieces)
    server = h11.Connection(h11.SERVER)
    server.receive_data(bytes(connection.transport.sent))
    events = []
    while type(event := server.next_event()) is not h11.EndOfMessage:
        events.append(event)
    assert (events[0].method, events[0].target) == (b"PUT", b"/k")
    assert b"".join(event.data for event in events[1:]) == b"".join(pieces)


@pytest.mark.parametrize("over", [-1, 0, 1])
@pytest.mark.parametrize("step", [1, 1000, 10**6])
def test_a_head_is_read_up_to_64_kib(over: int, step: int) -> None:
    start = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\nPad: "
    pad = b"p" * (MAX_HEAD_BYTES - len(start) - 4 + over)
    stream = Stream(start + pad + b"\r\n\r\nok")
    cuts = range(0, len(stream.data), step)
    reading = FedConnection().read(b"GET", stream, cuts=cuts, into="memory")
    if over > 0:
        assert isinstance(reading.error, ProtocolError)
    else:
        assert (reading.error, reading.payload) == (None, b"ok")
