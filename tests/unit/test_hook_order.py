"""Hooks at fork and at exit are registered in the same order whatever is imported first.

Hooks at exit run in reverse: the event loop ends after the saves and file systems that use it.
"""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

PROBE = """
import atexit, json, os, sys

registered = []

def record(kind, register):
    def wrapper(*args, **kwargs):
        hook = args[0] if args else next(iter(kwargs.values()))
        registered.append((kind, str(hook.__module__), getattr(hook, "__name__", "")))
        return register(*args, **kwargs)
    return wrapper

atexit.register = record("exit", atexit.register)
os.register_at_fork = record("fork", os.register_at_fork)
import importlib
import fsspec, torch.distributed.checkpoint, torch.utils.data  # once for all orders
for modules in sys.argv[1:]:
    if child := os.fork():
        assert os.waitpid(child, 0)[1] == 0
        continue
    for name in modules.split():
        importlib.import_module(name)
    from aioflux.checkpoint import Checkpointer
    print(json.dumps(registered), flush=True)
    os._exit(0)
"""

ORDERS = [
    "aioflux.data aioflux.checkpoint aioflux.integrations.fsspec",
    "aioflux.integrations.fsspec aioflux.checkpoint aioflux.data",
]


@pytest.fixture(scope="module")
def registered_by_order() -> list[list[tuple[str, str, str]]]:
    run = subprocess.run(
        [sys.executable, "-c", PROBE, *ORDERS], check=True, capture_output=True, text=True
    )
    return [[tuple(each) for each in json.loads(line)] for line in run.stdout.splitlines()]


@pytest.mark.parametrize("number", range(len(ORDERS)), ids=["data-first", "fsspec-first"])
def test_the_loop_ends_last(
    registered_by_order: list[list[tuple[str, str, str]]], number: int
) -> None:
    registered = registered_by_order[number]
    ours = [each for each in registered if each[1].split(".")[0] == "aioflux"]
    assert [each for each in ours if each[0] == "fork"] == [
        ("fork", "aioflux._bridge", "_after_fork_in_child")
    ]
    at_exit = [module for kind, module, _ in registered if kind == "exit"]
    for before, after in (
        ("aioflux._bridge", "aioflux.checkpoint._checkpointer"),
        ("aioflux._bridge", "aioflux.integrations.fsspec._filesystem"),
    ):
        assert at_exit.index(before) < at_exit.index(after)
