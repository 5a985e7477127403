"""The store's contract on a server of another process, whose inside nobody can reach.

Environment:
    AIOFLUX_TEST_GCS_URL: A server of the Cloud Storage API that is asked without credentials; by
        default `aioflux serve` is started.
    AIOFLUX_TEST_GCS_BUCKET: An existing bucket on it, "bucket" by default.
    AIOFLUX_TEST_GCS_LACKS: What it cannot do: fields of `SuiteCapabilities`, with commas.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import pytest

from aioflux.testing import GCSServerProcess
from aioflux.testing.store_suite import SuiteCapabilities
from tests.store.places import RemotePlace
from tests.store.suite import PlaceSuite

if TYPE_CHECKING:
    from collections.abc import Iterator

URL = os.environ.get("AIOFLUX_TEST_GCS_URL", "")
BUCKET = os.environ.get("AIOFLUX_TEST_GCS_BUCKET", "bucket")
LACKS = [name for name in os.environ.get("AIOFLUX_TEST_GCS_LACKS", "").split(",") if name]


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    if URL:
        yield URL
        return
    with GCSServerProcess(buckets=(BUCKET,)) as server:
        yield server.url


class TestOtherServer(PlaceSuite):
    can = SuiteCapabilities(**dict.fromkeys(LACKS, False))  # type: ignore[arg-type]

    @pytest.fixture(autouse=True)
    def set_place(self, url: str) -> Iterator[None]:
        self.place = place = RemotePlace(url, BUCKET)
        yield
        place.close()
