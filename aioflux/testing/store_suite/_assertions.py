"""Has pytest show the values of a failing assertion of the suite: imported before its other parts.

Here rather than where users import the suite from, so that any of its names may come first.
"""

from __future__ import annotations

import pytest

__all__ = ["PARTS"]

PARTS = ("base", "keys", "listing", "many", "on_service", "reading", "streams", "writing")
"""Modules with assertions."""

pytest.register_assert_rewrite(*(f"aioflux.testing.store_suite._{part}" for part in PARTS))
