"""The source of the documentation site has each page, public name, option and command."""

from __future__ import annotations

import importlib
import logging
import re
from pathlib import Path

import pytest

from docs.site.pages import REPOSITORY, rewrite_links
from tests.unit.test_public_names import load, public_modules

griffe = pytest.importorskip("griffe")
commands = pytest.importorskip("docs.site.command_line", exc_type=ModuleNotFoundError)
reference = importlib.import_module("docs.site.reference")

ROOT = Path(__file__).parents[2]
CONFIG = (ROOT / "mkdocs.yml").read_text(encoding="utf-8")
KEYWORDS = dict(re.findall(r"^ {20}(aioflux\.\S+): (aioflux\.\S+)$", CONFIG, re.MULTILINE))
MODULES = {module.name: module for module in reference.public_modules()}
PAGES = reference.reference_pages()
DESCRIBED = set(re.findall(r"^::: (\S+)$", "".join(PAGES.values()), re.MULTILINE))


@pytest.fixture(scope="module")
def package() -> griffe.Module:
    """The package, as the site shows it."""
    from docs.site.signatures import ReadableSignatures

    extensions = griffe.load_extensions(ReadableSignatures(KEYWORDS))
    return griffe.load(
        "aioflux",
        search_paths=[ROOT],
        extensions=extensions,
        docstring_parser=griffe.Parser.google,
        allow_inspection=False,
    )


# --- public names -----------------------------


@pytest.mark.parametrize("name", public_modules())
def test_each_public_name_has_an_entry(name: str) -> None:
    exported = list(getattr(load(name), "__all__", None) or ())
    module = MODULES.get(name)
    shown = [] if module is None else [*module.own, *module.others]
    assert sorted(each.name for each in shown) == sorted(exported)
    assert [each.path for each in shown if not is_described(each)] == []


def is_described(name: reference.Name) -> bool:
    """Return whether a page describes a name, or another package defines it."""
    elsewhere = (reference.COMMAND, "")
    return name.path in DESCRIBED or name.module in elsewhere


def test_a_class_has_one_page_under_its_shortest_path() -> None:
    assert "reference/aioflux/Store.md" in PAGES
    assert "reference/aioflux.store/Store.md" not in PAGES
    assert "(../aioflux/Store.md)" in PAGES["reference/aioflux.store/index.md"]


def test_the_navigation_has_each_page_once() -> None:
    linked = re.findall(r"\((\S+\.md)\)", reference.navigation())
    wanted = [page.removeprefix("reference/") for page in PAGES]
    assert sorted(linked) == sorted([*wanted, "index.md", "command-line.md"])


def test_a_module_that_the_overview_lacks_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reference, "ROOT", tmp_path)
    monkeypatch.setattr(reference, "OVERVIEW", tmp_path / "README.md")
    reference.OVERVIEW.write_text("[`aioflux`](../../aioflux/__init__.py)\n")
    with pytest.raises(ValueError, match=r"README\.md lacks .*aioflux/sync\.py"):
        reference.navigation()


# --- signatures and docstrings ----------------


@pytest.mark.parametrize("name", ["TransferOptions", "RetryPolicy", "Timeouts", "CleanupTimeouts"])
def test_each_option_says_its_default(package: griffe.Module, name: str) -> None:
    fields = package["options"][name].attributes.values()
    texts = {each.name: each.docstring.value if each.docstring else "" for each in fields}
    has_own = {"cleanup"}  # its class says the defaults
    assert [each for each, text in texts.items() if "default" not in text] == [
        each for each in texts if each in has_own
    ]


@pytest.mark.parametrize("name", ["GCSAccess", "S3Access"])
def test_each_field_of_access_to_a_service_is_described(package: griffe.Module, name: str) -> None:
    fields = package[f"options.{name}"].attributes.values()
    shown = [each for each in fields if not each.name.startswith("_")]
    assert [each.name for each in shown if not each.docstring] == []
    assert "credentials" in [each.name for each in shown]


def test_keywords_of_a_typed_dict_are_shown(package: griffe.Module) -> None:
    function = package["checkpoint._load.torch_file.load"]
    shown = {each.name: each.default for each in function.parameters}
    assert "options" not in shown
    assert shown["endpoint_url"] == "None"
    texts = [section for section in function.docstring.parsed if section.kind == "parameters"]
    assert {"transfer", "retry", "ssl_context"} <= {each.name for each in texts[0].value}


def test_keywords_of_a_dataset_have_its_defaults(package: griffe.Module) -> None:
    parameters = package["data._iterable_dataset.IterableDataset.from_keys"].parameters
    assert (parameters["tail"].default, parameters["on_error"].default) == ("'pad'", "'raise'")


def test_the_values_of_an_alias_are_shown(package: griffe.Module) -> None:
    parameters = package["data._loader.loader"].parameters
    assert str(parameters["tail"].annotation) == "Literal['drop', 'pad', 'uneven'] | None"


def test_a_class_that_only_results_have_is_described() -> None:
    assert "aioflux.checkpoint._store.verify.Verification" in DESCRIBED
    assert "aioflux.checkpoint._store.history.SaveRecord" in DESCRIBED


def test_docstrings_fit_their_signatures(
    package: griffe.Module, caplog: pytest.LogCaptureFixture
) -> None:
    """An argument that was renamed is renamed in the docstring, too."""
    with caplog.at_level(logging.WARNING, logger="griffe"):
        for each in described_objects(package):
            if each.docstring:
                assert each.docstring.parsed
    assert [record.getMessage() for record in caplog.records] == []


def described_objects(package: griffe.Module) -> list[griffe.Object]:
    """Return the public classes and functions with the members that they define."""
    collection = package.modules_collection
    found = [collection.get_member(path) for path in sorted(DESCRIBED)]
    found = [each.final_target if each.is_alias else each for each in found]
    members = [member for each in found for member in each.members.values()]
    return [*found, *(each for each in members if not each.is_alias and each.is_public)]


# --- the command ------------------------------


@pytest.mark.parametrize("words", commands.commands())
def test_each_command_and_option_is_described(words: str) -> None:
    page = commands.command_page()
    section = page.partition(f"\n## `{words}`\n")[2] if " " in words else page
    section = section.partition("\n## ")[0]
    assert section
    options = [name for each in commands.commands()[words].params for name in each.opts]
    assert [name for name in options if name.startswith("-") and f"`{name}`" not in section] == []


@pytest.mark.parametrize("status", ["0", "1", "2", "130"])
def test_each_exit_status_is_described(status: str) -> None:
    assert f"\n| {status} | " in commands.command_page()


# --- pages ------------------------------------


def test_the_navigation_has_each_page_of_docs() -> None:
    listed = re.findall(r"^ +- .*: (\S+\.md)$", CONFIG, re.MULTILINE)
    pages = {path.name for path in (ROOT / "docs").glob("*.md")} - {"README.md"}
    assert sorted(listed) == sorted(pages | {"index.md"})


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("[datasets](datasets.md#cache)", "[datasets](datasets.md#cache)"),
        ("[s3.md](s3.md)", "[S3](s3.md)"),
        ("[start](README.md)", "[start](index.md)"),
        ("[errors](../aioflux/errors.py)", "[errors](reference/aioflux.errors.md)"),
        ("[perf](../perf/README.md#ray)", f"[perf]({REPOSITORY}/blob/main/perf/README.md#ray)"),
        ("[examples](../examples)", f"[examples]({REPOSITORY}/tree/main/examples)"),
        ("![a](images/a.png) [b](#b)", "![a](images/a.png) [b](#b)"),
        ("[c](https://c.example/d.md)", "[c](https://c.example/d.md)"),
        ("`a[b](../c)`\n```\nd[e](../f)\n```\n", "`a[b](../c)`\n```\nd[e](../f)\n```\n"),
    ],
    ids=["page", "title", "start", "module", "file", "folder", "picture", "url", "code"],
)
def test_links_work_on_the_site(text: str, expected: str) -> None:
    modules = {"aioflux/errors.py": "reference/aioflux.errors.md"}
    assert rewrite_links(text, "docs/page.md", modules) == expected
