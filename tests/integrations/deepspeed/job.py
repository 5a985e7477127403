"""One rank of a real DeepSpeed job, with DeepSpeed's CPU accelerator.

    python -m tests.integrations.deepspeed.job <kind> <uri> <local directory>

The job trains, saves and trains further. A new engine then loads the checkpoint and repeats the
last steps. The kinds are `decoupled`, and `nebula`, which is DeepSpeed's own Nebula engine with the
alias `torch_nebula`.
"""

from __future__ import annotations

import json
import sys
from typing import Any

import deepspeed  # type: ignore[import-not-found]
import torch
from deepspeed import comm as dist  # type: ignore[import-not-found]

from aioflux.compat import nebula as nm
from aioflux.integrations.deepspeed import attach

# DeepSpeed would compile this extension, which takes minutes.
deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False

kind, uri, directory = sys.argv[1:4]
save_dir = directory if kind == "nebula" else uri


def build(seed: int) -> Any:
    torch.manual_seed(seed)
    model = torch.nn.Sequential(torch.nn.Linear(16, 16), torch.nn.Linear(16, 4))
    config = {
        "train_batch_size": 4,
        "optimizer": {"type": "Adam", "params": {"lr": 1e-2, "torch_adam": True}},
        # Not stage 3: on CPU, DeepSpeed's stage 3 alone, without a checkpoint, computes wrong
        # losses after 9 to 83 steps on a busy machine (7 of 7 jobs; stage 2: none of 3 in 300).
        "zero_optimization": {"stage": 2 if kind == "decoupled" else 1},
        "bf16": {"enabled": True},
    }
    if kind == "nebula":
        config["nebula"] = {
            "enabled": True,
            "persistent_storage_path": uri,
            "persistent_time_interval": 1000,
            "enable_nebula_load": True,
        }
    engine = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)[
        0
    ]
    if kind != "nebula":
        attach(engine, decoupled=kind == "decoupled")
    return engine


def train(engine: Any) -> float:
    loss = engine(torch.ones(2, 16, dtype=torch.bfloat16)).float().square().sum()
    engine.backward(loss)
    engine.step()
    return float(loss)


def main() -> None:
    torch.set_num_threads(1)
    if kind == "nebula":
        nm.install_alias()
    engine = build(0)
    for step in range(2):
        train(engine)
        engine.save_checkpoint(save_dir, tag=f"global_step{step}", client_state={"mine": step})
    went_on = [train(engine) for _ in range(2)]
    name = type(engine.checkpoint_engine).__name__
    if kind == "decoupled":
        engine.destroy()
    other = build(1)
    path, client_state = other.load_checkpoint(save_dir)
    again = [train(other) for _ in range(2)]
    result = {
        "engine": name,
        "path": path,
        "mine": client_state["mine"],
        "went_on": went_on,
        "again": again,
        "world_size": dist.get_world_size(),
    }
    sys.stdout.write(f"result {json.dumps(result)}\n")
    sys.stdout.flush()
    dist.barrier()
    if kind == "nebula":
        nm.shutdown()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
