"""Real jobs of DeepSpeed, of two processes each, on its accelerator of the CPU."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from aioflux.checkpoint import verify
from tests.rendezvous import rendezvous_port

if TYPE_CHECKING:
    from aioflux.testing import GCSServer

ROOT = Path(__file__).parents[3]
URI = "gs://bucket/run"

pytestmark = [
    pytest.mark.skipif(
        find_spec("deepspeed") is None, reason="deepspeed is not installed; `make test` does it"
    ),
    pytest.mark.more,
]


@pytest.mark.parametrize("kind", ["decoupled", "nebula"])
def test_a_job_goes_on_from_a_bucket_as_if_it_had_not_stopped(
    kind: str, server: GCSServer, tmp_path: Path
) -> None:
    with tempfile.TemporaryDirectory(prefix="nm-") as node, rendezvous_port() as port:
        environment = {
            **os.environ,
            "AIOFLUX_NEBULA_DIR": node,
            "DS_ACCELERATOR": "cpu",
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
            "OMP_NUM_THREADS": "1",
            "WORLD_SIZE": "2",
        }
        command = [sys.executable, "-m", "tests.integrations.deepspeed.job", kind, URI]
        ranks = [
            subprocess.Popen(
                [*command, str(tmp_path)],
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                cwd=ROOT,
                env={**environment, "RANK": str(rank), "LOCAL_RANK": str(rank)},
            )
            for rank in range(2)
        ]
        outputs = []
        try:
            outputs = [rank.communicate()[0] for rank in ranks]
        finally:
            for rank in ranks:
                if rank.poll() is None:
                    rank.kill()
                    rank.communicate()
    assert [rank.returncode for rank in ranks] == [0, 0], "\n".join(outputs)[-4000:]
    for output in outputs:
        line = next(line for line in output.splitlines() if line.startswith("result "))
        result = json.loads(line.removeprefix("result "))
        assert result["again"] == result["went_on"]
        assert result["mine"] == 1
        assert result["world_size"] == 2
        is_nebula = kind == "nebula"
        assert result["engine"] == (
            "NebulaCheckpointEngine" if is_nebula else "AiofluxCheckpointEngine"
        )
        place = tmp_path if is_nebula else URI
        assert result["path"].startswith(f"{place}/global_step1/")
    assert verify(f"{URI}/global_step1", deep=True).is_valid
