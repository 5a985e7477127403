"""Collections of garbage that pass over the objects of one test alone.

A full pass over all objects of the test process takes a second or more.
"""

from __future__ import annotations

import gc
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["quick_collection"]


@pytest.fixture
def quick_collection() -> Iterator[None]:
    """Leave objects that are older than the test out of `gc.collect`."""
    gc.freeze()
    yield
    gc.unfreeze()
