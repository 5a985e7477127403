"""Samples of a tar archive, decoded from a stream.

The module does not use `tarfile.open`, which takes a damaged or truncated header for the end of the
archive: all further samples would be missing without an error.
"""

from __future__ import annotations

import re
import tarfile
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, BinaryIO, ClassVar

from aioflux.data._records.decompress import GZIP_ERRORS, decompress, gzip_error, record_error

if TYPE_CHECKING:
    from aioflux._values.meta import ObjectMeta
    from aioflux.data._records.decompress import StreamRecords
    from aioflux.errors import RecordError

_BLOCK = 512
_ZERO_BLOCK = bytes(_BLOCK)
_READ_BYTES = 16 * 1024 * 1024
_LONG_NAME, _LONG_LINK, _PAX, _PAX_GLOBAL = b"L", b"K", b"x", b"g"
_EXTENDED_HEADERS = {_LONG_NAME, _LONG_LINK, _PAX, _PAX_GLOBAL}
_FILES = {tarfile.REGTYPE, tarfile.AREGTYPE, tarfile.CONTTYPE}
_MAX_EXTENDED_BYTES = 1024 * 1024
_NOT_DATA = re.compile(r"__[^/]*__(/|$)")
"""Names that webdataset reserves for files that belong to no sample."""


@dataclass(frozen=True, slots=True)
class _Tar:
    takes_stream: ClassVar[bool] = True

    def __call__(self, stream: BinaryIO, meta: ObjectMeta, /) -> Iterator[dict[str, Any]]:
        with decompress(stream) as plain:
            archive = _Archive(plain, meta)
            sample: dict[str, Any] = {}
            for name, data in archive.files():
                if (parts := sample_name(name)) is None:
                    continue
                key, extension = parts
                if sample and sample["__key__"] != key:
                    yield sample
                    archive.num_samples += 1
                    sample = {}
                if extension in sample:
                    raise archive.error(f"it has two files for {extension!r}, the second {name!r}")
                sample.setdefault("__key__", key)
                sample[extension] = data
            if sample:
                yield sample


def tar() -> StreamRecords[dict[str, Any]]:
    """Return a decoder of the samples of a tar archive.

    Consecutive files whose names differ only in the extension become one sample: a dict of
    extension -> bytes, with the common name at `__key__`, as in webdataset:
    `{"__key__": "train/0001", "jpg": b"...", "cls": b"7"}`. The extension is the text after the
    first dot of the file name, in lower case; for a file without extension it is `""`. Directories,
    hidden files and files with names like `__this__` are ignored.

    Archives may be compressed by gzip, and an object may contain several archives in sequence. A
    damaged header, two files of a sample with the same extension, a link, or an archive without an
    end marker raises RecordError.
    """
    return _Tar()


def split_name(name: str) -> tuple[str, str]:
    """Return the name without its extension, and the extension in lower case."""
    directory, slash, base = name.rpartition("/")
    stem, _, extension = base.partition(".")
    return f"{directory}{slash}{stem}", extension.lower()


def sample_name(name: str) -> tuple[str, str] | None:
    """Return the key and the extension of a file; None if the file belongs to no sample."""
    key, extension = split_name(name)
    is_ignored = not key or key.endswith("/") or _NOT_DATA.match(name)
    return None if is_ignored else (key, extension)


class _Archive:
    """A tar archive (POSIX ustar and pax, GNU), read from its beginning to its end."""

    def __init__(self, stream: BinaryIO, meta: ObjectMeta) -> None:
        self._stream = stream
        self._meta = meta
        self.num_samples = 0

    def error(self, reason: str) -> RecordError:
        return record_error(self._meta, self.num_samples, reason)

    def files(self) -> Iterator[tuple[str, bytes]]:
        """Yield name and bytes of each file."""
        extended: dict[str, str] = {}
        has_ended = False
        while header := self._read(_BLOCK, "a header", may_be_empty=True):
            if header == _ZERO_BLOCK:
                if extended:
                    raise self.error("the archive ends after an extended header")
                has_ended = True
                continue
            has_ended = False
            info = self._parse(header)
            if info.type in _EXTENDED_HEADERS:
                extended |= self._extended_fields(info)
                continue
            name, size = extended.get("path", info.name), self._size(info, extended)
            extended = {}
            data = self._read_blocks(size, repr(name))
            if info.type in _FILES:
                yield name, data
            elif info.type != tarfile.DIRTYPE:
                raise self.error(f"{name!r} is neither a file nor a directory; pack its target")
        if not has_ended:
            raise self.error("the archive is cut off: it does not end with blocks of zeros")

    def _parse(self, header: bytes) -> tarfile.TarInfo:
        try:
            return tarfile.TarInfo.frombuf(header, "utf-8", "surrogateescape")
        except tarfile.HeaderError as exc:
            raise self.error(f"a header of the archive is damaged ({exc})") from exc

    def _size(self, info: tarfile.TarInfo, extended: dict[str, str]) -> int:
        if info.type == tarfile.GNUTYPE_SPARSE or any(key.startswith("GNU.sp") for key in extended):
            raise self.error(f"{info.name!r} is packed as a sparse file; pack it without --sparse")
        try:
            size = int(extended.get("size", info.size))
        except ValueError as exc:
            raise self.error(f"the size of {info.name!r} is not a number") from exc
        if size < 0:
            raise self.error(f"the size of {info.name!r} is negative")
        # Headers of other types may have a size, but no data follows them.
        return size if info.type in _FILES else 0

    def _extended_fields(self, info: tarfile.TarInfo) -> dict[str, str]:
        """Return the fields of an extended header, which apply to the next file."""
        if not 0 <= info.size <= _MAX_EXTENDED_BYTES:
            raise self.error(
                f"an extended header of the archive has {info.size} bytes, and 0 to "
                f"{_MAX_EXTENDED_BYTES} are allowed"
            )
        data = self._read_blocks(info.size, "an extended header")
        if info.type == _LONG_NAME:
            return {"path": data.rstrip(b"\0").decode("utf-8", "surrogateescape")}
        if info.type == _PAX:
            try:
                return parse_pax(data)
            except ValueError as exc:
                raise self.error(f"a pax header of the archive is damaged ({exc})") from exc
        return {}

    def _read_blocks(self, size: int, part: str) -> bytes:
        """Read data, and the padding of its last block."""
        data = self._read(size, part)
        self._read(-size % _BLOCK, part)
        return data

    def _read(self, size: int, part: str, *, may_be_empty: bool = False) -> bytes:
        try:
            data = self._stream.read(min(size, _READ_BYTES))
            if len(data) < size:
                # Read in pieces: a wrong size must not allocate more memory than there is data.
                pieces, remaining = [data], size - len(data)
                while remaining and (piece := self._stream.read(min(remaining, _READ_BYTES))):
                    pieces.append(piece)
                    remaining -= len(piece)
                data = b"".join(pieces)
        except GZIP_ERRORS as exc:
            raise gzip_error(self._meta, self.num_samples, exc) from exc
        if len(data) < size and (data or not may_be_empty):
            raise self.error(f"the archive is cut off in {part}, {size - len(data)} bytes early")
        return data


def parse_pax(data: bytes) -> dict[str, str]:
    """Return the fields of a pax header, which are lines of `length key=value`.

    Raises:
        ValueError: The header is malformed.
    """
    fields, offset = {}, 0
    while offset < len(data) and data[offset]:
        space = data.index(b" ", offset)
        end = offset + int(data[offset:space])
        if not space < end <= len(data) or data[end - 1 : end] != b"\n":
            raise ValueError(f"a field at byte {offset} is truncated")
        key, equals, value = data[space + 1 : end - 1].partition(b"=")
        if not equals:
            raise ValueError(f"a field at byte {offset} has no value")
        fields[key.decode("utf-8", "surrogateescape")] = value.decode("utf-8", "surrogateescape")
        offset = end
    return fields
