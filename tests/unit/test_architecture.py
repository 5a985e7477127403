"""The map of the code in docs/architecture.md names files that exist."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
PATHS = re.compile(r"`([\w./]+(?:\.py|/))`")


def rows() -> list[list[str]]:
    """Return the cells of the table that says where to change what."""
    table = TEXT.partition("| to change |")[2].partition("\n\n")[0]
    return [
        [cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]]
        for line in table.splitlines()[2:]
    ]


def missing(cell: str, below: Path) -> list[str]:
    """Return the paths of a cell that do not exist below a folder; a bare name follows a path."""
    folder, absent = below, []
    for name in PATHS.findall(cell):
        path = next((at / name for at in (below, folder, ROOT) if (at / name).exists()), None)
        if path is None:
            absent.append(name)
        else:
            folder = path.parent
    return absent


@pytest.mark.parametrize("cells", rows(), ids=lambda cells: cells[0][:40])
def test_each_row_names_files_that_exist(cells: list[str]) -> None:
    _, places, tests = cells
    assert missing(places, ROOT / "aioflux") == []
    package = ROOT / "aioflux"
    assert [each for each in missing(tests, ROOT / "tests") if not (package / each).exists()] == []


def read_tests(cell: str) -> str:
    """Return the text of all tests that a cell names: files and folders."""
    folder, texts = ROOT / "tests", []
    for name in PATHS.findall(cell):
        places = (ROOT / "tests" / name, folder / name, ROOT / "aioflux" / name)
        path = next(place for place in places if place.exists())
        folder = path.parent
        files = [path] if path.is_file() else path.rglob("*.py")
        texts += (file.read_text(encoding="utf-8") for file in files)
    return "\n".join(texts)


@pytest.mark.parametrize(
    ("name", "cell"),
    [
        (name, cells[2])
        for cells in rows()
        for code in re.findall(r"`([^`]+)`", cells[0])
        for name in re.findall(r"[A-Za-z_]\w*", code)
    ],
    ids=lambda value: value[:40],
)
def test_each_name_to_change_occurs_in_the_tests_of_its_row(name: str, cell: str) -> None:
    assert re.search(rf"\b{name}\b", read_tests(cell))


def test_the_map_is_long_enough_to_be_one() -> None:
    assert len(rows()) >= 40


def test_the_rest_of_the_page_names_files_that_exist() -> None:
    names = set(PATHS.findall(TEXT))
    folders = ("aioflux", "tests", "perf")
    files = (path for folder in folders for path in (ROOT / folder).rglob("*.py"))
    known = {path.relative_to(ROOT).as_posix() for path in files}
    absent = [
        name
        for name in names
        if name.endswith(".py")
        and not any(each.endswith(f"/{name}") for each in known)
        and name not in known
    ]
    assert absent == []


def test_the_glossary_stays_short() -> None:
    table = TEXT.partition("## Glossary")[2].partition("| --- | --- |")[2]
    assert 30 <= table.count("\n| ") <= 60
