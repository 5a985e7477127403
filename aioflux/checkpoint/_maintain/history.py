"""History of saves: one record of the outcome of each, as JSON and CSV next to the steps.

    root/.checkpoint-history/record-<time>-<token>.json    one save each, created and never changed
    root/.checkpoint-history/history.json, history.csv     all that were gathered from such records

A record is an object of its own, so that concurrent or killed writers lose no records of others.
Now and then the records are gathered: `history.json` is replaced in the generation that was read,
and then they are deleted. An interrupt in between leaves records that are in both, and count once.
"""

from __future__ import annotations

import csv
import importlib
import io
import os
from datetime import UTC, datetime
from typing import IO, TYPE_CHECKING, Any, Final, Literal, TypeAlias, TypeVar

import msgspec

from aioflux.errors import (
    AlreadyExistsError,
    CheckpointCorruptError,
    NotFoundError,
    PreconditionFailedError,
)

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from aioflux._values.meta import ObjectMeta
    from aioflux.store import Store

__all__ = [
    "HISTORY_PREFIX",
    "SaveRecord",
    "append",
    "gather",
    "merge",
    "plot",
    "read_history",
    "record_key",
    "to_csv",
    "to_json",
]

HISTORY_PREFIX: Final = ".checkpoint-history/"
"""Prefix of the history, below the root of the checkpoints."""

_JSON_KEY = f"{HISTORY_PREFIX}history.json"
_CSV_KEY = f"{HISTORY_PREFIX}history.csv"
_RECORD = f"{HISTORY_PREFIX}record-"

_GROWTH = 32
"""Records are gathered as soon as they are a 32nd of what is gathered: each byte of a record is
written 32 times at most, on average, and a reader finds a bounded share of single records."""
_MAX_ATTEMPTS = 8

T = TypeVar("T")
Outcome: TypeAlias = Literal["committed", "failed", "cancelled"]


class SaveRecord(msgspec.Struct, frozen=True, kw_only=True):
    """The outcome of one save."""

    record_id: str
    """The save id, or a name of its form, `<time>-<8 hexadecimal digits>`; sorts by time."""
    time: datetime
    """Time of the end of the save, with its zone."""
    step: int
    """The training step."""
    outcome: Outcome
    """`committed`, `failed` or `cancelled`."""
    num_bytes: int = 0
    """Bytes of the data objects of all ranks, without the commit object; 0 if not committed."""
    staged_seconds: float = 0.0
    """Time for which the training thread was held up, in seconds."""
    upload_seconds: float = 0.0
    """Time from then to the commit or the failure, in seconds."""
    num_retries: int = 0
    """Requests that were sent again."""
    world_size: int = 1
    """Ranks that saved."""
    error: str = ""
    """Its error."""

    @property
    def bytes_per_second(self) -> float:
        """Throughput of the upload; 0 if it took no time."""
        return self.num_bytes / self.upload_seconds if self.upload_seconds > 0 else 0.0


COLUMNS: Final = (
    "time",
    "step",
    "outcome",
    "num_bytes",
    "staged_seconds",
    "upload_seconds",
    "bytes_per_second",
    "num_retries",
    "world_size",
    "error",
    "record_id",
)
"""Columns of the CSV and fields of the JSON, in order; new ones are appended."""

_record_decoder = msgspec.json.Decoder(SaveRecord)
_history_decoder = msgspec.json.Decoder(list[SaveRecord])


def record_key(record: SaveRecord) -> str:
    """Return the key of a record of its own."""
    return f"{_RECORD}{record.record_id}.json"


def merge(*histories: Iterable[SaveRecord]) -> list[SaveRecord]:
    """Return the records of several histories by time, each once."""
    known = {record.record_id: record for records in histories for record in records}
    return sorted(known.values(), key=lambda record: (record.time, record.record_id))


def _row(record: SaveRecord) -> dict[str, Any]:
    row = {name: getattr(record, name) for name in COLUMNS}
    # It may hold names of local files that are no text, which JSON cannot hold.
    return row | {"error": record.error.encode(errors="backslashreplace").decode()}


def to_csv(records: Iterable[SaveRecord]) -> str:
    """Return records as CSV with a header (RFC 4180); times as RFC 3339, in UTC."""
    text = io.StringIO()
    writer = csv.DictWriter(text, COLUMNS)
    writer.writeheader()
    for record in records:
        moment = record.time.astimezone(UTC).isoformat(timespec="milliseconds")
        writer.writerow(_row(record) | {"time": moment.replace("+00:00", "Z")})
    return text.getvalue()


def to_json(records: Iterable[SaveRecord]) -> bytes:
    """Return records as a JSON list of objects; times as RFC 3339."""
    return msgspec.json.format(msgspec.json.encode([_row(record) for record in records]), indent=1)


async def append(store: Store, record: SaveRecord) -> None:
    """Add a record, durable when this returns; one of the same id is kept as it is.

    Costs two requests, and about six more if it is time to gather.
    """
    await _create(store, record)
    listing = await store.list_all(HISTORY_PREFIX)
    gathered = sum(meta.size for meta in listing if meta.key == _JSON_KEY)
    loose = sum(meta.size for meta in listing if meta.key.startswith(_RECORD))
    if loose * _GROWTH >= gathered:
        await gather(store)


async def _create(store: Store, record: SaveRecord) -> None:
    try:
        await store.put(
            record_key(record),
            msgspec.json.encode(_row(record)),
            mode="create",
            content_type="application/json",
        )
    except AlreadyExistsError:
        return  # ids are unique: this record was written before


async def read_history(store: Store) -> list[SaveRecord]:
    """Return the records of all saves, oldest first.

    Raises:
        CheckpointCorruptError: An object of the history is damaged.
    """
    _, records = await _read_records(store)
    # Read last: it has the records that were gathered meanwhile.
    _, gathered = await _read_gathered(store)
    return merge(gathered, records)


async def gather(store: Store) -> None:
    """Write the records to `history.json` and `history.csv`, and then delete them.

    Several at once do no harm: the second one leaves it to the first.

    Raises:
        CheckpointCorruptError: An object of the history is damaged.
    """
    metas, records = await _read_records(store)
    if not metas:
        return
    meta, gathered = await _read_gathered(store)
    data = to_json(merge(gathered, records))
    try:
        await _replace(store, _JSON_KEY, data, meta, "application/json")
        await _publish_csv(store)
    except (AlreadyExistsError, PreconditionFailedError):
        return
    await store.delete_many(metas)


async def _publish_csv(store: Store) -> None:
    """Write the CSV of what `history.json` holds now.

    The generation to replace is read first: a process that read an older `history.json` meanwhile
    and writes later fails, and one that does not fail has read the newest.

    Raises:
        PreconditionFailedError: Others keep writing it; they have read newer records.
    """
    for attempt in range(_MAX_ATTEMPTS):
        try:
            old: ObjectMeta | None = await store.head(_CSV_KEY)
        except NotFoundError:
            old = None
        _, records = await _read_gathered(store)
        try:
            await _replace(store, _CSV_KEY, to_csv(records).encode(), old, "text/csv")
        except (AlreadyExistsError, PreconditionFailedError):
            if attempt == _MAX_ATTEMPTS - 1:
                raise
        else:
            return


async def _replace(
    store: Store, key: str, data: bytes, old: ObjectMeta | None, content_type: str
) -> None:
    """Write an object in place of the one that was read, or create it."""
    if old is None:
        await store.put(key, data, mode="create", content_type=content_type)
    else:
        await store.put(key, data, if_generation_match=old.generation, content_type=content_type)


async def _read_records(store: Store) -> tuple[list[ObjectMeta], list[SaveRecord]]:
    """Return the single records, as far as they are still there."""
    listing = await store.list_all(_RECORD)
    metas: list[ObjectMeta] = []
    records: list[SaveRecord] = []
    async for batch in store.try_fetch_batches(listing):
        for each in batch:
            if each[0] is not None:
                metas.append(each[0])
                records.append(_decode(_record_decoder, each[0], each[1]))
            elif not isinstance(each[1], NotFoundError):
                raise each[1]
    return metas, records


async def _read_gathered(store: Store) -> tuple[ObjectMeta | None, list[SaveRecord]]:
    """Return the gathered records, and the object that holds them."""
    async for batch in store.try_fetch_batches([_JSON_KEY]):
        for each in batch:
            if each[0] is not None:
                return each[0], _decode(_history_decoder, each[0], each[1])
            if not isinstance(each[1], NotFoundError):
                raise each[1]
    return None, []


def _decode(decoder: msgspec.json.Decoder[T], meta: ObjectMeta, data: bytes) -> T:
    try:
        return decoder.decode(data)
    except msgspec.DecodeError as exc:
        raise CheckpointCorruptError(
            f"{meta.uri} is no history of saves: {exc}; move it away, the checkpoints do not need "
            "it"
        ) from exc


_MB = 1e6
_COLORS = {"committed": "tab:blue", "failed": "tab:red", "cancelled": "tab:gray"}


def plot(
    records: Sequence[SaveRecord], target: str | os.PathLike[str] | IO[bytes], *, title: str = ""
) -> None:
    """Draw a history: throughput above, seconds staged and uploaded below, over the steps.

    Args:
        records: As `read_history` returns them.
        target: Local path of a picture (.png, .svg, .pdf), or a binary file, which gets a PNG.
        title: Heading.

    Raises:
        ImportError: There is no matplotlib.
        ValueError: There are no records, or the path ends in no kind of picture.
    """
    if not records:
        raise ValueError("there is nothing to draw: the history has no records")
    try:
        figures = importlib.import_module("matplotlib.figure")
    except ImportError as exc:
        raise ImportError("a plot needs matplotlib: pip install matplotlib") from exc
    # Without pyplot, which would choose a window system and keep every figure.
    figure = figures.Figure(figsize=(9, 6), layout="constrained")
    upper, lower = figure.subplots(2, 1, sharex=True)
    _draw_throughput(upper, records)
    _draw_seconds(lower, records)
    if title:
        figure.suptitle(title)
    is_path = isinstance(target, str | os.PathLike)
    figure.savefig(target, format=None if is_path else "png")


def _draw_throughput(axes: Any, records: Sequence[SaveRecord]) -> None:
    for outcome, color in _COLORS.items():
        chosen = [record for record in records if record.outcome == outcome]
        if chosen:
            axes.scatter(
                [record.step for record in chosen],
                [record.bytes_per_second / _MB for record in chosen],
                color=color,
                label=f"{outcome} ({len(chosen)})",
                s=18,
            )
    axes.set_ylabel("MB/s")
    axes.set_ylim(bottom=0)
    axes.grid(alpha=0.3)
    axes.legend()


def _draw_seconds(axes: Any, records: Sequence[SaveRecord]) -> None:
    steps = [record.step for record in records]
    axes.plot(steps, [record.upload_seconds for record in records], ".-", label="uploaded")
    axes.plot(steps, [record.staged_seconds for record in records], ".-", label="staged")
    axes.set_xlabel("step")
    axes.set_ylabel("seconds")
    axes.set_ylim(bottom=0)
    axes.grid(alpha=0.3)
    axes.legend()
