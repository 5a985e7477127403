"""A fake of DeepSpeed's engine: it calls a checkpoint engine like the engine of DeepSpeed 0.19.

The calls have the same order, run on all ranks, and have the same checks of directories.
"""

from __future__ import annotations

import glob
import os
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist


@dataclass
class CommitInfo:
    tag: str
    save_dir: str
    save_latest: bool


class Unused:
    def cleanup(self) -> None:
        pass


class Engine:
    """An engine whose state is one number."""

    def __init__(self) -> None:
        self.checkpoint_engine: Any = Unused()
        self.number = 0.0
        self.fails = False
        self.breaks_off = False
        """Whether to fail between two parts."""
        self.stage = 1
        self.is_universal = False
        self.has_nvme = False

    @property
    def rank(self) -> int:
        return dist.get_rank() if dist.is_initialized() else 0

    def zero_optimization_stage(self) -> int:
        return self.stage

    def load_universal_checkpoint(self) -> bool:
        return self.is_universal

    def zero_nvme_offload_optimizer(self) -> bool:
        return self.has_nvme

    def barrier(self) -> None:
        if dist.is_initialized():
            dist.barrier()

    def save_checkpoint(self, save_dir: str, tag: str, save_latest: bool = True) -> bool:
        if self.rank == 0:
            self.checkpoint_engine.makedirs(save_dir, exist_ok=True)
        self.barrier()
        info = CommitInfo(tag, save_dir, save_latest)
        self.checkpoint_engine.create(info)
        self.checkpoint_engine.makedirs(os.path.join(save_dir, tag), exist_ok=True)
        if self.rank == 0:
            self._save({"module": self._tensor()}, save_dir, tag, "mp_rank_00_model_states.pt")
        name = f"zero_pp_rank_{self.rank}_mp_rank_00_optim_states.pt"
        try:
            state = {"optimizer": self._tensor(), "bad": (lambda: 1) if self.fails else None}
            self._save(state, save_dir, tag, name)
        except Exception:
            if not self.fails:
                raise
        if not self.checkpoint_engine.is_decoupled():
            self.checkpoint_engine.commit(info)
            self._move_latest(info)
        self.barrier()
        return True

    def step(self) -> None:
        """End a step: a decoupled engine decides whether to commit."""
        info = self.checkpoint_engine.get_commit_info()
        if info is not None:
            self.checkpoint_engine.commit(info)
            self._move_latest(info)
            self.barrier()

    def save_16bit_model(self, save_dir: str, name: str = "pytorch_model.bin") -> bool:
        info = CommitInfo("global_step0", save_dir, False)
        self.checkpoint_engine.create(info)
        if self.rank == 0:
            self.checkpoint_engine.makedirs(save_dir, exist_ok=True)
            self.checkpoint_engine.save({"w": self._tensor()}, os.path.join(save_dir, name))
        self.checkpoint_engine.commit(info)
        return True

    def load_checkpoint(
        self, load_dir: str, tag: str | None = None, load_optimizer_states: bool = True
    ) -> tuple[str | None, Any]:
        if tag is None:
            latest = os.path.join(load_dir, "latest")
            if not os.path.isfile(latest):
                return None, None
            with open(latest) as file:
                tag = file.read().strip()
        paths = sorted(glob.glob(os.path.join(load_dir, tag, "mp_rank_*_model_states.pt")))
        model = self.checkpoint_engine.load(paths[0], map_location="cpu")
        name = f"zero_pp_rank_{self.rank}_mp_rank_00_optim_states.pt"
        path = os.path.join(load_dir, tag, name)
        assert os.path.exists(path)
        state = self.checkpoint_engine.load(path, map_location="cpu")
        self.number = float(model["module"][0])
        assert torch.equal(state["optimizer"], self._tensor())
        return paths[0], {}

    def _tensor(self) -> torch.Tensor:
        return torch.full((20_000,), float(self.number))

    def _save(self, state: Any, save_dir: str, tag: str, name: str) -> None:
        if self.breaks_off and "optim" in name:
            raise MemoryError("gathering")
        self.checkpoint_engine.save(state, os.path.join(save_dir, tag, name))

    def _move_latest(self, info: CommitInfo) -> None:
        if info.save_latest and self.rank == 0:
            with open(os.path.join(info.save_dir, "latest"), "w") as file:
                file.write(info.tag)
