"""Faults that tests order from Python: which requests they meet, and what happens to those."""

from __future__ import annotations

import math
import random
import threading
from collections import Counter
from contextlib import contextmanager
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import lru_cache
from http import HTTPStatus
from typing import TYPE_CHECKING, Literal, TypedDict

from aioflux.testing.gcs_server._app import ROUTES, Hook
from aioflux.testing.gcs_server._disturb import body_size, disturb, refuse, touches

if TYPE_CHECKING:
    from collections.abc import Iterator
    from typing import Unpack

    from aioflux.testing.gcs_server._messages import Request, Response

_STATUSES = frozenset(status.value for status in HTTPStatus if status.value >= 300)
_OPERATIONS = frozenset({"storage.batch", *(route.operation for route in ROUTES)})
_NAMES = _OPERATIONS | {"objects.media", *(name.partition(".")[2] for name in _OPERATIONS)}
Kind = Literal["status", "reset", "truncate", "flip", "stall", "lost", "delay"]
_REFUSALS: tuple[Kind, ...] = ("status", "reset")  # these answer in place of the handler


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Fault:
    """One fault: the requests it meets, and one thing that it does to them.

    What it does is one of `status`, `truncate_at`, `flip_at`, `stall_at`, `lost`,
    `delay_seconds`, or `reset` alone; positions count bytes of the body that is sent.
    `truncate_at`, `flip_at` and `stall_at` meet only successful answers that are long enough.
    """

    operation: str
    """Name of an operation with or without its API (`storage.objects.get`; `objects.get` for
    JSON and XML), `objects.media` for those reads that send an object's bytes, or a pattern
    with `*`."""
    status: int | None = None
    """Answer with this status and do nothing else; nothing is committed."""
    retry_after: int | str | None = None
    """`Retry-After` of that answer: seconds or an HTTP date."""
    body: bytes | None = None
    """Body of that answer; None has the one that GCS sends."""
    reset: bool = False
    """Alone: reset the connection and do nothing else. Beside `truncate_at` or `lost`: end the
    connection with a reset rather than an orderly close."""
    truncate_at: int | None = None
    """End the connection after this many bytes of the body."""
    flip_at: int | Literal["random"] | None = None
    """Invert the byte at this position; the checksums in the headers stay true."""
    stall_at: int | None = None
    """Fall silent for `stall_seconds` before the byte at this position."""
    stall_seconds: float = math.inf
    """By default until the client gives up."""
    lost: bool = False
    """Commit, then end the connection without an answer."""
    delay_seconds: float | None = None
    """Commit, then wait so long before the answer."""
    bucket: str | None = None
    """Only requests for buckets of this name or pattern."""
    key: str | None = None
    """Only requests that name an object of this key or pattern in their path or query: those
    on a resumable session name none."""
    skip: int = 0
    """Leave alone so many requests first."""
    times: int | None = None
    """Disturb at most so many; None has no limit."""
    probability: float = 1.0
    """Disturb this share, at random."""
    seed: int = 0
    """Of what is random."""

    def __post_init__(self) -> None:
        """Refuse a fault that does nothing, or two things."""
        self._kinds_checked()
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
        """What the fault does."""
        return self._kinds_checked()

    def _kinds_checked(self) -> Kind:
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


# --- which requests it meets ---------------------------------------------------------------


def meets(fault: Fault, request: Request) -> bool:
    """Judge whether a fault is meant for a request, whatever its counts say."""
    operation = request.match.operation
    if operation.startswith("retry_tests."):
        return False
    media = request.method == "GET" and (
        not request.match.url.is_json or request.query.get("alt") == "media"
    )
    if not _names(fault.operation, operation, media=media):
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
def _names(pattern: str, operation: str, *, media: bool) -> bool:
    group = operation.partition(".")[2]
    names = [operation, group]
    if media and group == "objects.get":
        names.append("objects.media")
    return any(fnmatchcase(name, pattern) for name in names)


class _Rule:
    """A fault with its counts and its own random numbers."""

    def __init__(self, fault: Fault) -> None:
        self.fault = fault
        self.kind = fault.kind
        self.rng = random.Random(fault.seed)  # noqa: S311
        self._skipped = self._fired = 0

    def fires(self) -> bool:
        """Count a request that the fault meets; judge whether this one is disturbed."""
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
    """The faults of a server; any thread may change them. The first that fires is the one."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._rules: tuple[_Rule, ...] = ()
        self._injected: Counter[Kind] = Counter()
        self._refusal: Response | None = None

    def add(self, operation: str, **options: Unpack[FaultOptions]) -> Fault:
        """Order a fault.

        Args:
            operation: Which requests it meets; see `Fault.operation`.
            **options: The other fields of `Fault`.

        Returns:
            The fault, for `remove`.

        Raises:
            ValueError: It does nothing, or two things, or meets no operation.
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
        """Take back a fault; nothing happens where it has been taken back already."""
        with self._lock:
            self._rules = tuple(rule for rule in self._rules if rule.fault is not fault)

    def clear(self) -> None:
        """Take back all faults and set `injected` to zero."""
        with self._lock:
            self._rules = ()
            self._injected.clear()

    @contextmanager
    def inject(self, operation: str, **options: Unpack[FaultOptions]) -> Iterator[Fault]:
        """Order a fault for the length of a `with` block; see `add`."""
        fault = self.add(operation, **options)
        try:
            yield fault
        finally:
            self.remove(fault)

    @property
    def injected(self) -> Counter[Kind]:
        """How often something has happened, by kind."""
        with self._lock:
            return self._injected.copy()

    def before(self, request: Request) -> Response | None:
        """See base class."""
        for rule in self._rules:
            if rule.kind not in _REFUSALS or not meets(rule.fault, request):
                continue
            if self._counted(rule):
                self._refusal = refuse(rule.fault, xml=not request.match.url.is_json)
                return self._refusal
        return None

    def after(self, request: Request, response: Response) -> Response:
        """See base class."""
        if not self._rules or response is self._refusal:
            return response
        size = body_size(request, response)
        for rule in self._rules:
            fault = rule.fault
            if rule.kind in _REFUSALS or not meets(fault, request):
                continue
            if touches(fault, response, size) and self._counted(rule):
                return disturb(fault, response, size, rule.rng)
        return response

    def _counted(self, rule: _Rule) -> bool:
        with self._lock:
            if not rule.fires():
                return False
            self._injected[rule.kind] += 1
            return True
