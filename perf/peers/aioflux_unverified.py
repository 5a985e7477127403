"""aioflux with `TransferOptions(verify=False)`, which compares no checksums."""

from __future__ import annotations

from perf.peers.aioflux import get_many, get_one, put_one

__all__ = ["get_many", "get_one", "put_one"]
