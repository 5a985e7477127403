"""Sample: the default item of the datasets, one whole object."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from typing_extensions import TypeVar  # for `default=`; torch depends on this package

if TYPE_CHECKING:
    from aioflux._values.meta import ObjectMeta


@dataclass(frozen=True, slots=True)
class Sample:
    """One object: its key, its bytes and its metadata."""

    key: str
    """Name of the object, below the uri of the dataset."""
    data: bytes = field(repr=False)
    """Stored bytes of the object, verified by checksum."""
    meta: ObjectMeta
    """Metadata of the object: as listed, or from the response if only the key was known."""

    @property
    def uri(self) -> str:
        """Full uri of the object, with its bucket."""
        return self.meta.uri


def make_sample(meta: ObjectMeta, data: bytes) -> Sample:
    """Return the sample of an object; the one place that constructs a `Sample`."""
    return Sample(meta.key, data, meta)


# An item is the result of the transform. Without a transform it is a record, and without records=
# a sample.
Record = TypeVar("Record", default=Sample)
Item = TypeVar("Item", default=Sample)
Item_co = TypeVar("Item_co", covariant=True, default=Sample)
ItemOfRecord = TypeVar("ItemOfRecord", default=Record)
