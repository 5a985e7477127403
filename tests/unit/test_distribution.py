"""Every text calls the distribution `aioflux-storage`; `aioflux` at PyPI is another project."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path
from typing import Any

import pytest

import aioflux
from aioflux._values.distribution import pip_install

ROOT = Path(__file__).parents[2]
PROJECT: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
EXTRAS = set(PROJECT["optional-dependencies"])

FOLDERS = ("aioflux", "docs", "examples", "perf")
SUFFIXES = {".ipynb", ".md", ".py", ".sbatch", ".sh", ".toml", ".yaml"}
TEXTS = sorted(
    path
    for path in (
        *ROOT.iterdir(),
        *(path for folder in FOLDERS for path in (ROOT / folder).rglob("*")),
    )
    if path.suffix in SUFFIXES or path.name in {"Makefile", "constraints.txt"}
)

OTHER_PROJECT = re.compile(
    r"""(?<![\w.-])aioflux\[[a-z]  # an extra of the other project
    | pip\ install\ [^`\n]*?(?<![\w./-])aioflux(?![\w/-])  # the other project itself
    | version\(["']aioflux["']\)
    """,
    re.VERBOSE,
)
ASKED_EXTRAS = re.compile(r"(?:aioflux-storage|pip install (?:-e )?'\.)\[([a-z0-9,-]+)\]")


def lines(pattern: re.Pattern[str]) -> dict[str, list[str]]:
    """Return the matches of a pattern in each text that has one."""
    found = {path: pattern.findall(path.read_text(encoding="utf-8")) for path in TEXTS}
    return {path.relative_to(ROOT).as_posix(): each for path, each in found.items() if each}


def test_no_text_names_the_other_project() -> None:
    assert lines(OTHER_PROJECT) == {}


@pytest.mark.parametrize(
    "text",
    [
        "pip install aioflux",
        "pip install -U aioflux   # the store",
        "pip install 'aioflux[s3]'",
        'torch = ["aioflux[torch]"]',
        "version('aioflux')",
    ],
)
def test_the_other_project_is_recognised(text: str) -> None:
    assert OTHER_PROJECT.search(text)


@pytest.mark.parametrize(
    "text",
    [
        "pip install aioflux-storage",
        "pip install 'aioflux-storage[s3]'",
        "pip install git+https://github.com/aioflux/aioflux",
    ],
)
def test_this_project_is_not_taken_for_the_other(text: str) -> None:
    assert OTHER_PROJECT.search(text) is None


def test_every_text_asks_for_extras_that_exist() -> None:
    asked = lines(ASKED_EXTRAS)
    assert len(asked) >= 20
    names = {name for found in asked.values() for extras in found for name in extras.split(",")}
    assert names <= EXTRAS


def test_the_project_has_the_name_that_messages_give() -> None:
    assert pip_install("s3") == f"pip install '{PROJECT['name']}[s3]'"


def test_code_takes_the_name_from_one_function() -> None:
    """Messages call `pip_install` with an extra that exists; docstrings write the name out."""
    called, written = [], []
    for path in (ROOT / "aioflux").rglob("*.py"):
        code = path.read_text(encoding="utf-8")
        called += re.findall(r"""\{_?pip_install\(['"](\w+)['"]\)\}""", code)
        written += [path.name for text in re.findall(r"aioflux-storage.*", code) if "`" not in text]
    assert written == ["distribution.py"]
    assert len(called) >= 12
    assert set(called) <= EXTRAS


def test_the_version_stands_in_one_place() -> None:
    assert "version" in PROJECT["dynamic"]
    holders = [
        path.relative_to(ROOT).as_posix()
        for path in TEXTS
        if re.search(rf"version__? = .{re.escape(aioflux.__version__)}\b", path.read_text())
    ]
    assert holders == ["aioflux/__init__.py"]


def test_a_resumable_loader_needs_no_other_extra_than_torch() -> None:
    extra = PROJECT["optional-dependencies"]["torch"]
    assert {re.split(r"[<>=]", each)[0] for each in extra} == {"numpy", "torch", "torchdata"}


def test_the_classifiers_name_the_tested_pythons() -> None:
    """README and the page for contributors name the same Pythons as the classifiers."""
    prefix = "Programming Language :: Python :: 3."
    named = [each for each in PROJECT["classifiers"] if each.startswith(prefix)]
    assert [each.rpartition(" ")[2] for each in named] == ["3.11", "3.12", "3.13"]
    for name in ("README.md", "docs/contributing.md"):
        text = (ROOT / name).read_text(encoding="utf-8")
        assert all(each.rpartition(" ")[2] in text for each in named), name
