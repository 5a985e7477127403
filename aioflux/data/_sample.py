"""Sample: one object as a dataset hands it out."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from aioflux._values.meta import ObjectMeta

__all__ = ["Sample"]


@dataclass(frozen=True, slots=True)
class Sample:
    """One object: its key, its bytes and what is known about it."""

    key: str
    """Name of the object, below the uri of the dataset."""
    data: bytes = field(repr=False)
    """Its bytes, as stored, verified."""
    meta: ObjectMeta
    """Its metadata: as listed, or as it came with the bytes where nothing was listed."""

    @property
    def uri(self) -> str:
        """Whole uri of the object."""
        return self.meta.uri
