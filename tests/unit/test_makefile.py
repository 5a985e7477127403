"""Each Python has an environment of its own, and each package has fast tests."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
VERSION = "{}.{}".format(*sys.version_info)


def make(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = ["make", "--no-print-directory", *arguments]
    # `make test VENV=...` passes its variables on to each make below it.
    environment = {name: value for name, value in os.environ.items() if "MAKE" not in name}
    return subprocess.run(
        command,
        cwd=ROOT,
        env={name: each for name, each in environment.items() if name not in {"PYTHON", "VENV"}},
        capture_output=True,
        text=True,
        check=False,
    )


def test_each_package_has_fast_tests() -> None:
    printed = make("--dry-run", "quick").stdout
    named = [Path(word.partition("::")[0]) for word in printed.split() if word.startswith("tests/")]
    assert [path for path in named if not (ROOT / path).exists()] == []
    packages = {path.relative_to(ROOT).parts[1] for path in (ROOT / "tests").rglob("test_*.py")}
    slow = {"azure", "examples", "packaging"}
    assert packages - {path.parts[1] for path in named} == slow


def test_another_python_uses_another_folder() -> None:
    printed = make("--dry-run", "lint", f"PYTHON={sys.executable}").stdout
    assert f".venv-{VERSION}/bin/mypy" in printed


def test_the_folder_can_be_chosen(tmp_path: Path) -> None:
    printed = make("--dry-run", "lint", f"VENV={tmp_path}").stdout
    assert f"{tmp_path}/bin/mypy" in printed


def test_a_folder_with_another_python_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "pyvenv.cfg").write_text("home = /usr/bin\nversion = 3.10.13\n")
    ended = make("check-python", f"VENV={tmp_path}", f"PYTHON={sys.executable}")
    assert ended.returncode != 0
    assert (
        f"{tmp_path} has another Python than {sys.executable}, which is {VERSION}" in ended.stderr
    )


def test_a_folder_with_the_same_python_is_none(tmp_path: Path) -> None:
    (tmp_path / "pyvenv.cfg").write_text(f"home = /usr/bin\nversion = {VERSION}.99\n")
    ended = make("check-python", f"VENV={tmp_path}", f"PYTHON={sys.executable}")
    assert (ended.returncode, ended.stderr) == (0, "")


def test_a_python_that_does_not_run_is_an_error() -> None:
    ended = make("check-python", "PYTHON=python9.9")
    assert ended.returncode != 0
    assert "python9.9 does not run" in ended.stderr
