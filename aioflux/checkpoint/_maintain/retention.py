"""Retention: the steps that are kept, and the removal of the others, commit object first.

    committed steps -> plan_prune (pure) -> remove_step, oldest first

A step without its commit object does not exist for any reader: a removal that is interrupted leaves
objects that no commit names, which `clean` finds, and never a step that cannot be loaded.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, TypeAlias

from aioflux.checkpoint._format.commit import step_prefix
from aioflux.checkpoint._maintain.orphans import save_of
from aioflux.checkpoint._maintain.verify import verify_steps
from aioflux.checkpoint._store.commits import read_commits, summarize, uri_below
from aioflux.errors import (
    CheckpointCorruptError,
    CheckpointNotFoundError,
    NotFoundError,
    PreconditionFailedError,
    StorageError,
)

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Mapping, Sequence

    from aioflux._values.meta import DeleteResult, ObjectMeta
    from aioflux.checkpoint._store.commits import CommitObject
    from aioflux.errors import AiofluxError
    from aioflux.store import Store

__all__ = [
    "Pruned",
    "Retention",
    "StepRecord",
    "plan_prune",
    "prune",
    "remove_step",
    "steps_to_verify",
]

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
    number as third, so many. Of equal ones the newest; steps without the metric do not count."""
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


async def remove_step(store: Store, step: int, *, generation: str = "") -> DeleteResult:
    """Remove a step: its commit object, then what this and older saves of the step wrote.

    All are deleted in the generation that was read. Keys that no save makes stay, and so do objects
    of a newer save of the step. A damaged commit object is deleted alone: what it names is unknown,
    and `clean` finds it.

    Args:
        store: The root of the checkpoints.
        step: The step.
        generation: Remove it only if its commit object is this one still; any by default.

    Returns:
        The keys that were deleted, and the errors of those that stay as garbage.

    Raises:
        CheckpointNotFoundError: The step is not committed.
        CheckpointCorruptError: Another program wrote the commit object.
        PreconditionFailedError: It was saved again or removed meanwhile.
    """
    prefix = step_prefix(step)
    found = await _read_removable(store, step)
    newest = found[-1].commit
    made = await _list_saved(store, prefix, newest.save_id if newest else "")
    removed = []
    for at, each in enumerate(found):
        is_last = at == len(found) - 1
        meta = replace(each.meta, generation=generation) if generation and is_last else each.meta
        try:
            await store.delete(meta)
        except NotFoundError as exc:
            raise PreconditionFailedError(
                f"{meta.uri} was removed or saved again meanwhile", uri=meta.uri
            ) from exc
        removed.append(meta.key)
    result = await store.delete_many(made)
    return replace(result, deleted=(*removed, *result.deleted))


async def _read_removable(store: Store, step: int) -> list[CommitObject]:
    """Return the commit objects of a step; of two layouts the newer last.

    The older one may lack objects by now: it must not be seen without the newer.
    """
    found = await read_commits(store, step_prefix(step))
    for each in found:
        if each.commit is None and each.problem is None:
            raise CheckpointCorruptError(
                f"{each.meta.uri} stays: something else than aioflux wrote it; remove it with "
                "`aioflux rm -r` if it is of no use"
            )
    if not found:
        raise CheckpointNotFoundError(
            f"there is no step {step} in {store.uri} to remove: it has no commit object"
        )
    return found


async def _list_saved(store: Store, prefix: str, newest: str) -> list[ObjectMeta]:
    """Return the objects that saves of a step wrote, up to the newest save that is removed."""
    if not newest:
        return []
    return [
        meta
        for meta in await store.list_all(prefix)
        if (save := save_of(meta.key)) is not None and save[0] == prefix and save[1] <= newest
    ]


@dataclass(frozen=True, kw_only=True, slots=True)
class Pruned:
    """The result of a `prune`; of a dry run, what it would do."""

    removed: tuple[int, ...]
    """Steps that were removed, ascending."""
    kept: tuple[int, ...]
    """Steps that stay, ascending."""
    errors: Mapping[str, AiofluxError] = field(default_factory=dict)
    """Uris of steps that could not be removed, and of objects of removed steps that could not be
    deleted, with the reason."""


async def prune(
    store: Store,
    retention: Retention,
    *,
    now: float,
    protected: Collection[int] = (),
    dry_run: bool = False,
) -> Pruned:
    """Remove the steps that no rule keeps, oldest first, each in the generation that was read.

    The steps that the rules rely on are verified first, not deep: as many as `keep_last`, the best
    and the newest. Steps that another program wrote stay.

    Args:
        store: The root of the checkpoints.
        retention: The rules.
        now: The time, in seconds since 1970, UTC.
        protected: Steps that stay in any case, such as the one that was loaded from.
        dry_run: Only return what would be removed.
    """
    known = {each.step: each for each in await summarize(store) if each.is_ours}
    records = {
        step: StepRecord(
            step=step, created=each.created, metrics=each.metrics, is_valid=not each.problem
        )
        for step, each in known.items()
    }
    verified: set[int] = set()
    while plan := plan_prune(records.values(), retention, now=now, protected=protected):
        unverified = steps_to_verify(records.values(), retention) - verified
        if not unverified:
            break
        results = {
            each.step: each.is_valid for each in await verify_steps(store, sorted(unverified))
        }
        for step in unverified:
            records[step] = replace(records[step], is_valid=results.get(step, False))
        verified |= unverified
    errors: dict[str, AiofluxError] = {}
    removed = []
    for step in plan:
        try:
            if not dry_run:
                result = await remove_step(store, step, generation=known[step].generation)
                errors |= {uri_below(store, key): exc for key, exc in result.errors.items()}
        except (CheckpointCorruptError, StorageError) as exc:
            errors[known[step].uri] = exc
        except CheckpointNotFoundError:
            continue  # it was removed meanwhile
        else:
            removed.append(step)
    kept = tuple(step for step in known if step not in removed)
    return Pruned(removed=tuple(removed), kept=kept, errors=errors)
