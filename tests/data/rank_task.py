"""One rank of a job that reads epochs with workers and kills itself at a given batch.

A saved file has the keys read so far and the dataset's state at the same moment. It is replaced
atomically.
"""

from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from aioflux.data import IterableDataset, loader, merge_states
from tests.data.transforms import key_of


def main(settings: dict[str, Any]) -> None:
    torch.set_num_threads(1)
    out = Path(settings["out"])
    rank, world_size = settings["rank"], settings["world_size"]
    meeting = f"file://{settings['meeting']}"
    dist.init_process_group("gloo", init_method=meeting, rank=rank, world_size=world_size)
    dataset = IterableDataset(
        settings["uri"],
        transform=key_of,
        shuffle=True,
        seed=5,
        tail="uneven",
        endpoint_url=settings["endpoint_url"],
    )
    first = 0
    if settings["resume"]:
        saved = [json.loads(Path(each).read_text()) for each in settings["resume"]]
        dataset.load_state_dict(merge_states([each["state"] for each in saved]))
        first = saved[0]["epoch"]
    batches = loader(
        dataset,
        batch_size=settings["batch_size"],
        num_workers=settings["num_workers"],
        start_method="fork",
        resumable=True,
    )
    for epoch in range(first, settings["num_epochs"]):
        dataset.set_epoch(epoch)
        read: list[str] = []
        for step, batch in enumerate(batches):
            read += batch
            if step + 1 == settings["kill_at_step"] and epoch == settings["kill_in_epoch"]:
                # torchdata's state has tuples and None, which JSON would change; merge it first.
                state = merge_states([batches.state_dict()])
                save(out / f"{rank}.json", {"epoch": epoch, "read": read, "state": state})
                # Wait until all ranks have saved; a barrier may fail when a rank is killed in it.
                while len(list(out.glob("?.json"))) < world_size:
                    time.sleep(0.01)
                os.kill(os.getpid(), signal.SIGKILL)
        save(out / f"{rank}-{epoch}.json", {"epoch": epoch, "read": read})
        dist.barrier()
    dist.destroy_process_group()


def save(path: Path, content: Any) -> None:
    path.with_suffix(".new").write_text(json.dumps(content))
    path.with_suffix(".new").replace(path)
