"""Glob patterns for names of objects, the parameter `matchGlob` of listings.

`*` matches characters except `/`, `**` all characters, `?` one character except `/`, `[a-z]` one
of these characters, `[!a-z]` any other character except `/`, `{a,b}` `a` or `b`. A backslash
quotes the next character (cloud.google.com/storage/docs/json_api/v1/objects/list, matchGlob).

Names are matched by a nondeterministic automaton, in time proportional to their length. A regular
expression with several `*` backtracks, in time that grows as a power of the length.
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
    """Compiled pattern: a nondeterministic finite automaton. State 0 is the start.

    A set of states is an integer whose bit `n` is state `n`.
    """

    def __init__(self) -> None:
        self._empty_moves: list[list[int]] = [
            []
        ]  # by state: states that follow without a character
        self._edges: list[tuple[int, re.Pattern[str], int]] = []
        self._closures: list[int] = []  # by state: the set of states reachable by empty moves
        self._cache: dict[tuple[int, str], int] = {}

    def add_state(self, *before: int) -> int:
        """Add a state, with an empty move to it from each of the given states."""
        self._empty_moves.append([])
        state = len(self._empty_moves) - 1
        for source in before:
            self._empty_moves[source].append(state)
        return state

    def add_edge(self, start: int, character: re.Pattern[str], end: int) -> None:
        """Add a transition between two states for the characters that match a pattern."""
        self._edges.append((start, character, end))

    def close(self) -> None:
        """Finish the automaton. The last added state is the accepting state."""
        closures = [0] * len(self._empty_moves)
        for state in reversed(range(len(closures))):  # empty moves lead to higher numbers
            closures[state] = 1 << state
            for target in self._empty_moves[state]:
                closures[state] |= closures[target]
        self._closures = closures

    def matches(self, name: str) -> bool:
        """Return whether a whole name matches the pattern."""
        cache, states = self._cache, self._closures[0]
        for character in name:
            cached = cache.get((states, character))
            states = self._step(states, character) if cached is None else cached
            if not states:
                return False
        return bool(states >> (len(self._closures) - 1))

    def _step(self, states: int, character: str) -> int:
        """Return the set of states after a character, and cache the result."""
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
    """Compile a glob pattern. Raise APIError (400) if it is malformed or too long."""
    if len(pattern) > _MAX_LENGTH:
        raise _malformed(pattern)
    glob = Glob()
    state = position = 0
    # For each open brace, the state before it, and the last states of the finished branches.
    open_braces: list[tuple[int, list[int]]] = []
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
    """Return the longest literal prefix of a pattern: every matching name begins with it."""
    special = _SPECIAL.search(pattern)
    return pattern if special is None else pattern[: special.start()]


def _add_characters(glob: Glob, state: int, token: re.Match[str]) -> int:
    """Add the states of one token, and return the last state."""
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
    """Return a regular expression for one character that a token matches."""
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
