"""Standard output, written in a thread: who reads it slowly keeps no signal from its answer.

Not through `sys.stdout`, whose lock a thread that nobody waits for would hold at the exit.
"""

from __future__ import annotations

import codecs
import os
import sys

from aioflux.cli._event_loop import in_daemon

__all__ = ["UNENCODABLE", "tell", "write_stdout"]

UNENCODABLE = "aioflux.unencodable"
"""Error handler of encodings: bytes of names that are no text leave as they are, and characters
that the encoding lacks as escapes."""


def _replace(error: UnicodeError) -> tuple[str | bytes, int]:
    if not isinstance(error, UnicodeEncodeError):
        raise error
    code = ord(error.object[error.start])
    if 0xDC80 <= code <= 0xDCFF:
        return bytes([code - 0xDC00]), error.start + 1
    return ascii(chr(code))[1:-1], error.start + 1


codecs.register_error(UNENCODABLE, _replace)


async def tell(text: str) -> None:
    """Write lines to standard output; no text writes nothing."""
    if text:
        encoding = getattr(sys.stdout, "encoding", None) or "utf-8"
        await in_daemon(write_stdout, f"{text}\n".encode(encoding, UNENCODABLE))


def write_stdout(data: bytes | bytearray | memoryview) -> None:
    """Write all bytes to standard output, waiting for its reader.

    Raises:
        OSError: It cannot be written to.
    """
    view = memoryview(data)
    try:
        while view.nbytes:
            view = view[os.write(1, view) :]
    except BrokenPipeError:
        raise
    except OSError as exc:
        raise OSError(exc.errno, exc.strerror, "standard output") from exc
