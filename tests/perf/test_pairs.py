"""How a match is played: in turn, each in a process of its own, and what becomes of failures."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import time
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Any

import pytest

from perf import _pairs
from perf._pairs import addressed, is_hopeless, last_error, play, warm_up_work
from perf._samples import Pair, Result, Sample
from perf.scenarios import Match, Side
from perf.servers import Server, ServerSpec
from perf.work import WARM_UP_BYTES, Work

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")

STAND_INS = """
import asyncio, os, subprocess, sys, time, types
from pathlib import Path

from perf import work as runner
from perf._meter import steady as steady_part

MIB = 1 << 20

def log(work, what):
    with Path(work.bucket, "log").open("a") as target:
        target.write(f"{what} {work.peer} {os.getpid()} {work.num_objects}\\n")

async def steady(work):
    log(work, "begin")
    await asyncio.sleep(0.05)
    log(work, "end")
    return work.size_bytes * work.num_objects

async def short(work):
    return work.size_bytes * work.num_objects - 1

async def endless(work):
    child = subprocess.Popen(["sleep", "1000"])
    Path(work.bucket, "child").write_text(str(child.pid))
    await asyncio.sleep(1000)

async def asleep(work):
    log(work, "begin")
    os.fork()
    Path(work.bucket, f"asleep-{os.getpid()}").touch()
    time.sleep(1000)

async def killed(work):
    os.kill(os.getpid(), 9)

async def late(work):
    if work.num_objects > work.in_flight:
        raise OSError("so many are too many")
    return work.size_bytes * work.num_objects

async def hungry(work):
    held = bytearray((64 if work.num_objects > work.in_flight else 256) * MIB)
    held[::4096] = bytes(len(held) // 4096)
    return work.size_bytes * work.num_objects

async def opened(work):
    async def move(work):
        held = bytearray((4 if work.num_objects > work.in_flight else 128) * MIB)
        held[::4096] = bytes(len(held) // 4096)
        await asyncio.sleep(0.05 if work.num_objects > work.in_flight else 1)
        return work.size_bytes * work.num_objects

    num_bytes = await steady_part(move, work)
    await asyncio.sleep(1)
    return num_bytes

async def busy(work):
    if work.num_objects > work.in_flight:
        subprocess.run([sys.executable, "-c", "sum(range(10_000_000))"])
    return work.size_bytes * work.num_objects

for name in ("steady", "short", "endless", "asleep", "killed", "late", "hungry", "opened", "busy"):
    module = types.ModuleType(f"perf.peers.{name}")
    module.get_many = globals()[name]
    sys.modules[module.__name__] = module
runner.main()
"""
"""Contenders that touch no server, in a process that is otherwise like any contender's."""


def work(peer: str, place: Path) -> Work:
    return Work(
        peer=peer,
        operation="get_many",
        url="",
        bucket=str(place),
        size_bytes=10,
        num_objects=8,
        in_flight=2,
    )


def played(
    place: Path,
    ours: str,
    theirs: str,
    *,
    num_pairs: int = 1,
    has_warm_up: bool = False,
    limit_seconds: float = 200.0,
) -> list[Pair]:
    """Play a match between two stand-ins."""
    script = place / "stand_ins.py"
    script.write_text(STAND_INS)
    match = Match(
        ours=Side(work=work(ours, place), server=ServerSpec()),
        theirs=Side(work=work(theirs, place), server=ServerSpec(tls=True)),
    )
    kept: list[Pair] = []
    pairs = play(
        match,
        lambda spec: Server(url=f"tls={spec.tls}", pids=(os.getpid(),), kind="embedded"),
        num_pairs=num_pairs,
        has_warm_up=has_warm_up,
        limit_seconds=limit_seconds,
        keep=kept.append,
        command=(sys.executable, "-c", f"import runpy; runpy.run_path({str(script)!r})"),
    )
    assert pairs == kept
    return pairs


def test_contenders_take_turns_each_sample_in_a_process_of_its_own(tmp_path: Path) -> None:
    pairs = played(tmp_path, "steady", "steady", num_pairs=2, has_warm_up=True)
    assert [(pair.index, pair.is_warm_up) for pair in pairs] == [(0, True), (1, False), (2, False)]
    log = [line.split() for line in (tmp_path / "log").read_text().splitlines()]
    assert len({pid for _, _, pid, _ in log}) == 6
    # Within a pair the second begins when the first has ended; the pair that warms up is smaller.
    for pair, expected in enumerate(("1", "8", "8")):
        lines = log[8 * pair + 4 : 8 * pair + 8]
        assert [line[0] for line in lines] == ["begin", "end", "begin", "end"]
        assert lines[0][2] == lines[1][2] != lines[2][2] == lines[3][2]
        assert {line[3] for line in lines} == {expected}


def test_each_side_has_its_own_server(tmp_path: Path) -> None:
    (pair,) = played(tmp_path, "steady", "steady")
    assert (pair.ours.work.url, pair.theirs.work.url) == ("tls=False", "tls=True")
    assert pair.ours.work.server_pids == (os.getpid(),)


def test_sample_reports_what_it_took(tmp_path: Path) -> None:
    (pair,) = played(tmp_path, "steady", "hungry")
    assert pair.ours.result is not None
    assert pair.ours.result.seconds >= 0.05
    assert (pair.ours.result.num_objects, pair.ours.result.num_bytes) == (8, 80)


def test_peak_is_that_of_the_measured_part_alone(tmp_path: Path) -> None:
    (pair,) = played(tmp_path, "hungry", "steady")
    assert pair.ours.result is not None
    grown = pair.ours.result.peak_bytes - pair.ours.result.idle_bytes
    # 64 MiB then, and 256 MiB in the warm-up.
    assert 60 << 20 <= grown <= 80 << 20


def test_opening_and_closing_are_not_measured(tmp_path: Path) -> None:
    (pair,) = played(tmp_path, "opened", "steady")
    assert pair.ours.result is not None
    assert 0.05 <= pair.ours.result.seconds < 1
    assert pair.ours.result.peak_bytes - pair.ours.result.idle_bytes < 64 << 20
    assert pair.ours.result.num_faults > 0


def test_cpu_time_of_children_is_the_contenders(tmp_path: Path) -> None:
    (pair,) = played(tmp_path, "busy", "steady")
    assert pair.ours.result is not None
    assert pair.theirs.result is not None
    assert pair.ours.result.cpu_seconds > pair.theirs.result.cpu_seconds + 0.05


@pytest.mark.parametrize(
    ("peer", "error"),
    [
        ("short", "RuntimeError: short moved 19 bytes: "),
        ("late", "OSError: so many are too many"),
        ("killed", "exited with status -9"),
        ("nosuch", "ModuleNotFoundError: No module named 'perf.peers.nosuch'"),
    ],
)
def test_failed_sample_says_why_and_spares_the_other(peer: str, error: str, tmp_path: Path) -> None:
    (pair,) = played(tmp_path, "steady", peer)
    assert pair.theirs.result is None
    assert pair.theirs.error.startswith(error)
    assert pair.ours.result is not None
    assert not pair.ours.error


def test_contender_that_hangs_is_ended_with_its_children_and_the_match_with_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    warm_up, child = _pairs._warm_up, tmp_path / "child"

    async def hanging(contender: Any, work: Work, limit_seconds: float) -> Sample | None:
        if work.peer == "endless":
            limit_seconds = 0.5
            while not (child.exists() and child.read_text()):  # noqa: ASYNC110  another process does
                await asyncio.sleep(0.02)
        return await warm_up(contender, work, limit_seconds)

    # Its time begins when it hangs: until then it starts, as long as that takes.
    monkeypatch.setattr(_pairs, "_warm_up", hanging)
    (pair,) = played(tmp_path, "steady", "endless", num_pairs=5)
    assert pair.theirs.error == "had not warmed up after 0.5 s"
    assert pair.theirs.is_too_slow
    wait_until(lambda: not is_running(int(child.read_text())))


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", ""),
        ("nobody waits\n", "nobody waits"),
        ("Traceback (most recent call last):\n  File x\n    y()\nKeyError: 1\n", "KeyError: 1"),
        (
            (
                "warning\nTraceback (most recent call last):\n  a\nKeyError: 1\n\nDuring ...\n\n"
                "Traceback (most recent call last):\n  b\nx.Generic: broken {\n    at: 1,\n}\n"
            ),
            "x.Generic: broken { at: 1, }",
        ),
    ],
)
def test_error_is_that_of_the_last_traceback(text: str, expected: str) -> None:
    assert last_error(text) == expected


def test_contender_ends_when_no_one_waits_for_it(tmp_path: Path) -> None:
    script = tmp_path / "stand_ins.py"
    script.write_text(STAND_INS)
    done = subprocess.run(
        [sys.executable, str(script), json.dumps(asdict(work("steady", tmp_path))), "--wait"],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "PYTHONPATH": os.getcwd()},
    )
    assert (done.returncode, done.stdout) == (1, "ready\n")
    assert "standard input was closed before the measurement" in done.stderr


def test_contender_and_what_it_forked_end_when_its_parent_is_killed(tmp_path: Path) -> None:
    script = tmp_path / "stand_ins.py"
    script.write_text(STAND_INS)
    command = [sys.executable, str(script), json.dumps(asdict(work("asleep", tmp_path)))]
    parent = subprocess.Popen(
        [sys.executable, "-c", f"import subprocess; subprocess.run({command!r})"],
        env={**os.environ, "PYTHONPATH": os.getcwd()},
    )
    try:
        wait_until(lambda: len(list(tmp_path.glob("asleep-*"))) == 2)
        pids = [int(path.name.removeprefix("asleep-")) for path in tmp_path.glob("asleep-*")]
        assert parent.pid not in pids
    finally:
        parent.kill()
        parent.wait()
    wait_until(lambda: not any(is_running(pid) for pid in pids))


def wait_until(is_so: Callable[[], bool]) -> None:
    """Wait for something, but not for ever."""
    until = time.monotonic() + 200
    while not is_so():
        assert time.monotonic() < until
        time.sleep(0.02)


def is_running(pid: int) -> bool:
    """Whether there is a process that is more than a name."""
    try:
        with open(f"/proc/{pid}/stat") as stat:
            return stat.read().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def test_work_is_done_at_once_where_no_one_asks_to_wait(tmp_path: Path) -> None:
    script = tmp_path / "stand_ins.py"
    script.write_text(STAND_INS)
    done = subprocess.run(
        [sys.executable, str(script), json.dumps(asdict(work("steady", tmp_path)))],
        capture_output=True,
        text=True,
        check=True,
        env={**os.environ, "PYTHONPATH": os.getcwd()},
    )
    told = json.loads(done.stdout)
    assert told["work"]["num_objects"] == told["num_objects"] == 8
    assert Result.from_json(told).num_bytes == 80


def test_what_fails_twice_is_not_tried_again(tmp_path: Path) -> None:
    assert len(played(tmp_path, "steady", "late", num_pairs=5)) == 2


def sample(*, error: str = "", is_too_slow: bool = False, place: Path) -> Sample:
    return Sample(work=work("steady", place), error=error, is_too_slow=is_too_slow)


@pytest.mark.parametrize(
    ("errors", "is_too_slow", "expected"),
    [
        (("", ""), False, False),
        (("no", ""), False, False),
        (("no", "no"), False, True),
        (("no", ""), True, True),
    ],
)
def test_match_is_hopeless_after_two_failures_or_one_that_took_too_long(
    errors: tuple[str, ...], is_too_slow: bool, expected: bool, tmp_path: Path
) -> None:
    pairs = [
        Pair(
            index=index,
            is_warm_up=False,
            ours=sample(place=tmp_path),
            theirs=sample(error=error, is_too_slow=is_too_slow and bool(error), place=tmp_path),
        )
        for index, error in enumerate(errors)
    ]
    assert is_hopeless(pairs) is expected


def test_work_is_addressed_to_its_server_and_eased_for_a_warm_up(tmp_path: Path) -> None:
    server = Server(url="https://h", ca_file="/ca", pids=(1, 2), kind="nginx")
    found = addressed(work("steady", tmp_path), server)
    assert (found.url, found.ca_file, found.server_pids) == ("https://h", "/ca", (1, 2))
    assert warm_up_work(replace(found, num_objects=200)).num_objects == 20
    assert warm_up_work(found).num_objects == 1
    large = replace(found, num_objects=1, size_bytes=100 * WARM_UP_BYTES)
    assert (warm_up_work(large).num_objects, warm_up_work(large).size_bytes) == (1, WARM_UP_BYTES)
