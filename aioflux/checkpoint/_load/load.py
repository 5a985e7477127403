"""load: what torch.save wrote to an object, in one line."""

from __future__ import annotations

import os
import pickle
import zipfile
from contextlib import suppress
from inspect import signature
from typing import IO, TYPE_CHECKING, Any, cast

from aioflux import _bridge
from aioflux.checkpoint._format.zip_records import ZIP_MAGIC, compare_records
from aioflux.checkpoint._require_torch import require_torch
from aioflux.checkpoint._store.mapping import PrivateMemory, fetch
from aioflux.checkpoint._store.target import split_uri
from aioflux.errors import ChecksumError
from aioflux.options import TransferOptions

if TYPE_CHECKING:
    import mmap
    from typing import Unpack

    from aioflux.options import StoreOptions

__all__ = ["load"]


def load(
    uri: str,
    *,
    map_location: Any = None,
    weights_only: bool = True,
    mmap: bool = True,
    **options: Unpack[StoreOptions],
) -> Any:
    """Read an object that `torch.save` wrote, verify all of it, and return what was saved.

    The bytes come in parallel ranges, straight into the memory that the tensors refer to: 1.0 times
    the object. An object that is overwritten meanwhile is read anew, never a mix of both. torch is
    given none of the bytes before they are verified:

    * by the crc32c of the object, if the service knows one: on `gs://`, on `s3://` for objects that
      were uploaded with it, and on `file://` for files that aioflux wrote, on a file system that
      keeps extended attributes, and that no other program changed or copied since;
    * otherwise by the CRC-32 that the archive has of each record, which torch.load itself does not
      compare: `torch.save` writes it, and `aioflux.checkpoint.save` to `file://`. This takes about
      1 s for each GB;
    * otherwise, and in the format before torch 1.6, by nothing but the transport.

    Args:
        uri: Whole uri of the object, such as `gs://bucket/run-7/model.pt`.
        map_location: Where tensors go, as in `torch.load`.
        weights_only: Load tensors and plain values and refuse what would run code, which is safe
            with objects that others can write. False loads anything that pickles.
        mmap: Tensors refer to the memory that the bytes were read into. It is writable; what is
            written to takes its pages once more, and none is given back before all tensors are
            gone. False copies each tensor to memory of its own: 2.0 times the object meanwhile.
        options: `transfer`, `retry`, `timeouts`, `credentials`, `endpoint_url` and `ssl_context`,
            as `aioflux.open_store`.

    Raises:
        NotFoundError: There is no such object.
        ChecksumError: Its bytes do not match its checksum, three times, or those of a record do not
            match its CRC-32.
        PreconditionFailedError: It was replaced while it was read, three times in a row.
        pickle.UnpicklingError: `weights_only`, and there is more in it. What torch.save did not
            write raises this or whatever else `torch.load` raises, with a note that names the uri.
        ValueError: The uri names no object, or a setting has no effect with it.
        ModuleNotFoundError: torch is not installed.
    """
    require_torch("aioflux.checkpoint.load")
    import torch

    root, key = split_uri(uri)
    meta, memory = _bridge.run(fetch(root, key, options, PrivateMemory))
    file = memory.mapping
    verify = (options.get("transfer") or TransferOptions()).verify
    try:
        if not meta.size:
            raise EOFError(f"{meta.uri} is empty")  # noqa: TRY301  with the note of all errors
        if verify and meta.crc32c is None:
            compare_records(file, meta.uri)
        if mmap and file[: len(ZIP_MAGIC)] == ZIP_MAGIC:
            with suppress(_NotByReferenceError):
                return _by_reference(file, map_location, weights_only)
            file.seek(0)
        # What torch.save wrote before it wrote zip files is copied, too.
        return torch.load(
            cast("IO[bytes]", file), map_location=map_location, weights_only=weights_only
        )
    except ChecksumError:
        raise
    except Exception as exc:
        exc.add_note(f"while {meta.uri} was loaded, whose bytes are as they were stored")
        raise
    finally:
        del file
        memory.close()


class _NotByReferenceError(Exception):
    """It is for `torch.load` to say what is to become of this."""


def _by_reference(file: mmap.mmap, map_location: Any, weights_only: bool) -> Any:
    """Return what `torch.load(path, mmap=True)` does, for memory that has no path.

    torch maps a file there and then reads from the mapping, in a function that it has had since
    2.1; the mapping is all that is another one here.

    Raises:
        _NotByReferenceError: Not this torch, an archive of another kind or with packed entries,
            or an error that `torch.load` words.
    """
    import torch

    serialization: Any = torch.serialization
    if not _is_stored(file):
        raise _NotByReferenceError
    if "overall_storage" not in signature(serialization._load).parameters:  # noqa: SLF001
        raise _NotByReferenceError
    forced = os.environ.get("TORCH_FORCE_WEIGHTS_ONLY_LOAD", "0").lower()
    is_restricted = weights_only or forced in {"1", "y", "yes", "true"}
    unpickler = torch._weights_only_unpickler if is_restricted else pickle  # noqa: SLF001
    # torch keeps the object that it is given, and not what that exports: of a view, the mapping.
    whole = torch.frombuffer(memoryview(file), dtype=torch.uint8)
    try:
        with serialization._open_zipfile_reader(file) as archive:  # noqa: SLF001
            if archive.has_record("constants.pkl"):  # TorchScript
                raise _NotByReferenceError
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
        raise _NotByReferenceError from exc  # nothing of it was run


def _is_stored(file: mmap.mmap) -> bool:
    """Tell whether all entries of an archive are stored as they are, as torch.save does.

    Those that some tool has packed again are not the tensors' bytes.
    """
    try:
        with zipfile.ZipFile(cast("IO[bytes]", file)) as archive:
            return all(each.compress_type == zipfile.ZIP_STORED for each in archive.infolist())
    except (zipfile.BadZipFile, ValueError):
        return False
    finally:
        file.seek(0)
