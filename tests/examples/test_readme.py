"""What README shows is what happens: its Python blocks run in turn on the embedded server."""

from __future__ import annotations

import ast
import inspect
import re
from pathlib import Path

import pytest

from aioflux.testing import GCSServer

README = Path(__file__).parents[2] / "README.md"
BLOCKS = re.findall(
    r"^```python\n(.*?)^```", README.read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE
)


@pytest.fixture(scope="module")
def namespace():
    """What the blocks define; the later ones go on with it, as a reader would."""
    return {"__name__": "readme"}


@pytest.fixture(scope="module")
def server():
    """A server for all the blocks, so that one finds what another wrote."""
    with GCSServer(buckets=("bucket",)) as running:
        yield running


def test_readme_has_examples():
    """Were the blocks not found, the test below would prove nothing."""
    assert len(BLOCKS) >= 5


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")  # of DCP, in one process
@pytest.mark.parametrize("block", BLOCKS, ids=range(len(BLOCKS)))
async def test_a_block_of_readme_runs(block, namespace, server, monkeypatch):
    """A block runs as it stands, with top-level await as in a notebook."""
    monkeypatch.setenv("STORAGE_EMULATOR_HOST", server.url)
    code = compile(block, "README.md", "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
    outcome = eval(code, namespace)
    if inspect.isawaitable(outcome):
        await outcome
