"""Sample: one object as a dataset returns it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from typing_extensions import TypeVar  # with defaults; torch requires it

if TYPE_CHECKING:
    from aioflux._values.meta import ObjectMeta

__all__ = ["Item", "ItemOfRecord", "Item_co", "Record", "Sample", "make_sample"]


@dataclass(frozen=True, slots=True)
class Sample:
    """One object: its key, its bytes and its metadata."""

    key: str
    """Name of the object, below the uri of the dataset."""
    data: bytes = field(repr=False)
    """Its bytes, as stored, verified."""
    meta: ObjectMeta
    """Its metadata: as listed, or as it came with the bytes if only the key was given."""

    @property
    def uri(self) -> str:
        """Whole uri of the object."""
        return self.meta.uri


def make_sample(meta: ObjectMeta, data: bytes) -> Sample:
    """Return the sample of an object; all samples of the library are made here."""
    return Sample(meta.key, data, meta)


# Items are what a transform returns, without one the records, and without these the samples.
Record = TypeVar("Record", default=Sample)
Item = TypeVar("Item", default=Sample)
Item_co = TypeVar("Item_co", covariant=True, default=Sample)
ItemOfRecord = TypeVar("ItemOfRecord", default=Record)
