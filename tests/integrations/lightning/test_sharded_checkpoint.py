"""Sharded saves: the state that is copied, and the objects that are stored."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
from lightning.pytorch.plugins.io import TorchCheckpointIO

import aioflux
from aioflux.integrations.lightning import (
    AiofluxCheckpointIO,
    FSDPStrategy,
    ModelParallelStrategy,
)
from aioflux.integrations.lightning._sharded_checkpoint import (
    TrainerData,
    has_trainer_data,
    load_sharded,
    save_sharded,
    snapshot,
    training_memory,
)

if TYPE_CHECKING:
    from aioflux.testing import GCSServer

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled, unavailable or")

URI = "gs://bucket/run/last.ckpt"


def trained() -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    model = torch.nn.Sequential(torch.nn.Linear(4, 2), torch.nn.BatchNorm1d(2))
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.randn(3, 4)).sum().backward()
    optimizer.step()
    return model, optimizer


def test_only_memory_that_training_writes_to_is_copied() -> None:
    model, optimizer = trained()
    elsewhere = torch.ones(3)
    state = {
        "model": model.state_dict(),
        "optimizer": optimizer.state_dict(),
        "other": [elsewhere, {"epoch": 3}],
    }
    copied = snapshot(state, training_memory(model, [optimizer]))
    assert copied["other"][0].data_ptr() == elsewhere.data_ptr()
    before = [each.clone() for each in tensors(copied)]
    model(torch.randn(3, 4)).sum().backward()
    optimizer.step()
    state["other"][1]["epoch"] = 4
    assert all(torch.equal(*pair) for pair in zip(before, tensors(copied), strict=True))
    assert not torch.equal(copied["model"]["0.weight"], model.state_dict()["0.weight"])
    assert copied["other"][1] == {"epoch": 3}


def tensors(state: dict[str, Any]) -> list[torch.Tensor]:
    leaves = torch.utils._pytree.tree_leaves(state)
    return [each for each in leaves if isinstance(each, torch.Tensor)]


def test_everything_else_is_in_the_save_itself(server: GCSServer) -> None:
    """meta.pt is for Lightning's own strategies; ours load what was committed with the weights."""
    trainer_data = TrainerData.serialize({"epoch": 3, "global_step": 7})
    save_sharded(URI, {"model": {"weight": torch.ones(3)}}, trainer_data, {"step": 7})
    server.put("bucket", "run/last.ckpt/meta.pt", b"of a save that was killed")
    assert has_trainer_data(URI, {})
    state: dict[str, Any] = {"model": {"weight": torch.zeros(3)}, "aioflux.rest": b""}
    load_sharded(URI, state, {}, weights_only=None, is_strict=True)
    assert torch.equal(state["model"]["weight"], torch.ones(3))
    assert TrainerData(state["aioflux.rest"]).load(weights_only=True)["epoch"] == 3


def test_a_missing_tensor_fails_a_strict_load(server: GCSServer) -> None:
    save_sharded(URI, {"model": {"weight": torch.ones(3)}}, None, {})
    state = {"model": {"weight": torch.zeros(3), "bias": torch.zeros(3)}}
    with pytest.raises(aioflux.CheckpointError, match=r"last\.ckpt could not be loaded.*bias"):
        load_sharded(URI, state, {}, weights_only=None, is_strict=True)
    load_sharded(URI, state, {}, weights_only=None, is_strict=False)
    assert torch.equal(state["model"]["weight"], torch.ones(3))


def test_a_sharded_checkpoint_replaces_one_object_of_its_name(server: GCSServer) -> None:
    AiofluxCheckpointIO().save_checkpoint({"step": 1}, URI)
    for _ in range(2):
        save_sharded(URI, {"model": {"weight": torch.ones(3)}}, TrainerData.serialize({}), {})
        assert "run/last.ckpt" not in server.keys("bucket")
        assert "run/last.ckpt/meta.pt" in server.keys("bucket")
        assert AiofluxCheckpointIO().exists(URI)


@pytest.mark.parametrize("kind", [FSDPStrategy, ModelParallelStrategy])
def test_a_strategy_has_its_plugin_and_rejects_others(kind: Any) -> None:
    strategy = kind()
    assert isinstance(strategy.checkpoint_io, AiofluxCheckpointIO)
    strategy.checkpoint_io = TorchCheckpointIO()
    with pytest.raises(TypeError, match="with AiofluxCheckpointIO, not with TorchCheckpointIO"):
        strategy.load_checkpoint(URI)


@pytest.mark.parametrize("kind", [FSDPStrategy, ModelParallelStrategy])
def test_options_of_one_save_are_checked(kind: Any) -> None:
    strategy = kind(state_dict_type="sharded") if kind is FSDPStrategy else kind()
    with pytest.raises(TypeError, match="has no option thread_count; its options are compression"):
        strategy.save_checkpoint({"state_dict": {}}, URI, {"thread_count": 4})
