"""The examples that Nebula was taught by run, with the import changed."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from aioflux.compat import nebula as nm

if TYPE_CHECKING:
    from pathlib import Path

SAVE = """
import aioflux.compat.nebula as nm
persistent_storage_path="/tmp/test",
nm.init(persistent_storage_path, persistent_time_interval=2)
checkpoint = nm.Checkpoint('global_step500')
checkpoint.save('<CKPT_NAME>', model)
"""

LOAD = """
latest_ckpt = nm.get_latest_checkpoint()
p0 = latest_ckpt.load('<CKPT_NAME>')
"""

MANAGE = """
# Managing checkpoints
## List all checkpoints
ckpts = nm.list_checkpoints()
## Get Latest checkpoint path
latest_ckpt_path = nm.get_latest_checkpoint_path("checkpoint", persisted_storage_path)
"""


def test_the_example_of_saving_loading_and_managing(node: Path, tmp_path: Path) -> None:
    """Its path ends in a comma, too."""
    model = torch.nn.Linear(20, 10)
    place = str(tmp_path / "test")
    names: dict[str, Any] = {"model": model, "persisted_storage_path": place}
    exec(SAVE.replace("/tmp/test", place), names)
    with torch.no_grad():
        model.weight.add_(1)  # training goes on
    exec(LOAD, names)
    assert torch.equal(names["p0"].weight + 1, model.weight)
    exec(MANAGE, names)
    assert list(names["ckpts"]) == ["global_step500"]
    assert names["latest_ckpt_path"] is None  # nothing of that name was saved
    nm.Checkpoint("global_step1000").save("checkpoint", model.state_dict())
    exec(MANAGE, names)
    assert list(names["ckpts"]) == ["global_step1000", "global_step500"]
    assert torch.equal(torch.load(names["latest_ckpt_path"])["weight"], model.weight)


def test_the_example_of_a_memory_limit(inside: str, monkeypatch: Any) -> None:
    """`export NEBULA_MEMORY_BUFFER_SIZE=200000000`: a single process has all of it, not half."""
    monkeypatch.setenv("NEBULA_MEMORY_BUFFER_SIZE", "20000000")
    nm.init(inside, persistent_time_interval=1000)
    for number in range(3):
        nm.Checkpoint(f"global_step{number}").save(
            "model", torch.full((4_500_000,), number, dtype=torch.int32)
        )
    found = nm.get_latest_checkpoint()
    assert found is not None
    loaded = found.load("model")
    assert loaded.numel() == 4_500_000
    assert int(loaded[0]) == 2
