"""TaskStore: the store of a task, whose limits are a share of those of its node."""

from __future__ import annotations

import pickle
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import ray

from aioflux import sync
from aioflux._values.uri import join_uri

if TYPE_CHECKING:
    from aioflux.options import StoreOptions, TransferOptions


@dataclass(frozen=True)
class TaskStore:
    """Settings of a store that a task opens. Tasks of one process share its connections."""

    uri: str
    pickled_options: bytes
    max_in_flight_per_node: int = 256

    @classmethod
    def of(cls, store: sync.Store, options: StoreOptions, **limit: int) -> TaskStore:
        """Return the settings of `store`.

        Raises:
            TypeError: The options contain credentials.
            ValueError: The uri is `memory://`, which no other process can read.
        """
        if store.uri.startswith("memory:"):
            raise ValueError(
                f"tasks cannot open {store.uri}, which is in the memory of one process"
            )
        pickle.dumps(store)
        sent = {name: value for name, value in options.items() if name != "progress"}
        pickled = pickle.dumps(sent | {"transfer": store.transfer})
        return cls(store.uri, pickled, **limit)

    def open(self, prefix: str = "") -> sync.Store:
        """Return the store of a prefix below the uri, with the limits of one task of this node."""
        context: Any = ray.get_runtime_context()
        task_cpus = context.get_assigned_resources().get("CPU", 1.0)
        num_tasks = max(1, int(_node_cpus(context.get_node_id()) / task_cpus))
        uri = join_uri(self.uri, prefix) if prefix else self.uri
        return _open(uri, self.pickled_options, self.max_in_flight_per_node, num_tasks)


def task_transfer(transfer: TransferOptions, max_per_node: int, num_tasks: int) -> TransferOptions:
    """Return the limits of one of `num_tasks` tasks on a node: of requests, and of their bytes."""
    in_flight = max(1, min(transfer.max_in_flight, max_per_node // num_tasks))
    num_bytes = max(1, transfer.max_in_flight_bytes * in_flight // transfer.max_in_flight)
    buffered = max(transfer.part_size_bytes, min(transfer.max_buffered_bytes, num_bytes))
    return replace(
        transfer,
        max_in_flight=in_flight,
        max_in_flight_bytes=num_bytes,
        max_buffered_bytes=buffered,
    )


@lru_cache(maxsize=8)
def _open(uri: str, pickled_options: bytes, max_per_node: int, num_tasks: int) -> sync.Store:
    options: Any = pickle.loads(pickled_options)  # noqa: S301  pickled by the driver
    transfer = task_transfer(options.pop("transfer"), max_per_node, num_tasks)
    return sync.open_store(uri, transfer=transfer, **options)


@lru_cache(maxsize=1)
def _node_cpus(node_id: str) -> float:
    nodes: Any = ray.nodes
    cpus = (node["Resources"].get("CPU", 1.0) for node in nodes() if node["NodeID"] == node_id)
    return float(next(cpus, 1.0))
