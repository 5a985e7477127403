"""The fixtures of the package, in pytest processes of their own."""

from __future__ import annotations

import subprocess
import sys
import tomllib
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path

ROOT = Path(__file__).parents[2]
PLUGIN = "aioflux.testing.pytest_plugin"

TESTS = """
import os
import aioflux


def test_a_blocking_store(store, gcs_server):
    store.put("a.bin", b"hello")
    bucket = store.uri.removeprefix("gs://").rstrip("/")
    assert gcs_server.keys(bucket) == ["a.bin"]
    with aioflux.sync.open_store(store.uri) as other:  # as the code under test opens it
        assert other.get("a.bin") == b"hello"
    gcs_server.faults.add("objects.*", status=403)


def test_the_next_bucket_is_empty_and_has_no_faults(store):
    assert list(store.list_all()) == []


async def test_an_asynchronous_store_of_the_same_bucket(async_store, store):
    store.put("a.bin", b"hello")
    async with async_store as opened:
        assert await opened.get("a.bin") == b"hello"


def test_the_environment_is_restored():
    assert "STORAGE_EMULATOR_HOST" not in os.environ
"""

OWN_FIXTURE = """
import pytest


@pytest.fixture
def store():
    return "mine"


def test_a_fixture_of_the_suite_comes_first(store):
    assert store == "mine"
"""

NOT_USED = """
import sys


def test_nothing_is_loaded():
    assert "aioflux.testing.pytest_plugin" in sys.modules
    assert not {"aioflux.store", "asyncio.events", "torch", "uvloop", "aiohttp"} & {*sys.modules}
"""


def run_pytest(directory: Path, code: str, *arguments: str) -> str:
    """Run tests with the plugin, without the settings of this repository; return the output."""
    (directory / "test_it.py").write_text(code)
    is_installed = "aioflux" in entry_points(group="pytest11").names
    plugins = ["-pno:cacheprovider", *([] if is_installed else [f"-p{PLUGIN}"])]
    command = [sys.executable, "-m", "pytest", "-q", *plugins, *arguments]
    ended = subprocess.run(
        [*command, "--rootdir", str(directory), str(directory)],
        capture_output=True,
        text=True,
        check=False,
        cwd=ROOT,
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    return ended.stdout


def test_the_fixtures_work(tmp_path: Path) -> None:
    settings = "asyncio_mode = auto\nasyncio_default_fixture_loop_scope = function\n"
    (tmp_path / "pytest.ini").write_text(f"[pytest]\n{settings}filterwarnings = error\n")
    assert "4 passed" in run_pytest(tmp_path, TESTS)


def test_the_fixtures_of_a_suite_come_first(tmp_path: Path) -> None:
    assert "1 passed" in run_pytest(tmp_path, OWN_FIXTURE)


def test_a_suite_without_the_fixtures_loads_no_store(tmp_path: Path) -> None:
    others = [
        f"-pno:{name}" for name in ("asyncio", "anyio", "zarr", "cov", "xdist", "hypothesispytest")
    ]
    assert "1 passed" in run_pytest(tmp_path, NOT_USED, *others)


def test_the_entry_point_names_the_plugin() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    ((name, module),) = project["entry-points"]["pytest11"].items()
    assert (name, module) == ("aioflux", PLUGIN)
    assert EntryPoint(name, module, "pytest11").load().__name__ == PLUGIN
