"""What became of each save: one record each, as JSON and CSV beside the steps.

    root/.checkpoint-history/record-<time>-<token>.json    one save each, created and never changed
    root/.checkpoint-history/history.json, history.csv     all that were gathered from such records

A record is an object of its own, so that writers at the same time, or killed ones, lose nothing of
each other. Now and then the records are gathered: `history.json` is replaced under the generation
that was read, and only then are they deleted. Whoever is interrupted in between leaves records that
are in both, and count once.
"""

from __future__ import annotations

import csv
import io
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, Final, Literal, TypeAlias, TypeVar

import msgspec

from aioflux.checkpoint._maintain.history_plot import plot
from aioflux.errors import (
    AlreadyExistsError,
    CheckpointCorruptError,
    NotFoundError,
    PreconditionFailedError,
)

if TYPE_CHECKING:
    from collections.abc import Iterable

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
"""What lies below it belongs to the history of saves; below the root of the checkpoints."""

_JSON_KEY = f"{HISTORY_PREFIX}history.json"
_CSV_KEY = f"{HISTORY_PREFIX}history.csv"
_RECORD = f"{HISTORY_PREFIX}record-"

_GROWTH = 32
"""Gathered as soon as the records are a 32nd of what is gathered: each byte of a record is written
32 times at most, on the average, and a reader meets a bounded share of records."""
_MAX_TURNS = 8

T = TypeVar("T")
Outcome: TypeAlias = Literal["committed", "failed", "cancelled"]


class SaveRecord(msgspec.Struct, frozen=True, kw_only=True):
    """What became of one save."""

    record_id: str
    """Names the record: `<time>-<8 hexadecimal digits>`, as a save id; sorts by time. The save id
    where there is one."""
    time: datetime
    """When the save ended, aware."""
    step: int
    """The training step."""
    outcome: Outcome
    """`committed`, `failed` or `cancelled`."""
    num_bytes: int = 0
    """Bytes of the state that were uploaded, over all ranks that are known of."""
    staged_seconds: float = 0.0
    """Seconds that the training thread was held up."""
    upload_seconds: float = 0.0
    """Seconds from then to the commit, or to the failure."""
    num_retries: int = 0
    """Requests that were sent again."""
    world_size: int = 1
    """Ranks that saved."""
    error: str = ""
    """Why it failed."""

    @property
    def bytes_per_second(self) -> float:
        """Throughput of the upload; 0 where it took no time."""
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
"""Columns of the CSV and fields of the JSON, in order; new ones come behind them."""

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
    # Names of local files that are no text can stand in it, and in no JSON.
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
    """Add a record, durable when this returns; another one of the same id is left as it is.

    Costs two requests, and some six more where it is time to gather.

    Args:
        store: The root of the checkpoints.
        record: What to add.
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
        return  # nobody makes an id twice: this one was written before


async def read_history(store: Store) -> list[SaveRecord]:
    """Return what became of all saves, oldest first.

    Args:
        store: The root of the checkpoints.

    Raises:
        CheckpointCorruptError: An object of the history is damaged.
    """
    _, records = await _loose(store)
    # Read last: a record that went meanwhile is in it.
    _, gathered = await _gathered(store)
    return merge(gathered, records)


async def gather(store: Store) -> None:
    """Bring the records into `history.json` and `history.csv`, and delete them then.

    Several at once do no harm: who comes second leaves it to the other.

    Raises:
        CheckpointCorruptError: An object of the history is damaged.
    """
    metas, records = await _loose(store)
    if not metas:
        return
    meta, gathered = await _gathered(store)
    data = to_json(merge(gathered, records))
    try:
        await _replace(store, _JSON_KEY, data, meta, "application/json")
        await _publish_csv(store)
    except (AlreadyExistsError, PreconditionFailedError):
        return
    await store.delete_many(metas)


async def _publish_csv(store: Store) -> None:
    """Write the CSV of what `history.json` holds now.

    The generation to replace is read first: whoever read an older `history.json` meanwhile and
    writes later fails, and who does not fail has read the newest.

    Raises:
        PreconditionFailedError: Others keep writing it; they have read what is newer.
    """
    for turn in range(_MAX_TURNS):
        try:
            old: ObjectMeta | None = await store.head(_CSV_KEY)
        except NotFoundError:
            old = None
        _, records = await _gathered(store)
        try:
            await _replace(store, _CSV_KEY, to_csv(records).encode(), old, "text/csv")
        except (AlreadyExistsError, PreconditionFailedError):
            if turn == _MAX_TURNS - 1:
                raise
        else:
            return


async def _replace(
    store: Store, key: str, data: bytes, old: ObjectMeta | None, content_type: str
) -> None:
    """Write an object in the place of the one that was seen, or of none."""
    if old is None:
        await store.put(key, data, mode="create", content_type=content_type)
    else:
        await store.put(key, data, if_generation_match=old.generation, content_type=content_type)


async def _loose(store: Store) -> tuple[list[ObjectMeta], list[SaveRecord]]:
    """Return the records that are objects of their own, as far as they are still there."""
    listing = await store.list_all(_RECORD)
    metas: list[ObjectMeta] = []
    records: list[SaveRecord] = []
    async for batch in store.fetch_batches(listing, return_exceptions=True):
        for each in batch:
            if each[0] is not None:
                metas.append(each[0])
                records.append(_decode(_record_decoder, each[0], each[1]))
            elif not isinstance(each[1], NotFoundError):
                raise each[1]
    return metas, records


async def _gathered(store: Store) -> tuple[ObjectMeta | None, list[SaveRecord]]:
    """Return what was gathered, and the object that holds it."""
    async for batch in store.fetch_batches([_JSON_KEY], return_exceptions=True):
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
