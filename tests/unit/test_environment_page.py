"""docs/environment.md lists the environment variables that the package reads."""

from __future__ import annotations

import ast
import re
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from collections.abc import Iterator

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "environment.md"
NAME = re.compile(r"[A-Z][A-Z0-9]*(_[A-Z0-9]+)*")
OTHER = {"ANONYMOUS", "EAI_NODATA", "LIST_BELOW", "NOT_READY", "SC_PAGE_SIZE", "SC_PHYS_PAGES"}
"""Texts that look like names of variables, in modules that read the environment."""
BY_LIBRARIES = {"GOOGLE_APPLICATION_CREDENTIALS", "HTTPS_PROXY", "HTTP_PROXY", "TMPDIR"}
"""Variables that a library reads for aioflux."""


def listed() -> list[str]:
    """Return the names in the first column of the tables."""
    cells = re.findall(
        r"^\| ([A-Z][A-Z0-9_, ]+) \|", PAGE.read_text(encoding="utf-8"), re.MULTILINE
    )
    return [name for cell in cells for name in cell.split(", ")]


def read_variables() -> set[str]:
    """Return the texts in modules that read the environment which may be names of variables."""
    sources = [path.read_text(encoding="utf-8") for path in (ROOT / "aioflux").rglob("*.py")]
    trees = [ast.parse(source) for source in sources if re.search("environ|getenv", source)]
    return {name for tree in trees for name in texts(tree)} - OTHER


def texts(tree: ast.Module) -> Iterator[str]:
    """Yield upper-case texts: those with an underscore, and all arguments of a call of `get`."""
    exported = {
        element.value
        for node in ast.walk(tree)
        if isinstance(node, ast.List)
        for element in node.elts
        if isinstance(element, ast.Constant)
    }
    for node in ast.walk(tree):
        values = [node]
        is_get = isinstance(node, ast.Call) and ast.unparse(node.func).rpartition(".")[2] == "get"
        if isinstance(node, ast.Call) and is_get:
            values += node.args
        for value in values:
            if not (isinstance(value, ast.Constant) and isinstance(value.value, str)):
                continue
            if not NAME.fullmatch(value.value) or value.value in exported:
                continue
            if value is not node or "_" in value.value:
                yield value.value


def test_each_variable_that_is_read_is_on_the_page() -> None:
    assert sorted(read_variables() - set(listed())) == []


@pytest.mark.parametrize("name", sorted(BY_LIBRARIES))
def test_variables_of_libraries_are_on_the_page(name: str) -> None:
    assert name in listed()


def test_each_variable_on_the_page_is_read() -> None:
    assert sorted(set(listed()) - read_variables() - BY_LIBRARIES) == []
