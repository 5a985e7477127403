"""The wheel in an empty environment: README's first examples, the command, the metadata."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tomllib
import zipfile
from typing import TYPE_CHECKING

import pytest

import aioflux
from tests.examples.test_pages import ROOT, blocks

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.more

README = ROOT / "README.md"
CONSTRAINTS = str(ROOT / "constraints.txt")
INSTALL_SECONDS = 250

RUN = """
import ast, asyncio, inspect, json, os, subprocess, sys
from aioflux.testing import GCSServer

async def wait_for(outcome):
    await outcome

root, command, examples = json.load(sys.stdin)
with GCSServer(buckets=("bucket",)) as server:
    os.environ["STORAGE_EMULATOR_HOST"] = server.url
    names = {"__name__": "page"}
    for code in examples:
        flags = ast.PyCF_ALLOW_TOP_LEVEL_AWAIT
        outcome = eval(compile(code, "README.md", "exec", flags), names)
        if inspect.isawaitable(outcome):
            asyncio.run(wait_for(outcome))
    subprocess.run([command, "ls", "-r", root], check=True)
"""


class Environment:
    """A virtual environment."""

    def __init__(self, folder: Path) -> None:
        self.scripts = folder / "bin"
        self._folder = folder
        subprocess.run([sys.executable, "-m", "venv", folder], check=True)

    def run(self, *arguments: str, given: str = "", status: int = 0) -> str:
        """Run this environment's Python outside of the repository, and return what it prints."""
        ignored = ("PYTHONPATH", "STORAGE_EMULATOR_HOST")
        ended = subprocess.run(
            [self.scripts / "python", *arguments],
            input=given,
            capture_output=True,
            text=True,
            timeout=INSTALL_SECONDS,
            cwd=self._folder,
            env={name: value for name, value in os.environ.items() if name not in ignored},
            check=False,
        )
        assert ended.returncode == status, ended.stdout + ended.stderr
        return ended.stdout + ended.stderr


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel of this repository, built without the packages of this environment."""
    folder = tmp_path_factory.mktemp("wheel")
    build = [sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "-w", str(folder), str(ROOT)]
    pinned = {"PIP_CONSTRAINT": CONSTRAINTS, "PIP_BUILD_CONSTRAINT": CONSTRAINTS}
    subprocess.run(build, check=True, timeout=INSTALL_SECONDS, env=os.environ | pinned)
    (wheel,) = folder.iterdir()
    return wheel


@pytest.fixture(scope="module")
def environment(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Environment:
    """An environment with the wheel and its extra `cli`, and nothing else."""
    environment = Environment(tmp_path_factory.mktemp("environment"))
    requirement = f"aioflux-storage[cli] @ {wheel.as_uri()}"
    environment.run("-m", "pip", "install", "-q", "-c", CONSTRAINTS, requirement)
    return environment


@pytest.mark.parametrize("scheme", ["gs", "file"])
def test_the_first_examples_of_readme_run(
    environment: Environment, scheme: str, tmp_path: Path
) -> None:
    root = "gs://bucket/prefix" if scheme == "gs" else tmp_path.as_uri()
    code = [each.code for each in blocks(README) if each.language == "python"]
    examples = [each.replace("gs://bucket/prefix", root) for each in code[:2]]
    assert "open_writer" in examples[0]
    assert "aioflux.sync" in examples[1]
    command = str(environment.scripts / "aioflux")
    printed = environment.run("-c", RUN, given=json.dumps([root, command, examples]))
    keys = [f"{root}/{name}" for name in ("a.bin", "big.bin", "once.bin")]
    assert printed.splitlines()[-3:] == keys


def test_the_command_of_readme_shows_whose_package_it_is(environment: Environment) -> None:
    (command,) = re.findall(r'^python -c "(.*)"$', README.read_text(encoding="utf-8"), re.MULTILINE)
    assert environment.run("-c", command) == "['aioflux-storage']\n"


def test_the_version_is_that_of_the_package(environment: Environment) -> None:
    code = "import importlib.metadata as m, aioflux; print(m.version('aioflux-storage'))"
    assert environment.run("-c", code) == f"{aioflux.__version__}\n"
    assert environment.run("-m", "aioflux", "--version") == f"aioflux {aioflux.__version__}\n"


def test_a_missing_extra_can_be_installed_as_its_message_says(environment: Environment) -> None:
    """pip takes the installed distribution, also if no index has it."""
    said = environment.run("-c", "import aioflux.integrations.fsspec", status=1)
    (extra,) = re.findall(r"pip install '(.*)'$", said, re.MULTILINE)
    planned = environment.run("-m", "pip", "install", "--dry-run", "-c", CONSTRAINTS, extra)
    assert "Would install fsspec" in planned


def test_the_wheel_has_the_package_and_its_metadata(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
        (metadata,) = (archive.read(each).decode() for each in names if each.endswith("/METADATA"))
    folder = f"aioflux_storage-{aioflux.__version__}.dist-info"
    assert {name.partition("/")[0] for name in names} == {"aioflux", folder}
    assert {"aioflux/py.typed", f"{folder}/licenses/LICENSE"} <= names
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    lines = metadata.splitlines()
    assert {f"Project-URL: {name}, {url}" for name, url in project["urls"].items()} <= {*lines}
    assert len(project["urls"]) >= 4
