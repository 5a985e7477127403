"""load: what torch.save wrote to an object, in one line."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from aioflux import bridge
from aioflux.checkpoint._mapping import fetch
from aioflux.checkpoint._target import split_uri

if TYPE_CHECKING:
    from typing import Unpack

    from aioflux._policy import StoreOptions
    from aioflux.checkpoint._mapping import MemoryFile

__all__ = ["load"]

_ZIP_MAGIC = b"PK\x03\x04"


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
    the object. torch is given none of them before the crc32c of the whole is right.

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
        ChecksumError: Its bytes do not match its checksum, three times.
        pickle.UnpicklingError: `weights_only`, and there is more in it; or it is no such object.
        ValueError: The uri names no object, or a setting has no effect with it.
    """
    import torch

    root, key = split_uri(uri)
    meta, file = bridge.run(fetch(root, key, options))
    try:
        return torch.load(
            file.path,
            map_location=map_location,
            weights_only=weights_only,
            # What torch.save wrote before it wrote zip files cannot be mapped.
            mmap=mmap and _is_zip(file),
        )
    except Exception as exc:
        exc.add_note(f"while {meta.uri} was loaded, whose bytes are as they were stored")
        raise
    finally:
        file.close()


def _is_zip(file: MemoryFile) -> bool:
    with open(file.path, "rb") as opened:
        return opened.read(len(_ZIP_MAGIC)) == _ZIP_MAGIC
