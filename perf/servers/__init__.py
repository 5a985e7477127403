"""Servers of the benchmarks: nginx and the embedded server."""

from __future__ import annotations

from perf.servers._open import open_server
from perf.servers._spec import BUCKET, Server, ServerSpec, contents

__all__ = ["BUCKET", "Server", "ServerSpec", "contents", "open_server"]
