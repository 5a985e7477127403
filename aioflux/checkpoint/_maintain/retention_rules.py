"""Retention: the rules for the steps that are kept. Pure."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, TypeAlias

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Mapping, Sequence

__all__ = ["Retention", "StepRecord", "plan_prune", "steps_to_verify"]

Best: TypeAlias = tuple[str, str] | tuple[str, str, int]


@dataclass(frozen=True, kw_only=True, slots=True)
class Retention:
    """Rules for the steps that are kept: each that one of them keeps. Without rules all are.

    The newest valid step, and all steps that are newer, stay in any case.
    """

    keep_last: int | None = None
    """So many of the newest valid steps."""
    keep_every: int | None = None
    """Every step that this number divides."""
    keep_best: Best | None = None
    """`(metric, "min")` or `(metric, "max")`: the step whose metric is lowest or highest; with a
    number N as third, the N best. Ties go to the newest; steps without the metric do not count."""
    ttl_seconds: float | None = None
    """Every step younger than this."""

    def __post_init__(self) -> None:
        for name in ("keep_last", "keep_every"):
            value = getattr(self, name)
            if value is not None and (isinstance(value, bool) or int(value) != value or value < 1):
                raise ValueError(f"{name} must be a whole number of 1 or more, not {value!r}")
        if self.ttl_seconds is not None and not self.ttl_seconds > 0:
            raise ValueError(f"ttl_seconds must be above 0, not {self.ttl_seconds!r}")
        if self.keep_best is not None:
            _check_best(self.keep_best)

    @property
    def has_rules(self) -> bool:
        """Return whether there is any rule."""
        rules = (self.keep_last, self.keep_every, self.keep_best, self.ttl_seconds)
        return any(rule is not None for rule in rules)


def _check_best(best: object) -> None:
    match best:
        case (str(), "min" | "max"):
            return
        case (str(), "min" | "max", int(count)) if count >= 1:
            return
        case _:
            pass
    raise ValueError(
        'keep_best must be (metric, "min") or (metric, "max"), with a number of 1 or more as '
        f"third where several stay, not {best!r}"
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class StepRecord:
    """A step as retention sees it."""

    step: int
    """The training step."""
    created: float
    """Time of its commit, in seconds since 1970, UTC."""
    metrics: Mapping[str, float] = field(default_factory=dict)
    """Its metrics."""
    is_valid: bool = True
    """Whether it verifies. One that does not never counts as kept."""


def plan_prune(
    steps: Iterable[StepRecord],
    retention: Retention,
    *,
    now: float,
    protected: Collection[int] = (),
) -> list[int]:
    """Return the steps to remove, ascending.

    The newest valid step stays, steps newer than it stay (so that the reason why they do not verify
    can be found), protected steps stay, and if no step is valid all stay. A step that does not
    verify is removed by the same rules as a valid one, but does not count as one of those kept.

    Args:
        steps: All committed steps.
        retention: The rules.
        now: The time, in seconds since 1970, UTC.
        protected: Steps that stay in any case, such as the one that was loaded from.
    """
    known = sorted(steps, key=lambda each: each.step)
    valid = [each for each in known if each.is_valid]
    if not retention.has_rules or not valid:
        return []
    kept = {each.step for each in known if each.step >= valid[-1].step}
    kept.update(protected)
    if retention.keep_last is not None:
        kept.update(each.step for each in valid[-retention.keep_last :])
    if retention.keep_every is not None:
        kept.update(each.step for each in known if each.step % retention.keep_every == 0)
    if retention.ttl_seconds is not None:
        kept.update(each.step for each in known if now - each.created < retention.ttl_seconds)
    if retention.keep_best is not None:
        kept.update(_best(valid, retention.keep_best))
    return [each.step for each in known if each.step not in kept]


def steps_to_verify(steps: Iterable[StepRecord], retention: Retention) -> set[int]:
    """Return the valid steps because of which others may be removed: to be verified first."""
    valid = sorted((each for each in steps if each.is_valid), key=lambda each: each.step)
    unverified = {each.step for each in valid[-(retention.keep_last or 1) :]}
    if retention.keep_best is not None:
        unverified.update(_best(valid, retention.keep_best))
    return unverified


def _best(valid: Sequence[StepRecord], best: Best) -> list[int]:
    """Return the steps whose metric is best, of those that have it."""
    metric, mode, *most = best
    sign = 1.0 if mode == "max" else -1.0
    ranked = sorted(
        (
            (sign * each.metrics[metric], each.step)
            for each in valid
            if not math.isnan(each.metrics.get(metric, math.nan))
        ),
        reverse=True,
    )
    return [step for _, step in ranked[: most[0] if most else 1]]
