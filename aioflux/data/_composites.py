"""How a dataset reads small objects: each by a request of its own, or composed on the service.

Reading directly is the default: a composite is written and deleted in the bucket of the data, takes
three requests one after another, and comes over one connection where its objects came over many.
Objects a second, direct -> composed, from the embedded server with 20 ms to the first byte and
50 MB/s for each connection, on one machine of two cores:

    size       stream of all      stream, 256 in flight   batches of 100
    10 kB      2,628 -> 9,004     1,908 -> 4,252          1,627 -> 1,284
    100 KiB    1,265 -> 1,577     2,775 -> 2,650          1,009 ->   667
    500 KiB    1,564 ->   695     1,839 ->   663          1,145 ->   241

So it is worth trying, with "auto", where an IterableDataset streams objects of some 10 kB over a
long way, and nowhere else; a real service, whose compose takes longer than a read, only moves that.
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
    from collections.abc import Iterable, Iterator

    from aioflux.store import TriedBatch
    from aioflux.sync import Store

__all__ = ["Choice", "Compose", "prepare", "read_batches"]

_log = logging.getLogger("aioflux")

Compose: TypeAlias = Literal["off", "on", "auto"]
Way: TypeAlias = Literal["off", "on"]

_PERMISSIONS: Final = ("storage.objects.create", "storage.objects.delete")
"""What a composed read needs beside a plain one."""

_TRIALS: Final[tuple[Way, ...]] = ("off", "on", "off", "on")
"""What `auto` measures, in order: the first of each opens connections, the better one counts."""

_TRIAL_OBJECTS: Final = 1024
_TRIAL_BYTES: Final = 64 * 1024 * 1024
"""Size of one trial at most: it is held whole, so that the consumer's time is not measured."""

_LEAD: Final = 1.1
"""How much faster composing must be to be kept: it writes to the bucket, and a difference of a
tenth between two trials of a second is chance."""


def prepare(store: Store, compose: Compose, *, older_than_seconds: float = 86_400.0) -> Compose:
    """Check where a dataset is built whether it can compose, and sweep what dead processes left.

    Sends nothing for "off"; otherwise asks for the permissions and lists the composites below the
    store's own prefix, two requests.

    Args:
        store: Where; connections stay open in it.
        compose: What was asked for.
        older_than_seconds: Only composites of at least this age are swept, a day by default:
            younger ones may be of a process that is alive.

    Returns:
        How to read: "auto" becomes "off" where composing is not possible.

    Raises:
        PermissionDeniedError: "on", and the credentials may not create or not delete objects.
        ValueError: "on", and the service does not compose; or no such word.
    """
    if compose not in {"off", "on", "auto"}:
        raise ValueError(f'compose must be "off", "on" or "auto", not {compose!r}')
    if compose == "off":
        return "off"
    if not store.uri.startswith(("gs://", "memory://")):
        if compose == "on":
            raise ValueError(f'{store.uri} cannot compose objects; take compose="off"')
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
                f'{text}; grant it, or take compose="off", which needs neither', uri=store.uri
            )
        _log.info("%s; they are read directly", text)
        return "off"
    _sweep(store, older_than_seconds)
    return compose


def _sweep(store: Store, older_than_seconds: float) -> None:
    """Delete what dead processes left; whose listing is refused reads all the same."""
    try:
        swept = store.clean(COMPOSITE_PREFIX, older_than_seconds=older_than_seconds)
    except PermissionDeniedError as exc:
        _log.warning("composites that dead processes left are not looked for: %s", exc)
        return
    for error in swept.errors.values():
        _log.warning("a composite that a dead process left could not be deleted: %s", error)


def read_batches(
    store: Store,
    metas: Iterable[str | ObjectMeta],
    *,
    compose: Compose,
    max_composite_bytes: int = 100_000_000,
) -> Iterator[TriedBatch]:
    """Yield lists of `(meta, data)` in the order of `metas`, or `(None, error)` for what has one.

    With "auto" the first objects that are read through a store, in one call or several, are read
    both ways in turn, up to 1024 at a time, and the way that gave more objects a second is kept for
    all that follow in this process.

    Args:
        store: Where.
        metas: Metadata of a listing; with "off" and "auto" names too, which are read directly.
        compose: What `prepare` returned.
        max_composite_bytes: Bytes of one composite, at most; 100 MB by default.

    Raises:
        PermissionDeniedError: "on", and composites may not be made or deleted.
    """
    if compose == "auto":
        return _measured(store, metas, max_composite_bytes)
    return _read(store, metas, compose, max_composite_bytes)


class Choice:
    """Which way to read, by trials of both. Knows no clock."""

    def __init__(self) -> None:
        self._num_trials = 0
        self._rates: dict[Way, float] = {"off": 0.0, "on": 0.0}

    def trial(self) -> Way | None:
        """Return what is to be tried next; None where all is known."""
        return _TRIALS[self._num_trials] if self._num_trials < len(_TRIALS) else None

    def tell(self, way: Way, *, num_objects: int, seconds: float) -> None:
        """Take in one trial."""
        self._num_trials += 1
        self._rates[way] = max(self._rates[way], num_objects / max(seconds, 1e-9))

    def refuse(self) -> None:
        """Take in that composing is not possible."""
        self._num_trials = len(_TRIALS)
        self._rates["on"] = 0.0

    @property
    def way(self) -> Way:
        """The way that is kept."""
        return "on" if self._rates["on"] > _LEAD * self._rates["off"] else "off"


_choices: weakref.WeakKeyDictionary[Store, Choice] = weakref.WeakKeyDictionary()
"""What was found out in this process. A forked worker goes on with what its parent knew."""


def _read(
    store: Store, metas: Iterable[str | ObjectMeta], way: Way, max_composite_bytes: int
) -> Iterator[TriedBatch]:
    if way == "off":
        return store.fetch_batches(metas, return_exceptions=True)
    if get_worker_info() is not None:
        _bridge.shut_down_with_worker()
    return store.fetch_composed(
        cast("Iterable[ObjectMeta]", metas),  # names are refused there
        max_composite_bytes=max_composite_bytes,
        return_exceptions=True,
    )


def _measured(
    store: Store, metas: Iterable[str | ObjectMeta], max_composite_bytes: int
) -> Iterator[TriedBatch]:
    choice = _choices.setdefault(store, Choice())
    rest: Iterator[str | ObjectMeta] = iter(metas)
    while (way := choice.trial()) is not None:
        trial = _take(rest)
        if not trial:
            return
        if len(trial) == 1 or not all(isinstance(each, ObjectMeta) for each in trial):
            if _is_hopeless(trial[0]):
                choice.refuse()
            yield from _read(store, trial, "off", max_composite_bytes)
            continue
        began = time.perf_counter()
        try:
            read = list(_read(store, trial, way, max_composite_bytes))
        except PermissionDeniedError as exc:
            if way == "off":
                raise
            _log.warning("objects are read directly from now on: %s", exc)
            choice.refuse()
            yield from _read(store, trial, "off", max_composite_bytes)
            continue
        choice.tell(way, num_objects=len(trial), seconds=time.perf_counter() - began)
        yield from read
    yield from _read(store, rest, choice.way, max_composite_bytes)


def _is_hopeless(meta: str | ObjectMeta) -> bool:
    """Tell whether objects like this one are never composed: names, and very large ones."""
    return not isinstance(meta, ObjectMeta) or meta.size >= _TRIAL_BYTES


def _take(metas: Iterator[str | ObjectMeta]) -> list[str | ObjectMeta]:
    """Take the objects of one trial."""
    taken: list[str | ObjectMeta] = []
    num_bytes = 0
    for meta in islice(metas, _TRIAL_OBJECTS):
        taken.append(meta)
        num_bytes += meta.size if isinstance(meta, ObjectMeta) else 0
        if num_bytes >= _TRIAL_BYTES:
            break
    return taken
