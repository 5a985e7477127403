"""A session over a memory service that fails as a test says; retries cost no time."""

from __future__ import annotations

import uuid

import pytest

from tests.transfer.rig import Rig


@pytest.fixture
def rig() -> Rig:
    return Rig(f"rig-{uuid.uuid4().hex}")
