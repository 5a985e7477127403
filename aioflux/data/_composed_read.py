"""Composed reads of small objects: a check of permissions, and trials to choose the faster mode.

Direct reads are the default. A composite is written to the bucket of the data and deleted again. It
takes three requests, one after the other, and its bytes arrive over one connection, not over many.
Measured objects per second, direct -> composed, from the embedded server with 20 ms to the first
byte and 50 MB/s for each connection, on one machine of two cores:

    size       stream of all      stream, 256 in flight   batches of 100
    10 kB      2,628 -> 9,004     1,908 -> 4,252          1,627 -> 1,284
    100 KiB    1,265 -> 1,577     2,775 -> 2,650          1,009 ->   667
    500 KiB    1,564 ->   695     1,839 ->   663          1,145 ->   241

So "auto" is worth trying only for an IterableDataset of objects of about 10 kB, at a high latency.
On a real service the gain is smaller, because a compose request takes longer than a read.
"""

from __future__ import annotations

import logging
import time
import weakref
from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from typing import TYPE_CHECKING, Final, Literal, TypeAlias, cast

from torch.utils.data import get_worker_info

from aioflux import _bridge
from aioflux._values.meta import ObjectMeta
from aioflux.errors import PermissionDeniedError
from aioflux.store import COMPOSITE_PREFIX

if TYPE_CHECKING:
    from aioflux.store import TriedBatch
    from aioflux.sync import Store

_log = logging.getLogger("aioflux")

Compose: TypeAlias = Literal["off", "on", "auto"]
ReadMode: TypeAlias = Literal["off", "on"]

_PERMISSIONS: Final = ("storage.objects.create", "storage.objects.delete")
"""Permissions that a composed read needs in addition to the permission to read."""

_TRIALS: Final[tuple[ReadMode, ...]] = ("off", "on", "off", "on")
"""Modes that "auto" measures, in this order. The better of two trials counts for each mode, because
the first trial also opens connections."""

_TRIAL_OBJECTS: Final = 1024
_TRIAL_BYTES: Final = 64 * 1024 * 1024
"""A trial ends with the object that reaches this size. Its objects are buffered before the first is
yielded, so that the time of the consumer is not measured."""

_MIN_SPEEDUP: Final = 1.1
"""Factor by which composed reads must be faster. Composing writes to the bucket, and the rates of
two trials that take one second each differ by up to a tenth."""


def prepare(store: Store, compose: Compose, *, older_than_seconds: float = 86_400.0) -> Compose:
    """Check whether a dataset can compose, and delete the composites of dead processes.

    Sends no request for "off". Otherwise sends two: one for the permissions, and one for a listing
    of composites below the prefix of the store.

    Args:
        store: Store of the objects. It has open connections afterwards.
        compose: Option of the dataset.
        older_than_seconds: Age from which composites are deleted; a day by default. A younger
            composite may belong to a live process.

    Returns:
        The mode of reading: `compose`, or "off" if `compose` is "auto" and composing is impossible.

    Raises:
        PermissionDeniedError: "on", and the credentials may not create or delete objects.
        ValueError: "on", and the service cannot compose; or `compose` is not a known mode.
    """
    if compose not in {"off", "on", "auto"}:
        raise ValueError(f'compose must be "off", "on" or "auto", not {compose!r}')
    if compose == "off":
        return "off"
    _bridge.limit_wait_for_workers()
    if not store.uri.startswith(("gs://", "memory://")):
        if compose == "on":
            raise ValueError(f'{store.uri} cannot compose objects; use compose="off"')
        return "off"
    try:
        missing = store.missing_permissions(_PERMISSIONS)
    except PermissionDeniedError:
        if compose == "on":
            raise
        _log.info("objects of %s are read directly: cannot query the permissions", store.uri)
        return "off"
    if missing:
        text = (
            f"objects of {store.uri} cannot be composed: the credentials in use lack "
            f"{' and '.join(missing)} on the bucket"
        )
        if compose == "on":
            raise PermissionDeniedError(
                f'{text}; grant these permissions, or use compose="off"', uri=store.uri
            )
        _log.info("%s; the objects are read directly", text)
        return "off"
    _delete_orphans(store, older_than_seconds)
    return compose


def _delete_orphans(store: Store, older_than_seconds: float) -> None:
    """Delete composites of dead processes; without permission to list, only log a warning."""
    try:
        cleaned = store.clean(COMPOSITE_PREFIX, older_than_seconds=older_than_seconds)
    except PermissionDeniedError as exc:
        _log.warning("composites of dead processes are not deleted: %s", exc)
        return
    for error in cleaned.errors.values():
        _log.warning("a composite of a dead process could not be deleted: %s", error)


def fetch_batches(
    store: Store,
    metas: Iterable[str | ObjectMeta],
    *,
    compose: Compose,
    max_composite_bytes: int = 100_000_000,
    clock: Callable[[], float] = time.perf_counter,
) -> Iterator[TriedBatch]:
    """Yield lists of `(meta, data)`, or `(None, error)` for a failed read, in the order of `metas`.

    With "auto" the first objects of a store are read in trials of up to 1024 objects, alternately
    direct and composed. Further objects are composed if that was more than 1.1 times as fast,
    and otherwise read directly. Trials continue over several calls in one process.

    Args:
        store: Store of the objects.
        metas: Metadata of a listing; with "off" and "auto" also keys, which are read directly.
        compose: Result of `prepare`.
        max_composite_bytes: Largest size of a composite, in bytes.
        clock: Clock for the trials, in seconds.

    Raises:
        PermissionDeniedError: "on", and composites may not be created or deleted.
    """
    if compose == "auto":
        return _fetch_measured(store, metas, max_composite_bytes, clock)
    return _fetch(store, metas, compose, max_composite_bytes)


class ComposeTrials:
    """Results of trials, and the faster mode; the caller measures the times."""

    def __init__(self) -> None:
        self._num_trials = 0
        self._rates: dict[ReadMode, float] = {"off": 0.0, "on": 0.0}

    def next_mode(self) -> ReadMode | None:
        """Return the mode of the next trial; None after the last trial."""
        return _TRIALS[self._num_trials] if self._num_trials < len(_TRIALS) else None

    def add(self, mode: ReadMode, *, num_objects: int, seconds: float) -> None:
        """Add the result of one trial."""
        self._num_trials += 1
        self._rates[mode] = max(self._rates[mode], num_objects / max(seconds, 1e-9))

    def rule_out_composing(self) -> None:
        """Skip the remaining trials and choose direct reads."""
        self._num_trials = len(_TRIALS)
        self._rates["on"] = 0.0

    @property
    def best_mode(self) -> ReadMode:
        """The mode for all objects after the trials."""
        return "on" if self._rates["on"] > _MIN_SPEEDUP * self._rates["off"] else "off"


_trials: weakref.WeakKeyDictionary[Store, ComposeTrials] = weakref.WeakKeyDictionary()
"""Trials of this process by store. A forked worker continues with the results of its parent."""


def _fetch(
    store: Store, metas: Iterable[str | ObjectMeta], mode: ReadMode, max_composite_bytes: int
) -> Iterator[TriedBatch]:
    if mode == "off":
        return store.try_fetch_batches(metas)
    if get_worker_info() is not None:
        _bridge.shut_down_with_worker()
    return store.try_fetch_composed(
        cast("Iterable[ObjectMeta]", metas),  # `try_fetch_composed` rejects keys
        max_composite_bytes=max_composite_bytes,
    )


def _fetch_measured(
    store: Store,
    metas: Iterable[str | ObjectMeta],
    max_composite_bytes: int,
    clock: Callable[[], float],
) -> Iterator[TriedBatch]:
    trials = _trials.setdefault(store, ComposeTrials())
    rest: Iterator[str | ObjectMeta] = iter(metas)
    while (mode := trials.next_mode()) is not None:
        objects = _objects_of_trial(rest)
        if not objects:
            return
        if len(objects) == 1 or not all(isinstance(meta, ObjectMeta) for meta in objects):
            first = objects[0]
            if not isinstance(first, ObjectMeta) or first.size >= _TRIAL_BYTES:
                trials.rule_out_composing()
            yield from _fetch(store, objects, "off", max_composite_bytes)
            continue
        started = clock()
        try:
            batches = list(_fetch(store, objects, mode, max_composite_bytes))
        except PermissionDeniedError as exc:
            if mode == "off":
                raise
            _log.warning("objects are read directly from now on: %s", exc)
            trials.rule_out_composing()
            yield from _fetch(store, objects, "off", max_composite_bytes)
            continue
        trials.add(mode, num_objects=len(objects), seconds=clock() - started)
        yield from batches
    yield from _fetch(store, rest, trials.best_mode, max_composite_bytes)


def _objects_of_trial(metas: Iterator[str | ObjectMeta]) -> list[str | ObjectMeta]:
    objects: list[str | ObjectMeta] = []
    num_bytes = 0
    for meta in islice(metas, _TRIAL_OBJECTS):
        objects.append(meta)
        num_bytes += meta.size if isinstance(meta, ObjectMeta) else 0
        if num_bytes >= _TRIAL_BYTES:
            break
    return objects
