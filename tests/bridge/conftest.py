"""A GCS server in this process, for stores in this process and in child processes."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.quick_collection import quick_collection

if TYPE_CHECKING:
    from collections.abc import Iterator

    from aioflux.testing import GCSServer


@pytest.fixture
def server() -> Iterator[GCSServer]:
    from aioflux.testing import GCSServer

    with GCSServer(buckets=("bucket",)) as running:
        yield running


__all__ = ["quick_collection"]
