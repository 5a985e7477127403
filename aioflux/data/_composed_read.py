"""Composed reads of small objects: whether a dataset may and should use them.

Direct reads are the default: a composite is written and deleted in the bucket of the data, takes
three requests one after another, and comes over one connection instead of many.
Objects per second, direct -> composed, from the embedded server with 20 ms to the first byte and
50 MB/s for each connection, on one machine of two cores:

    size       stream of all      stream, 256 in flight   batches of 100
    10 kB      2,628 -> 9,004     1,908 -> 4,252          1,627 -> 1,284
    100 KiB    1,265 -> 1,577     2,775 -> 2,650          1,009 ->   667
    500 KiB    1,564 ->   695     1,839 ->   663          1,145 ->   241

So it is worth trying, with "auto", for an IterableDataset of objects of some 10 kB at a high
latency, and nowhere else; on a real service a compose takes longer than a read.
"""

from __future__ import annotations

import logging
import time
import weakref
from itertools import islice
from typing import TYPE_CHECKING, Final, Literal, TypeAlias, cast

from torch.utils.data import get_worker_info

from aioflux import _bridge
from aioflux._values.meta import ObjectMeta
from aioflux.errors import PermissionDeniedError
from aioflux.store import COMPOSITE_PREFIX

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from aioflux.store import TriedBatch
    from aioflux.sync import Store

__all__ = ["Compose", "ComposeTrials", "fetch_batches", "prepare"]

_log = logging.getLogger("aioflux")

Compose: TypeAlias = Literal["off", "on", "auto"]
ReadMode: TypeAlias = Literal["off", "on"]

_PERMISSIONS: Final = ("storage.objects.create", "storage.objects.delete")
"""Permissions that a composed read needs in addition to those of a direct one."""

_TRIALS: Final[tuple[ReadMode, ...]] = ("off", "on", "off", "on")
"""Modes that `auto` measures, in order: the first of each opens connections, the better counts."""

_TRIAL_OBJECTS: Final = 1024
_TRIAL_BYTES: Final = 64 * 1024 * 1024
"""Size of one trial at most: it is held whole, so that the consumer's time is not measured."""

_MIN_SPEEDUP: Final = 1.1
"""Factor by which composing must be faster: it writes to the bucket, and two trials of a
second differ by a tenth by chance."""


def prepare(store: Store, compose: Compose, *, older_than_seconds: float = 86_400.0) -> Compose:
    """Check whether a dataset can compose, and delete composites that dead processes left.

    Sends nothing for "off"; otherwise requests the permissions and lists the composites below the
    store's own prefix, two requests.

    Args:
        store: Store of the objects; connections stay open in it.
        compose: Option of the dataset.
        older_than_seconds: Only composites of at least this age are deleted, a day by default:
            younger ones may belong to a live process.

    Returns:
        Mode of reading: "auto" becomes "off" if composing is impossible.

    Raises:
        PermissionDeniedError: "on", and the credentials may not create or not delete objects.
        ValueError: "on", and the service does not compose; or no such mode.
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
        _log.info("objects of %s are read directly: its permissions may not be asked", store.uri)
        return "off"
    if missing:
        text = (
            f"objects of {store.uri} cannot be composed: the credentials in use lack "
            f"{' and '.join(missing)} on the bucket"
        )
        if compose == "on":
            raise PermissionDeniedError(
                f'{text}; grant it, or use compose="off", which needs neither', uri=store.uri
            )
        _log.info("%s; they are read directly", text)
        return "off"
    _delete_orphans(store, older_than_seconds)
    return compose


def _delete_orphans(store: Store, older_than_seconds: float) -> None:
    """Delete composites of dead processes; without permission to list, only log a warning."""
    try:
        cleaned = store.clean(COMPOSITE_PREFIX, older_than_seconds=older_than_seconds)
    except PermissionDeniedError as exc:
        _log.warning("composites that dead processes left are not looked for: %s", exc)
        return
    for error in cleaned.errors.values():
        _log.warning("a composite that a dead process left could not be deleted: %s", error)


def fetch_batches(
    store: Store,
    metas: Iterable[str | ObjectMeta],
    *,
    compose: Compose,
    max_composite_bytes: int = 100_000_000,
    clock: Callable[[], float] = time.perf_counter,
) -> Iterator[TriedBatch]:
    """Yield lists of `(meta, data)` in the order of `metas`, or `(None, error)` of a failed one.

    With "auto" the first objects that are read through a store, in one call or several, are read
    in both modes in turn, up to 1024 at a time, and the mode that gave more objects per second is
    kept for all that follow in this process.

    Args:
        store: Store of the objects.
        metas: Metadata of a listing; with "off" and "auto" keys too, which are read directly.
        compose: Result of `prepare`.
        max_composite_bytes: Largest size of one composite.
        clock: Measures the trials, in seconds.

    Raises:
        PermissionDeniedError: "on", and composites may not be made or deleted.
    """
    if compose == "auto":
        return _fetch_measured(store, metas, max_composite_bytes, clock)
    return _fetch(store, metas, compose, max_composite_bytes)


class ComposeTrials:
    """Decides by trials whether to compose. Knows no clock."""

    def __init__(self) -> None:
        self._num_trials = 0
        self._rates: dict[ReadMode, float] = {"off": 0.0, "on": 0.0}

    def next_mode(self) -> ReadMode | None:
        """Return the mode to try next; None if all trials are done."""
        return _TRIALS[self._num_trials] if self._num_trials < len(_TRIALS) else None

    def add(self, mode: ReadMode, *, num_objects: int, seconds: float) -> None:
        """Add the result of one trial."""
        self._num_trials += 1
        self._rates[mode] = max(self._rates[mode], num_objects / max(seconds, 1e-9))

    def rule_out_composing(self) -> None:
        """End the trials: composing is not possible."""
        self._num_trials = len(_TRIALS)
        self._rates["on"] = 0.0

    @property
    def best_mode(self) -> ReadMode:
        """The faster mode."""
        return "on" if self._rates["on"] > _MIN_SPEEDUP * self._rates["off"] else "off"


_trials: weakref.WeakKeyDictionary[Store, ComposeTrials] = weakref.WeakKeyDictionary()
"""Results in this process. A forked worker continues from those of its parent."""


def _fetch(
    store: Store, metas: Iterable[str | ObjectMeta], mode: ReadMode, max_composite_bytes: int
) -> Iterator[TriedBatch]:
    if mode == "off":
        return store.try_fetch_batches(metas)
    if get_worker_info() is not None:
        _bridge.shut_down_with_worker()
    return store.try_fetch_composed(
        cast("Iterable[ObjectMeta]", metas),  # keys are rejected there
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
        if len(objects) == 1 or not all(isinstance(each, ObjectMeta) for each in objects):
            if not _may_be_composed(objects[0]):
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


def _may_be_composed(meta: str | ObjectMeta) -> bool:
    """Return whether objects like this one may be composed: not keys, nor very large ones."""
    return isinstance(meta, ObjectMeta) and meta.size < _TRIAL_BYTES


def _objects_of_trial(metas: Iterator[str | ObjectMeta]) -> list[str | ObjectMeta]:
    objects: list[str | ObjectMeta] = []
    num_bytes = 0
    for meta in islice(metas, _TRIAL_OBJECTS):
        objects.append(meta)
        num_bytes += meta.size if isinstance(meta, ObjectMeta) else 0
        if num_bytes >= _TRIAL_BYTES:
            break
    return objects
