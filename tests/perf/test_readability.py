from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from perf.readability import class_collisions, idiom_lines, main, private_imports, read_modules

if TYPE_CHECKING:
    from pathlib import Path

SOURCE = '''"""A module.

Tell whether it has two lines of docstring.
"""

LIMIT = 3
"""A constant."""


class _Place:
    # A comment is no code.
    value: int = LIMIT


class Place:
    pass
'''


@pytest.fixture
def root(tmp_path: Path) -> Path:
    (tmp_path / "aioflux" / "_http").mkdir(parents=True)
    (tmp_path / "aioflux" / "_http" / "pool.py").write_text(SOURCE, encoding="utf-8")
    return tmp_path


def test_lines_are_code_or_docstring_or_neither(root: Path) -> None:
    (module,) = read_modules(root)
    assert (module.num_lines, module.num_docstring_lines, module.num_code_lines) == (16, 5, 5)


def test_class_names_collide_within_a_package_whatever_their_underscores(root: Path) -> None:
    (module,) = read_modules(root)
    assert list(class_collisions([module])) == [("_http", "Place")]


def test_lines_with_idioms_are_found_with_their_place(root: Path) -> None:
    assert list(idiom_lines(root, read_modules(root))) == ["aioflux/_http/pool.py:3"]


def test_seams_and_public_names_may_be_imported_by_tests(root: Path) -> None:
    (root / "Makefile").write_text(
        "PURE := $(addprefix aioflux/,_http/codec.py \\\n\t_values/uri.py)\n", encoding="utf-8"
    )
    (root / "aioflux" / "_http" / "connection.py").touch()
    tests = root / "tests"
    tests.mkdir()
    for name, line in {
        "public": "from aioflux.errors import StorageError",
        "pure": "from aioflux._values.uri import parse_uri",
        "pool": "from aioflux._http import Pool",
        "seam": "from aioflux._services.base import Service",
        "module": "from aioflux._http import pool, connection",
        "private": "from aioflux._transfer.session import Session",
        "package": "import aioflux._http.connection",
        "name": "from aioflux.errors import _quoted",
    }.items():
        (tests / f"test_{name}.py").write_text(f"{line}\n", encoding="utf-8")
    assert {path.stem for path in private_imports(root)} == {
        "test_module",
        "test_private",
        "test_package",
        "test_name",
    }


def test_a_folder_without_the_package_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([str(tmp_path)]) == 2
    assert "has no folder aioflux/" in capsys.readouterr().err


def test_a_checkout_is_counted(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(root)]) == 0
    assert "| **all** | 1 | 16 | 5 | 5 |" in capsys.readouterr().out
