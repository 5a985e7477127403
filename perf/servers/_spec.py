"""Specification of a server, and the running server."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import Literal, get_args

__all__ = [
    "BUCKET",
    "DEFAULT_WRITTEN_BYTES",
    "Kind",
    "Server",
    "ServerSpec",
    "contents",
]

Kind = Literal["nginx", "embedded"]
BUCKET = "perf"
"""The bucket of every server."""
DEFAULT_WRITTEN_BYTES = 64 << 20
"""Default of `ServerSpec.written_bytes`."""
_BLOCK_BYTES = 1 << 20


@dataclass(frozen=True, kw_only=True)
class ServerSpec:
    """Kind, network and objects of a server."""

    kind: Kind = "nginx"
    """"nginx", which is faster than the clients, or "embedded", which has the whole API."""
    tls: bool = False
    """Whether the server uses TLS 1.3, with its own certificate."""
    latency_seconds: float = 0.0
    """Time to the first byte of each response."""
    connection_bytes_per_second: int | None = None
    """Bandwidth of each connection, to the client; None has no limit."""
    kept_bytes: int = 8 << 20
    """Uploaded bodies of more bytes are hashed and discarded; nginx only."""
    fault_rate: float = 0.0
    """Share of the reads that fail with 503, and share that fail with a reset; embedded server
    only."""
    objects: tuple[tuple[int, int], ...] = ()
    """Objects to store: pairs of size in bytes and count, with the keys `size/index`."""
    sets: tuple[tuple[int, int], ...] = ()
    """Sets of many objects: pairs of size in bytes and count, with the keys of `perf.work.set_key`.
    Each set has its own prefix. nginx computes listings of sets, and stores only one object."""
    states: tuple[tuple[str, int], ...] = ()
    """States to store with torch.save: pairs of dtype and size of the tensors in bytes, with the
    keys of `perf.work.state_key`."""
    written_bytes: int = DEFAULT_WRITTEN_BYTES
    """Disk or memory space for objects that contenders write, in bytes."""

    def __post_init__(self) -> None:
        """Check that values are in range."""
        if self.kind not in get_args(Kind):
            raise ValueError(f"kind must be one of {', '.join(get_args(Kind))}, not {self.kind!r}")
        if not 0 <= self.fault_rate <= 0.5:
            raise ValueError(f"fault_rate must be from 0 to 0.5, not {self.fault_rate}")
        if self.latency_seconds < 0:
            raise ValueError(f"latency_seconds must not be negative, is {self.latency_seconds}")
        rate = self.connection_bytes_per_second
        if rate is not None and rate <= 0:
            raise ValueError(f"connection_bytes_per_second must be above 0, is {rate}")

    @property
    def has_faults(self) -> bool:
        """Whether faults are injected, which only the embedded server supports."""
        return self.fault_rate > 0

    @property
    def files(self) -> tuple[tuple[int, int], ...]:
        """Objects that nginx stores: `objects`, and one object for all sets of a size."""
        counts = {size: 1 for size, _ in self.sets}
        for size, count in self.objects:
            counts[size] = max(count, counts.get(size, 0))
        return tuple(counts.items())

    @property
    def num_bytes(self) -> int:
        """Space for stored and written objects, in bytes."""
        stored = sum(size * count for size, count in self.files)
        return stored + sum(size for _, size in self.states) + self.written_bytes


@dataclass(frozen=True, kw_only=True)
class Server:
    """A running server."""

    url: str
    """Root url."""
    ca_file: str = ""
    """PEM file of the authority that signed the certificate; empty without TLS."""
    pids: tuple[int, ...] = ()
    """Processes of the server; their CPU time is measured."""
    counter: str = ""
    """Url of a page with the number of requests; empty if the server has none."""
    kind: Kind
    """Kind of the server, which can differ from the spec."""
    notes: tuple[str, ...] = field(default=())
    """Notes that the figures need, for the output."""


def contents(size_bytes: int) -> bytes:
    """Return the bytes of all objects of this size: random, but always the same."""
    block = random.Random(size_bytes).randbytes(min(size_bytes, _BLOCK_BYTES))  # noqa: S311
    if size_bytes <= _BLOCK_BYTES:
        return block
    return (block * (size_bytes // _BLOCK_BYTES + 1))[:size_bytes]
