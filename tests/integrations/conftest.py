"""Fixtures for the tests of all integrations."""

from __future__ import annotations

from tests.patience import patient

__all__ = ["patient"]
