"""Collections of garbage that pass over the objects of one test alone.

A full pass over all objects of the test process takes a second or more.
"""

from __future__ import annotations

import gc

import pytest

__all__ = ["quick_collection"]


@pytest.fixture
def quick_collection() -> None:
    """Leave objects that are older than the test out of `gc.collect`, for good."""
    gc.freeze()
