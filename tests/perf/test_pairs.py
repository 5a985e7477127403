"""How a match is played: in turn, each in a process of its own, and what becomes of failures."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from perf._pairs import last_error, play
from perf.scenarios import Match, Side
from perf.servers import Server, ServerSpec
from perf.work import Work
from tests.patience import wait_until

if TYPE_CHECKING:
    from perf._samples import Pair

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")

CONTENDERS = """
import asyncio, os, subprocess, sys, types
from pathlib import Path

from perf import work as runner

def log(work, what):
    with Path(work.bucket, "log").open("a") as target:
        target.write(f"{what} {os.getpid()} {work.num_objects}\\n")

async def steady(work):
    log(work, "begin")
    await asyncio.sleep(0.05)
    log(work, "end")
    return work.size_bytes * work.num_objects

async def endless(work):
    if work.num_objects > work.in_flight:
        child = subprocess.Popen(["sleep", "1000"])
        Path(work.bucket, "child").write_text(str(child.pid))
        await asyncio.sleep(1000)
    return work.size_bytes * work.num_objects

async def killed(work):
    os.kill(os.getpid(), 9)

async def late(work):
    if work.num_objects > work.in_flight:
        raise OSError("so many are too many")
    return work.size_bytes * work.num_objects

for name in ("steady", "endless", "killed", "late"):
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
        bucket=str(place),
        size_bytes=10,
        num_objects=8,
        in_flight=2,
    )


def played(
    place: Path,
    theirs: str,
    *,
    num_pairs: int = 1,
    has_warm_up: bool = False,
    limit_seconds: float = 200.0,
) -> list[Pair]:
    """Play a match between `steady` and another contender."""
    script = place / "contenders.py"
    script.write_text(CONTENDERS)
    match = Match(
        ours=Side(work=work("steady", place), server=ServerSpec()),
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
    pairs = played(tmp_path, "steady", num_pairs=2, has_warm_up=True)
    assert [(pair.index, pair.is_warm_up) for pair in pairs] == [(0, True), (1, False), (2, False)]
    assert (pairs[0].ours.work.url, pairs[0].theirs.work.url) == ("tls=False", "tls=True")
    log = [line.split() for line in (tmp_path / "log").read_text().splitlines()]
    assert len({pid for _, pid, _ in log}) == 6
    # Within a pair the second begins when the first has ended; the pair that warms up is smaller.
    for pair, expected in enumerate(("1", "8", "8")):
        lines = log[8 * pair + 4 : 8 * pair + 8]
        assert [line[0] for line in lines] == ["begin", "end", "begin", "end"]
        assert lines[0][1] == lines[1][1] != lines[2][1] == lines[3][1]
        assert {line[2] for line in lines} == {expected}


@pytest.mark.parametrize(
    ("peer", "error"),
    [
        ("late", "OSError: so many are too many"),
        ("killed", "exited with status -9"),
        ("nosuch", "ModuleNotFoundError: No module named 'perf.peers.nosuch'"),
    ],
)
def test_a_failed_sample_has_its_error_and_two_end_the_match(
    peer: str, error: str, tmp_path: Path
) -> None:
    pairs = played(tmp_path, peer, num_pairs=5)
    assert len(pairs) == 2
    for pair in pairs:
        assert pair.theirs.error.startswith(error)
        assert pair.ours.result is not None
        assert pair.ours.result.num_bytes == 80


def test_a_contender_that_hangs_is_ended_with_its_children_and_the_match(tmp_path: Path) -> None:
    (pair,) = played(tmp_path, "endless", num_pairs=5, limit_seconds=8.0)
    assert pair.theirs.error == "had not ended after 8 s"
    assert pair.theirs.is_too_slow
    child = Path("/proc", (tmp_path / "child").read_text(), "stat")
    wait_until(lambda: not child.exists() or child.read_text().rpartition(")")[2].split()[0] == "Z")


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", ""),
        ("nobody waits\n", "nobody waits"),
        (
            (
                "Traceback (most recent call last):\n  a\nKeyError: 1\n\nDuring ...\n\n"
                "Traceback (most recent call last):\n  b\nx.Generic: broken {\n    at: 1,\n}\n"
            ),
            "x.Generic: broken { at: 1, }",
        ),
    ],
)
def test_error_is_that_of_the_last_traceback(text: str, expected: str) -> None:
    assert last_error(text) == expected
