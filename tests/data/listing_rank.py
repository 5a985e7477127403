"""A rank that builds datasets on command, in a process of its own."""

from __future__ import annotations

import os
import signal
import threading
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from aioflux import TransferOptions
from aioflux.data import IterableDataset, MapDataset
from aioflux.data._job_listing import Sharing, listed_once
from tests.data.transforms import key_of
from tests.patience import wait_until

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

KINDS: dict[str, Any] = {"MapDataset": MapDataset, "IterableDataset": IterableDataset}


def open_rank(
    *,
    rank: int,
    world_size: int,
    port: int,
    timeout_seconds: float = 60.0,
    environments: Sequence[dict[str, str]] = (),
) -> Callable[..., Any]:
    """Join the process group, and return the function that runs commands.

    `environments` has variables of each rank, which PyTorch does not read.
    """
    torch.set_num_threads(1)

    def join(port: int) -> None:
        dist.init_process_group(
            "gloo",
            init_method=f"tcp://127.0.0.1:{port}",
            rank=rank,
            world_size=world_size,
            timeout=timedelta(seconds=timeout_seconds),
        )

    def build(kind: str, uri: str, *, rate: float | None = None, **options: Any) -> Any:
        if rate is not None:
            options["transfer"] = TransferOptions(max_requests_per_second=rate)
        return KINDS[kind](uri, transform=key_of, **options)

    def handle(name: str, **arguments: Any) -> Any:
        match name:
            case "keys":
                dataset = build(**arguments)
                return [meta.key for meta in dataset._source._stores[0].items]
            case "read":
                return list(build(**arguments))
            case "epochs":
                dataset = build(**arguments)
                epochs = []
                for epoch in range(2):
                    dataset.set_epoch(epoch)
                    epochs.append(list(dataset))
                    dist.barrier()
                return epochs
            case "keys_in_fork":
                return in_fork(lambda: build(**arguments))
            case "hang":
                blocker = Path(arguments.pop("blocker"))
                build(**arguments, credentials=lambda: wait_forever(blocker))
            case "handed_over":
                return handed_over(**arguments)
            case "given_rates":
                return given_rates(**arguments)
            case "list_late":
                return list_late(Path(arguments["started"]), Path(arguments["goes_on"]))
            case "interrupted":
                return interrupted(arguments["seconds"])
            case "num_keys":
                return dist.distributed_c10d._get_default_store().num_keys()
            case "join_again":
                dist.destroy_process_group()
                join(**arguments)
        return None

    join(port)
    os.environ.update(environments[rank] if environments else {})
    return handle


def in_fork(build: Callable[[], Any]) -> int:
    """Build a dataset in a forked child, and return the exit status of the child."""
    child = os.fork()
    if child == 0:
        try:
            build()
        except BaseException:
            os._exit(1)
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def list_late(started: Path, goes_on: Path) -> list[Any]:
    """List when a file exists."""

    def list_objects(_: Any) -> Any:
        started.touch()
        wait_until(goes_on.exists)
        return [1]

    return listed_once(["gs://bucket"], {}, Sharing(True, is_same_on_all_ranks=True), list_objects)


def interrupted(seconds: float) -> bool:
    """Wait for the listing of another rank, and press Ctrl-C."""
    signal.signal(signal.SIGALRM, signal.default_int_handler)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    sharing = Sharing(place=True, is_same_on_all_ranks=True)
    try:
        listed_once(["gs://bucket"], {}, sharing, lambda _: [])
    except KeyboardInterrupt:
        return True
    return False


def wait_forever(blocker: Path) -> str:
    blocker.touch()
    threading.Event().wait()
    return ""


def given_rates(*, uri: str, rate: float) -> list[Any]:
    """Return the rate of the options with which this rank lists."""
    sharing = Sharing(place=True, is_same_on_all_ranks=False)
    transfer = TransferOptions(max_requests_per_second=rate)
    return listed_once(
        [uri],
        {"transfer": transfer},
        sharing,
        lambda given: [given["transfer"].max_requests_per_second],  # type: ignore[list-item, union-attr]
    )


def handed_over(*, endpoint_url: str, place: str, uri: str, value: int) -> list[Any]:
    """Share `value` by an object, however small it is."""
    sharing = Sharing(place, is_same_on_all_ranks=True, max_store_bytes=0)
    return listed_once([uri], {"endpoint_url": endpoint_url}, sharing, lambda _: [value])  # type: ignore[list-item]
