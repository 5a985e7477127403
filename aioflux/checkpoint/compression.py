"""ZStandard: compressed checkpoints, for aioflux and for the files of stock DCP.

With aioflux; a load needs no setting:

    StorageWriter(uri, compression=ZStandard())

With stock DCP:

    FileSystemWriter(path, _extensions=[ZStandard()])
    registry = ExtensionRegistry()
    registry.register(ZStandard)
    FileSystemReader(path, _extension_registry=registry)
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import IO, Final, cast

from torch.distributed.checkpoint._extension import StreamTransformExtension

from aioflux.checkpoint._format.codec import Codec
from aioflux.checkpoint._format.methods import require_zstandard
from aioflux.checkpoint._format.streams import StreamReader, StreamWriter

__all__ = ["ZStandard"]

_VERSION: Final = "1"
_MIN_LEVEL: Final = -100
_MAX_LEVEL: Final = 22


@dataclass(frozen=True, kw_only=True)
class ZStandard(StreamTransformExtension):
    """zstd over byte planes: bf16 weights become a third smaller, fp32 weights a sixth.

    A load needs no settings: it reads data compressed with any settings. A tensor is compressed in
    independent frames with checksums, so that a load can read and verify a part of the tensor.

    Raises:
        ModuleNotFoundError: zstandard is not installed:
            `pip install 'aioflux-storage[compression]'`.
        ValueError: A setting is out of its range.
    """

    level: int = 1
    """Level of zstd, from -100 to 22, for data with repeated bytes. It seldom has an effect on
    floats: their exponents are only entropy-coded, if that compresses better than this level."""
    threads: int = 2
    """Number of threads of each save, load or stream. A thread compresses about 600 MB/s."""
    byte_planes: bool = True
    """Store byte k of all elements side by side before compressing. Without byte planes, bf16
    weights become only a fifth smaller, and compress more slowly."""

    def __post_init__(self) -> None:
        """Check the settings."""
        if not _MIN_LEVEL <= self.level <= _MAX_LEVEL:
            raise ValueError(f"level must be {_MIN_LEVEL} to {_MAX_LEVEL}, not {self.level}")
        if self.threads < 1:
            raise ValueError(f"threads must be 1 or more, not {self.threads}")
        require_zstandard()

    @staticmethod
    def registry_name() -> str:
        """Return the name of this compression in the metadata of checkpoints."""
        return "aioflux.zstd"

    @staticmethod
    def from_descriptor(version: str) -> ZStandard:
        """Return an instance that reads data of this version.

        Raises:
            ValueError: A newer aioflux compressed the data.
        """
        if version.partition(".")[0] != _VERSION:
            raise ValueError(
                f"cannot read data compressed by aioflux.zstd version {version}: this aioflux "
                f"reads version {_VERSION}; install a newer one"
            )
        return ZStandard()

    def get_descriptor(self) -> str:
        """Return the name and version that the metadata lists for each compressed item."""
        return f"{self.registry_name()}/{_VERSION}"

    def open_codec(self) -> Codec:
        """Return a codec with these settings; the caller must close the codec."""
        return Codec(level=self.level, threads=self.threads, byte_planes=self.byte_planes)

    def transform_to(self, output: IO[bytes]) -> IO[bytes]:
        """Return a file that compresses to `output`; closing it closes `output`, too."""
        return cast("IO[bytes]", StreamWriter(output, self.open_codec))

    def transform_from(self, input: IO[bytes]) -> IO[bytes]:  # noqa: A002  torch's name
        """Return a file that decompresses the output of `transform_to` from `input`."""
        return cast("IO[bytes]", StreamReader(input, self.open_codec))
