"""The words of the code and its documents: no idioms, and docstrings that begin well."""

from __future__ import annotations

import ast
import re
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

ROOT = Path(__file__).parents[2]
MODULES = {
    path.relative_to(ROOT): path.read_text(encoding="utf-8")
    for path in sorted((ROOT / "aioflux").rglob("*.py"))
}

IDIOMS = re.compile(
    r"\b[Tt]old\b|\b[Tt]ells\b|\b[Tt]ell (?:whether|apart|of)\b|\b(?:[Ss]ome|[Aa]ny)body\b"
    r"|\b[Nn]obody\b|\b[Ww]hoever\b|\b[Ss]tand(?:s|ing)? (?:below|above|beside|for|still|there)\b"
    r"|\b[Hh]ears? of\b|\bin vain\b|\bcomes? up with\b|\bas it stands\b"
    r"|\b(?:of|to|than|before) ours\b|\blet go\b|\bwho asks\b|\bdoes not yet speak\b"
)
"""Banned wording; use the terms of the field instead."""

OPENER = re.compile(r"(What|Who|Where|Which|How|When|Whoever|Whether|Why|That)\b")
"""Words that begin a clause where a noun phrase or an imperative is due."""

PARTICIPLE = re.compile(r"(ing|ed|ly)$")
NOUNS = {
    "hashing",
    "lightning",
    "listing",
    "mapping",  # of memory, as in mmap
    "nesting",
    "sharding",
    "staging",
}
"""Nouns of the field that look like participles."""

DocNode = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef


def docstrings(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Yield the line and the first line of each docstring."""
    for node in ast.walk(tree):
        if isinstance(node, DocNode) and (text := ast.get_docstring(node)):
            yield node.body[0].lineno, text.splitlines()[0]


def test_no_idioms() -> None:
    documents = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
    texts = list(MODULES.items())
    texts += [(path.relative_to(ROOT), path.read_text(encoding="utf-8")) for path in documents]
    found = [
        f"{path}:{number}: {line.strip()}"
        for path, text in texts
        for number, line in enumerate(text.splitlines(), 1)
        if IDIOMS.search(line)
    ]
    assert found == []


def test_docstrings_begin_with_a_noun_phrase_or_an_imperative() -> None:
    found = [
        f"{path}:{line}: {text}"
        for path, source in MODULES.items()
        for line, text in docstrings(ast.parse(source))
        if OPENER.match(text) or re.search(r"\bwhere\b", text)
    ]
    assert found == []


def test_modules_are_named_after_things_and_operations() -> None:
    found = [
        str(path)
        for path in MODULES
        # The last word is the thing; before it a participle describes: `composed_read`.
        for word in path.stem.strip("_").split("_")[-1:]
        if PARTICIPLE.search(word) and word not in NOUNS
    ]
    assert found == []
