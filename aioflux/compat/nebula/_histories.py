"""checkpointHistories.csv: one line for each save, as Nebula showed it beside a job.

The object is replaced under the generation that was read, so that two writers lose nothing of each
other. A line is some 150 bytes: ten thousand saves are 1.5 MB.
"""

from __future__ import annotations

import csv
import io
from dataclasses import astuple, dataclass, fields
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Final

from aioflux.errors import AlreadyExistsError, NotFoundError, PreconditionFailedError

if TYPE_CHECKING:
    from aioflux.store import Store

__all__ = ["COLUMNS", "HISTORY_KEY", "Line", "append"]

HISTORY_KEY: Final = "nebula/checkpointHistories.csv"
"""Below the root of the checkpoints."""

_MAX_TURNS: Final = 8


@dataclass(frozen=True, kw_only=True, slots=True)
class Line:
    """What became of one save."""

    tag: str
    """The tag."""
    outcome: str
    """`committed`, `failed` or `cancelled`."""
    num_files: int
    """Parts of it."""
    size_bytes: int
    """Bytes that were stored."""
    blocked_seconds: float
    """How long the training was held up."""
    duration_seconds: float
    """From memory to the commit, or to the failure."""
    num_nodes: int = 1
    """Nodes that saved it."""
    save_id: str = ""
    """Names the save."""
    error: str = ""
    """Why it failed."""


COLUMNS: Final = (
    "time",
    "tag",
    "outcome",
    "num_files",
    "size_bytes",
    "blocked_seconds",
    "duration_seconds",
    "num_nodes",
    "save_id",
    "error",
    "throughput_bytes_per_second",
)
"""In order; new ones come behind them."""

assert COLUMNS[1:-1] == tuple(each.name for each in fields(Line))


def _encode(rows: list[tuple[object, ...]]) -> bytes:
    text = io.StringIO()
    csv.writer(text).writerows(rows)
    return text.getvalue().encode(errors="backslashreplace")


async def append(store: Store, line: Line) -> None:
    """Add a line; two or three requests.

    Raises:
        StorageError: It could not be added.
    """
    seconds = line.duration_seconds
    moment = datetime.now(UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
    throughput = round(line.size_bytes / seconds) if seconds > 0 else 0
    row = _encode([(moment, *astuple(line), throughput)])
    for turn in range(_MAX_TURNS):
        try:
            meta = await store.head(HISTORY_KEY)
            data = await store.get(meta) + row
        except NotFoundError:
            meta, data = None, _encode([COLUMNS]) + row
        try:
            if meta is None:
                await store.put(HISTORY_KEY, data, mode="create", content_type="text/csv")
            else:
                generation = meta.generation
                await store.put(
                    HISTORY_KEY, data, if_generation_match=generation, content_type="text/csv"
                )
        except (AlreadyExistsError, PreconditionFailedError):
            if turn == _MAX_TURNS - 1:
                raise
        else:
            return
