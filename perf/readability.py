"""Counts of what makes the code hard to read: `python -m perf.readability [ROOT]`.

Prints one table for a checkout: size per package, class names that a top-level package uses twice,
idioms that the style guide bans, tests that depend on private names, and the longest modules and
functions. Two checkouts are compared by running it on each; nothing is imported or executed.
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
"""Wording that the style guide replaces by the field's terms."""

SEAMS: Final = frozenset(
    {"aioflux._services.base", "aioflux._http", "aioflux._http.pool", "aioflux._http.request"}
)
"""Private modules that tests may import, beside the pure ones."""
PURE: Final = re.compile(r"^PURE := \$\(addprefix aioflux/,(.*?)\)$", re.MULTILINE | re.DOTALL)
"""The pure modules, in the Makefile."""
PATCH: Final = re.compile(r"monkeypatch\.setattr\(|mock\.patch|patch\.object\(")
SECONDS: Final = re.compile(r"^_?[A-Z][A-Z0-9_]*SECONDS\b", re.MULTILINE)


@dataclass
class Module:
    """One source file and what was counted in it."""

    path: Path
    source: str
    tree: ast.Module
    package: str
    """First part of the dotted path below `aioflux`; the module itself for those at the top."""
    num_lines: int = 0
    num_docstring_lines: int = 0
    num_code_lines: int = 0
    functions: list[tuple[str, int]] = field(default_factory=list)


def read_modules(root: Path) -> list[Module]:
    """Read every module of the package below a checkout.

    Args:
        root: The checkout: the folder that holds `aioflux/`.
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
    """Count the lines of one module: all, those of docstrings, and those that hold code."""
    lines = module.source.splitlines()
    docstring_lines: set[int] = set()
    for node in ast.walk(module.tree):
        body = getattr(node, "body", None)
        if isinstance(body, list):
            # A string that is an expression documents what it follows: a field, a constant.
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
    """Return the class names that one top-level package uses twice, underscores aside."""
    places: dict[tuple[str, str], list[str]] = defaultdict(list)
    for module in modules:
        for node in ast.walk(module.tree):
            if isinstance(node, ast.ClassDef):
                key = (module.package, node.name.lstrip("_"))
                places[key].append(f"{module.path}:{node.lineno}")
    return {key: found for key, found in places.items() if len(found) > 1}


def idiom_lines(root: Path, modules: Sequence[Module]) -> Iterator[str]:
    """Yield each line of the package, the README and the documents that holds a banned idiom."""
    texts = [(module.path, module.source) for module in modules]
    documents = (*root.glob("README.md"), *sorted((root / "docs").rglob("*.md")))
    texts += [(path.relative_to(root), path.read_text(encoding="utf-8")) for path in documents]
    for path, source in texts:
        for number, text in enumerate(source.splitlines(), 1):
            if IDIOMS.search(text):
                yield f"{path}:{number}"


def tests_matching(root: Path, pattern: re.Pattern[str]) -> dict[Path, int]:
    """Return the test files that match a pattern, and how often."""
    found = {}
    for path in sorted((root / "tests").rglob("*.py")):
        if number := len(pattern.findall(path.read_text(encoding="utf-8"))):
            found[path.relative_to(root)] = number
    return found


def private_imports(root: Path) -> dict[Path, set[str]]:
    """Return the test files that import private modules or names other than seams, and which."""
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
        print(f"{root} holds no aioflux/; name a checkout", file=sys.stderr)
        return 2
    _print_packages(modules)
    _print_counts(root, modules)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
