"""DatafluxFSDPStrategy on two ranks without accelerators, as the old library's demo trains."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from aioflux.compat.dataflux.lightning import (
    DatafluxFSDPStrategy,
    DatafluxLightningAsyncCheckpoint,
    DatafluxLightningCheckpoint,
)
from tests.meeting import meeting_port

if TYPE_CHECKING:
    from tests.compat.conftest import Bucket


def test_two_ranks_save_shards_and_resume(bucket: Bucket, tmp_path: Path) -> None:
    with meeting_port() as port:
        command = [sys.executable, "-W", "ignore", "-m", "tests.compat.fsdp_task", str(port)]
        done = subprocess.run(
            [*command, str(tmp_path)],
            cwd=Path(__file__).parents[2],
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            check=False,
        )
    assert done.returncode == 0, done.stdout[-20_000:]
    for rank in range(2):
        found = json.loads((tmp_path / f"{rank}.json").read_text())
        assert found == {"is_same": True, "num_steps": 3}
    keys = bucket.server.keys("bucket")
    for directory in ("sync", "async"):
        for step in ("01", "02", "03"):
            prefix = f"{directory}/checkpoint-epoch=00-step={step}.ckpt"
            assert f"{prefix}/.metadata" in keys
            assert f"{prefix}/meta.pt" in keys
            names = [key for key in keys if key.startswith(prefix) and key.endswith(".distcp")]
            assert len(names) == 2
        assert f"{directory}/extra/.metadata" in keys


@pytest.mark.parametrize("use_async", [False, True])
def test_the_client_that_is_given_is_used(server: Bucket, use_async: bool) -> None:
    """The old class took another for the shards."""
    client = server.client()
    strategy = DatafluxFSDPStrategy("project", client, use_async=use_async)
    plugin = strategy.checkpoint_io
    kind = DatafluxLightningAsyncCheckpoint if use_async else DatafluxLightningCheckpoint
    assert type(plugin) is kind
    assert plugin.storage_client is client
    assert plugin.options["endpoint_url"] == server.server.url
