"""A forked child ends with its own status after its parent has looked up names through libuv.

libuv joins the threads of its lookups at the end of a process, in a forked child also those that
only the parent has.
"""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from tests.bridge.scripts import IGNORE_FORK_WARNING, LIMIT_SECONDS, ROOT

SCRIPT = """
import asyncio, os, sys
import aioflux.sync, uvloop
aioflux.sync.open_store("memory://bucket").put("key", b"data")

async def look_up():
    await asyncio.get_running_loop().getaddrinfo("localhost", 80)

with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
    runner.run(look_up())
child = os.fork()
if not child:
    sys.exit(7)
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="the system has no fork")
def test_a_child_ends_with_its_own_status() -> None:
    done = subprocess.run(
        [sys.executable, "-W", IGNORE_FORK_WARNING, "-c", SCRIPT],
        capture_output=True,
        text=True,
        timeout=LIMIT_SECONDS,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        check=False,
    )
    assert (done.stdout, done.stderr) == ("7\n", "")
