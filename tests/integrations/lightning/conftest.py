"""A bucket on the embedded server for tests of the Lightning integration."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from aioflux.testing import GCSServer

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[GCSServer]:
    with GCSServer(buckets=("bucket",)) as server:
        monkeypatch.setenv("STORAGE_EMULATOR_HOST", server.url)
        yield server
