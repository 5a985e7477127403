"""Secrets that requests of this process sent, removed from the texts of servers.

A server, or a proxy in between, may repeat a request in its response. Error messages quote
responses, so each quoted text passes through `redact`.
"""

from __future__ import annotations

import re
from functools import lru_cache
from typing import Final

_MAX_SECRETS: Final = 32
_MIN_CHARACTERS: Final = 6
"""Shorter texts are not removed: they are words of messages rather than secrets."""
_NUM_CHARACTERS: Final = 8
"""Number of consecutive characters of a secret that are recognized: a text may be truncated, or
have other characters in between."""
_SHAPES: Final = re.compile(
    r"[0-9a-f]{40,}"  # signature of AWS
    r"|[a-z0-9+/]{43}="  # signature of an account key of Azure
    r"|\beyJ[\w-]{8,}\.[\w.-]*"  # JSON Web Token
    r"|(?:(?<=bearer )|(?<=sharedkey )|(?<=signature=)|(?<=sig=)|(?<=assertion=)"
    r"|(?<=refresh_token=)|(?<=client_secret=))[^\s\"'<>&]+",
    re.IGNORECASE,
)
"""Secrets that differ in each request, or that other libraries send."""

_secrets: dict[str, None] = {}  # the latest ones, oldest first


def add_secret(secret: str | None) -> None:
    """Remember a secret that requests send from now on, in place of the oldest one."""
    if secret and len(secret) >= _MIN_CHARACTERS and secret not in _secrets:
        _secrets[secret] = None
        if len(_secrets) > _MAX_SECRETS:
            del _secrets[next(iter(_secrets))]


def redact(text: str) -> str:
    """Return a text of a server with `***` in place of each secret, or part of a secret."""
    text = _SHAPES.sub("***", text)
    hidden = bytearray(len(text))
    for size, pieces in _pieces_by_size(tuple(_secrets)).items():
        for index in range(len(text) - size + 1):
            if text[index : index + size] in pieces:
                hidden[index : index + size] = b"\1" * size
    for match in reversed(list(re.finditer(b"\1+", hidden))):
        text = f"{text[: match.start()]}***{text[match.end() :]}"
    return text


def redact_error(error: BaseException) -> str:
    """Remove secrets from an error about a text of a server, and return its text.

    Causes with a secret are dropped.
    """
    if isinstance(error, UnicodeDecodeError):
        error.object = b""  # the whole text of the server
        error.args = (error.encoding, b"", *error.args[2:])
    else:
        error.args = tuple(redact(arg) if isinstance(arg, str) else arg for arg in error.args)
    cause = error.__cause__ or error.__context__
    if cause is not None and redact(text := f"{cause} {cause!r}") != text:
        error.__cause__ = error.__context__ = None
    return str(error)


@lru_cache(maxsize=1)
def _pieces_by_size(secrets: tuple[str, ...]) -> dict[int, set[str]]:
    """Return all pieces of `_NUM_CHARACTERS` of the secrets, and shorter secrets as a whole."""
    by_size: dict[int, set[str]] = {}
    for secret in secrets:
        size = min(len(secret), _NUM_CHARACTERS)
        pieces = by_size.setdefault(size, set())
        pieces.update(secret[index : index + size] for index in range(len(secret) - size + 1))
    return by_size
