"""Keys of the datasets that `write_objects` writes: data objects, and the manifest that lists them.

out/aioflux-manifest
out/data-<write id>-<task>-<attempt>-<number>.parquet
out/data-<write id>-<task>-<attempt>/<key of a row>      with format="objects"
"""

from __future__ import annotations

import re
from typing import Final, NamedTuple

MANIFEST_KEY: Final = "aioflux-manifest"
"""Name of a manifest in the prefix of its dataset, and beginning of the names of further ones."""

_WRITTEN = re.compile(
    r"((?:.*?/)??)((data-[0-9a-f]{32})-\d{5,}-[0-9a-f]{8})(?:-\d{5,}\.[a-z]+|/(.+))", re.DOTALL
)


class WrittenKey(NamedTuple):
    """Parts of the key of a data object; all are empty for another key."""

    dataset: str = ""
    """Prefix of the dataset, with a slash at the end unless it is empty."""
    attempt: str = ""
    """Beginning of the names of one attempt of a task, which no other attempt overwrites."""
    write_id: str = ""
    """Beginning of the names of one write."""
    name: str = ""
    """Key of the row with format="objects"; otherwise empty."""

    @classmethod
    def parse(cls, key: str) -> WrittenKey:
        """Return the parts of a key."""
        match = _WRITTEN.fullmatch(key) if "data-" in key else None
        return cls() if match is None else cls(*match.groups(default=""))


def is_manifest(key: str) -> bool:
    """Return whether a key is that of a manifest, in any prefix."""
    return key.rpartition("/")[2].startswith(MANIFEST_KEY)
