"""FSDPStrategy and ModelParallelStrategy on two ranks without accelerators."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from aioflux.integrations.lightning import AiofluxCheckpointIO
from tests.integrations.lightning.tiny import OF_LIGHTNING, fit

if TYPE_CHECKING:
    from aioflux.testing import GCSServer

pytestmark = OF_LIGHTNING


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port: int = probe.getsockname()[1]
    return port


def run_on_two_ranks(kind: str, directory: Path) -> list[dict[str, Any]]:
    shared = {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
        "NODE_RANK": "0",
        "OMP_NUM_THREADS": "1",
        "PYTHONWARNINGS": "ignore",
        "PYTHONFAULTHANDLER": "1",
    }
    module = "tests.integrations.lightning.sharded_run"
    ranks = [
        subprocess.Popen(
            [sys.executable, "-m", module, kind, "gs://bucket/run", str(directory)],
            cwd=Path(__file__).parents[3],
            env={**os.environ, **shared, "LOCAL_RANK": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        told = [rank.communicate(timeout=200)[0] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    assert [rank.returncode for rank in ranks] == [0, 0], "\n".join(told)[-20_000:]
    return [json.loads(each.strip().splitlines()[-1]) for each in told]


@pytest.mark.parametrize("kind", ["model-parallel", "fsdp"])
def test_two_ranks(kind: str, server: GCSServer, tmp_path: Path) -> None:
    whole, _ = fit(4, AiofluxCheckpointIO(), [], enable_checkpointing=False)
    whole.save_checkpoint("gs://bucket/run/whole.ckpt")
    server.faults.add("*", status=403, key="run/refused/*")
    for rank, found in enumerate(run_on_two_ranks(kind, tmp_path)):
        refused, nothing = found.pop("refused"), found.pop("nothing")
        assert found == dict.fromkeys(found, True), rank
        assert "gs://bucket/run/refused" in refused
        assert "gs://bucket/run/nothing" in nothing
        assert len(found) >= 5
