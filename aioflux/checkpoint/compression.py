"""ZStandard: compressed checkpoints, for the DCP storage of aioflux and for that of stock DCP.

StorageWriter(uri, compression=ZStandard())

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
    """zstd over byte planes: weights in bf16 become a third smaller, those in fp32 a sixth.

    Data compressed with any settings can be read with any others. Frames are independent, so that
    parts of a tensor can be read alone, and their checksums are verified.

    Raises:
        ModuleNotFoundError: zstandard is missing: `pip install 'aioflux[compression]'`.
        ValueError: A setting is out of its range.
    """

    level: int = 1
    """Level of zstd, from -100 to 22, for data with repetitions. Floats have none: their exponents
    are only entropy-coded, at every level, which is smaller than any low level."""
    threads: int = 2
    """Threads of each save, load or stream: about 600 MB/s each when writing."""
    byte_planes: bool = True
    """Compress byte k of all elements together: without it bf16 becomes a fifth smaller only, and
    is slower to write."""

    def __post_init__(self) -> None:
        """Check the settings."""
        if not _MIN_LEVEL <= self.level <= _MAX_LEVEL:
            raise ValueError(f"level must be {_MIN_LEVEL} to {_MAX_LEVEL}, not {self.level}")
        if self.threads < 1:
            raise ValueError(f"threads must be 1 or more, not {self.threads}")
        require_zstandard()

    @staticmethod
    def registry_name() -> str:
        """Return its name in the metadata of checkpoints."""
        return "aioflux.zstd"

    @staticmethod
    def from_descriptor(version: str) -> ZStandard:
        """Return one that reads data of a descriptor of this version.

        Raises:
            ValueError: A newer aioflux wrote it.
        """
        if version.partition(".")[0] != _VERSION:
            raise ValueError(
                f"aioflux.zstd/{version} is of another version, and this aioflux reads "
                f"{_VERSION}; install a newer one"
            )
        return ZStandard()

    def get_descriptor(self) -> str:
        """Return the descriptor of each item in the metadata."""
        return f"{self.registry_name()}/{_VERSION}"

    def open_codec(self) -> Codec:
        """Return a codec with these settings; close it when the save or load is done."""
        return Codec(level=self.level, threads=self.threads, byte_planes=self.byte_planes)

    def transform_to(self, output: IO[bytes]) -> IO[bytes]:
        """Return a file that writes compressed to `output`, and closes it when it is closed."""
        return cast("IO[bytes]", StreamWriter(output, self.open_codec))

    def transform_from(self, input: IO[bytes]) -> IO[bytes]:  # noqa: A002  torch's name
        """Return a file that reads what `transform_to` wrote to `input`."""
        return cast("IO[bytes]", StreamReader(input, self.open_codec))
