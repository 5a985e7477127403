"""Ctrl-C in the very moment of a fork: the child works, although the hook after the fork did not.

CPython raises KeyboardInterrupt in whichever hook comes first then, and goes on with the next one.
"""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from aioflux.testing import GCSServer
from tests.bridge.scripts import IGNORE_FORK_WARNING, LIMIT_SECONDS, ROOT

SCRIPT = """
import _thread, os, sys
import aioflux.store
# All in C, so that nothing but the hook of the bridge, which comes next, can be interrupted.
os.register_at_fork(after_in_child=_thread.interrupt_main)
import aioflux._bridge, aioflux.sync

transfer = aioflux.TransferOptions(
    range_size_bytes=4 << 20, num_loops=int(os.environ["AIOFLUX_TEST_NUM_LOOPS"])
)
store = aioflux.sync.open_store("gs://bucket/p", endpoint_url=sys.argv[1], transfer=transfer)
large = bytes(12 << 20)
assert store.get("large") == large
assert store.get("a") == b"1"
batches = store.get_batches(["a"] * 1000)
next(batches)
child = os.fork()
if not child:
    assert aioflux._bridge._bridge.pid != os.getpid(), "the hook has run"
    what = sys.argv[2]
    if what == "read":
        assert store.get("a") == b"1"
        assert store.get("large") == large
    elif what == "close":
        store.close()
    sys.exit(7)
status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
# The sockets of this process are as they were.
assert sum(len(batch) for batch in batches) > 0
assert store.get("a") == b"1"
assert store.get("large") == large
print(status, flush=True)
"""


@pytest.mark.usefixtures("num_loops")
@pytest.mark.parametrize("what", ["read", "close", "end"])
def test_a_child_whose_hook_was_interrupted_starts_over(what: str) -> None:
    with GCSServer(buckets=("bucket",)) as server:
        server.put("bucket", "p/a", b"1")
        server.put("bucket", "p/large", bytes(12 << 20))
        done = subprocess.run(
            [sys.executable, "-W", IGNORE_FORK_WARNING, "-c", SCRIPT, server.url, what],
            capture_output=True,
            text=True,
            timeout=LIMIT_SECONDS,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
            check=False,
        )
    assert done.stdout == "7\n", done.stderr
    assert "Exception ignored in: <function _after_fork_in_child" in done.stderr
