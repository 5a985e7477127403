"""What a scenario asks of its server, and what it gets."""

from __future__ import annotations

import base64
import random
from dataclasses import dataclass, field
from typing import Literal, get_args

__all__ = [
    "BUCKET",
    "BUCKET_ROOM_BYTES",
    "Kind",
    "Server",
    "ServerSpec",
    "contents",
    "lines_of",
]

Kind = Literal["nginx", "embedded", "seaweedfs", "azurite"]
BUCKET = "perf"
"""The one bucket of every server."""
BUCKET_ROOM_BYTES = 64 << 20
"""Room that each server has for what is written, where the spec asks for no more."""
_BLOCK_BYTES = 1 << 20
_LINE_BYTES = 1560
"""Of a line of text, its end among them: 100,000 of them are a shard of 156 MB."""


@dataclass(frozen=True, kw_only=True)
class ServerSpec:
    """A server and the way to it."""

    kind: Kind = "nginx"
    """"nginx" measures the client and "embedded" speaks the whole API, both of `gs`; "seaweedfs" is
    the server of `s3`, "azurite" that of `az`."""
    tls: bool = False
    """HTTPS, TLS 1.3, with a certificate of its own."""
    latency_seconds: float = 0.0
    """Time to the first byte of each answer."""
    connection_bytes_per_second: int | None = None
    """Bandwidth of each connection, towards the client."""
    received_bytes_per_second: int | None = None
    """Bandwidth of each connection, from the client, for bodies of uploads; nginx only."""
    kept_bytes: int = 8 << 20
    """Bodies of uploads that are larger are hashed and dropped, in bytes; nginx only."""
    fault_rate: float = 0.0
    """Share of the reads that are answered with 503, and again as many that meet a reset;
    embedded server only."""
    objects: tuple[tuple[int, int], ...] = ()
    """Objects to have ready: pairs of size in bytes and count, under the keys `size/index`."""
    sets: tuple[tuple[int, int], ...] = ()
    """Sets of many objects, told by arithmetic where nginx serves: pairs of size in bytes and
    count, with the keys of `perf.work.set_key`. Each set has a prefix of its own."""
    lines: tuple[tuple[int, int], ...] = ()
    """Sets of shards of text: pairs of size in bytes and count, with the keys of
    `perf.work.lines_key`; not on nginx."""
    states: tuple[tuple[str, int], ...] = ()
    """States that torch.save wrote, to have ready: pairs of dtype and bytes of the tensors, under
    `perf.work.state_key`."""
    written_bytes: int = BUCKET_ROOM_BYTES
    """Room for what is written at once, in bytes."""

    def __post_init__(self) -> None:
        """Refuse what no server can do."""
        if self.kind not in get_args(Kind):
            raise ValueError(f"kind must be one of {', '.join(get_args(Kind))}, not {self.kind!r}")
        if not 0 <= self.fault_rate <= 0.5:
            raise ValueError(f"fault_rate must be from 0 to 0.5, not {self.fault_rate}")
        if self.latency_seconds < 0:
            raise ValueError(f"latency_seconds must not be negative, is {self.latency_seconds}")
        for name in ("connection_bytes_per_second", "received_bytes_per_second"):
            paced = getattr(self, name)
            if paced is not None and paced <= 0:
                raise ValueError(f"{name} must be above 0, is {paced}")

    @property
    def has_faults(self) -> bool:
        """Whether only the embedded server can do it."""
        return self.fault_rate > 0

    @property
    def files(self) -> tuple[tuple[int, int], ...]:
        """Objects that nginx stores: those to have ready, and one for all sets of a size."""
        counts = {size: 1 for size, _ in self.sets}
        for size, count in self.objects:
            counts[size] = max(count, counts.get(size, 0))
        return tuple(counts.items())

    @property
    def num_bytes(self) -> int:
        """Room that the objects and what is written take, in bytes."""
        stored = sum(size * count for size, count in (*self.files, *self.lines))
        if self.kind not in {"nginx", "embedded"}:
            stored += sum(size * count for size, count in self.sets)
        return stored + sum(size for _, size in self.states) + self.written_bytes


@dataclass(frozen=True, kw_only=True)
class Server:
    """A server that runs."""

    url: str
    """Its root."""
    ca_file: str = ""
    """PEM of the authority that signed its certificate; empty without TLS."""
    pids: tuple[int, ...] = ()
    """Processes whose CPU time is the server's."""
    counter: str = ""
    """Url of a page that tells how many requests came; empty where there is none."""
    directory: str = ""
    """Where nginx keeps objects; empty for the embedded server."""
    kind: Kind
    """The one that runs, which may be another than was asked for."""
    notes: tuple[str, ...] = field(default=())
    """What the reader of the figures must know, in sentences."""


def contents(size_bytes: int) -> bytes:
    """Return the bytes of every object of this size: random ones, the same each time."""
    block = random.Random(size_bytes).randbytes(min(size_bytes, _BLOCK_BYTES))  # noqa: S311
    if size_bytes <= _BLOCK_BYTES:
        return block
    return (block * (size_bytes // _BLOCK_BYTES + 1))[:size_bytes]


def lines_of(size_bytes: int) -> bytes:
    """Return so many bytes of text, in lines that are alike but for what they say."""
    text = base64.b64encode(random.Random(size_bytes).randbytes(_BLOCK_BYTES))  # noqa: S311
    width = _LINE_BYTES - 1
    starts = range(0, len(text) - width, width)
    block = b"".join(text[start : start + width] + b"\n" for start in starts)
    return (block * (size_bytes // len(block) + 1))[: size_bytes - 1] + b"\n"
