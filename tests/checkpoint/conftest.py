"""An empty bucket for checkpoints: on the embedded server, or on each cloud (`clouds`)."""

from __future__ import annotations

import gc
import uuid
from typing import TYPE_CHECKING, Any

import pytest

from tests.bridge.patience import be_patient
from tests.servers.clouds import open_bucket

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


@pytest.fixture
def server(
    cloud: str, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Any]:
    """A bucket; the module's `URI` is one in it."""
    with open_bucket(cloud, request, monkeypatch) as bucket:
        uri = getattr(request.module, "URI", None)
        if uri is not None and cloud != "gs":
            monkeypatch.setattr(request.module, "URI", uri.replace("gs://bucket", bucket.root))
        yield bucket


@pytest.fixture(scope="module")
def _small_heap() -> Iterator[None]:
    """Take a second from each `gc.collect`: what other tests left is not looked at."""
    gc.freeze()
    yield
    gc.unfreeze()


@pytest.fixture
def _patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """For tests that look at what a failure leaves: clean-up may take its time."""
    be_patient(monkeypatch.setitem)


@pytest.fixture
def root(cloud: str, request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """Uri of an empty place, also on `file` and in `memory`."""
    if cloud == "file":
        return tmp_path.as_uri()
    if cloud == "memory":
        return f"memory://{uuid.uuid4().hex}"
    uri: str = request.getfixturevalue("server").root
    return uri
