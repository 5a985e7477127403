"""A model of a store with ambiguous writes: the possible contents of each object."""

from __future__ import annotations

from dataclasses import dataclass, field

__all__ = ["Model"]

ABSENT = None
"""Means "no object" among the possible contents of a key."""


@dataclass
class Model:
    """The possible contents of each object.

    After a write that succeeded, one content is possible. A write that raised may have happened or
    not: its content is added to the possible contents.
    """

    contents: dict[str, set[bytes | None]] = field(default_factory=dict)

    def possible(self, key: str) -> set[bytes | None]:
        """Return the possible contents of an object."""
        return self.contents.setdefault(key, {ABSENT})

    def is_certain(self, key: str) -> bool:
        """Return whether there is one possible content."""
        return len(self.possible(key)) == 1

    def certain(self, key: str) -> bytes | None:
        """Return the one possible content."""
        [content] = self.possible(key)
        return content

    def became(self, key: str, content: bytes | None) -> None:
        """Add a write that succeeded."""
        self.contents[key] = {content}

    def may_have_become(self, key: str, content: bytes | None) -> None:
        """Add a write that raised."""
        self.possible(key).add(content)

    def check(self, key: str, content: bytes | None) -> None:
        """Compare a read content with the possible ones."""
        if content not in self.possible(key):
            possible = ", ".join(map(_describe, self.possible(key)))
            raise AssertionError(f"{key} has {_describe(content)}, the model {possible}")

    def check_part(self, key: str, start: int, end: int, content: bytes) -> None:
        """Compare a read range with the possible ones."""
        parts = {whole[start:end] for whole in self.possible(key) if whole is not ABSENT}
        if content not in parts:
            raise AssertionError(
                f"{key}[{start}:{end}] has {_describe(content)}, the model "
                f"{', '.join(map(_describe, parts))}"
            )


def _describe(content: bytes | None) -> str:
    return "nothing" if content is ABSENT else f"{len(content)} bytes ({content[:8].hex()}...)"
