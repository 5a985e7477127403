"""Clusters of Ray on this machine, whose processes end with their block."""

from __future__ import annotations

import logging
import os
import secrets
import shutil
import tempfile
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import pytest
import ray
import ray.data
from ray.cluster_utils import Cluster

if TYPE_CHECKING:
    from collections.abc import Iterator

# Ray caches the token in the process. Without one, it writes a token into the home directory.
os.environ.setdefault("RAY_AUTH_TOKEN", secrets.token_hex(32))
os.environ["RAY_USAGE_STATS_ENABLED"] = "0"

STORE_BYTES = 200_000_000
SAME_PRIORITY = {"worker_niceness": 0}
"""Workers of Ray have a lower priority by default. Beside busy tests, they would start too late."""
SYSTEM_CONFIG = {
    **SAME_PRIORITY,
    "health_check_period_ms": 1000,
    "health_check_timeout_ms": 2000,
    "health_check_failure_threshold": 3,
}
"""A dead node is noticed after 3 s instead of 15."""


def quiet() -> ray.data.DataContext:
    """Switch off messages about progress, and return the context of Ray Data."""
    context = ray.data.DataContext.get_current()
    context.enable_progress_bars = False
    context.print_on_execution_start = False
    logging.getLogger("ray.data").setLevel(logging.WARNING)
    return context


@contextmanager
def local_node(num_cpus: int = 2) -> Iterator[None]:
    """Run Ray with one node in this process."""
    with _directory() as directory:
        ray.init(
            num_cpus=num_cpus,
            include_dashboard=False,
            object_store_memory=STORE_BYTES,
            log_to_driver=False,
            _temp_dir=directory,
            _system_config=SAME_PRIORITY,
        )
        try:
            quiet()
            yield
        finally:
            ray.shutdown()


class Nodes:
    """A cluster whose nodes have addresses of this machine, 127.0.0.2 and so on."""

    def __init__(self, directory: str) -> None:
        self._directory = directory
        self._next_address = 2
        self._cluster = Cluster()
        self.workers: list[Any] = []
        """Nodes other than the first one, to which the driver is connected."""

    @property
    def address(self) -> str:
        return self._cluster.address

    def start(self) -> None:
        """Start three nodes, and connect this process to the first one."""
        self._add(include_dashboard=False, _system_config=SYSTEM_CONFIG)
        self.add_workers()
        ray.init(address=self.address, _node_ip_address="127.0.0.2", log_to_driver=False)

    def add_workers(self) -> None:
        """Add nodes until there are three."""
        while len(self.workers) < 2:
            self.workers.append(self._add())
        self._cluster.wait_for_nodes()

    def _add(self, **options: Any) -> Any:
        address = f"127.0.0.{self._next_address}"
        self._next_address += 1
        return self._cluster.add_node(
            num_cpus=1,
            object_store_memory=STORE_BYTES,
            node_ip_address=address,
            temp_dir=self._directory,
            **options,
        )

    def kill_worker(self, node_id: str = "") -> None:
        """Kill all processes of a node that is not the first one."""
        ids = [worker.node_id for worker in self.workers]
        worker = self.workers.pop(ids.index(node_id) if node_id else -1)
        self._cluster.remove_node(worker, allow_graceful=False)

    def shutdown(self) -> None:
        ray.shutdown()
        self._cluster.shutdown()


@contextmanager
def three_nodes() -> Iterator[Nodes]:
    """Run three nodes of one processor each, to which this process is connected."""
    with _directory() as directory:
        nodes = Nodes(directory)
        try:
            nodes.start()
            quiet()
            yield nodes
        finally:
            nodes.shutdown()


@contextmanager
def _directory() -> Iterator[str]:
    """Return a directory with a short path, since the path of a socket has at most 107 bytes."""
    directory = tempfile.mkdtemp(prefix="ray-", dir="/tmp")
    os.mkdir(f"{directory}/ray")
    try:
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("RAY_TMPDIR", directory)  # for the address of the newest cluster
            yield directory
    finally:
        shutil.rmtree(directory, ignore_errors=True)
