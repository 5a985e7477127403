"""docs/api.md lists exactly the public names."""

from __future__ import annotations

import importlib
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

import aioflux
from tests.unit.test_public_names import public_modules

if TYPE_CHECKING:
    from types import ModuleType

PAGE = Path(__file__).parents[2] / "docs" / "api.md"


def sections() -> dict[str, list[str]]:
    """Return the names in the tables below each heading."""
    text = PAGE.read_text(encoding="utf-8")
    parts = re.split(r"^##+ (.*)$", text, flags=re.MULTILINE)[1:]
    return {
        heading: re.findall(r"^\| `(\w+)` \|", body, re.MULTILINE)
        for heading, body in zip(parts[::2], parts[1::2], strict=True)
    }


LISTED = {
    heading.strip("`"): names for heading, names in sections().items() if heading.startswith("`")
}
MODULES = public_modules()


def load(name: str) -> ModuleType:
    return pytest.importorskip(name, exc_type=ModuleNotFoundError)


def value(module: str, name: str) -> Any:
    return getattr(importlib.import_module(module), name)


@pytest.mark.parametrize("name", MODULES)
def test_each_public_name_is_listed(name: str) -> None:
    """A name that another module exports, too, is listed once."""
    module = load(name)
    elsewhere = {each for names in LISTED.values() for each in names}
    missing = [
        each
        for each in getattr(module, "__all__", ())
        if each not in LISTED.get(name, ())
        and not (each in elsewhere and is_listed(each, getattr(module, each)))
    ]
    assert missing == []


def is_listed(name: str, wanted: Any) -> bool:
    """Return whether the page lists this object, by this name, below another module."""
    return any(value(module, name) is wanted for module, names in LISTED.items() if name in names)


@pytest.mark.parametrize("module", LISTED)
def test_each_listed_name_exists(module: str) -> None:
    found = load(module)
    assert [name for name in LISTED[module] if name not in {*dir(found), *found.__all__}] == []
    assert len(set(LISTED[module])) == len(LISTED[module])


async def test_each_method_of_store_is_listed() -> None:
    listed = sections()["Methods of `Store`"]
    methods = {name for name in vars(aioflux.Store) if not name.startswith("_")}
    assert sorted(methods - set(listed)) == []
    async with aioflux.open_store("memory://names") as store:
        assert [name for name in listed if not hasattr(store, name)] == []
