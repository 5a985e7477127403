"""History of saves: a record of the outcome of each save, stored next to the steps.

    root/.checkpoint-history/record-<time>-<token>.json    one new record
    root/.checkpoint-history/history.json, history.csv     older records, compacted

Each new record is an object of its own, so that concurrent or killed writers cannot lose the
records of others. A compaction adds the new records to `history.json`, under the precondition that
no other process replaced it, and deletes their objects. If a compaction is killed before the
delete, some records are stored twice; readers drop duplicates. A process compacts when it closes
its Checkpointer, when it reads the history, and when there are more than 64 new records.
"""

from __future__ import annotations

import asyncio
import csv
import importlib
import io
import logging
import os
from collections import deque
from collections.abc import Iterable, Sequence
from datetime import UTC, datetime
from typing import IO, TYPE_CHECKING, Any, Final, Literal, TypeAlias, TypeVar

import msgspec

from aioflux.errors import (
    AiofluxError,
    AlreadyExistsError,
    CheckpointCorruptError,
    NotFoundError,
    PreconditionFailedError,
    TransientError,
)

if TYPE_CHECKING:
    from aioflux._values.meta import ObjectMeta
    from aioflux.store import Store

_log = logging.getLogger("aioflux")

HISTORY_PREFIX: Final = ".checkpoint-history/"
"""Prefix of the history, below the root of the checkpoints."""

_JSON_KEY = f"{HISTORY_PREFIX}history.json"
_CSV_KEY = f"{HISTORY_PREFIX}history.csv"
_RECORD = f"{HISTORY_PREFIX}record-"

_MAX_NEW_RECORDS: Final = 64
"""Number of new records above which a save compacts them."""
_MAX_ATTEMPTS = 8
_WRITE_SECONDS: Final = 10

T = TypeVar("T")
Outcome: TypeAlias = Literal["committed", "failed", "cancelled"]


class SaveRecord(msgspec.Struct, frozen=True, kw_only=True):
    """The outcome of one save."""

    record_id: str
    """The save id, or a name of the same form, `<time>-<8 hexadecimal digits>`; sorts by time."""
    time: datetime
    """Time of the commit, the failure or the cancellation, with its time zone."""
    step: int
    outcome: str
    """An `Outcome`, or what a later release adds."""
    num_bytes: int = 0
    """Bytes of the data objects of all ranks, without the commit object; 0 if not committed."""
    staged_seconds: float = 0.0
    """Time for which staging blocked the training thread, in seconds."""
    upload_seconds: float = 0.0
    """Time from the end of staging to the commit or the failure, in seconds."""
    num_retries: int = 0
    """Number of retried requests."""
    world_size: int = 1
    """Number of ranks that saved."""
    error: str = ""
    """Text of the error, if the save failed."""

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
"""Columns of the CSV and fields of the JSON. New columns are appended at the end."""

_record_decoder = msgspec.json.Decoder(SaveRecord)
_history_decoder = msgspec.json.Decoder(list[SaveRecord])


def record_key(record: SaveRecord) -> str:
    """Return the key of the object of a new record."""
    return f"{_RECORD}{record.record_id}.json"


def merge(*histories: Iterable[SaveRecord]) -> list[SaveRecord]:
    """Return the records of several histories in order of time, without duplicates."""
    by_id = {record.record_id: record for records in histories for record in records}
    return sorted(by_id.values(), key=lambda record: (record.time, record.record_id))


def _row(record: SaveRecord) -> dict[str, Any]:
    row = {name: getattr(record, name) for name in COLUMNS}
    # The error may contain file names with bytes that are not UTF-8, which JSON cannot store.
    return row | {"error": record.error.encode(errors="backslashreplace").decode()}


def to_csv(records: Iterable[SaveRecord]) -> str:
    """Return records as CSV with a header (RFC 4180). Times have the form of RFC 3339, in UTC."""
    text = io.StringIO()
    writer = csv.DictWriter(text, COLUMNS)
    writer.writeheader()
    for record in records:
        time = record.time.astimezone(UTC).isoformat(timespec="milliseconds")
        writer.writerow(_row(record) | {"time": time.replace("+00:00", "Z")})
    return text.getvalue()


def to_json(records: Iterable[SaveRecord]) -> bytes:
    """Return records as a JSON list of objects. Times have the form of RFC 3339."""
    return msgspec.json.format(msgspec.json.encode([_row(record) for record in records]), indent=1)


class HistoryWriter:
    """Writer of the records of one process; all errors are only logged.

    `add` only queues a record, and `write` stores what is queued, so that a caller who waits for a
    save need not wait for its record. A record costs one request; the first one costs a listing
    more, which counts the records that other processes left.
    """

    def __init__(self, store: Store) -> None:
        self._store = store
        self._queued: deque[SaveRecord] = deque()
        self._num_new: int | None = None
        """Number of new records in the bucket; None if they were not counted."""
        self._lock = asyncio.Lock()

    def add(self, record: SaveRecord) -> None:
        """Queue a record."""
        self._queued.append(record)

    async def write(self) -> None:
        """Store the queued records within 10 s, unless records with the same ids exist.

        Records that cannot be stored now stay queued for the next call. The committed steps do not
        depend on their records, so a process that ends must not wait for them much longer.
        """
        try:
            async with asyncio.timeout(_WRITE_SECONDS), self._lock:
                await self._write_queued()
        except TimeoutError:
            _log.warning(
                "the history of %s lacks %d records, which could not be stored within %d s",
                self._store.uri,
                len(self._queued),
                _WRITE_SECONDS,
            )

    async def _write_queued(self) -> None:
        while self._queued:
            record = self._queued[0]
            try:
                await append(self._store, record)
            except Exception as exc:  # also of the user's function for credentials
                self._log_error(f"step {record.step} could not be added to", exc)
                if isinstance(exc, TransientError):
                    return
            self._queued.popleft()
            try:
                await self._compact_if_many()
            except Exception as exc:
                self._log_error("could not compact", exc)

    async def _compact_if_many(self) -> None:
        """Count one record more, and compact the history if there are too many new ones."""
        if self._num_new is None:
            self._num_new = 0  # if the listing fails, count from here
            self._num_new = len(await self._store.list_all(_RECORD))
        else:
            self._num_new += 1
        if self._num_new > _MAX_NEW_RECORDS:
            self._num_new = 0  # if it fails, not again at the next save
            await compact(self._store)

    async def close(self) -> None:
        """Store the queued records, and compact the history within 10 s if this process wrote any.

        If that takes longer, the next process compacts it.
        """
        await self.write()
        if self._num_new and not self._queued:
            self._num_new = 0
            try:
                async with asyncio.timeout(_WRITE_SECONDS):
                    await compact(self._store)
            except Exception as exc:
                self._log_error("could not compact", exc)

    def _log_error(self, what: str, error: Exception) -> None:
        _log.warning("%s the history of %s: %s", what, self._store.uri, str(error) or repr(error))


async def append(store: Store, record: SaveRecord) -> None:
    """Store a record by one request, unless a record with the same id exists."""
    try:
        await store.put(
            record_key(record),
            msgspec.json.encode(_row(record)),
            mode="create",
            content_type="application/json",
        )
    except AlreadyExistsError:
        return  # ids are unique: an earlier call wrote this record


async def read_history(store: Store) -> list[SaveRecord]:
    """Return the records of all saves, oldest first, and compact them if that is permitted.

    Raises:
        CheckpointCorruptError: An object of the history is damaged.
    """
    metas, records = await _read_records(store)
    # Read `history.json` last, so that records compacted in the meantime are not missed.
    meta, compacted = await _read_compacted(store)
    history = merge(compacted, records)
    if metas:
        try:
            await _compact(store, metas, history, meta)
        except AiofluxError as exc:  # for example without the permission to write
            _log.debug("the history of %s could not be compacted: %s", store.uri, exc)
    return history


async def compact(store: Store) -> None:
    """Add the new records to `history.json` and `history.csv`, and delete their objects.

    If another process compacts at the same time, one of the two calls may return before it has
    deleted the objects. They are then deleted by the other call, or by the next compaction.

    Raises:
        CheckpointCorruptError: An object of the history is damaged.
    """
    metas, records = await _read_records(store)
    if not metas:
        return
    meta, compacted = await _read_compacted(store)
    await _compact(store, metas, merge(compacted, records), meta)


async def _compact(
    store: Store, metas: list[ObjectMeta], history: list[SaveRecord], old: ObjectMeta | None
) -> None:
    """Store a history in place of `old`, and delete the objects of its new records."""
    try:
        await _replace(store, _JSON_KEY, to_json(history), old, "application/json")
        await _publish_csv(store)
    except (AlreadyExistsError, PreconditionFailedError):
        return
    await store.delete_many(metas)


async def _publish_csv(store: Store) -> None:
    """Write the CSV of the records in `history.json`.

    The generation of the CSV is read before `history.json`. So if another process then writes a
    CSV of newer records, the write of the older records fails its precondition.

    Raises:
        AlreadyExistsError, PreconditionFailedError: Other processes wrote the CSV in each attempt.
            They had read the same or newer records.
    """
    for attempt in range(_MAX_ATTEMPTS):
        try:
            old: ObjectMeta | None = await store.head(_CSV_KEY)
        except NotFoundError:
            old = None
        _, records = await _read_compacted(store)
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
    """Replace the object that was read, or create the object if there was none."""
    if old is None:
        await store.put(key, data, mode="create", content_type=content_type)
    else:
        await store.put(key, data, if_generation_match=old.generation, content_type=content_type)


async def _read_records(store: Store) -> tuple[list[ObjectMeta], list[SaveRecord]]:
    """Return the new records, and their objects. Objects deleted in the meantime are omitted."""
    listing = await store.list_all(_RECORD)
    metas: list[ObjectMeta] = []
    records: list[SaveRecord] = []
    async for batch in store.try_fetch_batches(listing):
        for result in batch:
            if result[0] is not None:
                metas.append(result[0])
                records.append(_decode(_record_decoder, result[0], result[1]))
            elif not isinstance(result[1], NotFoundError):
                raise result[1]
    return metas, records


async def _read_compacted(store: Store) -> tuple[ObjectMeta | None, list[SaveRecord]]:
    """Return the metadata of `history.json`, or None if it does not exist, and its records."""
    async for batch in store.try_fetch_batches([_JSON_KEY]):
        for result in batch:
            if result[0] is not None:
                return result[0], _decode(_history_decoder, result[0], result[1])
            if not isinstance(result[1], NotFoundError):
                raise result[1]
    return None, []


def _decode(decoder: msgspec.json.Decoder[T], meta: ObjectMeta, data: bytes) -> T:
    try:
        return decoder.decode(data)
    except msgspec.DecodeError as exc:
        raise CheckpointCorruptError(
            f"{meta.uri} is not a valid part of the history of saves: {exc}; move the object away: "
            "the checkpoints do not need it"
        ) from exc


_MB = 1e6
_COLORS = {"committed": "tab:blue", "failed": "tab:red", "cancelled": "tab:gray"}


def plot(
    records: Sequence[SaveRecord], target: str | os.PathLike[str] | IO[bytes], *, title: str = ""
) -> None:
    """Plot a history: throughput, and seconds of staging and upload, for each step.

    Args:
        records: The result of `read_history`.
        target: Local path of a picture (.png, .svg, .pdf), or a binary file to write a PNG to.
        title: Heading of the picture.

    Raises:
        ImportError: matplotlib is not installed.
        ValueError: There are no records, or the suffix of the path is not that of a
            picture format.
    """
    if not records:
        raise ValueError("there is nothing to draw: the history has no records")
    try:
        figures = importlib.import_module("matplotlib.figure")
    except ImportError as exc:
        from aioflux._values.distribution import pip_install

        raise ImportError(f"a plot needs matplotlib: {pip_install('plot')}") from exc
    # pyplot is not used: it would choose a window system, and keep every figure in memory.
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
        selected = [record for record in records if record.outcome == outcome]
        if selected:
            axes.scatter(
                [record.step for record in selected],
                [record.bytes_per_second / _MB for record in selected],
                color=color,
                label=f"{outcome} ({len(selected)})",
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
