"""The table of docs/command-line.md has each command, and each of its options."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

PAGE = (Path(__file__).parents[2] / "docs" / "command-line.md").read_text(encoding="utf-8")
CELLS = re.findall(r"^\| `aioflux (.*?)` \|", PAGE, re.MULTILINE)
"""First cells of the table, such as `ckpt show [--step STEP]`."""
NAMES = [" ".join(re.match(r"(?:ckpt )?\w+", cell)[0].split()) for cell in CELLS]


def shown(aioflux, monkeypatch: pytest.MonkeyPatch, *words: str) -> str:
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.setenv("TERM", "dumb")
    return aioflux(*words, "--help").out


def commands(text: str) -> list[str]:
    """Return the names in the box of commands of a help text."""
    return re.findall(r"^\W+(\w+) {2}", text.partition("Commands")[2], re.MULTILINE)


def test_the_table_has_each_command_once(aioflux, monkeypatch) -> None:
    names = commands(shown(aioflux, monkeypatch))
    names.remove("ckpt")
    names += (f"ckpt {name}" for name in commands(shown(aioflux, monkeypatch, "ckpt")))
    assert sorted(NAMES) == sorted(names)
    assert len(names) > 10


@pytest.mark.parametrize("cell", CELLS, ids=NAMES)
def test_a_row_has_each_option_of_its_command(aioflux, monkeypatch, cell) -> None:
    """Options of all commands are below the table; those of `serve` are in its help alone."""
    words = re.match(r"(?:ckpt )?\w+", cell)[0].split()
    text = shown(aioflux, monkeypatch, *words)
    rows = re.findall(r"^\W+ (--[a-z][a-z-]*)(?: +(-[a-z]) )?", text, re.MULTILINE)
    assert ("--help", "") in rows
    options = {short or name for name, short in rows}
    assert set(re.findall(r"\[(--?[a-z-]+)", cell)) <= options
    if words != ["serve"]:
        of_all = PAGE.partition("Each command has")[2].partition("\n\n")[0]
        assert options <= set(re.findall(r"(?<![\w-])--?[a-z][a-z-]*", cell + of_all)) | {"--help"}
