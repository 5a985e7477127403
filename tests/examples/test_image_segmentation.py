"""Segmentation as its page says: killed at any step, it goes on where its checkpoint was."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from aioflux.testing import GCSServer
from aioflux.testing.gcs_server import Hook, Request, Response
from tests.rendezvous import rendezvous_port

# Each test starts three processes that import torch: ten seconds of two idle cores, more when busy.
pytestmark = [pytest.mark.timeout(900), pytest.mark.more]

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "examples" / "image_segmentation" / "segmentation.py"
STEP = re.compile(r"epoch (\d+) step (\d+) rank \d+ loss \S+ on (.*)")
VOLUMES = [f"{number:04d}" for number in range(40)]
NUM_EPOCHS = 2


Start = Callable[..., "subprocess.Popen[str]"]


@pytest.fixture
def start() -> Iterator[Start]:
    """Starts the script; none of its processes outlives the test."""
    inherited = {key: os.environ[key] for key in os.environ if key != "STORAGE_EMULATOR_HOST"}
    with ExitStack() as running:

        def process(*arguments: str, **environment: str) -> subprocess.Popen[str]:
            begun = running.enter_context(
                subprocess.Popen(
                    [
                        sys.executable,
                        SCRIPT,
                        f"--epochs={NUM_EPOCHS}",
                        "--save-every=3",
                        *arguments,
                    ],
                    stdout=subprocess.PIPE,
                    text=True,
                    env={**inherited, "PYTHONPATH": str(ROOT), **environment},
                )
            )
            running.callback(begun.kill)
            return begun

        yield process


def ended(process: subprocess.Popen[str]) -> list[str]:
    said, _ = process.communicate()
    assert process.returncode == 0, said
    return said.splitlines()


def killed(process: subprocess.Popen[str]) -> list[str]:
    said, _ = process.communicate()
    assert process.returncode == -signal.SIGKILL, said
    return said.splitlines()


def read_by_epoch(said: list[str], *, until_step: int) -> dict[int, list[str]]:
    """The volumes of each epoch that steps up to `until_step` were taken on."""
    volumes: dict[int, list[str]] = defaultdict(list)
    for epoch, step, names in (found.groups() for found in map(STEP.fullmatch, said) if found):
        if int(step) <= until_step:
            volumes[int(epoch)] += names.split()
    return volumes


def resumed_step(said: list[str]) -> int:
    resumed = [line for line in said if line.startswith("resumed")]
    assert len(resumed) == 1, said
    return int(resumed[0].split()[3])


def assert_each_volume_once(before: list[str], after: list[str]) -> None:
    first = read_by_epoch(before, until_step=resumed_step(after))
    then = read_by_epoch(after, until_step=sys.maxsize)
    for epoch in range(NUM_EPOCHS):
        assert sorted(first[epoch] + then[epoch]) == VOLUMES


class KillAt(Hook):
    """Kills processes at a request for an object, which comes to nothing."""

    def __init__(self, server: GCSServer, key: str) -> None:
        self.processes: list[subprocess.Popen[str]] = []
        self._key = key
        server.app.hooks = (self, *server.app.hooks)

    def before(self, request: Request) -> Response | None:
        named = request.params.get("object") or request.query.get("name", "")
        if named != self._key or not self.processes:
            return None
        killed, self.processes = self.processes, []
        for each in killed:
            each.kill()
        return Response(status=503)


@pytest.fixture
def server() -> Iterator[GCSServer]:
    with GCSServer(buckets=("bucket",)) as running:
        yield running


def test_killed_and_started_again_it_ends_with_the_same_weights(
    start: Start, server: GCSServer
) -> None:
    """It resumes in the middle of an epoch, and nothing is read twice or left out."""
    whole = start()  # beside the other one, on a server of its own
    kill = KillAt(server, "run-1/checkpoints/step-00000009/.metadata")
    first = start("--uri", "gs://bucket/run-1", STORAGE_EMULATOR_HOST=server.url)
    kill.processes = [first]
    before = killed(first)

    after = ended(start("--uri", "gs://bucket/run-1", STORAGE_EMULATOR_HOST=server.url))
    assert "made 0 volumes" in after
    resumed = resumed_step(after)
    assert resumed in {3, 6}  # a save may still be in progress when the next one starts
    assert_each_volume_once(before, after)
    assert after[-2:] == ended(whole)[-2:]
    keys = server.keys("bucket", "run-1/checkpoints/")
    commits = [key.split("/")[2] for key in keys if key.endswith("/.metadata")]
    # The two newest steps, and the one from which it resumed.
    assert commits == [f"step-{resumed:08d}", "step-00000018", "step-00000020"]


def test_two_ranks_are_killed_and_one_goes_on_with_two_workers(
    start: Start, server: GCSServer
) -> None:
    kill = KillAt(server, "run-2/checkpoints/step-00000009/.metadata")
    with rendezvous_port() as port:
        place = {
            "STORAGE_EMULATOR_HOST": server.url,
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
            "GLOO_SOCKET_IFNAME": "lo",
            "WORLD_SIZE": "2",
        }
        ranks = [start("--uri", "gs://bucket/run-2", **place, RANK=str(rank)) for rank in range(2)]
        kill.processes = ranks
        before = [line for each in ranks for line in killed(each)]

    last = start("--uri", "gs://bucket/run-2", "--workers=2", STORAGE_EMULATOR_HOST=server.url)
    after = ended(last)
    assert resumed_step(after) in {3, 6}
    assert_each_volume_once(before, after)
