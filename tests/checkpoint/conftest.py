"""Fixtures for checkpoint tests: an empty bucket on the cloud of the test (`clouds`)."""

from __future__ import annotations

import uuid
from typing import TYPE_CHECKING, Any

import pytest

from tests.bridge.patience import be_patient
from tests.quick_collection import quick_collection
from tests.servers.clouds import open_bucket

__all__ = ["quick_collection"]

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


@pytest.fixture
def server(
    cloud: str, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Any]:
    """An empty bucket. A constant `URI` of the test module is changed to this bucket."""
    with open_bucket(cloud, request, monkeypatch) as bucket:
        uri = getattr(request.module, "URI", None)
        if uri is not None and cloud != "gs":
            monkeypatch.setattr(request.module, "URI", uri.replace("gs://bucket", bucket.root))
        yield bucket


@pytest.fixture
def _patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Long limits for clean-up, for tests of the objects that remain after a failure."""
    be_patient(monkeypatch.setitem)


@pytest.fixture
def root(cloud: str, request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """Uri without objects, on a cloud, `file` or `memory`."""
    if cloud == "file":
        return tmp_path.as_uri()
    if cloud == "memory":
        return f"memory://{uuid.uuid4().hex}"
    uri: str = request.getfixturevalue("server").root
    return uri
