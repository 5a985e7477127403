"""load: the value in an object that torch.save wrote."""

from __future__ import annotations

import os
import pickle
import zipfile
from contextlib import suppress
from inspect import signature
from typing import IO, TYPE_CHECKING, Any, Unpack, cast

from aioflux import _bridge
from aioflux._values.uri import split_object_uri
from aioflux.checkpoint._format.commit import parse_step
from aioflux.checkpoint._format.tensor_zip import ZIP_MAGIC, compare_records, is_stored
from aioflux.checkpoint._require_torch import require_torch
from aioflux.checkpoint._store.mapping import PrivateMemory, read_into_memory
from aioflux.checkpoint._store.steps import COMMIT_KEYS
from aioflux.errors import AiofluxError, ChecksumError, NotFoundError
from aioflux.options import TransferOptions
from aioflux.store import open_store

if TYPE_CHECKING:
    import mmap

    from aioflux.options import StoreOptions


def load(
    uri: str,
    *,
    map_location: Any = None,
    weights_only: bool = True,
    mmap: bool = True,
    **options: Unpack[StoreOptions],
) -> Any:
    """Read an object that `torch.save` wrote, verify all of it, and return the saved value.

    Parallel ranges are read straight into the memory of the tensors, so that the load needs memory
    of 1.0 times the size of the object. If the object is overwritten during the read, all of it is
    read again; the result never mixes two versions. The bytes are verified before torch reads them,
    unless `transfer` has `verify=False`:

    * by the crc32c of the object, if the service stores it: on `gs://`; on `s3://` for objects that
      were uploaded with it; on `file://` for files that aioflux wrote on a file system with
      extended attributes, and that no other program changed or copied since;
    * otherwise by the CRC-32 of each record, which `torch.save` writes and torch.load does not
      compare (about 1 s for each GB);
    * otherwise by the transport alone, for example in the format before torch 1.6.

    Args:
        uri: Whole uri of the object, such as `gs://bucket/run-7/model.pt`.
        map_location: Device of the tensors, as in `torch.load`.
        weights_only: Load tensors and plain values, and reject pickles that would run code. Then
            objects that others can write are safe to load. False runs any code in the pickle.
        mmap: Tensors share the memory that the object was read into. The memory is writable, and is
            freed when the last tensor is freed. With False, each tensor is copied to memory of its
            own, so that the load needs memory of 2.0 times the size of the object.
        options: `transfer`, `retry`, `timeouts`, `credentials`, `endpoint_url` and `ssl_context`,
            as for `aioflux.open_store`.

    Raises:
        NotFoundError: The object does not exist.
        ChecksumError: The bytes did not match the crc32c of the object in any of four reads, or a
            record does not match its CRC-32.
        PreconditionFailedError: The object was replaced during every attempt to read it.
        pickle.UnpicklingError: `weights_only` is True, and the pickle contains classes that are not
            allowed. An object that torch.save did not write raises this or another error of
            `torch.load`, with a note that names the uri.
        ValueError: The uri names no object, or a setting has no effect with it.
        ModuleNotFoundError: torch is not installed.
    """
    require_torch("aioflux.checkpoint.load")
    root, key = split_object_uri(uri)
    try:
        meta, memory = _bridge.run(read_into_memory(root, key, options, PrivateMemory))
    except NotFoundError as exc:
        if other := _bridge.run(_describe_prefix(uri, options)):
            raise NotFoundError(f"{uri} is {other}", uri=uri, status=exc.status) from exc
        raise
    verify = (options.get("transfer") or TransferOptions()).verify
    try:
        if verify and meta.crc32c is None:
            compare_records(memory.mapping, meta.uri)
        if not meta.size:
            raise EOFError(f"{meta.uri} is empty")  # noqa: TRY301  adds the note below
        return _load_mapping(memory.mapping, map_location, weights_only, by_reference=mmap)
    except ChecksumError:
        raise
    except Exception as exc:
        exc.add_note(f"while loading {meta.uri}, after all of its bytes were read")
        raise
    finally:
        memory.close()


async def _describe_prefix(uri: str, options: StoreOptions) -> str:
    """Describe the checkpoints below a uri, and how to load them; empty if there are none."""
    async with open_store(uri, **options) as store:
        with suppress(AiofluxError):
            listing = await store.list_all(delimiter="/")
            if any(parse_step(prefix) is not None for prefix in listing.prefixes):
                return f"a run of a Checkpointer, not an object: use Checkpointer({uri!r}).load()"
            if any(meta.key in COMMIT_KEYS for meta in listing):
                return (
                    "a distributed checkpoint, not an object: use "
                    f"aioflux.checkpoint.dcp.load_state({uri!r}), or for a step of a Checkpointer "
                    "its load(step=...)"
                )
    return ""


class _UnsupportedByReferenceError(Exception):
    """Tensors cannot share the memory: `torch.load` must load the value, or raise its own error."""


def _load_mapping(
    file: mmap.mmap, map_location: Any, weights_only: bool, *, by_reference: bool
) -> Any:
    import torch

    if by_reference and file[: len(ZIP_MAGIC)] == ZIP_MAGIC:
        with suppress(_UnsupportedByReferenceError):
            return _load_by_reference(file, map_location, weights_only)
        file.seek(0)
    # The format before torch 1.6 is not a zip archive, so torch always copies it.
    return torch.load(cast("IO[bytes]", file), map_location=map_location, weights_only=weights_only)


def _load_by_reference(file: mmap.mmap, map_location: Any, weights_only: bool) -> Any:
    """Load like `torch.load(path, mmap=True)`, but from memory that has no path.

    `torch.load` maps the file, and passes the mapping to `torch.serialization._load` (since torch
    2.1). This function passes the memory instead.

    Raises:
        _UnsupportedByReferenceError: This version of torch has no such function, the archive is
            TorchScript or compressed, or `torch.load` must raise its own error for the pickle.
    """
    import torch

    serialization: Any = torch.serialization
    try:
        is_plain = is_stored(cast("IO[bytes]", file), len(file))
    except (zipfile.BadZipFile, ValueError):
        is_plain = False
    file.seek(0)
    parameters = signature(serialization._load).parameters  # noqa: SLF001
    if not is_plain or "overall_storage" not in parameters:
        raise _UnsupportedByReferenceError
    forced = os.environ.get("TORCH_FORCE_WEIGHTS_ONLY_LOAD", "0").lower()
    is_restricted = weights_only or forced in {"1", "y", "yes", "true"}
    unpickler = torch._weights_only_unpickler if is_restricted else pickle  # noqa: SLF001
    # torch keeps a reference to the view, and the view keeps the mapping open.
    whole = torch.frombuffer(memoryview(file), dtype=torch.uint8)
    try:
        with serialization._open_zipfile_reader(file) as archive:  # noqa: SLF001
            if archive.has_record("constants.pkl"):  # TorchScript
                raise _UnsupportedByReferenceError
            return serialization._load(  # noqa: SLF001
                archive,
                map_location,
                unpickler,
                overall_storage=whole.untyped_storage(),
                encoding="utf-8",
            )
    except pickle.UnpicklingError as exc:
        if not is_restricted:
            raise
        raise _UnsupportedByReferenceError from exc  # no code in the pickle was run
