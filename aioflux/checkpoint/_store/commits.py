"""The steps below a root, and their commit objects.

    root/step-00000100/.metadata                       the commit object; the step exists with it
    root/step-00000100/<save_id>/__0_0.distcp          a data object of the commit

Nothing is unpickled here: the commit is the JSON that follows the pickle.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

from aioflux._concurrency.fan_out import gather_bounded
from aioflux._values.uri import join_uri, parse_uri
from aioflux.checkpoint._format.commit import (
    COMMIT_KEY,
    INDEX_KEY,
    decode_commit,
    decode_index,
    parse_step,
    step_prefix,
)
from aioflux.errors import CheckpointCorruptError, CheckpointNotFoundError, NotFoundError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from aioflux._values.meta import ObjectMeta
    from aioflux.checkpoint._format.commit import Commit
    from aioflux.store import Store

__all__ = [
    "COMMIT_KEYS",
    "MAX_IN_FLIGHT",
    "CommitObject",
    "StepSummary",
    "as_prefix",
    "is_home",
    "list_prefixes",
    "list_steps",
    "read_commit",
    "read_commits",
    "summarize",
    "uri_below",
]

COMMIT_KEYS = (COMMIT_KEY, INDEX_KEY)
"""Keys that a commit object can have below its checkpoint's prefix, one for each layout."""

MAX_IN_FLIGHT = 64
"""Commit objects that are read at once."""


class CommitObject(NamedTuple):
    """A commit object and its content."""

    meta: ObjectMeta
    """Its metadata; its generation is the precondition of a removal."""
    data: bytes
    """Its bytes."""
    commit: Commit | None
    """The decoded commit; None if another program wrote it, or if it is damaged."""
    problem: CheckpointCorruptError | None = None
    """The error, if it is damaged."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StepSummary:
    """The commit of a step, without the list of its objects."""

    step: int
    """The training step."""
    uri: str
    """Uri of the checkpoint."""
    created: float = 0.0
    """Time of the commit, in seconds since 1970, UTC."""
    num_bytes: int = 0
    """Bytes of all data objects, without the commit object."""
    num_objects: int = 0
    """Data objects."""
    world_size: int = 0
    """Ranks that wrote it."""
    layout: str = ""
    """`dcp` or `safetensors`."""
    save_id: str = ""
    """Name of the save."""
    metrics: Mapping[str, float] = field(default_factory=dict)
    """Metrics for retention."""
    generation: str = ""
    """Generation of the commit object."""
    problem: str = ""
    """Message, if the commit object cannot be read; then only step and uri are set."""
    is_ours: bool = True
    """False if another program wrote it; then `problem` is set, too."""


def as_prefix(prefix: str) -> str:
    """Return a prefix with a slash at its end; empty for the root of the store."""
    return prefix if not prefix or prefix.endswith("/") else f"{prefix}/"


def uri_below(store: Store, key: str) -> str:
    """Return the whole uri of a key or prefix of a store."""
    return join_uri(store.uri, key)


def is_home(store: Store, prefix: str, commit: Commit) -> bool:
    """Return whether a checkpoint is at the uri it was saved at: a copy has other generations."""
    try:
        home, here = parse_uri(commit.uri), parse_uri(uri_below(store, prefix))
    except ValueError:
        return False
    if home.scheme == "file" == here.scheme:
        # With links and `..` one directory has several names.
        return os.path.realpath(home.key) == os.path.realpath(here.key)
    return str(home).rstrip("/") == str(here).rstrip("/")


async def list_prefixes(store: Store, root: str = "") -> list[int]:
    """Return the steps with objects below `root`, committed or not, ascending; one listing."""
    within = as_prefix(root)
    listing = await store.list_all(within, delimiter="/")
    steps = (parse_step(prefix[len(within) :]) for prefix in listing.prefixes)
    return sorted(step for step in steps if step is not None)


async def list_steps(store: Store) -> list[int]:
    """Return the committed steps below the store's prefix, ascending; they are not verified.

    Costs a listing of one level and a request for each step, 64 at once.
    """

    async def is_committed(step: int) -> bool:
        for key in COMMIT_KEYS:
            try:
                await store.head(step_prefix(step) + key)
            except NotFoundError:
                continue
            return True
        return False

    steps = await list_prefixes(store)
    found = await gather_bounded(is_committed, steps, max_in_flight=MAX_IN_FLIGHT)
    return [step for step, is_there in zip(steps, found, strict=True) if is_there]


def _decode(meta: ObjectMeta, data: bytes) -> CommitObject:
    """Decode a commit object in the layout that its key implies."""
    decode = decode_index if meta.key.endswith(INDEX_KEY) else decode_commit
    try:
        return CommitObject(meta, data, decode(data, uri=meta.uri)[1])
    except CheckpointCorruptError as exc:
        return CommitObject(meta, data, None, exc)


async def read_commits(
    store: Store, prefix: str, names: Sequence[str] = COMMIT_KEYS
) -> list[CommitObject]:
    """Return the commit objects of a checkpoint, oldest save first; damaged ones come first.

    Those of `names` below the checkpoint's prefix are read; by default one for each layout.
    """
    keys = [as_prefix(prefix) + name for name in names]
    found: list[CommitObject] = []
    async for batch in store.try_fetch_batches(keys):
        for each in batch:
            if each[0] is not None:
                found.append(_decode(*each))
            elif not isinstance(each[1], NotFoundError):
                raise each[1]
    return sorted(found, key=lambda each: each.commit.save_id if each.commit else "")


async def read_commit(store: Store, prefix: str) -> CommitObject:
    """Read the commit object of a checkpoint; the newest if two layouts were saved.

    Raises:
        CheckpointNotFoundError: There is none: no save was committed.
        CheckpointCorruptError: It is damaged.
    """
    found = await read_commits(store, prefix)
    for each in found:
        if each.problem is not None:
            raise each.problem
    if not found:
        uri = uri_below(store, as_prefix(prefix))
        raise CheckpointNotFoundError(
            f"there is no checkpoint {uri}: it has no commit object; list the checkpoints with "
            "`aioflux ckpt list`"
        )
    return found[-1]


async def summarize(store: Store, steps: Sequence[int] | None = None) -> list[StepSummary]:
    """Return summaries of the commits of many steps, ascending; they are not verified.

    Costs a request or two for each step, 64 at once. Steps without a commit are left out.
    """

    async def summarize_step(step: int) -> StepSummary | None:
        uri = uri_below(store, step_prefix(step))
        try:
            found = await read_commit(store, step_prefix(step))
        except CheckpointNotFoundError:
            return None
        except CheckpointCorruptError as exc:
            return StepSummary(step=step, uri=uri, problem=str(exc))
        commit = found.commit
        if commit is None:
            problem = f"{found.meta.uri} holds no commit of aioflux: another program wrote it"
            return StepSummary(step=step, uri=uri, problem=problem, is_ours=False)
        return StepSummary(
            step=step,
            uri=uri,
            created=commit.created,
            num_bytes=commit.num_bytes,
            num_objects=len(commit.objects),
            world_size=commit.world_size,
            layout=commit.layout,
            save_id=commit.save_id,
            metrics=commit.metrics,
            generation=found.meta.generation,
        )

    selected = sorted(set(steps)) if steps is not None else await list_prefixes(store)
    summaries = await gather_bounded(summarize_step, selected, max_in_flight=MAX_IN_FLIGHT)
    return [each for each in summaries if each is not None]
