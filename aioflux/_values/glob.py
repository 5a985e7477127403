r"""Glob patterns over keys, for services that do not support `matchGlob` in listings.

    *       any characters except `/`
    **      any characters
    ?       one character except `/`
    [a-z]   one character in the set, except `/`; `[!a-z]` or `[^a-z]`: one that is not in the set
    {a,b}   one of the patterns between the braces
    \*      the character after the backslash, here `*`

The syntax is that of Google (cloud.google.com/storage/docs/json_api/v1/objects/list, matchGlob).
"""

from __future__ import annotations

import re

_TOKEN = re.compile(
    r"(?P<escape>\\.)|(?P<any>\*\*+)|(?P<star>\*)|(?P<one>\?)"
    r"|\[(?P<negation>[!^]?)(?P<set>\]?[^\]]*)\]"
    r"|(?P<open>\{)|(?P<close>\})|(?P<comma>,)|(?P<literal>[^\\\[])",
    re.DOTALL,
)
_FIXED = {"any": ".*", "star": "[^/]*", "one": "[^/]", "open": "(?:", "close": ")"}


_SPECIAL = re.compile(r"[*?\[{\\]")


def literal_prefix(pattern: str) -> str:
    """Return the longest prefix of a pattern without special characters."""
    return _SPECIAL.split(pattern, maxsplit=1)[0]


def compile_glob(pattern: str) -> re.Pattern[str]:
    """Return a regular expression for a pattern; match keys by its `fullmatch`.

    Raises:
        ValueError: The pattern is malformed, for example because a bracket is not closed.
    """
    text, depth, position = "", 0, 0
    while position < len(pattern):
        token = _TOKEN.match(pattern, position)
        if token is None or (token["close"] and not depth):
            raise _malformed(pattern)
        depth += bool(token["open"]) - bool(token["close"])
        text += _translated(token, is_in_braces=depth > 0)
        position = token.end()
    if depth:
        raise _malformed(pattern)
    try:
        return re.compile(text, re.DOTALL)
    except re.error as exc:
        raise _malformed(pattern) from exc


def _translated(token: re.Match[str], *, is_in_braces: bool) -> str:
    kind = token.lastgroup or ""
    if kind in _FIXED:
        return _FIXED[kind]
    if kind == "comma" and is_in_braces:
        return "|"
    if kind == "escape":
        return re.escape(token["escape"][1])
    if token["set"]:
        members = re.sub(r"([\\\[\]^&~|])", r"\\\1", token["set"])
        return f"(?!/)[{'^' if token['negation'] else ''}{members}]"
    return re.escape(token[0])


def _malformed(pattern: str) -> ValueError:
    return ValueError(
        f"{pattern!r} is not a pattern: a bracket or brace has no partner, a set is invalid, or "
        "the last character is a backslash"
    )
