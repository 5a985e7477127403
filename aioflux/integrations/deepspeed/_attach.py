"""Saves to uris and loads from them by an engine of DeepSpeed."""

from __future__ import annotations

import functools
import os
import sys
from typing import TYPE_CHECKING, Any

from aioflux import _bridge
from aioflux._values.uri import parse_uri
from aioflux.checkpoint._tag_checkpoints import is_valid, read_tag
from aioflux.errors import (
    AiofluxError,
    CheckpointCorruptError,
    CheckpointError,
    NotFoundError,
)
from aioflux.integrations.deepspeed._engine import AiofluxCheckpointEngine
from aioflux.integrations.deepspeed._placeholders import LATEST, is_uri, put_placeholders

if TYPE_CHECKING:
    from typing import Unpack

    from aioflux.options import StoreOptions

__all__ = ["attach"]


def attach(
    engine: Any,
    *,
    decoupled: bool = False,
    commit_seconds: float = 600.0,
    **options: Unpack[StoreOptions],
) -> AiofluxCheckpointEngine:
    """Let an engine of DeepSpeed save checkpoints to uris and load them, on every rank.

    Call it after `deepspeed.initialize`, before the first save. `save_checkpoint`,
    `load_checkpoint` and `save_16bit_model` then take uris, besides directories.

    Args:
        engine: First return value of `deepspeed.initialize`.
        decoupled: Continue training while parts are stored; the checkpoint is committed at the end
            of the step in which the last rank has finished, and `destroy` waits for it. A copy of
            the parts is held until then.
        commit_seconds: Time that ranks wait for each other; 600 by default.
        options: As `aioflux.open_store`.

    Returns:
        The checkpoint engine, now `engine.checkpoint_engine`.

    Raises:
        CheckpointError: The optimizer is offloaded to NVMe, which DeepSpeed itself copies.
    """
    before = engine.checkpoint_engine
    if isinstance(before, AiofluxCheckpointEngine):
        raise CheckpointError("attach was already called for this engine")
    if getattr(engine, "zero_nvme_offload_optimizer", bool)():
        raise CheckpointError(
            "an optimizer that is offloaded to NVMe cannot be saved to a uri: DeepSpeed itself "
            "copies its directories"
        )
    before.cleanup()
    ours = AiofluxCheckpointEngine(
        None, decoupled=decoupled, commit_seconds=commit_seconds, **options
    )
    base = sys.modules.get("deepspeed.runtime.checkpoint_engine.checkpoint_engine")
    if base is not None:
        base.CheckpointEngine.register(AiofluxCheckpointEngine)
    engine.checkpoint_engine = ours
    for name in ("save_checkpoint", "save_16bit_model"):
        if (method := getattr(engine, name, None)) is not None:
            setattr(engine, name, _wrap_save(ours, method))
    engine.load_checkpoint = _wrap_load(ours, engine, engine.load_checkpoint)
    return ours


def _wrap_save(ours: AiofluxCheckpointEngine, method: Any) -> Any:
    @functools.wraps(method)
    def save(save_dir: Any, *arguments: Any, **options: Any) -> Any:
        if is_uri(save_dir):
            save_dir = ours.placeholders.directory_of(save_dir)
        before = ours.pending
        try:
            return method(save_dir, *arguments, **options)
        except BaseException as exc:
            if ours.pending is not before:  # it may have failed between two parts
                ours.fail(exc)
            raise

    return save


def _wrap_load(ours: AiofluxCheckpointEngine, engine: Any, method: Any) -> Any:
    @functools.wraps(method)
    def load(load_dir: Any, tag: Any = None, *arguments: Any, **options: Any) -> Any:
        uri = str(parse_uri(load_dir)).rstrip("/") if is_uri(load_dir) else ""
        has_partial = not options.get("load_optimizer_states", (True, *arguments[1:2])[-1])
        if uri and has_partial and _stage(engine) == 3:
            raise CheckpointError(
                f"{uri} cannot be loaded with load_optimizer_states=False under ZeRO stage 3: "
                "DeepSpeed itself reads the parts then; copy them to a directory first"
            )
        if uri and getattr(engine, "load_universal_checkpoint", bool)():
            raise CheckpointError(
                f"{uri} cannot be loaded as a universal checkpoint, whose directories DeepSpeed "
                "itself reads; copy it to a directory first"
            )
        directory = ours.placeholders.directory_of(uri) if uri else os.fspath(load_dir)
        found = _prepare(ours, uri or ours.placeholders.uri_of(directory), directory, tag)
        path, client_state = method(directory, found or tag, *arguments, **options)
        if uri and path is not None:
            path = f"{uri}/{os.path.relpath(path, directory)}"
        return path, client_state

    return load


def _stage(engine: Any) -> int:
    return int(getattr(engine, "zero_optimization_stage", int)())


def _prepare(ours: AiofluxCheckpointEngine, uri: str, directory: str, tag: Any) -> str:
    """Create placeholders for the parts of a tag, by default of the latest; return the tag.

    The coordinator reads the tag, so that all ranks load the same.

    Returns:
        The tag; empty if there is no checkpoint of this engine.

    Raises:
        CheckpointError: The tag is not complete.
    """
    outcome: tuple[str, list[str], AiofluxError | None] = ("", [], None)
    if ours.ranks.is_coordinator:
        try:
            outcome = (*_find_tag(ours, uri, "" if tag is None else str(tag)), None)
        except AiofluxError as exc:
            outcome = ("", [], exc)
    found, names, failure = ours.ranks.broadcast(outcome)
    if failure is not None:
        raise failure
    if names:
        put_placeholders(directory, found, names)
    return found


def _find_tag(ours: AiofluxCheckpointEngine, uri: str, tag: str) -> tuple[str, list[str]]:
    """Return a tag, by default the latest, and the names of its parts."""
    store = ours.store(uri)
    is_given = bool(tag)
    if not is_given:
        try:
            tag = _bridge.run(store.get(LATEST)).decode().strip()
        except NotFoundError:
            return "", []  # DeepSpeed logs it, and trains from the beginning
    found = _bridge.run(read_tag(store, tag))
    if found is None:
        if not uri.startswith("file:"):
            raise CheckpointError(
                f"{tag} is not at {uri}"
                + ("" if is_given else f", and {LATEST} names it; pass the tag of another")
            )
        return tag, []  # a directory that DeepSpeed wrote itself
    if not _bridge.run(is_valid(store, found)):
        raise CheckpointCorruptError(
            f"{tag} at {uri} is not complete; load another tag. `aioflux ckpt verify {uri}/{tag}` "
            "shows what is missing"
        )
    return tag, found.names
