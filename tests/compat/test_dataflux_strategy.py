"""DatafluxFSDPStrategy on two ranks without accelerators, as the old library's demo trains."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest

from aioflux.compat.dataflux.lightning import (
    DatafluxFSDPStrategy,
    DatafluxLightningAsyncCheckpoint,
    DatafluxLightningCheckpoint,
)
from tests.rendezvous import rendezvous_port

if TYPE_CHECKING:
    from pathlib import Path

    from tests.compat.conftest import Bucket
    from tests.integrations.lightning.fork_server import ForkServer


def test_two_ranks_save_shards_and_resume(
    bucket: Bucket, fork_server: ForkServer, tmp_path: Path
) -> None:
    log = tmp_path / "log"
    with rendezvous_port() as port:
        ended = fork_server.run(
            "tests.compat.fsdp_task:train_and_tell",
            str(tmp_path),
            log=log,
            num_ranks=2,
            STORAGE_EMULATOR_HOST=bucket.server.url,
            MASTER_ADDR="127.0.0.1",
            MASTER_PORT=str(port),
            NODE_RANK="0",
        )
    assert ended == [0, 0], log.read_text()[-20_000:]
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
