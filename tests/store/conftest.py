"""One server for all tests of this folder; each test has a prefix of its own."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from collections.abc import Iterator

    from aioflux.testing import GCSServer


@pytest.fixture(scope="session")
def gcs_server() -> Iterator[GCSServer]:
    from aioflux.testing import GCSServer

    with GCSServer(buckets=("bucket",)) as server:
        yield server
