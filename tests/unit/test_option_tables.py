"""The tables of options in docs/ have each option, and the defaults of the code."""

from __future__ import annotations

import dataclasses
import inspect
import re
from pathlib import Path
from typing import Any

import pytest

from aioflux.options import (
    MIB,
    CleanupTimeouts,
    GCSAccess,
    RetryPolicy,
    S3Access,
    Timeouts,
    TransferOptions,
)

DOCS = Path(__file__).parents[2] / "docs"


def rows(page: str, header: str) -> list[list[str]]:
    """Return the cells of all rows of the tables of a page whose first row begins with `header`."""
    text = (DOCS / page).read_text(encoding="utf-8")
    pattern = rf"^\| {re.escape(header)} \|.*\n\| ---.*\n((?:\|.*\n)+)"
    lines = "".join(re.findall(pattern, text, re.MULTILINE)).splitlines()
    return [[cell.strip() for cell in line.split("|")[1:-1]] for line in lines]


def names(cells: list[str]) -> list[str]:
    """Return the names in the first cell: `name`, `Class.name`, `name=value` or `name=Class()`."""
    return re.findall(r"`(?:[A-Z]\w*\.)?(\w+)(?:=[^`]*)?`", cells[0])


def keywords(function: Any) -> list[str]:
    parameters = inspect.signature(function).parameters.values()
    return [each.name for each in parameters if each.kind is inspect.Parameter.KEYWORD_ONLY]


def shown(value: object) -> str:
    """Return a default as the tables show it."""
    if isinstance(value, str):
        return f'"{value}"'
    if isinstance(value, int) and value >= MIB:
        return f"{value // MIB} MiB"
    return str(value)


SETTINGS = {
    field.name: field.default
    for kind in (TransferOptions, RetryPolicy, Timeouts, CleanupTimeouts)
    for field in dataclasses.fields(kind)
}
SETTING_ROWS = rows("stores.md", "setting")


def test_each_setting_of_a_store_is_in_its_table_once() -> None:
    listed = [name for cells in SETTING_ROWS for name in names(cells)]
    assert sorted(listed) == sorted(SETTINGS)


@pytest.mark.parametrize("cells", SETTING_ROWS, ids=lambda cells: cells[0])
def test_the_table_has_the_defaults_of_a_store(cells: list[str]) -> None:
    defaults = [SETTINGS[name] for name in names(cells)]
    if all(isinstance(each, (bool, int, float, str)) for each in defaults):
        assert cells[1] == ", ".join(map(shown, defaults))


@pytest.mark.parametrize(
    ("page", "kind"), [("s3.md", S3Access), ("google-cloud-storage.md", GCSAccess)]
)
def test_each_field_of_access_to_a_service_is_in_its_table_once(page: str, kind: Any) -> None:
    header = f"field of `{kind.__name__}`"
    listed = [name for cells in rows(page, header) for name in names(cells)]
    assert sorted(listed) == sorted(field.name for field in dataclasses.fields(kind))


def test_each_keyword_of_a_dataset_is_in_its_table_once() -> None:
    data = pytest.importorskip("aioflux.data", exc_type=ModuleNotFoundError)
    listed = [name for cells in rows("datasets.md", "option") for name in names(cells)]
    assert sorted(listed) == sorted(keywords(data.IterableDataset))
    assert set(listed) >= set(keywords(data.MapDataset))


def test_each_keyword_of_a_checkpointer_is_in_its_table_once() -> None:
    checkpoint = pytest.importorskip("aioflux.checkpoint", exc_type=ModuleNotFoundError)
    listed = [name for cells in rows("checkpoints.md", "argument") for name in names(cells)]
    assert sorted(listed) == sorted(keywords(checkpoint.Checkpointer))
