"""Placeholder directories are removed with the process that made them, also a forked one."""

from __future__ import annotations

import multiprocessing
import os
from typing import TYPE_CHECKING

from aioflux.integrations.deepspeed import AiofluxCheckpointEngine

if TYPE_CHECKING:
    from multiprocessing.connection import Connection

URI = "gs://bucket/run"
KEPT: list[AiofluxCheckpointEngine] = []


def use_two(connection: Connection) -> None:
    """Drop one engine, and keep another until the process ends."""
    dropped = AiofluxCheckpointEngine().placeholders.directory_of(URI)
    KEPT.append(AiofluxCheckpointEngine())
    connection.send([dropped, KEPT[0].placeholders.directory_of(URI)])


def test_a_process_of_multiprocessing_leaves_no_directory() -> None:
    context = multiprocessing.get_context("fork")
    ours, its = context.Pipe()
    process = context.Process(target=use_two, args=(its,))
    process.start()
    directories = ours.recv()
    process.join()
    assert process.exitcode == 0
    assert len(directories) == 2
    assert not any(map(os.path.exists, directories))
    ours.close()
    its.close()


def test_a_forked_child_keeps_the_directories_of_its_parent() -> None:
    engine = AiofluxCheckpointEngine()
    directory = engine.placeholders.directory_of(URI)
    process = multiprocessing.get_context("fork").Process(target=KEPT.append, args=(engine,))
    process.start()
    process.join()
    assert os.path.isdir(directory)
    engine.cleanup()
    assert not os.path.exists(directory)
