"""What tests of the Checkpointer share."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch

from aioflux.checkpoint._save import commit_protocol as _commit_protocol
from tests.checkpoint.manager.desk import Forks

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture(autouse=True, scope="session")
def _one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def _time_to_clean_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a failed save wrote is gone when it has ended, also on a machine that stands still."""
    monkeypatch.setattr(_commit_protocol, "_CLEANUP_SECONDS", 240.0)


@pytest.fixture(scope="session")
def forks() -> Iterator[Forks]:
    """What forks the processes of tests; each test waits for the end of its own."""
    with Forks() as forks:
        yield forks
