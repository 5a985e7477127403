"""Support for uris in the save and load methods of a DeepSpeed engine."""

from __future__ import annotations

import functools
import os
import sys
from typing import TYPE_CHECKING, Any, Unpack

from aioflux import _bridge
from aioflux._values.uri import parse_uri
from aioflux.checkpoint._tag_checkpoints import is_valid, read_tag
from aioflux.errors import CheckpointCorruptError, CheckpointError, NotFoundError
from aioflux.integrations.deepspeed._engine import AiofluxCheckpointEngine
from aioflux.integrations.deepspeed._placeholders import LATEST, is_uri, put_placeholders

if TYPE_CHECKING:
    from aioflux.options import StoreOptions


def attach(
    engine: Any,
    *,
    decoupled: bool = False,
    commit_seconds: float = 600.0,
    **options: Unpack[StoreOptions],
) -> AiofluxCheckpointEngine:
    """Make a DeepSpeed engine accept uris for checkpoints; call it on every rank.

    Call it after `deepspeed.initialize` and before the first save. `save_checkpoint`,
    `load_checkpoint` and `save_16bit_model` then accept uris as well as local directories.

    Args:
        engine: First return value of `deepspeed.initialize`.
        decoupled: Copy the parts of a checkpoint, and upload the copy while training continues. The
            checkpoint is committed at the end of the training step in which the last rank finishes
            its uploads; `destroy` waits for the commit.
        commit_seconds: Maximum time that a rank waits for the other ranks; 600 by default.
        options: Options of `aioflux.open_store`.

    Returns:
        The new `engine.checkpoint_engine`.

    Raises:
        CheckpointError: The optimizer is offloaded to NVMe: DeepSpeed copies its files without the
            checkpoint engine.
    """
    previous = engine.checkpoint_engine
    if isinstance(previous, AiofluxCheckpointEngine):
        raise CheckpointError("attach was already called for this engine")
    if getattr(engine, "zero_nvme_offload_optimizer", bool)():
        raise CheckpointError(
            "an optimizer that is offloaded to NVMe cannot be saved to a uri, because DeepSpeed "
            "copies its files from directory to directory; save to a local directory"
        )
    previous.cleanup()
    checkpoint_engine = AiofluxCheckpointEngine(
        None, decoupled=decoupled, commit_seconds=commit_seconds, **options
    )
    base = sys.modules.get("deepspeed.runtime.checkpoint_engine.checkpoint_engine")
    if base is not None:
        base.CheckpointEngine.register(AiofluxCheckpointEngine)
    engine.checkpoint_engine = checkpoint_engine
    for name in ("save_checkpoint", "save_16bit_model"):
        if (method := getattr(engine, name, None)) is not None:
            setattr(engine, name, _wrap_save(checkpoint_engine, method))
    engine.load_checkpoint = _wrap_load(checkpoint_engine, engine, engine.load_checkpoint)
    return checkpoint_engine


def _wrap_save(checkpoint_engine: AiofluxCheckpointEngine, method: Any) -> Any:
    @functools.wraps(method)
    def save(save_dir: Any, *arguments: Any, **options: Any) -> Any:
        if is_uri(save_dir):
            save_dir = checkpoint_engine.placeholders.directory_of(save_dir)
        previous = checkpoint_engine.pending
        try:
            return method(save_dir, *arguments, **options)
        except BaseException as exc:
            # If this save has started a checkpoint, some of its parts may be missing.
            if checkpoint_engine.pending is not previous:
                checkpoint_engine.fail(exc)
            raise

    return save


def _wrap_load(checkpoint_engine: AiofluxCheckpointEngine, engine: Any, method: Any) -> Any:
    @functools.wraps(method)
    def load(load_dir: Any, tag: Any = None, *arguments: Any, **options: Any) -> Any:
        uri = str(parse_uri(load_dir)).rstrip("/") if is_uri(load_dir) else ""
        skips_optimizer = not options.get("load_optimizer_states", (True, *arguments[1:2])[-1])
        if uri and skips_optimizer and getattr(engine, "zero_optimization_stage", int)() == 3:
            raise CheckpointError(
                f"{uri} cannot be loaded with load_optimizer_states=False under ZeRO stage 3, "
                "because DeepSpeed then opens the parts as local files; copy the checkpoint to a "
                "directory first"
            )
        if uri and getattr(engine, "load_universal_checkpoint", bool)():
            raise CheckpointError(
                f"{uri} cannot be loaded as a universal checkpoint, because DeepSpeed opens its "
                "parts as local files; copy the checkpoint to a directory first"
            )
        placeholders = checkpoint_engine.placeholders
        directory = placeholders.directory_of(uri) if uri else os.fspath(load_dir)
        source = uri or placeholders.uri_of(directory)
        found_tag = _prepare_load(checkpoint_engine, source, directory, tag)
        path, client_state = method(directory, found_tag or tag, *arguments, **options)
        if uri and path is not None:
            path = f"{uri}/{os.path.relpath(path, directory)}"
        return path, client_state

    return load


def _prepare_load(
    checkpoint_engine: AiofluxCheckpointEngine, uri: str, directory: str, tag: Any
) -> str:
    """Create placeholder files for the parts of a tag, by default of the latest tag.

    The coordinator looks up the tag and broadcasts it, so that all ranks load the same tag.

    Returns:
        The tag, or "" if `tag` is None and no latest tag exists.

    Raises:
        CheckpointError: The tag does not exist or is not complete.
    """
    given_tag = "" if tag is None else str(tag)
    found_tag, names = checkpoint_engine.ranks.on_coordinator(
        lambda: _find_tag(checkpoint_engine, uri, given_tag)
    )
    if names:
        put_placeholders(directory, found_tag, names)
    return found_tag


def _find_tag(
    checkpoint_engine: AiofluxCheckpointEngine, uri: str, tag: str
) -> tuple[str, list[str]]:
    """Return a tag, or the latest tag if `tag` is empty, and the names of its parts."""
    store = checkpoint_engine.store(uri)
    is_given = bool(tag)
    if not is_given:
        try:
            tag = _bridge.run(store.get(LATEST)).decode().strip()
        except NotFoundError:
            return "", []  # DeepSpeed logs a warning and trains from the beginning
    checkpoint = _bridge.run(read_tag(store, tag))
    if checkpoint is None:
        if not uri.startswith("file:"):
            raise CheckpointError(
                f"there is no checkpoint {tag!r} at {uri}"
                + ("" if is_given else f", although {LATEST} names it; pass another tag")
            )
        return tag, []  # DeepSpeed's own checkpoint engine wrote this directory
    if not _bridge.run(is_valid(store, checkpoint)):
        raise CheckpointCorruptError(
            f"{tag} at {uri} is not complete; load another tag. `aioflux ckpt verify {uri}/{tag}` "
            "shows the missing objects"
        )
    return tag, checkpoint.names
