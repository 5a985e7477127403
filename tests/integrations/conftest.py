"""What tests of all integrations have."""

from __future__ import annotations

from tests.patience import patient

__all__ = ["patient"]
