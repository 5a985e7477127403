"""The statuses that docs/failures.md lists as retried are retried, and no others."""

from __future__ import annotations

import re
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

import aioflux
from aioflux.testing import GCSServer
from tests.faults.failure_table import table
from tests.servers.statuses import AMBIGUOUS

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

PAGE = Path(__file__).parents[2] / "docs" / "failures.md"
TEXT = PAGE.read_text(encoding="utf-8")
ROWS = re.findall(r"^\| ([^|]*) \| `TransientError` \| yes \|", TEXT, re.MULTILINE)
RETRIED = [int(each) for each in re.findall(r"\b\d{3}\b", "".join(ROWS))]
STATUSES = (
    *range(400, 416),
    417,
    421,
    422,
    425,
    429,
    431,
    451,
    500,
    501,
    502,
    503,
    504,
    505,
    507,
    511,
)
OPERATIONS: dict[str, tuple[str, Callable[[aioflux.sync.Store], object]]] = {
    "read": ("objects.get", lambda store: store.get("a")),
    "list": ("objects.list", lambda store: list(store.list())),
    "write": ("objects.insert", lambda store: store.put("b", b"b", mode="create")),
    "compose": ("objects.compose", lambda store: store.compose("b", ["a"])),
    "delete": ("objects.delete", lambda store: store.delete(store.head("a"))),
}


@pytest.fixture(scope="module")
def server() -> Iterator[GCSServer]:
    with GCSServer(buckets=("bucket",)) as server:
        yield server


def test_the_table_lists_statuses() -> None:
    assert sorted(RETRIED) == list(AMBIGUOUS)


def test_the_table_is_printed_from_the_package() -> None:
    """If this fails, copy the table that `python -m tests.faults.failure_table` prints."""
    assert table() in TEXT


@pytest.mark.parametrize("name", OPERATIONS)
@pytest.mark.parametrize("status", STATUSES)
def test_a_status_is_retried_if_it_is_listed(server: GCSServer, status: int, name: str) -> None:
    operation, call = OPERATIONS[name]
    uri = f"gs://bucket/{name}-{status}"
    retry = aioflux.RetryPolicy(initial_seconds=0.001)
    with aioflux.sync.open_store(uri, endpoint_url=server.url, retry=retry) as store:
        store.put("a", b"a")
        with server.faults.inject(operation, status=status, times=1):
            expected = nullcontext() if status in RETRIED else pytest.raises(aioflux.StorageError)
            with expected:
                call(store)
