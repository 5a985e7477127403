"""S3 servers that compare conditions differently: a server behind a proxy that changes them.

They behave like Ceph radosgw 18.2, the MinIO gateway of JuiceFS 1.4 and s3rver.
"""

from __future__ import annotations

from typing import Literal, TypeAlias

from tests.faults.gateway import Gateway

__all__ = ["ConditionsGateway", "Mode"]

Mode: TypeAlias = Literal["compares_conditions", "ignores_conditions", "quoted_if_match_fails"]
"""`compares_conditions`: as the server itself. `ignores_conditions`: of writes and deletes, as the
gateways. `quoted_if_match_fails`: on PUT, which needs the ETag without quotes; deletes are
unconditional, as on Ceph."""

_WRITES = (b"PUT", b"POST", b"DELETE")


class ConditionsGateway(Gateway):
    """A proxy in front of a server that checks no signatures.

    Attributes:
        requests: Methods of the requests that passed, in order.
    """

    def __init__(self, upstream: str, mode: Mode) -> None:
        super().__init__(upstream)
        self.requests: list[str] = []
        self._mode = mode

    def rewrite(self, method: bytes, lines: list[bytes]) -> list[bytes]:
        self.requests.append(method.decode())
        if self._mode == "ignores_conditions":
            return [line for line in lines if method not in _WRITES or not _is_condition(line)]
        if self._mode == "quoted_if_match_fails" and method == b"DELETE":
            return [line for line in lines if not _is_condition(line)]
        if self._mode == "quoted_if_match_fails" and method == b"PUT":
            return [_fail_if_quoted(line) for line in lines]
        return lines


def _is_condition(line: bytes) -> bool:
    return line.lower().startswith((b"if-match:", b"if-none-match:"))


def _fail_if_quoted(line: bytes) -> bytes:
    """Return a condition that fails instead of one in quotes."""
    is_quoted = line.lower().startswith(b"if-match:") and b'"' in line
    return b'If-Match: "no object has this"' if is_quoted else line
