"""Faults that the server injects: errors, resets, truncation, stalls, lost responses, delays."""

from __future__ import annotations

import math
import random
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from functools import lru_cache
from http import HTTPStatus
from typing import TYPE_CHECKING, Literal, TypedDict, Unpack

from aioflux.testing.gcs_server._app import ROUTES, Hook
from aioflux.testing.gcs_server._delivery import BEFORE_HEAD, PLAIN
from aioflux.testing.gcs_server._errors import status_error
from aioflux.testing.gcs_server._messages import Response, error_response

if TYPE_CHECKING:
    from aioflux.testing.gcs_server._messages import Request

_STATUSES = frozenset(status.value for status in HTTPStatus if status.value >= 300)
Kind = Literal["status", "reset", "truncate", "flip", "stall", "lost", "delay"]
_OPERATIONS = frozenset({"storage.batch", *(route.operation for route in ROUTES)})
_NAMES = _OPERATIONS | {"objects.media", *(name.partition(".")[2] for name in _OPERATIONS)}
_REPLACING_KINDS: tuple[Kind, ...] = ("status", "reset")  # the handler of the request does not run


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Fault:
    """One fault: the requests that fail, and how they fail.

    Set exactly one of `status`, `truncate_at`, `flip_at`, `stall_at`, `lost` and `delay_seconds`,
    or `reset` alone. Positions are offsets in the response body, in bytes. `truncate_at`,
    `flip_at` and `stall_at` apply to successful responses whose body is longer than the position.
    """

    operation: str
    """Operation that fails: a name with its API (`storage.objects.get`, `xml.objects.get`) or
    without (`objects.get` for both APIs), or a pattern with `*`. `objects.media` means downloads
    of the bytes of an object."""
    status: int | None = None
    """Respond with this status and do not handle the request."""
    retry_after: int | str | None = None
    """Header `Retry-After` of the response with `status`: seconds or an HTTP date."""
    body: bytes | None = None
    """Body of the response with `status`. None sends the error body of GCS."""
    reset: bool = False
    """Reset the connection and do not handle the request. With `truncate_at` or `lost`: reset the
    connection (RST) at the end of the fault instead of closing it (FIN)."""
    truncate_at: int | None = None
    """Close the connection after this many bytes of the body."""
    flip_at: int | Literal["random"] | None = None
    """Invert all bits of the byte at this position. The checksums in the headers stay correct."""
    stall_at: int | None = None
    """Send nothing for `stall_seconds` before the byte at this position."""
    stall_seconds: float = math.inf
    """Duration of the stall. By default the stall lasts until the client closes the connection."""
    lost: bool = False
    """Handle the request, then close the connection without a response."""
    delay_seconds: float | None = None
    """Handle the request, then wait this long before the response."""
    bucket: str | None = None
    """Name or pattern of buckets: requests for other buckets do not fail."""
    key: str | None = None
    """Key or pattern of keys: only requests with such a key in their path or query fail. A key in
    the request body, which the JSON API allows for a new object, is not compared."""
    skip: int = 0
    """Number of requests that pass before the first fault."""
    times: int | None = None
    """Maximum number of faults. None means no limit."""
    probability: float = 1.0
    """Probability that a request fails, from 0 to 1."""
    seed: int = 0
    """Seed of the random numbers for `probability` and `flip_at="random"`."""

    def __post_init__(self) -> None:
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
            ValueError: The fault has no effect, or more than one.
        """
        effects: dict[Kind, bool] = {
            "status": self.status is not None,
            "truncate": self.truncate_at is not None,
            "flip": self.flip_at is not None,
            "stall": self.stall_at is not None,
            "lost": self.lost,
            "delay": self.delay_seconds is not None,
        }
        kinds = [kind for kind, is_set in effects.items() if is_set]
        if not kinds and self.reset:
            return "reset"
        if len(kinds) != 1:
            given_kinds = ", ".join(kinds) or "none"
            raise ValueError(f"a fault must have exactly one effect, not {given_kinds}")
        if self.reset and kinds[0] not in ("truncate", "lost"):
            raise ValueError(f"reset cannot be combined with {kinds[0]}: drop one of the two")
        return kinds[0]


class FaultOptions(TypedDict, total=False):
    """Fields of `Fault` except `operation`, as keyword arguments."""

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
    """Return whether a request has the operation, bucket and key of a fault."""
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
    bare_name = operation.partition(".")[2]
    names = [operation, bare_name]
    if media and bare_name == "objects.get":
        names.append("objects.media")
    return any(fnmatchcase(name, pattern) for name in names)


def replacement_response(fault: Fault, *, xml: bool) -> Response | None:
    """Return the response that the fault sends without running the handler, or None."""
    if fault.kind == "reset":
        return Response(status=503, delivery=replace(PLAIN, cut_at=BEFORE_HEAD, reset=True))
    if fault.status is None:
        return None
    retry_after = fault.retry_after
    headers = () if retry_after is None else (("Retry-After", str(retry_after)),)
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
    positions = (fault.truncate_at, fault.flip_at, fault.stall_at)
    return next(position for position in positions if position is not None) < size


def alter(
    fault: Fault, response: Response, size: int, rng: random.Random | None = None
) -> Response:
    """Return the response with the fault. The caller must have checked `can_alter`."""
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
    """Return the number of body bytes that the response sends: 0 for HEAD."""
    return 0 if request.method == "HEAD" else response.size


class _Rule:
    """Fault, with counts of the requests that were skipped and that failed."""

    def __init__(self, fault: Fault) -> None:
        self.fault = fault
        self.kind = fault.kind
        self.rng = random.Random(fault.seed)  # noqa: S311
        self._skipped = self._fired = 0

    def fires(self) -> bool:
        """Return whether the current request fails, and update the counts."""
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
    """Faults of a server. Any thread may add or remove faults.

    A request has at most one fault. Faults are tried in the order of `add`: first those with
    `status`, or with `reset` alone, then all others.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._rules: tuple[_Rule, ...] = ()
        self._injected: Counter[Kind] = Counter()
        self._replacement: Response | None = None

    def add(self, operation: str, **options: Unpack[FaultOptions]) -> Fault:
        """Add a fault.

        Args:
            operation: Operation that fails. See `Fault.operation`.
            **options: Other fields of `Fault`.

        Returns:
            The fault, to be passed to `remove`.

        Raises:
            ValueError: The fault has no effect or more than one, a value is not valid, or no
                operation has this name.
        """
        if not any(fnmatchcase(name, operation) for name in _NAMES):
            raise ValueError(
                f"no operation matches {operation!r}; there are {', '.join(sorted(_NAMES))}"
            )
        fault = Fault(operation=operation, **options)
        with self._lock:
            self._rules += (_Rule(fault),)
        return fault

    def remove(self, fault: Fault) -> None:
        """Remove a fault. Do nothing if the fault is already removed."""
        with self._lock:
            self._rules = tuple(rule for rule in self._rules if rule.fault is not fault)

    def clear(self) -> None:
        """Remove all faults and set `injected` to zero."""
        with self._lock:
            self._rules = ()
            self._injected.clear()

    @contextmanager
    def inject(self, operation: str, **options: Unpack[FaultOptions]) -> Iterator[Fault]:
        """Add a fault for the duration of a `with` block. The arguments are those of `add`."""
        fault = self.add(operation, **options)
        try:
            yield fault
        finally:
            self.remove(fault)

    @property
    def injected(self) -> Counter[Kind]:
        """Number of injected faults by kind, for example `{"status": 2}`."""
        with self._lock:
            return self._injected.copy()

    def before(self, request: Request) -> Response | None:
        for rule in self._rules:
            if rule.kind not in _REPLACING_KINDS or not applies_to(rule.fault, request):
                continue
            if self._fires(rule):
                self._replacement = replacement_response(
                    rule.fault, xml=not request.match.url.is_json
                )
                return self._replacement
        return None

    def after(self, request: Request, response: Response) -> Response:
        if not self._rules or response is self._replacement:
            return response
        size = sent_size(request, response)
        for rule in self._rules:
            fault = rule.fault
            if rule.kind in _REPLACING_KINDS or not applies_to(fault, request):
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
