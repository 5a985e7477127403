"""Fixtures for tests of the Checkpointer."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch

from tests.checkpoint.manager.worker_process import Forks

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture(autouse=True, scope="session")
def _one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def forks() -> Iterator[Forks]:
    """A process that forks other processes; each test waits for the processes that it forked."""
    with Forks() as forks:
        yield forks
