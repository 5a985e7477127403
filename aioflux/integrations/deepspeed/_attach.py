"""attach: DeepSpeed's engine saves to uris and loads from them."""

from __future__ import annotations

import functools
import os
import sys
from typing import TYPE_CHECKING, Any

from aioflux import _bridge
from aioflux._values.uri import parse_uri
from aioflux.checkpoint._maintain.tags import is_valid, read_tag
from aioflux.errors import (
    AiofluxError,
    CheckpointCorruptError,
    CheckpointError,
    NotFoundError,
)
from aioflux.integrations.deepspeed._engine import AiofluxCheckpointEngine
from aioflux.integrations.deepspeed._roots import LATEST, is_uri, put_placeholders

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

    Call it behind `deepspeed.initialize`, before the first save. `save_checkpoint`,
    `load_checkpoint` and `save_16bit_model` then take uris, beside directories.

    Args:
        engine: What `deepspeed.initialize` returned first.
        decoupled: Training goes on while parts are stored; the checkpoint is committed at the end
            of the step in which the last rank is done, and `destroy` waits for it. A copy of the
            parts is held until then.
        commit_seconds: How long ranks wait for each other; 600 by default.
        options: As `aioflux.open_store`.

    Returns:
        The checkpoint engine, which `engine.checkpoint_engine` is now.

    Raises:
        CheckpointError: The optimizer is offloaded to NVMe, which DeepSpeed copies by itself.
    """
    before = engine.checkpoint_engine
    if isinstance(before, AiofluxCheckpointEngine):
        raise CheckpointError("attach was called for this engine already")
    if getattr(engine, "zero_nvme_offload_optimizer", bool)():
        raise CheckpointError(
            "an optimizer that is offloaded to NVMe is copied by DeepSpeed itself, directory by "
            "directory: such a checkpoint cannot be saved to a uri"
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
            setattr(engine, name, _saving(ours, method))
    engine.load_checkpoint = _loading(ours, engine, engine.load_checkpoint)
    return ours


def _saving(ours: AiofluxCheckpointEngine, method: Any) -> Any:
    @functools.wraps(method)
    def save(save_dir: Any, *arguments: Any, **options: Any) -> Any:
        if is_uri(save_dir):
            save_dir = ours.roots.stand_in(save_dir)
        before = ours.under_way
        try:
            return method(save_dir, *arguments, **options)
        except BaseException as exc:
            if ours.under_way is not before:  # it broke off between two parts, maybe
                ours.fail(exc)
            raise

    return save


def _loading(ours: AiofluxCheckpointEngine, engine: Any, method: Any) -> Any:
    @functools.wraps(method)
    def load(load_dir: Any, tag: Any = None, *arguments: Any, **options: Any) -> Any:
        uri = str(parse_uri(load_dir)).rstrip("/") if is_uri(load_dir) else ""
        has_partial = not options.get("load_optimizer_states", (True, *arguments[1:2])[-1])
        if uri and has_partial and _stage(engine) == 3:
            raise CheckpointError(
                f"{uri} cannot be loaded with load_optimizer_states=False under ZeRO stage 3: "
                "DeepSpeed then reads the parts by itself; copy them to a directory first"
            )
        if uri and getattr(engine, "load_universal_checkpoint", bool)():
            raise CheckpointError(
                f"{uri} cannot be loaded as a universal checkpoint, whose directories DeepSpeed "
                "reads by itself; copy it to a directory first"
            )
        directory = ours.roots.stand_in(uri) if uri else os.fspath(load_dir)
        found = _prepare(ours, uri or ours.roots.uri_of(directory), directory, tag)
        path, client_state = method(directory, found or tag, *arguments, **options)
        if uri and path is not None:
            path = f"{uri}/{os.path.relpath(path, directory)}"
        return path, client_state

    return load


def _stage(engine: Any) -> int:
    return int(getattr(engine, "zero_optimization_stage", int)())


def _prepare(ours: AiofluxCheckpointEngine, uri: str, directory: str, tag: Any) -> str:
    """Show DeepSpeed the parts of a tag, by default of the latest; return the tag.

    The coordinator looks, so that all ranks load the same.

    Returns:
        The tag; empty where there is no checkpoint of ours.

    Raises:
        CheckpointError: The tag is not all there.
    """
    told: tuple[str, list[str], AiofluxError | None] = ("", [], None)
    if ours.ranks.is_coordinator:
        try:
            told = (*_look(ours, uri, "" if tag is None else str(tag)), None)
        except AiofluxError as exc:
            told = ("", [], exc)
    found, names, failure = ours.ranks.broadcast(told)
    if failure is not None:
        raise failure
    if names:
        put_placeholders(directory, found, names)
    return found


def _look(ours: AiofluxCheckpointEngine, uri: str, tag: str) -> tuple[str, list[str]]:
    store = ours.store(uri)
    is_given = bool(tag)
    if not is_given:
        try:
            tag = _bridge.run(store.get(LATEST)).decode().strip()
        except NotFoundError:
            return "", []  # DeepSpeed says so, and trains from the beginning
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
            f"{tag} at {uri} is not all there; load another tag. `aioflux ckpt verify {uri}/{tag}` "
            "tells what is wrong"
        )
    return tag, found.names
