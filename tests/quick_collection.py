"""A fixture that limits garbage collection to the objects of one test.

A collection of all objects of the test process takes a second or more.
"""

from __future__ import annotations

import gc

import pytest

__all__ = ["quick_collection"]


@pytest.fixture
def quick_collection() -> None:
    """Exclude all existing objects from garbage collection, until the process exits."""
    gc.freeze()
