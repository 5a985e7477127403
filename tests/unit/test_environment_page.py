"""docs/environment.md lists the environment variables that the package reads."""

from __future__ import annotations

import ast
import re
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from collections.abc import Iterable

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "environment.md"
NAME = re.compile(r"[A-Z][A-Z0-9]*(_[A-Z0-9]+)*")
OTHER = {"ANONYMOUS", "EAI_NODATA", "LIST_BELOW", "NOT_READY", "SC_PAGE_SIZE", "SC_PHYS_PAGES"}
"""Texts that look like names of variables, in modules that read the environment."""
BY_LIBRARIES = {
    "ALL_PROXY",
    "GOOGLE_APPLICATION_CREDENTIALS",
    "HTTPS_PROXY",
    "HTTP_PROXY",
    "TMPDIR",
}
"""Variables that a library reads for aioflux."""


def listed() -> list[str]:
    """Return the names in the first column of the tables."""
    cells = re.findall(
        r"^\| ([A-Z][A-Z0-9_, ]+) \|", PAGE.read_text(encoding="utf-8"), re.MULTILINE
    )
    return [name for cell in cells for name in cell.split(", ")]


def read_variables() -> set[str]:
    """Return the names in modules that read the environment which may be variables."""
    sources = [path.read_text(encoding="utf-8") for path in (ROOT / "aioflux").rglob("*.py")]
    trees = [ast.parse(source) for source in sources if re.search("environ|getenv", source)]
    return {name for tree in trees for name in names_in(tree)} - OTHER


def names_in(tree: ast.Module) -> set[str]:
    """Return the arguments of each `get`, and all names with an underscore, except exports."""
    nodes = list(ast.walk(tree))
    calls = [node for node in nodes if isinstance(node, ast.Call)]
    gets = [call for call in calls if ast.unparse(call.func).rpartition(".")[2] == "get"]
    arguments = upper_case(each for call in gets for each in call.args)
    exports = upper_case(each for node in nodes if isinstance(node, ast.List) for each in node.elts)
    return (arguments | {name for name in upper_case(nodes) if "_" in name}) - exports


def upper_case(nodes: Iterable[ast.AST]) -> set[str]:
    """Return the texts among nodes that consist of capitals, digits and underscores."""
    values = (node.value for node in nodes if isinstance(node, ast.Constant))
    return {value for value in values if isinstance(value, str) and NAME.fullmatch(value)}


def test_each_variable_that_is_read_is_on_the_page() -> None:
    assert sorted(read_variables() - set(listed())) == []


@pytest.mark.parametrize("name", sorted(BY_LIBRARIES))
def test_variables_of_libraries_are_on_the_page(name: str) -> None:
    assert name in listed()


def test_each_variable_on_the_page_is_read() -> None:
    assert sorted(set(listed()) - read_variables() - BY_LIBRARIES) == []
