"""Pages of the reference: one for each public module, and one for each public class.

A module is public if no part of its dotted name begins with an underscore, and a name if `__all__`
of a public module has it. A name that several modules export has one page; the other modules link
to it. The modules are read and not imported, so that neither PyTorch nor a cloud SDK is needed.
"""

from __future__ import annotations

import contextlib
import posixpath
import re
from dataclasses import dataclass, field
from functools import cache
from typing import TYPE_CHECKING

import griffe

from docs.site.pages import ROOT

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = [
    "Name",
    "PublicModule",
    "module_pages",
    "navigation",
    "public_members",
    "public_modules",
    "reference_pages",
]

ON_ONE_PAGE = {"aioflux.errors", "aioflux.testing.store_suite"}
"""Modules of many small classes, which are described on the page of the module."""
OVERVIEW = ROOT / "docs" / "reference" / "README.md"
_OVERVIEW = re.compile(
    r"^## (.*)$|\[`(?:aioflux\.(?=\w))?([\w.]+)`\]\(\.\./\.\./(aioflux/[\w/.]+)\)", re.MULTILINE
)
COMMAND = "aioflux.cli"
"""Module of the command, whose page is made from the help of the command."""
PREFERRED = ("aioflux.errors",)
"""Modules that keep the page of a name that a shorter path exports, too."""


@dataclass(frozen=True)
class Name:
    """One public name of a module."""

    module: str
    name: str
    kind: griffe.Kind
    """Class, function, attribute or module; an alias if another package defines it."""
    first_line: str
    """First line of the docstring, or nothing; of an alias, the path of the definition."""

    @property
    def path(self) -> str:
        """Dotted path."""
        return f"{self.module}.{self.name}"

    @property
    def has_page(self) -> bool:
        """Whether the name has a page of its own."""
        is_listed = self.kind is griffe.Kind.CLASS and self.module not in ON_ONE_PAGE
        return is_listed or self.kind is griffe.Kind.MODULE

    @property
    def page(self) -> str:
        """Page of the name, below `docs/`, with the heading if it has no page of its own."""
        if self.kind is griffe.Kind.MODULE:
            return _module(self.path).page
        if self.has_page:
            return f"reference/{self.module}/{self.name}.md"
        return f"{_module(self.module).page}#{self.path}"


@dataclass(frozen=True)
class PublicModule:
    """A public module that exports something."""

    name: str
    file: str
    """Path of the file, relative to the root of the repository."""
    own: list[Name] = field(default_factory=list)
    """Names that are described here."""
    others: list[Name] = field(default_factory=list)
    """Names that another module describes."""
    results: list[str] = field(default_factory=list)
    """Paths of the classes that are returned by names of this module, and exported by none."""

    @property
    def classes(self) -> list[Name]:
        """Classes with a page of their own."""
        return [each for each in self.own if each.has_page and each.kind is griffe.Kind.CLASS]

    @property
    def page(self) -> str:
        """Page of the module, below `docs/`: the index of a folder if it has others below it."""
        if self.name == COMMAND:
            return "reference/command-line.md"
        return f"reference/{self.name}{'/index' if self.classes else ''}.md"


@cache
def _package() -> griffe.Module:
    package = griffe.load("aioflux", search_paths=[ROOT], allow_inspection=False)
    assert isinstance(package, griffe.Module)
    return package


def _modules(module: griffe.Module) -> list[griffe.Module]:
    """Return the public modules at and below a module, parents first."""
    found = [module]
    for each in sorted(module.modules.values(), key=lambda each: each.name):
        if not each.name.startswith("_") and not each.is_alias:
            found += _modules(each)
    return found


@cache
def public_modules() -> tuple[PublicModule, ...]:
    """Return the public modules, in the order of their names."""
    found = [module for module in _modules(_package()) if module.exports]
    homes: dict[str, str] = {}
    """Module that describes an object, by the path of its definition and its name."""
    for module in sorted(
        found, key=lambda each: (each.path not in PREFERRED, each.path.count("."), each.path)
    ):
        for name in map(str, module.exports or ()):
            homes.setdefault(f"{_definition(module, name).path} {name}", module.path)
    pages = []
    for module in found:
        assert not isinstance(module.filepath, list)
        page = PublicModule(module.path, module.filepath.relative_to(ROOT).as_posix())
        for name in map(str, module.exports or ()):
            definition = _definition(module, name)
            home = homes[f"{definition.path} {name}"]
            if isinstance(definition, griffe.Alias):
                page.others.append(Name("", name, griffe.Kind.ALIAS, definition.target_path))
                continue
            shown = Name(home, name, definition.kind, _first_line(definition))
            (page.own if home == module.path else page.others).append(shown)
        pages.append(page)
    _add_results(pages)
    return tuple(pages)


def _add_results(pages: list[PublicModule]) -> None:
    """Add to each module the classes that its functions and methods return."""
    collection = _package().modules_collection
    known = {
        _definition(collection.get_member(name.module), name.name).path
        for page in pages
        for name in page.own
    }
    for page in pages:
        for name in page.own:
            definition = _definition(collection.get_member(name.module), name.name)
            for path in _returned(definition):
                found = collection.get_member(path)
                is_named = isinstance(found, griffe.Class) and not found.name.startswith("_")
                if is_named and path not in known:
                    known.add(path)
                    page.results.append(path)


def _returned(definition: griffe.Object | griffe.Alias) -> Iterator[str]:
    """Yield the paths of the private definitions in the results of a function, or of methods."""
    for each in (definition, *definition.members.values()):
        if each.is_alias or (each is not definition and each.name.startswith("_")):
            continue
        result = each.returns if isinstance(each, griffe.Function) else None
        if isinstance(each, griffe.Attribute) and "property" in each.labels:
            result = each.annotation
        for part in result.iterate(flat=True) if isinstance(result, griffe.Expr) else ():
            if isinstance(part, griffe.ExprName) and part.canonical_path.startswith("aioflux."):
                with contextlib.suppress(KeyError):
                    found = _package().modules_collection.get_member(part.canonical_path)
                    yield found.final_target.path if found.is_alias else found.path


def _module(path: str) -> PublicModule:
    return next(module for module in public_modules() if module.name == path)


def _definition(module: griffe.Module, name: str) -> griffe.Object | griffe.Alias:
    """Return the definition of a name, or an alias if it is in another package."""
    found: griffe.Object | griffe.Alias = module.members[name]
    while isinstance(found, griffe.Alias) and found.target_path.startswith("aioflux."):
        found = _package().modules_collection.get_member(found.target_path)
    return found


def public_members(name: Name, *, inherited: bool) -> list[str]:
    """Return the dotted paths of the public members of a class; nothing for other names."""
    if name.kind is not griffe.Kind.CLASS:
        return []
    definition = _definition(_package().modules_collection.get_member(name.module), name.name)
    members = definition.all_members if inherited else definition.members
    return [f"{name.path}.{each}" for each in members if not each.startswith("_")]


def _first_line(definition: griffe.Object) -> str:
    text = definition.docstring.value if definition.docstring else ""
    return text.partition("\n\n")[0].replace("\n", " ").replace("|", "\\|")


def module_pages() -> dict[str, str]:
    """Return the page of each public module, by the path of its file."""
    return {module.file: module.page for module in public_modules()}


def reference_pages() -> dict[str, str]:
    """Return the text of each page but the command's, by its path below `docs/`."""
    modules = [module for module in public_modules() if module.name != COMMAND]
    pages = {module.page: _module_page(module) for module in modules}
    return pages | {name.page: _class_page(name) for module in modules for name in module.classes}


def _class_page(name: Name) -> str:
    return f"---\ntitle: {name.name}\n---\n\n" + _directive(name.path, heading_level=1)


def _module_page(module: PublicModule) -> str:
    text = f"---\ntitle: {module.name}\n---\n\n"
    text += _directive(module.name, heading_level=1, members="false", show_root_toc_entry="false")
    tables = (
        ("Contents", [name for name in module.own if name.has_page]),
        ("Described elsewhere", module.others),
    )
    for heading, names in tables:
        if names:
            folder = posixpath.dirname(module.page)
            rows = [f"| {_link(each, folder)} | {each.first_line} |" for each in names]
            text += "\n".join([f"## {heading}\n", "| name | is |", "| --- | --- |", *rows, "\n"])
    shown: dict[str, object] = {"heading_level": 2}
    if module.name in ON_ONE_PAGE:  # members of base classes are described there
        shown["inherited_members"] = "false"
    text += "".join(_directive(name.path, **shown) for name in module.own if not name.has_page)
    if module.results:
        text += "## Results\n\n"
        shown = {"heading_level": 3, "show_root_full_path": "false"}
        text += "".join(_directive(path, **shown) for path in module.results)
    return text


def _link(name: Name, folder: str) -> str:
    if name.kind is griffe.Kind.ALIAS:
        return f"`{name.name}`"
    return f"[`{name.name}`]({posixpath.relpath(name.page, folder)})"


def navigation() -> str:
    """Return the part of the navigation below "Reference": the modules as the overview has them.

    Raises:
        ValueError: The overview lacks a public module.
    """
    modules = {module.file: module for module in public_modules()}
    lines = ["* [Overview](index.md)"]
    for heading, label, module in _OVERVIEW.findall(OVERVIEW.read_text(encoding="utf-8")):
        if heading:
            lines.append(f"* {heading}")
        else:
            lines += _navigation_of(modules.pop(module), label.replace(".", ".\u200b"))
    if modules:
        raise ValueError(f"{OVERVIEW.relative_to(ROOT)} lacks {', '.join(sorted(modules))}")
    return "\n".join([*lines, ""])


def _navigation_of(module: PublicModule, label: str) -> list[str]:
    page = module.page.removeprefix("reference/")
    if module.name == COMMAND:
        label = "command aioflux"
    if not module.classes:
        return [f"    * [{label}]({page})"]
    names = [(module.name, page)]
    names += [(each.name, each.page.removeprefix("reference/")) for each in module.classes]
    return [f"    * {label}", *(f"        * [{name}]({page})" for name, page in names)]


def _directive(path: str, **options: object) -> str:
    lines = [f"      {name}: {value}" for name, value in options.items()]
    return "\n".join([f"::: {path}", "    options:", *lines, "\n"])
