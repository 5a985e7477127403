"""What was copied by us can be loaded by everybody that could load the original."""

from __future__ import annotations

import pytest
import torch
import torch.distributed.checkpoint as dcp

from aioflux import checkpoint
from aioflux.checkpoint.dcp import StorageWriter, load_state

pytestmark = [
    pytest.mark.clouds("gs", "s3", "az"),
    pytest.mark.filterwarnings("ignore:.*torch.distributed is disabled"),
]


def state_of(seed: int) -> dict[str, object]:
    generator = torch.Generator().manual_seed(seed)
    return {"model": {"w": torch.randn(64, 300, generator=generator), "b": torch.arange(5)}}


@pytest.mark.parametrize("layout", ["dcp", "safetensors"])
def test_a_copy_on_disk_is_loaded_by_stock_readers_and_by_ours(server, tmp_path, layout) -> None:
    state = state_of(1)
    for each in (state_of(0), state):  # an overwrite
        dcp.save(
            each, storage_writer=StorageWriter(f"{server.root}/a", layout=layout), no_dist=True
        )
    [copy] = checkpoint.copy(f"{server.root}/a", tmp_path.as_uri())
    assert checkpoint.verify(copy.uri, deep=True).is_valid
    loaded = load_state(copy.uri)
    torch.testing.assert_close(loaded["model"], state["model"], rtol=0, atol=0)
    if layout == "dcp":
        into = {"model": {"w": torch.zeros(64, 300), "b": torch.zeros(5, dtype=torch.int64)}}
        dcp.load(into, checkpoint_id=tmp_path, no_dist=True)
        torch.testing.assert_close(into["model"], state["model"], rtol=0, atol=0)
    else:
        safetensors = pytest.importorskip("safetensors.torch")
        [file] = tmp_path.glob("*.safetensors")
        torch.testing.assert_close(
            safetensors.load_file(file)["model.w"], state["model"]["w"], rtol=0, atol=0
        )
    assert checkpoint.clean(server.root, older_than_seconds=0).removed == ()
