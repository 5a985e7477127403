"""The code of README.md and of each page in docs/ runs as it is written.

The blocks of a page run in order. `python` blocks share one namespace and may use `await`, as in a
notebook. A `python` block with a title is written to the file of this name, which later blocks run.
Of a `console` block the lines after `$` run in the shell, and their output is compared with the
lines below; `...` stands for any text. If one of these lines is `^C` or `Killed`, the command
receives SIGINT or SIGKILL as soon as it has printed the line above. Each page has a server and a
working directory of its own.
"""

from __future__ import annotations

import ast
import asyncio
import doctest
import inspect
import os
import re
import signal
import subprocess
import sys
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from aioflux.testing import GCSServer
from tests.servers.azurite import ACCOUNT, Azurite
from tests.servers.seaweedfs import SeaweedFS

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from contextlib import AbstractContextManager

ROOT = Path(__file__).parents[2]
PAGES = (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")))
FENCED = re.compile(r'^```(\w*)(?: title="([^"]+)")?\n(.*?)^```$', re.DOTALL | re.MULTILINE)
SIGNALS = {"^C": signal.SIGINT, "Killed": signal.SIGKILL}
"""Signals by the line of a terminal that shows them."""
SIGNALLED = re.compile(r"^(?P<line>.*)\n(?P<signal>\^C|Killed)\n", re.MULTILINE)
LINK = re.compile(r"\]\((?!https?:)([^)#]*)(#[^)]*)?\)")
RUN = ("python", "console")
SHOWN_ONLY = ("", "sh")
"""Languages of blocks that are not run: commands that install or take minutes, and drawings."""
WARNINGS = {
    "datasets.md": ("ignore:'set_vital' is deprecated",),  # torchdata's call of torch
    "fsspec.md": (
        "ignore:The inplace keyword in DataFrame",  # dask's call of pandas
        "ignore::pytest.PytestUnraisableExceptionWarning",  # blockcache of fsspec
        "ignore:unclosed file:ResourceWarning",
    ),
    "lightning.md": (
        "ignore:`isinstance.treespec, LeafSpec.` is deprecated:FutureWarning",
        "ignore:Checkpoint directory .* exists and is not empty",
        "ignore:The '.*dataloader.*' does not have many workers",
    ),
    "ray.md": ("ignore",),
}
EVERYWHERE = ("ignore:torch.distributed is disabled",)  # DCP in one process


@dataclass(frozen=True)
class Block:
    """One block of code of a page."""

    page: Path
    number: int
    language: str
    title: str
    """Name of the file that contains the code; empty if the block is run."""
    code: str


def blocks(page: Path) -> list[Block]:
    """Return the blocks of a page, in order."""
    found = FENCED.findall(page.read_text(encoding="utf-8"))
    return [Block(page, number, *each) for number, each in enumerate(found, 1)]


# --- servers, one for each page ---------------


@contextmanager
def gcs(patch: pytest.MonkeyPatch) -> Iterator[dict[str, str]]:
    """Serve `gs://bucket`."""
    with GCSServer(buckets=("bucket",)) as server:
        patch.setenv("STORAGE_EMULATOR_HOST", server.url)
        yield {}


@contextmanager
def s3(patch: pytest.MonkeyPatch) -> Iterator[dict[str, str]]:
    """Serve `s3://bucket`, and `s3://public` to everyone."""
    with SeaweedFS() as server:
        server.sign_in(patch)
        yield {"http://127.0.0.1:9000": server.url}


@contextmanager
def azure(patch: pytest.MonkeyPatch) -> Iterator[dict[str, str]]:
    """Serve `az://account/container`; the emulator's account has another name."""
    with Azurite(containers=("container",)) as server:
        patch.setenv(
            "AZURE_STORAGE_CONNECTION_STRING",
            f"AccountName={ACCOUNT};AccountKey={server.key};BlobEndpoint={server.url}/{ACCOUNT}",
        )
        yield {"az://account/": f"az://{ACCOUNT}/"}


SERVERS: dict[str, Callable[[pytest.MonkeyPatch], AbstractContextManager[dict[str, str]]]] = {
    "azure.md": azure,
    "s3.md": s3,
}
"""The server of a page if it is not `gcs`, and then of another project. Each yields replacements of
texts in the code."""


def cases() -> list[Any]:
    """Return each block that is run."""
    return [
        pytest.param(
            block,
            id=f"{block.page.stem}-{block.number}",
            marks=[
                pytest.mark.filterwarnings(text)
                for text in (*EVERYWHERE, *WARNINGS.get(block.page.name, ()))
            ]
            + [pytest.mark.more] * (block.page.name in {*SERVERS, "ray.md"}),
        )
        for page in PAGES
        for block in blocks(page)
        if block.language in RUN
    ]


# --- what else a page needs -------------------


@contextmanager
def fsspec_caches(patch: pytest.MonkeyPatch, directory: Path) -> Iterator[dict[str, Any]]:
    """Keep caches of libraries below a directory, and close the connections of filesystems."""
    patch.setenv("HF_HOME", str(directory / "hf"))
    patch.setenv("HF_UPDATE_DOWNLOAD_COUNTS", "0")
    import datasets
    import zarr

    from aioflux.integrations.fsspec import GSFileSystem

    patch.setattr(datasets.config, "HF_DATASETS_CACHE", directory / "datasets")
    GSFileSystem.clear_instance_cache()
    yield {}
    for system in GSFileSystem._cache.values():
        zarr.core.sync.sync(system.aclose())  # connections on the loop of zarr
    GSFileSystem.clear_instance_cache()
    assert os.listdir() == []  # nothing was taken for a local path


@contextmanager
def deepspeed_engine(patch: pytest.MonkeyPatch, directory: Path) -> Iterator[dict[str, Any]]:
    """Provide `engine`, which calls a checkpoint engine as DeepSpeed does."""
    from tests.integrations.deepspeed.fake_engine import Engine

    engine = Engine()
    yield {"engine": engine}
    engine.checkpoint_engine.cleanup()


@contextmanager
def nebula_node(patch: pytest.MonkeyPatch, directory: Path) -> Iterator[dict[str, Any]]:
    """Let the processes of Nebula meet in a directory of the page's own."""
    import tempfile

    with tempfile.TemporaryDirectory(prefix="nm-", ignore_cleanup_errors=True) as meeting:
        patch.setenv("AIOFLUX_NEBULA_DIR", meeting)
        yield {}


@contextmanager
def ray_node(patch: pytest.MonkeyPatch, directory: Path) -> Iterator[dict[str, Any]]:
    """Run one node of Ray, whose processes know the server of the page."""
    from tests.integrations.ray.cluster import local_node

    with local_node():
        yield {}


NEEDS: dict[str, Callable[[pytest.MonkeyPatch, Path], AbstractContextManager[dict[str, Any]]]] = {
    "deepspeed.md": deepspeed_engine,
    "fsspec.md": fsspec_caches,
    "coming-from.md": nebula_node,
    "ray.md": ray_node,
}
"""Requirements of a page besides its server. Each yields names that the code may use."""


class OpenPage:
    """The page whose blocks run, with its server; opening another one closes it."""

    def __init__(self, directory: Callable[[str], Path]) -> None:
        self.namespace: dict[str, Any] = {}
        self._directory = directory
        self._path: Path | None = None
        self._replacements: dict[str, str] = {}
        self._stack = ExitStack()

    def open(self, path: Path) -> None:
        if path == self._path:
            return
        self.close()
        self._path = path
        enter = self._stack.enter_context
        patch = enter(pytest.MonkeyPatch.context())
        self._replacements = enter(SERVERS.get(path.name, gcs)(patch))
        patch.chdir(self._directory("work"))
        patch.setenv("PATH", f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")
        need = NEEDS.get(path.name, lambda *_: nullcontext({}))
        self.namespace = {"__name__": "page", **enter(need(patch, self._directory("caches")))}

    def close(self) -> None:
        self._path = None
        self.namespace = {}
        self._stack.close()

    def source(self, block: Block) -> str:
        """Return the code of a block, with the addresses of this page's server."""
        code = block.code
        for old, new in self._replacements.items():
            code = code.replace(old, new)
        return code


@pytest.fixture(scope="module")
def open_page(tmp_path_factory: pytest.TempPathFactory) -> Iterator[OpenPage]:
    page = OpenPage(tmp_path_factory.mktemp)
    yield page
    page.close()


# --- tests ------------------------------------


@pytest.mark.parametrize("block", cases())
def test_a_block_runs(open_page: OpenPage, block: Block) -> None:
    open_page.open(block.page)
    source = open_page.source(block)
    if block.title:
        Path(block.title).write_text(source, encoding="utf-8")
    elif block.language == "console":
        run_commands(source)
    else:
        run_python(source, block.page.name, open_page.namespace)


def run_python(source: str, name: str, namespace: dict[str, Any]) -> None:
    code = compile(source, name, "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
    outcome = eval(code, namespace)
    if inspect.isawaitable(outcome):
        asyncio.run(awaited(outcome))


async def awaited(outcome: Any) -> None:
    await outcome


def run_commands(source: str) -> None:
    """Run each command, and compare its output with the lines below it if there are any."""
    for text in re.split(r"^\$ ", source, flags=re.MULTILINE)[1:]:
        command, _, expected = text.partition("\n")
        shell = ["bash", "-c", command]
        if found := SIGNALLED.search(expected):
            expected = expected[found.end() :]
            printed = run_with_signal(shell, found["line"], SIGNALS[found["signal"]])
        else:
            ran = subprocess.run(shell, capture_output=True, text=True, check=False)
            assert ran.returncode == 0, ran.stderr
            printed = ran.stdout
        assert not expected or is_match(expected, printed), f"{command}\n{printed}"


def is_match(expected: str, printed: str) -> bool:
    options = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE
    return doctest.OutputChecker().check_output(expected, printed, options)


def run_with_signal(shell: list[str], line: str, number: signal.Signals) -> str:
    """Send a signal to a command after it has printed a line; return its output after that."""
    with subprocess.Popen(
        shell, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, process_group=0
    ) as process:
        assert process.stdout is not None
        found = any(is_match(f"{line}\n", each) for each in iter(process.stdout.readline, ""))
        os.killpg(process.pid, number)
        printed, errors = process.communicate()
        assert found, errors
    return printed


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_each_block_is_run_or_never_run(page: Path) -> None:
    """No block is left out because its language is misspelled."""
    assert {block.language for block in blocks(page)} <= {*RUN, *SHOWN_ONLY}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_to_files_and_headings(page: Path) -> None:
    wrong = []
    for target, heading in LINK.findall(page.read_text(encoding="utf-8")):
        path = (page.parent / target).resolve() if target else page
        if not path.exists() or (heading and heading[1:] not in anchors(path)):
            wrong.append(target + heading)
    assert wrong == []


def anchors(path: Path) -> set[str]:
    """Return the anchors of a page's headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.*)$", path.read_text(encoding="utf-8"), re.MULTILINE)
    return {
        re.sub(r"[^\w\- ]", "", heading.lower()).strip().replace(" ", "-") for heading in headings
    }


def test_the_contents_list_every_page() -> None:
    contents = (ROOT / "docs" / "README.md").read_text(encoding="utf-8")
    listed = {target for target, _ in LINK.findall(contents)}
    assert {page.name for page in (ROOT / "docs").glob("*.md")} - {"README.md"} <= listed


def test_readme_is_short() -> None:
    assert len((ROOT / "README.md").read_text(encoding="utf-8").splitlines()) <= 200
