"""What a scenario is: parameters, the matches that it plays, and what ours must reach in each."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Any, Literal, get_args, get_origin, get_type_hints

from perf.scenarios._scheme import check_scheme, in_scheme
from perf.work import WARM_UP_BYTES, Work

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping
    from typing import Self

    from perf.servers import ServerSpec

__all__ = [
    "KIB",
    "MIB",
    "OURS",
    "Match",
    "MemoryGoal",
    "Promise",
    "Rival",
    "Scenario",
    "Turn",
    "duels",
    "ready_objects",
]

KIB = 1024
MIB = 1024 * KIB
SHARES = {
    "aiohttp": 0.5,
    "gcloud_aio": 0.3,
    "gcsfs": 0.1,
    "google": 0.06,
    "obstore": 0.5,
    "requests": 0.06,
    "transfer_manager": 0.03,
}
"""How much of our objects a slower peer moves, so that its sample takes about as long as ours."""
MAX_IN_FLIGHT = 100_000
"""Most requests under way at once that can be asked for: each has a task and a connection."""
_UNITS = {"KiB": KIB, "MiB": MIB, "GiB": 1024 * MIB}


@dataclass(frozen=True, kw_only=True)
class Rival:
    """A peer, and how many times its rate ours must at least be."""

    peer: str
    """Module below `perf.peers`."""
    at_least: float | None = None
    """Ratio of our rate by the peer's; None where nothing is promised."""
    share: float | None = None
    """Share of our objects that it moves; None is that of `SHARES`, or all."""

    def num_objects(self, ours: int) -> int:
        """Return how many objects it moves where we move so many."""
        share = SHARES.get(self.peer, 1.0) if self.share is None else self.share
        return max(1, round(ours * share))


@dataclass(frozen=True, kw_only=True)
class Turn:
    """One side of a match: what a contender does, and on which server."""

    work: Work
    """Its url, authority and pids are filled in when the server is up."""
    server: ServerSpec


@dataclass(frozen=True, kw_only=True)
class Match:
    """Two contenders who take turns, and what ours must reach."""

    case: str = ""
    """Which of the scenario's cases; empty where it has one."""
    ours: Turn
    theirs: Turn
    label: str = ""
    """What the other side is called; empty is the name of its peer."""
    at_least: float | None = None
    """Ratio to reach, of our rate by what is set against it; None where nothing is promised."""
    cap_per_second: float = math.inf
    """Objects per second that no client can exceed here: the lesser of it and of the other side's
    rate is set against ours."""

    @property
    def name(self) -> str:
        """What the other side is called."""
        return self.label or self.theirs.work.peer


@dataclass(frozen=True, kw_only=True)
class MemoryGoal:
    """What our resident memory must stay under."""

    limit_bytes: int
    """The most, inclusive."""
    is_above_idle: bool
    """Whether what the process held before the measured part is taken off."""


@dataclass(frozen=True, kw_only=True)
class Promise:
    """A figure of ours alone, whoever it plays against."""

    figure: Literal["requests", "waiting", "stored", "read", "objects/s"]
    """Requests that came to the server, in any sample; the share of the time in which a consumer
    waited, that of their bytes which tensors take where they are stored, or that were read of them,
    and objects per second: medians."""
    at_most: float = math.inf
    """The most, inclusive."""
    at_least: float = 0.0
    """The least, inclusive."""


@dataclass(frozen=True, kw_only=True)
class Scenario(ABC):
    """The parameters of one scenario; its fields can be replaced by name."""

    name: str
    """What it is called on the command line."""
    rivals: tuple[Rival, ...] = ()
    """The peers that it is measured against."""
    scheme: str = "gs"
    """What is spoken: `gs`, `s3` or `az`, each to a server of its own."""

    @abstractmethod
    def matches(self) -> tuple[Match, ...]:
        """Return what is played, case by case and rival by rival."""

    def played(self) -> tuple[Match, ...]:
        """Return the matches of `matches` whose contenders speak the scheme, on its server."""
        return in_scheme(self.matches(), self.scheme)

    @abstractmethod
    def toy(self) -> Self:
        """Return the same at a size that runs in about a second."""

    @property
    def displayed_bytes(self) -> int:
        """Size of an object where rates are told in bytes; 0 where in objects."""
        return 0

    def memory_goal(self) -> MemoryGoal | None:
        """Return what our memory must stay under, where something is promised."""
        return None

    def promises(self) -> tuple[Promise, ...]:
        """Return what else is promised of ours."""
        return ()

    @property
    def is_by_name_only(self) -> bool:
        """Whether it is run only where it is named, because it takes long."""
        return False

    def scaled(self, factor: float) -> Self:
        """Return the same with so many times the objects, where it moves several."""
        count = getattr(self, "num_objects", None)
        if count is None:
            return self
        return self.replaced({"num_objects": str(max(1, round(count * factor)))})

    def against(self, peers: tuple[str, ...]) -> Self:
        """Return the same against these peers; those that it does not know have no goal."""
        known = {rival.peer: rival for rival in self.rivals}
        others = (peer for peer in peers if not peer.startswith("aioflux"))
        return replace(self, rivals=tuple(known.get(peer, Rival(peer=peer)) for peer in others))

    def parameters_in_words(self) -> str:
        """Return the fields that can be replaced, with their values."""
        return ", ".join(f"{name}={_typed(name, getattr(self, name))}" for name in self._settable())

    def _settable(self) -> list[str]:
        return [field.name for field in fields(self) if field.name not in {"name", "rivals"}]

    def replaced(self, settings: Mapping[str, str]) -> Self:
        """Return the same with fields replaced by values as they are typed.

        Raises:
            ValueError: There is no such field, or the value is none of its type.
        """
        types = get_type_hints(type(self))
        known = self._settable()
        changes: dict[str, Any] = {}
        for name, text in settings.items():
            if name not in known:
                raise ValueError(f"{self.name} has no {name!r}; it has {', '.join(known)}")
            try:
                changes[name] = _parsed(text, types[name])
                if name == "in_flight":
                    _check_in_flight(changes[name])
                if name == "scheme":
                    check_scheme(changes[name])
            except ValueError as exc:
                raise ValueError(f"{name} of {self.name}: {exc}") from exc
        return replace(self, **changes)


OURS = Rival(peer="aioflux")
"""Ourselves, through the public store."""


def duels(
    rivals: Iterable[Rival], turn: Callable[[Rival], Turn], *, ours: Rival = OURS, case: str = ""
) -> tuple[Match, ...]:
    """Return a match against each rival.

    Args:
        rivals: Against whom.
        turn: What a contender does.
        ours: The face of ours that plays.
        case: Which of the scenario's cases.
    """
    return tuple(
        Match(case=case, ours=turn(ours), theirs=turn(rival), at_least=rival.at_least)
        for rival in rivals
    )


def ready_objects(work: Work) -> tuple[tuple[int, int], ...]:
    """Return the objects that reads need to be there: their own, and that of a warm-up."""
    own = ((work.size_bytes, work.num_keys),)
    return own if work.size_bytes <= WARM_UP_BYTES else (*own, (WARM_UP_BYTES, 1))


def _typed(name: str, value: Any) -> str:
    """Return a value as it would be typed."""
    if isinstance(value, tuple):
        return ",".join(_typed(name, item) for item in value)
    if name.endswith("_bytes"):
        for unit, size in reversed(_UNITS.items()):
            if value >= size and value % size == 0:
                return f"{value // size}{unit}"
    return str(value).lower() if isinstance(value, bool) else str(value)


def _check_in_flight(value: int | tuple[int, ...]) -> None:
    """Raise ValueError where more is to be under way than can be."""
    most = max(value) if isinstance(value, tuple) else value
    if most > MAX_IN_FLIGHT:
        raise ValueError(f"must be at most {MAX_IN_FLIGHT:,}, is {most:,}")


def _parsed(text: str, kind: Any) -> Any:
    """Return the value that is meant.

    Raises:
        ValueError: It is none of this type; whole numbers are at least 1, others at least 0.
    """
    if get_origin(kind) is tuple:
        if not (items := [item for item in text.split(",") if item]):
            raise ValueError(f"must be one or more values with commas between, not {text!r}")
        return tuple(_parsed(item, get_args(kind)[0]) for item in items)
    if kind is bool:
        if text.lower() not in {"true", "false"}:
            raise ValueError(f"must be true or false, not {text!r}")
        return text.lower() == "true"
    if kind is str:
        return text
    return _whole(text) if kind is int else _fraction(text)


def _whole(text: str) -> int:
    unit = next((unit for unit in _UNITS if text.endswith(unit)), "")
    try:
        number = int(text.removesuffix(unit)) * _UNITS.get(unit, 1)
    except ValueError:
        raise ValueError(f"must be a whole number, not {text!r}") from None
    if number < 1:
        raise ValueError(f"must be at least 1, is {text!r}")
    return number


def _fraction(text: str) -> float:
    try:
        number = float(text)
    except ValueError:
        raise ValueError(f"must be a number, not {text!r}") from None
    if not 0 <= number < math.inf:
        raise ValueError(f"must be finite and not negative, is {text!r}")
    return number
