"""AiofluxCheckpointIO under Fabric."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch
from lightning.fabric import Fabric

from aioflux.integrations.lightning import AiofluxCheckpointIO
from tests.integrations.lightning.tiny import OF_LIGHTNING

if TYPE_CHECKING:
    from aioflux.testing import GCSServer

URI = "gs://bucket/run/state.ckpt"

pytestmark = OF_LIGHTNING


@pytest.mark.parametrize("is_background", [False, True], ids=["foreground", "background"])
def test_what_fabric_saves_it_loads(server: GCSServer, is_background: bool) -> None:
    """Fabric never ends its plugins: a load waits for what was saved before."""
    plugin = AiofluxCheckpointIO(background=is_background)
    fabric = Fabric(accelerator="cpu", devices=1, plugins=[plugin])
    model = torch.nn.Linear(4, 2)
    model, optimizer = fabric.setup(model, torch.optim.Adam(model.parameters()))
    fabric.backward(model(torch.ones(1, 4)).sum())
    optimizer.step()
    saved = [each.detach().clone() for each in model.parameters()]
    fabric.save(URI, {"model": model, "optimizer": optimizer, "step": 7})
    with torch.no_grad():
        for each in model.parameters():
            each.zero_()
    state = {"model": model, "optimizer": optimizer, "step": 0}
    rest = fabric.load(URI, state)
    assert all(torch.equal(*pair) for pair in zip(model.parameters(), saved, strict=True))
    assert (state["step"], rest) == (7, {})
    assert fabric.load(URI, weights_only=True)["step"] == 7
    plugin.teardown()
