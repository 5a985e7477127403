"""The notebook runs from top to bottom in a kernel, and shows what it says on its page."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import nbformat
import pytest
from nbclient import NotebookClient

ROOT = Path(__file__).parents[2]
NOTEBOOK = ROOT / "examples" / "notebook" / "walkthrough.ipynb"


def texts(notebook: Any) -> list[str]:
    """What each code cell shows, without pictures; a kernel may cut it anywhere."""
    cells = [cell for cell in notebook.cells if cell.cell_type == "code"]
    return [
        "".join(output.get("text") or output["data"]["text/plain"] for output in cell.outputs)
        for cell in cells
    ]


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where the kernel runs, and keeps what it writes."""
    monkeypatch.delenv("STORAGE_EMULATOR_HOST", raising=False)
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    for name in ("JUPYTER_RUNTIME_DIR", "JUPYTER_CONFIG_DIR", "IPYTHONDIR"):
        monkeypatch.setenv(name, str(tmp_path))
    return tmp_path


def test_every_cell_runs_and_shows_what_is_on_the_page(place: Path) -> None:
    page = nbformat.read(NOTEBOOK, as_version=4)
    shown = texts(page)
    assert any(shown)
    for cell in page.cells:
        cell.pop("outputs", None)
    executed = NotebookClient(page, timeout=100, resources={"metadata": {"path": place}}).execute()
    assert texts(executed) == shown
