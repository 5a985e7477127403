"""if(Meta)Generation(Not)Match: read from a request, and judged against an object."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from aioflux.testing.gcs_server._errors import condition_not_met, invalid, not_modified

if TYPE_CHECKING:
    from collections.abc import Mapping

    from aioflux.testing.gcs_server._records import Bucket, ObjectRecord


@dataclass(frozen=True, kw_only=True, slots=True)
class Preconditions:
    """What must hold of the object that a request names; None asks nothing."""

    generation: int | None = None
    """Generation that must match; 0: no object of this name."""
    generation_not: int | None = None
    metageneration: int | None = None
    metageneration_not: int | None = None

    def check(self, record: ObjectRecord | Bucket | None) -> None:
        """Judge the preconditions.

        A `NotMatch` that fails is 304 whatever the method
        (cloud.google.com/storage/docs/request-preconditions).

        Args:
            record: The live object or bucket, or None where there is none.

        Raises:
            APIError: 412 or 304.
        """
        generation = record.generation if record else 0
        metageneration = record.metageneration if record else 0
        if self.generation not in (None, generation):
            raise condition_not_met()
        if self.metageneration not in (None, metageneration):
            raise condition_not_met()
        if self.generation_not == generation or self.metageneration_not == metageneration:
            raise not_modified()


NONE = Preconditions()
_HEADERS = frozenset({"x-goog-if-generation-match", "x-goog-if-metageneration-match"})


def integer(values: Mapping[str, str], name: str) -> int | None:
    """Read a number from a query or headers.

    Raises:
        APIError: 400, the value is no number.
    """
    text = values.get(name)
    if text is None:
        return None
    try:
        return int(text)
    except ValueError:
        raise invalid(f"Invalid value for {name}: {text}") from None


def from_query(query: Mapping[str, str], prefix: str = "if") -> Preconditions:
    """Read preconditions from a query; `ifSource` is the prefix for the source of a copy."""
    if not any(name.startswith(prefix) for name in query):
        return NONE
    return Preconditions(
        generation=integer(query, f"{prefix}GenerationMatch"),
        generation_not=integer(query, f"{prefix}GenerationNotMatch"),
        metageneration=integer(query, f"{prefix}MetagenerationMatch"),
        metageneration_not=integer(query, f"{prefix}MetagenerationNotMatch"),
    )


def from_headers(headers: Mapping[str, str]) -> Preconditions:
    """Read the preconditions of an XML request."""
    if _HEADERS.isdisjoint(headers):
        return NONE
    return Preconditions(
        generation=integer(headers, "x-goog-if-generation-match"),
        metageneration=integer(headers, "x-goog-if-metageneration-match"),
    )
