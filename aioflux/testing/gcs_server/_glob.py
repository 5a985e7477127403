"""matchGlob: glob patterns over object names.

`*` matches any characters but `/`, `**` any characters, `?` one character but `/`, `[a-z]` and
`[!a-z]` one of a set or none of it, `{a,b}` either, and a backslash quotes the next character
(cloud.google.com/storage/docs/json_api/v1/objects/list, matchGlob).

Patterns come from callers, so names are matched by an automaton: the backtracking of a regular
expression could take time that grows as a power of the name's length.
"""

from __future__ import annotations

import re
from functools import lru_cache

from aioflux.testing.gcs_server._errors import APIError

_TOKEN = re.compile(
    r"(?P<escape>\\.)"
    r"|(?P<star>\*+)"
    r"|(?P<one>\?)"
    r"|\[(?P<negation>[!^]?)(?P<set>\]?[^\]]*)\]"
    r"|(?P<open>\{)|(?P<close>\})|(?P<comma>,)"
    r"|(?P<literal>[^\\\[])",
    re.DOTALL,
)
_SPECIAL = re.compile(r"[*?\[\]{}\\]")
_MAX_LENGTH = 1024  # a name has at most 1,024 bytes
_MAX_CACHED = 16_384


class Glob:
    """A compiled pattern: an automaton whose sets of states are the bits of a number."""

    def __init__(self) -> None:
        self._after: list[list[int]] = [[]]  # by state: those that follow without a character
        self._edges: list[tuple[int, re.Pattern[str], int]] = []
        self._closures: list[int] = []
        self._cache: dict[tuple[int, str], int] = {}

    def add_state(self, *before: int) -> int:
        """Add a state that follows others without a character."""
        self._after.append([])
        state = len(self._after) - 1
        for earlier in before:
            self._after[earlier].append(state)
        return state

    def add_edge(self, start: int, character: re.Pattern[str], end: int) -> None:
        """Add a transition by a character from one state to another."""
        self._edges.append((start, character, end))

    def close(self) -> None:
        """Finish the automaton: the last added state accepts."""
        closures = [0] * len(self._after)
        for state in reversed(range(len(closures))):  # later states have higher numbers
            closures[state] = 1 << state
            for later in self._after[state]:
                closures[state] |= closures[later]
        self._closures = closures

    def matches(self, name: str) -> bool:
        """Return whether a whole name matches the pattern."""
        cache, states = self._cache, self._closures[0]
        for character in name:
            step = states, character
            found = cache.get(step)
            states = self._step(states, character) if found is None else found
            if not states:
                return False
        return bool(states >> (len(self._closures) - 1))

    def _step(self, states: int, character: str) -> int:
        """Return the states behind a character, and cache them."""
        reached = 0
        for start, pattern, end in self._edges:
            if states >> start & 1 and pattern.fullmatch(character):
                reached |= self._closures[end]
        if len(self._cache) >= _MAX_CACHED:
            self._cache.clear()
        self._cache[states, character] = reached
        return reached


@lru_cache(maxsize=64)
def compile_glob(pattern: str) -> Glob:
    """Compile a glob pattern; an unclosed bracket or brace, or a long pattern, is a 400."""
    if len(pattern) > _MAX_LENGTH:
        raise _malformed(pattern)
    glob = Glob()
    state = position = 0
    open_braces: list[tuple[int, list[int]]] = []  # state before, and ends of the branches
    while position < len(pattern):
        token = _TOKEN.match(pattern, position)
        if token is None or (token["close"] and not open_braces):
            raise _malformed(pattern)
        if token["open"]:
            open_braces.append((state, []))
            state = glob.add_state(state)
        elif token["close"]:
            _, ends = open_braces.pop()
            state = glob.add_state(*ends, state)
        elif token["comma"] and open_braces:
            before, ends = open_braces[-1]
            ends.append(state)
            state = glob.add_state(before)
        else:
            state = _add_characters(glob, state, token)
        position = token.end()
    if open_braces:
        raise _malformed(pattern)
    glob.add_state(state)
    glob.close()
    return glob


def literal_prefix(pattern: str) -> str:
    """Return the beginning of every name that matches."""
    special = _SPECIAL.search(pattern)
    return pattern if special is None else pattern[: special.start()]


def _add_characters(glob: Glob, state: int, token: re.Match[str]) -> int:
    """Add one token for characters; return the state behind it."""
    try:
        character = re.compile(_one_character(token), re.DOTALL)
    except re.error:
        raise _malformed(token.string) from None
    if token["star"]:
        glob.add_edge(state, character, state)
        return state
    end = glob.add_state()
    glob.add_edge(state, character, end)
    return end


def _one_character(token: re.Match[str]) -> str:
    """Return a regular expression for one character of a token."""
    if token["escape"]:
        return re.escape(token["escape"][1])
    if token["star"]:
        return "[^/]" if len(token["star"]) == 1 else "."
    if token["one"]:
        return "[^/]"
    if token["set"]:
        members = re.sub(r"([\\\[\]^&~|])", r"\\\1", token["set"])
        return f"(?!/)[{'^' if token['negation'] else ''}{members}]"
    return re.escape(token[0])


def _malformed(pattern: str) -> APIError:
    return APIError(400, "invalid", f"Invalid value for matchGlob: {pattern}")
