"""What a store must hold after operations of which some may have failed: a set of possibilities."""

from __future__ import annotations

from dataclasses import dataclass, field

__all__ = ["Model"]

ABSENT = None
"""Stands for "no object" among the possible contents of a key."""


@dataclass
class Model:
    """Key -> the contents that its object may have.

    A write that succeeds leaves one possibility. One that raised may have happened or not: its
    content joins those that were possible before.
    """

    contents: dict[str, set[bytes | None]] = field(default_factory=dict)

    def possible(self, key: str) -> set[bytes | None]:
        """What the object may hold."""
        return self.contents.setdefault(key, {ABSENT})

    def is_certain(self, key: str) -> bool:
        """Whether there is one possibility."""
        return len(self.possible(key)) == 1

    def certain(self, key: str) -> bytes | None:
        """The one possibility."""
        [content] = self.possible(key)
        return content

    def became(self, key: str, content: bytes | None) -> None:
        """Take note of a write that succeeded."""
        self.contents[key] = {content}

    def may_have_become(self, key: str, content: bytes | None) -> None:
        """Take note of a write that raised."""
        self.possible(key).add(content)

    def check(self, key: str, content: bytes | None) -> None:
        """Compare what was read with what is possible."""
        if content not in self.possible(key):
            raise AssertionError(
                f"{key} has {_told(content)}, the model {', '.join(map(_told, self.possible(key)))}"
            )

    def check_part(self, key: str, start: int, end: int, content: bytes) -> None:
        """Compare a range with what is possible."""
        parts = {whole[start:end] for whole in self.possible(key) if whole is not ABSENT}
        if content not in parts:
            raise AssertionError(
                f"{key}[{start}:{end}] has {_told(content)}, the model "
                f"{', '.join(map(_told, parts))}"
            )


def _told(content: bytes | None) -> str:
    return "nothing" if content is ABSENT else f"{len(content)} bytes ({content[:8].hex()}...)"
