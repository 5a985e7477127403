"""A server that is away: what a command prints meanwhile, and how long it waits."""

from __future__ import annotations

import re
import time
from typing import TYPE_CHECKING, Any

import pytest

from perf.servers._ports import free_ports

if TYPE_CHECKING:
    from collections.abc import Callable


@pytest.fixture
def away(monkeypatch: pytest.MonkeyPatch) -> str:
    """The url of a server that is not there, and no setting of an earlier command."""
    monkeypatch.setenv("AIOFLUX_CONNECT_DEADLINE", "3")
    [port] = free_ports(1)
    return f"http://127.0.0.1:{port}"


def seconds_of(call: Callable[[], Any]) -> tuple[float, Any]:
    started_at = time.monotonic()
    result = call()
    return time.monotonic() - started_at, result


@pytest.mark.parametrize("command", ["ls", "cat", "stat", "rm"])
def test_a_command_prints_one_line_after_a_second(aioflux: Any, away: str, command: str) -> None:
    """The address, the cause, and how long it goes on; then the error."""
    ended = aioflux("--connect-deadline", "2.5", command, "gs://b/a", "--endpoint-url", away)
    assert ended.status == 1
    line, error, *_ = ended.err.splitlines()
    assert f"no connection to {away}: [Errno 111] Connect" in line
    assert re.search(r"; trying again for up to [012] s$", line)
    assert error.startswith("Error: could not ")
    assert f"no connection to {away}: " in error
    assert "RetryPolicy.connect_deadline_seconds" in error


def test_a_command_gives_up_after_three_seconds_by_default(aioflux: Any, away: str) -> None:
    seconds, ended = seconds_of(lambda: aioflux("ls", "gs://b", "--endpoint-url", away))
    assert ended.status == 1
    assert re.search(r"attempts in [3-9]\.\d s; RetryPolicy.connect_deadline_seconds", ended.err)
    assert seconds < 60, "on a busy machine; alone it takes 3 s"


@pytest.mark.parametrize("value", ["0", "soon"])
def test_a_wrong_deadline_is_an_error(aioflux: Any, away: str, value: str) -> None:
    ended = aioflux("--connect-deadline", value, "ls", "gs://b", "--endpoint-url", away)
    assert ended.status in {1, 2}
    assert "connect" in ended.err
