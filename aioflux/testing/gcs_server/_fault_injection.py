"""Injection of the faults that tests add from Python."""

from __future__ import annotations

import random
import threading
from collections import Counter
from contextlib import contextmanager
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING

from aioflux.testing.gcs_server._app import ROUTES, Hook
from aioflux.testing.gcs_server._fault import (
    Fault,
    alter,
    applies_to,
    can_alter,
    early_response,
    sent_size,
)

if TYPE_CHECKING:
    from collections.abc import Iterator
    from typing import Unpack

    from aioflux.testing.gcs_server._fault import FaultOptions, Kind
    from aioflux.testing.gcs_server._messages import Request, Response

_OPERATIONS = frozenset({"storage.batch", *(route.operation for route in ROUTES)})
_NAMES = _OPERATIONS | {"objects.media", *(name.partition(".")[2] for name in _OPERATIONS)}
_EARLY: tuple[Kind, ...] = ("status", "reset")  # they replace the handler's response


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
        """See base class."""
        for rule in self._rules:
            if rule.kind not in _EARLY or not applies_to(rule.fault, request):
                continue
            if self._fires(rule):
                self._early = early_response(rule.fault, xml=not request.match.url.is_json)
                return self._early
        return None

    def after(self, request: Request, response: Response) -> Response:
        """See base class."""
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
