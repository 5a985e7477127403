"""Faults: the requests they apply to, their effect on responses, and their injection."""

from __future__ import annotations

import math
import random
import threading
from collections import Counter
from contextlib import contextmanager
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from functools import lru_cache
from http import HTTPStatus
from typing import TYPE_CHECKING, Literal, TypedDict

from aioflux.testing.gcs_server._app import ROUTES, Hook
from aioflux.testing.gcs_server._delivery import BEFORE_HEAD, PLAIN
from aioflux.testing.gcs_server._errors import status_error
from aioflux.testing.gcs_server._messages import Response, error_response

if TYPE_CHECKING:
    from collections.abc import Iterator
    from typing import Unpack

    from aioflux.testing.gcs_server._messages import Request

_STATUSES = frozenset(status.value for status in HTTPStatus if status.value >= 300)
Kind = Literal["status", "reset", "truncate", "flip", "stall", "lost", "delay"]
_OPERATIONS = frozenset({"storage.batch", *(route.operation for route in ROUTES)})
_NAMES = _OPERATIONS | {"objects.media", *(name.partition(".")[2] for name in _OPERATIONS)}
_EARLY: tuple[Kind, ...] = ("status", "reset")  # they replace the handler's response


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Fault:
    """One fault: the requests it applies to, and its one effect on them.

    The effect is one of `status`, `truncate_at`, `flip_at`, `stall_at`, `lost`, `delay_seconds`,
    or `reset` alone; positions count bytes of the body that is sent. `truncate_at`, `flip_at` and
    `stall_at` apply only to successful responses that are long enough.
    """

    operation: str
    """Name of an operation with or without its API (`storage.objects.get`; `objects.get` for
    JSON and XML), `objects.media` for reads that send an object's bytes, or a pattern with `*`."""
    status: int | None = None
    """Return this status and do nothing else; nothing is committed."""
    retry_after: int | str | None = None
    """`Retry-After` of that response: seconds or an HTTP date."""
    body: bytes | None = None
    """Body of that response; None for that of GCS."""
    reset: bool = False
    """Alone: reset the connection and do nothing else. Beside `truncate_at` or `lost`: end the
    connection with a reset rather than an orderly close."""
    truncate_at: int | None = None
    """End the connection after this many bytes of the body."""
    flip_at: int | Literal["random"] | None = None
    """Invert the byte at this position; the checksums in the headers stay those of the object."""
    stall_at: int | None = None
    """Send nothing for `stall_seconds` before the byte at this position."""
    stall_seconds: float = math.inf
    """By default until the client ends the connection."""
    lost: bool = False
    """Commit, then end the connection without a response."""
    delay_seconds: float | None = None
    """Commit, then wait so long before the response."""
    bucket: str | None = None
    """Only requests for buckets of this name or pattern."""
    key: str | None = None
    """Only requests that name an object of this key or pattern in their path or query. Those of
    an open resumable upload name none."""
    skip: int = 0
    """Requests that pass before the first fault."""
    times: int | None = None
    """Faults at most; None has no limit."""
    probability: float = 1.0
    """Share of requests that fail, at random."""
    seed: int = 0
    """Seed of the random numbers."""

    def __post_init__(self) -> None:
        """Check that the fault has one effect, with values that it can have."""
        _ = self.kind
        if self.status is not None and self.status not in _STATUSES:
            raise ValueError(f"status must be an HTTP status of 300 or above, is {self.status}")
        if self.status is None and (self.retry_after, self.body) != (None, None):
            raise ValueError("retry_after and body need a status")
        if not 0 <= self.probability <= 1:
            raise ValueError(f"probability must be from 0 to 1, is {self.probability}")
        for name in (
            "truncate_at",
            "flip_at",
            "stall_at",
            "stall_seconds",
            "delay_seconds",
            "skip",
            "times",
        ):
            value = getattr(self, name)
            if isinstance(value, int | float) and value < 0:
                raise ValueError(f"{name} must not be negative, is {value}")

    @property
    def kind(self) -> Kind:
        """Effect of the fault.

        Raises:
            ValueError: It has none, or two.
        """
        given: dict[Kind, bool] = {
            "status": self.status is not None,
            "truncate": self.truncate_at is not None,
            "flip": self.flip_at is not None,
            "stall": self.stall_at is not None,
            "lost": self.lost,
            "delay": self.delay_seconds is not None,
        }
        kinds = [kind for kind, is_given in given.items() if is_given]
        if not kinds and self.reset:
            return "reset"
        if len(kinds) != 1:
            found = ", ".join(kinds) or "nothing"
            raise ValueError(f"a fault does one thing, this one does {found}")
        if self.reset and kinds[0] not in ("truncate", "lost"):
            raise ValueError(f"reset does not go with {kinds[0]}")
        return kinds[0]


class FaultOptions(TypedDict, total=False):
    """The fields of `Fault` behind `operation`."""

    status: int
    retry_after: int | str
    body: bytes
    reset: bool
    truncate_at: int
    flip_at: int | Literal["random"]
    stall_at: int
    stall_seconds: float
    lost: bool
    delay_seconds: float
    bucket: str
    key: str
    skip: int
    times: int
    probability: float
    seed: int


def applies_to(fault: Fault, request: Request) -> bool:
    """Return whether a fault applies to a request, apart from its counts."""
    operation = request.match.operation
    if operation.startswith("retry_tests."):
        return False
    media = request.method == "GET" and (
        not request.match.url.is_json or request.query.get("alt") == "media"
    )
    if not _matches(fault.operation, operation, media=media):
        return False
    if fault.bucket is not None:
        bucket = request.params.get("bucket", "")
        if not fnmatchcase(bucket, fault.bucket):
            return False
    if fault.key is not None:
        key = request.params.get("object") or request.query.get("name", "")
        return fnmatchcase(key, fault.key)
    return True


@lru_cache(maxsize=1024)
def _matches(pattern: str, operation: str, *, media: bool) -> bool:
    group = operation.partition(".")[2]
    names = [operation, group]
    if media and group == "objects.get":
        names.append("objects.media")
    return any(fnmatchcase(name, pattern) for name in names)


def early_response(fault: Fault, *, xml: bool) -> Response | None:
    """Return the response in place of the handler's, or None if the handler runs."""
    if fault.kind == "reset":
        return Response(status=503, delivery=replace(PLAIN, cut_at=BEFORE_HEAD, reset=True))
    if fault.status is None:
        return None
    after = fault.retry_after
    headers = () if after is None else (("Retry-After", str(after)),)
    if fault.body is not None:
        return Response(status=fault.status, headers=headers, body=fault.body)
    return error_response(status_error(fault.status, headers), xml=xml)


def can_alter(fault: Fault, response: Response, size: int) -> bool:
    """Return whether a fault can alter a response that sends `size` bytes of body."""
    if fault.lost or fault.delay_seconds is not None:
        return True
    if response.status >= 300:
        return False
    if fault.flip_at == "random":
        return size > 0
    position = next(
        at for at in (fault.truncate_at, fault.flip_at, fault.stall_at) if at is not None
    )
    return position < size


def alter(
    fault: Fault, response: Response, size: int, rng: random.Random | None = None
) -> Response:
    """Return the altered response; `can_alter` has been checked."""
    plan = response.delivery or PLAIN
    if fault.flip_at is not None:
        position = fault.flip_at
        if position == "random":
            assert rng is not None
            position = rng.randrange(size)
        body = bytearray().join(response.pieces())
        body[position] ^= 0xFF
        return replace(response, body=body)
    if fault.lost:
        plan = replace(plan, cut_at=BEFORE_HEAD, reset=fault.reset)
    elif fault.truncate_at is not None:
        plan = replace(plan, cut_at=fault.truncate_at, reset=fault.reset)
    elif fault.stall_at is not None:
        plan = replace(plan, stall_at=fault.stall_at, stall_seconds=fault.stall_seconds)
    elif fault.delay_seconds is not None:
        plan = replace(plan, delay_seconds=plan.delay_seconds + fault.delay_seconds)
    return replace(response, delivery=plan)


def sent_size(request: Request, response: Response) -> int:
    """Return how many bytes of body a response sends."""
    return 0 if request.method == "HEAD" else response.size


class _Rule:
    """A fault with its counts and its own random numbers."""

    def __init__(self, fault: Fault) -> None:
        self.fault = fault
        self.kind = fault.kind
        self.rng = random.Random(fault.seed)  # noqa: S311
        self._skipped = self._fired = 0

    def fires(self) -> bool:
        """Count a request that the fault applies to; return whether this one fails."""
        if self._skipped < self.fault.skip:
            self._skipped += 1
            return False
        if self.fault.times is not None and self._fired >= self.fault.times:
            return False
        if self.fault.probability < 1 and self.rng.random() >= self.fault.probability:
            return False
        self._fired += 1
        return True


class Faults(Hook):
    """Faults of a server. Any thread may change them; a request meets the first that fires."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._rules: tuple[_Rule, ...] = ()
        self._injected: Counter[Kind] = Counter()
        self._early: Response | None = None

    def add(self, operation: str, **options: Unpack[FaultOptions]) -> Fault:
        """Add a fault.

        Args:
            operation: Requests that it applies to; see `Fault.operation`.
            **options: The other fields of `Fault`.

        Returns:
            The fault, for `remove`.

        Raises:
            ValueError: It has no effect, or two, or applies to no operation.
        """
        if not any(fnmatchcase(name, operation) for name in _NAMES):
            raise ValueError(
                f"no operation is {operation!r}; there are {', '.join(sorted(_NAMES))}"
            )
        fault = Fault(operation=operation, **options)
        with self._lock:
            self._rules += (_Rule(fault),)
        return fault

    def remove(self, fault: Fault) -> None:
        """Remove a fault, if it is still there."""
        with self._lock:
            self._rules = tuple(rule for rule in self._rules if rule.fault is not fault)

    def clear(self) -> None:
        """Remove all faults and set `injected` to zero."""
        with self._lock:
            self._rules = ()
            self._injected.clear()

    @contextmanager
    def inject(self, operation: str, **options: Unpack[FaultOptions]) -> Iterator[Fault]:
        """Add a fault for the length of a `with` block; see `add`."""
        fault = self.add(operation, **options)
        try:
            yield fault
        finally:
            self.remove(fault)

    @property
    def injected(self) -> Counter[Kind]:
        """Number of faults that happened, by kind."""
        with self._lock:
            return self._injected.copy()

    def before(self, request: Request) -> Response | None:
        for rule in self._rules:
            if rule.kind not in _EARLY or not applies_to(rule.fault, request):
                continue
            if self._fires(rule):
                self._early = early_response(rule.fault, xml=not request.match.url.is_json)
                return self._early
        return None

    def after(self, request: Request, response: Response) -> Response:
        if not self._rules or response is self._early:
            return response
        size = sent_size(request, response)
        for rule in self._rules:
            fault = rule.fault
            if rule.kind in _EARLY or not applies_to(fault, request):
                continue
            if can_alter(fault, response, size) and self._fires(rule):
                return alter(fault, response, size, rule.rng)
        return response

    def _fires(self, rule: _Rule) -> bool:
        with self._lock:
            if not rule.fires():
                return False
            self._injected[rule.kind] += 1
            return True
