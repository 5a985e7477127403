"""State of this process that outlives a test: objects in memory, and results of probes."""

from __future__ import annotations

from aioflux._services import memory as _memory
from aioflux._services.memory import memory_bucket
from aioflux._services.s3 import writes as _s3_conditions
from aioflux._transfer import conditions as _conditions

__all__ = ["forget_objects", "forget_servers", "memory_bucket"]


def forget_servers() -> None:
    """Forget the results of S3 probes, and which warnings about servers were issued."""
    _conditions.forget_servers()
    _s3_conditions.unquoted_endpoints.clear()
    _s3_conditions._warned.clear()


def forget_objects() -> None:
    """Forget all objects below `memory://`."""
    _memory._buckets.clear()
