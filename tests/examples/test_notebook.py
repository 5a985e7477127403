"""The notebook runs from top to bottom in a kernel, and shows what it says on its page."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import nbformat
import pytest
from nbclient import NotebookClient
from traitlets.config import Config

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = pytest.mark.more

ROOT = Path(__file__).parents[2]
NOTEBOOK = ROOT / "examples" / "notebook" / "walkthrough.ipynb"


def texts(notebook: Any) -> list[str]:
    """What each code cell shows, without pictures; a kernel may cut it anywhere."""
    cells = [cell for cell in notebook.cells if cell.cell_type == "code"]
    return [
        "".join(output.get("text") or output["data"]["text/plain"] for output in cell.outputs)
        for cell in cells
    ]


FAR_SECONDS = 250
"""By when a cell has run, a kernel has begun, and what it said has arrived."""


@pytest.fixture
def sockets() -> Iterator[str]:
    """Where the kernel listens: at no port, which could be another's by then."""
    with tempfile.TemporaryDirectory(prefix="nb-") as directory:  # such paths have to be short
        yield f"{directory}/kernel"


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where the kernel runs, and keeps what it writes."""
    monkeypatch.delenv("STORAGE_EMULATOR_HOST", raising=False)
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    for name in ("JUPYTER_RUNTIME_DIR", "JUPYTER_CONFIG_DIR", "IPYTHONDIR"):
        monkeypatch.setenv(name, str(tmp_path))
    return tmp_path


def test_every_cell_runs_and_shows_what_is_on_the_page(place: Path, sockets: str) -> None:
    page = nbformat.read(NOTEBOOK, as_version=4)
    shown = texts(page)
    assert any(shown)
    for cell in page.cells:
        cell.pop("outputs", None)
    client = NotebookClient(
        page,
        timeout=FAR_SECONDS,
        startup_timeout=FAR_SECONDS,
        iopub_timeout=FAR_SECONDS,
        raise_on_iopub_timeout=True,
        resources={"metadata": {"path": place}},
        config=Config({"KernelManager": {"transport": "ipc", "ip": sockets}}),
    )
    assert texts(client.execute()) == shown
