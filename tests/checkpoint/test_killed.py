"""Whatever a killed save leaves, `clean` finds, and the checkpoint before it is whole."""

from __future__ import annotations

import asyncio
import random
import subprocess
import sys

import pytest

from aioflux import checkpoint
from aioflux.checkpoint._format.commit import find_save_id
from tests.patience import wait_until_idle

pytestmark = pytest.mark.more

CHILD = """
import asyncio, os, sys, threading
from aioflux import TransferOptions, open_store
from tests.checkpoint.saves import save_step

async def main():
    num_loops = int(os.environ["AIOFLUX_TEST_NUM_LOOPS"])
    small = TransferOptions(
        part_size_bytes=5 * 2**20, max_buffered_bytes=20 * 2**20, num_loops=num_loops
    )
    async with open_store("gs://bucket/run", transfer=small) as store:
        number = int(sys.argv[1])
        while True:
            print("begins", flush=True)
            await save_step(store, number % 2, number=number, num_objects=2, size=11_000_000)
            number += 1
            names = {thread.name for thread in threading.enumerate()}
            assert ("aioflux-loop-3" in names) == (num_loops == 3), names

asyncio.run(main())
"""


def kill_a_save(seed: int) -> None:
    """Begin some saves in another process, and kill it in the last one."""
    rng = random.Random(seed)
    with subprocess.Popen(
        [sys.executable, "-c", CHILD, str(100 * seed)], stdout=subprocess.PIPE, text=True
    ) as child:
        try:
            for _ in range(rng.randint(3, 5)):
                assert child.stdout.readline() == "begins\n"
            # The moment is as good as any; what holds must hold whenever it comes.
            with pytest.raises(subprocess.TimeoutExpired):
                child.wait(rng.uniform(0.0, 0.2))
        finally:
            child.kill()


@pytest.mark.usefixtures("num_loops")
@pytest.mark.parametrize("seed", range(3))
async def test_what_a_killed_save_leaves_is_found(server, seed) -> None:
    """Parts, uploads, objects that no commit names, and those that an overwrite replaced."""
    await asyncio.to_thread(kill_a_save, seed)
    await asyncio.to_thread(wait_until_idle, server)  # what it asked for at last is done
    with checkpoint.Checkpointer("gs://bucket/run") as manager:
        assert manager.latest(deep=True) is not None
        steps = manager.steps()
        result = checkpoint.clean("gs://bucket", older_than_seconds=0, dry_run=True)
        done = checkpoint.clean("gs://bucket", older_than_seconds=0)
        assert done == result
        assert not server.state.multipart_uploads
        found = {step: manager.verify(step, deep=True) for step in steps}
        assert all(each.is_valid for each in found.values())
        assert manager.steps() == steps
        named = {
            f"run/step-{step:08d}/{each.key}"
            for step in steps
            for each in found[step].found.commit.objects
        }
        left = {key for key in server.keys("bucket") if find_save_id(key)}
        assert left == named
        others = {key for key in server.keys("bucket") if not find_save_id(key)}
        assert others == {f"run/step-{step:08d}/.metadata" for step in steps}
