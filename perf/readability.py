"""Figures about the readability of the code: `python -m perf.readability [ROOT]`.

Prints for one checkout: size of each package, class names used twice in a top-level package, lines
with banned idioms, tests that depend on private names, and the longest modules and functions. To
compare two checkouts, run the command on each. It does not import or execute the code.
"""

from __future__ import annotations

import argparse
import ast
import re
import sys
from collections import defaultdict
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from collections.abc import Set as AbstractSet

__all__ = ["Module", "count", "main", "private_imports", "read_modules"]

IDIOMS: Final = re.compile(
    r"\b[Tt]old\b|\b[Tt]ells\b|\b[Tt]ell (?:whether|apart|of)\b|\b(?:[Ss]ome|[Aa]ny)body\b"
    r"|\b[Nn]obody\b|\b[Ww]hoever\b|\b[Ss]tand(?:s|ing)? (?:below|above|beside|for|still|there)\b"
    r"|\b[Hh]ears? of\b|\bin vain\b|\bcomes? up with\b|\bas it stands\b"
    r"|\b(?:of|to|than|before) ours\b|\blet go\b|\bwho asks\b|\bdoes not yet speak\b"
)
"""Banned wording; use the terms of the field instead."""

SEAMS: Final = frozenset(
    {"aioflux._services.base", "aioflux._http", "aioflux._http.pool", "aioflux._http.codec"}
)
"""Private modules that tests may import, in addition to the pure modules."""
PURE: Final = re.compile(r"^PURE := \$\(addprefix aioflux/,(.*?)\)$", re.MULTILINE | re.DOTALL)
"""List of the pure modules in the Makefile."""
PATCH: Final = re.compile(r"monkeypatch\.setattr\(|mock\.patch|patch\.object\(")
SECONDS: Final = re.compile(r"^_?[A-Z][A-Z0-9_]*SECONDS\b", re.MULTILINE)


@dataclass
class Module:
    """One source file and its counts."""

    path: Path
    source: str
    tree: ast.Module
    package: str
    """First part of the dotted path below `aioflux`; `(top)` for modules directly below it."""
    num_lines: int = 0
    num_docstring_lines: int = 0
    num_code_lines: int = 0
    functions: list[tuple[str, int]] = field(default_factory=list)


def read_modules(root: Path) -> list[Module]:
    """Read every module of the package below a checkout.

    Args:
        root: The folder that contains `aioflux/`.
    """
    modules = []
    for path in sorted((root / "aioflux").rglob("*.py")):
        source = path.read_text(encoding="utf-8")
        relative = path.relative_to(root / "aioflux")
        package = relative.parts[0] if len(relative.parts) > 1 else "(top)"
        module = Module(path.relative_to(root), source, ast.parse(source), package)
        count(module)
        modules.append(module)
    return modules


def count(module: Module) -> None:
    """Count the lines of one module: all lines, docstring lines, and lines with code."""
    lines = module.source.splitlines()
    docstring_lines: set[int] = set()
    for node in ast.walk(module.tree):
        body = getattr(node, "body", None)
        if isinstance(body, list):
            # A string expression documents the module, class, function, field or constant.
            for each in body:
                value = each.value if isinstance(each, ast.Expr) else None
                if isinstance(value, ast.Constant) and isinstance(value.value, str):
                    docstring_lines.update(range(each.lineno, (each.end_lineno or 0) + 1))
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            length = (node.end_lineno or node.lineno) - node.lineno + 1
            module.functions.append((node.name, length))
    module.num_lines = len(lines)
    module.num_docstring_lines = len(docstring_lines)
    module.num_code_lines = sum(
        bool(text.strip()) and not text.lstrip().startswith("#") and number not in docstring_lines
        for number, text in enumerate(lines, 1)
    )


def class_collisions(modules: Sequence[Module]) -> dict[tuple[str, str], list[str]]:
    """Return class names used twice in one top-level package, ignoring leading underscores."""
    places: dict[tuple[str, str], list[str]] = defaultdict(list)
    for module in modules:
        for node in ast.walk(module.tree):
            if isinstance(node, ast.ClassDef):
                key = (module.package, node.name.lstrip("_"))
                places[key].append(f"{module.path}:{node.lineno}")
    return {key: found for key, found in places.items() if len(found) > 1}


def idiom_lines(root: Path, modules: Sequence[Module]) -> Iterator[str]:
    """Yield the lines of the package, the README and the documents with a banned idiom."""
    texts = [(module.path, module.source) for module in modules]
    documents = (*root.glob("README.md"), *sorted((root / "docs").rglob("*.md")))
    texts += [(path.relative_to(root), path.read_text(encoding="utf-8")) for path in documents]
    for path, source in texts:
        for number, text in enumerate(source.splitlines(), 1):
            if IDIOMS.search(text):
                yield f"{path}:{number}"


def tests_matching(root: Path, pattern: re.Pattern[str]) -> dict[Path, int]:
    """Return the number of matches of a pattern, for each test file that has any."""
    found = {}
    for path in sorted((root / "tests").rglob("*.py")):
        if number := len(pattern.findall(path.read_text(encoding="utf-8"))):
            found[path.relative_to(root)] = number
    return found


def private_imports(root: Path) -> dict[Path, set[str]]:
    """Return the private names that test files import, except seams, for each file."""
    makefile = root / "Makefile"
    pure = PURE.search(makefile.read_text(encoding="utf-8")) if makefile.exists() else None
    paths = pure[1].replace("\\", " ").split() if pure else []
    seams = SEAMS | {f"aioflux.{path.removesuffix('.py').replace('/', '.')}" for path in paths}
    found = {}
    for path in sorted((root / "tests").rglob("*.py")):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        names = {name for node in ast.walk(tree) for name in _imported(node)}
        if private := {name for name in names if _is_private(root, name, seams)}:
            found[path.relative_to(root)] = private
    return found


def _imported(node: ast.AST) -> list[str]:
    """Return the dotted names that one statement imports."""
    if isinstance(node, ast.Import):
        return [each.name for each in node.names]
    if isinstance(node, ast.ImportFrom) and node.module:
        return [f"{node.module}.{each.name}" for each in node.names]
    return []


def _is_private(root: Path, name: str, seams: AbstractSet[str]) -> bool:
    if not name.startswith("aioflux."):
        return False
    path = root / name.replace(".", "/")
    is_module = path.is_dir() or path.with_suffix(".py").exists()
    module, _, attribute = (name, "", "") if is_module else name.rpartition(".")
    is_private = any(part.startswith("_") for part in module.split("."))
    return attribute.startswith("_") or (is_private and module not in seams)


def _print_packages(modules: Sequence[Module]) -> None:
    by_package: dict[str, list[Module]] = defaultdict(list)
    for module in modules:
        by_package[module.package].append(module)
    print("| package | modules | lines | docstrings | code |")
    print("| --- | --- | --- | --- | --- |")
    for name, members in [*sorted(by_package.items()), ("**all**", list(modules))]:
        lines = sum(each.num_lines for each in members)
        docstrings = sum(each.num_docstring_lines for each in members)
        code = sum(each.num_code_lines for each in members)
        print(f"| {name} | {len(members)} | {lines:,} | {docstrings:,} | {code:,} |")


def _print_counts(root: Path, modules: Sequence[Module]) -> None:
    collisions = class_collisions(modules)
    private = private_imports(root)
    patches = tests_matching(root, PATCH)
    functions = [(length, name, m.path) for m in modules for name, length in m.functions]
    rows = [
        ("class names used twice in one top-level package", len(collisions)),
        ("lines with banned idioms", sum(1 for _ in idiom_lines(root, modules))),
        ("test files that import private modules other than seams", len(private)),
        ("places where tests patch attributes", sum(patches.values())),
        ("constants of time", sum(len(SECONDS.findall(m.source)) for m in modules)),
        ("modules over 500 lines", sum(m.num_lines > 500 for m in modules)),
        ("modules under 60 lines", sum(m.num_lines < 60 for m in modules)),
        ("functions over 60 lines", sum(length > 60 for length, _, _ in functions)),
    ]
    print("\n| count | |\n| --- | --- |")
    for label, number in rows:
        print(f"| {label} | {number:,} |")
    print("\nMost used class names:")
    for (package, name), places in sorted(collisions.items(), key=lambda each: -len(each[1]))[:10]:
        print(f"  {package}.{name}: {len(places)}")
    print("Longest functions:")
    for length, name, path in sorted(functions, reverse=True, key=lambda each: each[0])[:10]:
        print(f"  {path} {name}: {length}")


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the counts of one checkout."""
    parser = argparse.ArgumentParser(prog="python -m perf.readability", description=__doc__)
    parser.add_argument("root", nargs="?", type=Path, default=Path(), help="a checkout")
    root: Path = parser.parse_args(arguments).root
    modules = read_modules(root)
    if not modules:
        print(f"{root} has no folder aioflux/; pass the path of a checkout", file=sys.stderr)
        return 2
    _print_packages(modules)
    _print_counts(root, modules)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
