"""Directories that stand for uris: they go with the process that made them, also a forked one."""

from __future__ import annotations

import multiprocessing
import os
from typing import TYPE_CHECKING

import pytest

from aioflux.integrations.deepspeed._roots import Roots

if TYPE_CHECKING:
    from multiprocessing.connection import Connection

URI = "gs://bucket/run"
KEPT: list[Roots] = []


def use_two(told: Connection) -> None:
    """Have one pair of roots that nobody holds, and one that lives until the process ends."""
    dropped = Roots().stand_in(URI)
    KEPT.append(Roots())
    told.send([dropped, KEPT[0].stand_in(URI)])


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_a_process_of_multiprocessing_leaves_no_directory(method: str) -> None:
    context = multiprocessing.get_context(method)
    ours, its = context.Pipe()
    process = context.Process(target=use_two, args=(its,))  # type: ignore[attr-defined]
    process.start()
    directories = ours.recv()
    process.join()
    assert process.exitcode == 0
    assert len(directories) == 2
    assert not any(map(os.path.exists, directories))
    ours.close()
    its.close()


def test_a_forked_child_leaves_its_parent_what_it_has() -> None:
    roots = Roots()
    directory = roots.stand_in(URI)
    process = multiprocessing.get_context("fork").Process(target=KEPT.append, args=(roots,))
    process.start()
    process.join()
    assert os.path.isdir(directory)
    roots.close()
    assert not os.path.exists(directory)
