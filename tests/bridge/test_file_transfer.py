"""Downloads of local files in processes that are killed or interrupted."""

from __future__ import annotations

import random
import signal
from typing import TYPE_CHECKING

import pytest

from tests.bridge.scripts import finish, line, running, tell

if TYPE_CHECKING:
    from pathlib import Path

    from aioflux.testing import GCSServer

MIB = 1024 * 1024
DATA = random.Random(3).randbytes(40 * MIB)

DOWNLOAD = """
done = 0
def progress(num_bytes):
    global done
    done += num_bytes
    say(done)
store.download_file("big", sys.argv[2], progress=progress)
say("complete")
"""

INTERRUPTED = """
import signal
say("ready")
try:
    store.download_file("big", sys.argv[2], progress=say)
except KeyboardInterrupt:
    say("interrupted")
input()
store.download_file("big", sys.argv[2])
store.upload_file(sys.argv[2], "copy")
say("complete")
"""


@pytest.fixture
def target(tmp_path: Path) -> Path:
    path = tmp_path / "target"
    path.write_bytes(b"old")
    return path


@pytest.mark.parametrize("is_replaced", [False, True], ids=["same", "replaced"])
def test_a_killed_download_continues_in_the_next_process(
    server: GCSServer, target: Path, is_replaced: bool
) -> None:
    """Only the missing bytes are served again, if the object is the same."""
    server.put("bucket", "p/big", DATA)
    fault = server.faults.add("objects.media", skip=12, stall_at=0)
    with running(DOWNLOAD, server, str(target)) as process:
        while int(line(process)) < 24 * MIB:  # then nothing is on the way
            pass
        process.kill()
        process.wait()
    server.faults.remove(fault)
    assert target.read_bytes() == b"old"
    data = DATA[::-1] if is_replaced else DATA
    if is_replaced:
        server.put("bucket", "p/big", data)
    server.stats.reset()
    with running(DOWNLOAD, server, str(target)) as process:
        assert finish(process)[-2:] == [str(len(DATA)), "complete"]
    assert target.read_bytes() == data
    assert [path.name for path in target.parent.iterdir()] == ["target"]
    num_served = server.stats.operation("objects.get").bytes_out
    if is_replaced:
        assert num_served >= len(DATA)
    else:
        assert num_served <= 16 * MIB + 10_000


def test_a_blocking_download_ends_at_ctrl_c_and_continues(server: GCSServer, target: Path) -> None:
    server.put("bucket", "p/big", DATA)
    fault = server.faults.add("objects.media", skip=12, stall_at=0)
    with running(INTERRUPTED, server, str(target)) as process:
        assert line(process) == "ready"
        while server.faults.injected["stall"] < 1:
            line(process)
        process.send_signal(signal.SIGINT)
        while line(process) != "interrupted":
            pass
        assert target.read_bytes() == b"old"
        server.faults.remove(fault)
        server.stats.reset()
        tell(process)
        assert finish(process) == ["complete"]
    assert target.read_bytes() == server.get("bucket", "p/copy") == DATA
    assert server.stats.operation("objects.get").bytes_out < len(DATA)
