"""The demo as its page says: it survives faults and a kill, shows both, and leaves only a page."""

from __future__ import annotations

import importlib.util
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING
from xml.etree import ElementTree

import pytest

if TYPE_CHECKING:
    from types import ModuleType

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "examples" / "demo"
FEW = ("--images", "64", "--epochs", "4")
NUM_STEPS = 8

Start = Callable[..., "subprocess.Popen[str]"]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Start the demo in an empty directory; stop it at the end of the test."""
    with ExitStack() as running:

        def start_demo(*arguments: str) -> subprocess.Popen[str]:
            demo = subprocess.Popen(
                [sys.executable, FOLDER / "demo.py", *arguments],
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
                cwd=tmp_path,
                env={**os.environ, "PYTHONPATH": str(ROOT)},
            )
            running.enter_context(demo)
            running.callback(demo.kill)
            return demo

        yield start_demo


def output_of(demo: subprocess.Popen[str]) -> str:
    output, errors = demo.communicate()
    assert demo.returncode == 0, output + errors
    return output


def check(output: str, num_steps: int) -> None:
    """Check that all losses are equal, and that every fault was injected, counted and survived."""
    assert f"All {num_steps} losses are bit-equal" in output
    counts = re.findall(r"survived: (\d+) x (.*?); (\d+) requests retried,", output)
    assert [(name, int(injected)) for injected, name, _ in counts] == [
        ("response 503", 100),
        ("flipped byte", 2),
        ("stalled body", 2),
    ]
    # A request may still pause before its retry when its fault is over.
    assert sum(int(retried) for _, _, retried in counts) >= 100
    assert output.count(", 0 samples skipped") == 3
    (killed,) = re.findall(r"step +(\d+)  SIGKILL", output)
    (resumed,) = re.findall(r"step +(\d+)  a new process resumes", output)
    assert 0 < int(resumed) <= int(killed) < num_steps
    for client in ("aioflux", "google-cloud-storage"):
        assert re.search(rf"read by {client}: [\d,]+ objects/s", output)


def check_page(path: Path, num_steps: int) -> None:
    """Check that the page is one well-formed file that loads nothing, with all that it shows."""
    text = path.read_text()
    assert not re.search(r"https?:|url\(|@import|<script|<link|<img|\b(src|href)=", text)
    page = ElementTree.fromstring(text)
    charts = page.findall("./body/svg")
    assert [chart.get("class") for chart in charts] == ["wide", "narrow"] * 3
    loss, rate, save = charts[::2]
    (clean,) = loss.findall("path[@class='band']")
    assert clean.get("d", "").count("L") == num_steps - 1
    assert len(loss.findall("path[@class='line']")) == 2  # before and after the kill
    assert len(rate.findall("path[@class='mark fault']")) == 3
    assert all(chart.find("path[@class='mark kill']") is not None for chart in charts)
    num_saves = num_steps // max(1, num_steps // 10)
    # The process may be killed after a commit, and before its entry in the history.
    assert len(save.findall("rect[@class='bar']")) in {num_saves, num_saves - 1}
    rows = {row[0].text: row[1].text or "" for row in page.iter("tr")}
    assert rows["Losses"].startswith(f"All {num_steps} losses are bit-equal")
    assert " ms (median), " in rows["A save blocked the training"]


def test_few_images(start: Start, tmp_path: Path) -> None:
    check(output_of(start(*FEW)), NUM_STEPS)
    check_page(tmp_path / "demo.html", NUM_STEPS)
    assert [path.name for path in tmp_path.iterdir()] == ["demo.html"]


@pytest.mark.more
def test_complete(start: Start, tmp_path: Path) -> None:
    output = output_of(start())
    check(output, 100)
    check_page(tmp_path / "demo.html", 100)
    assert f"The page with all results: {tmp_path / 'demo.html'}\n" in output


@pytest.mark.more
def test_two_at_once_in_one_directory(start: Start, tmp_path: Path) -> None:
    for demo in [start(*FEW), start(*FEW)]:
        check(output_of(demo), NUM_STEPS)
    check_page(tmp_path / "demo.html", NUM_STEPS)
    assert [path.name for path in tmp_path.iterdir()] == ["demo.html"]


@pytest.mark.more
@pytest.mark.parametrize(
    ("number", "status"),
    [(signal.SIGINT, 130), (signal.SIGTERM, -signal.SIGTERM), (signal.SIGKILL, -signal.SIGKILL)],
    ids=["Ctrl-C", "SIGTERM", "SIGKILL"],
)
def test_no_process_outlives_the_demo(
    start: Start, tmp_path: Path, number: int, status: int
) -> None:
    demo = start(*FEW)
    assert demo.stdout is not None
    assert any("training without faults" in line for line in demo.stdout)
    demo.send_signal(number)
    _, errors = demo.communicate()  # until no process has its standard error
    assert (demo.returncode, errors) == (status, "")
    assert not list(tmp_path.iterdir())


@pytest.fixture(scope="module")
def page() -> ModuleType:
    spec = importlib.util.spec_from_file_location("demo_page", FOLDER / "page.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # for dataclasses
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize(
    ("steps", "is_equal"),
    [
        ([(1, 1.5), (2, 1.25)], True),
        ([(1, 1.5), (2, 1.25), (2, 1.25)], True),
        ([(1, 1.5), (2, 1.2500000000000002)], False),
        ([(1, 1.5), (2, 1.3), (2, 1.25)], False),
        ([(1, 1.5)], False),
        ([(2, 1.25)], False),
    ],
    ids=["same", "repeated", "last bit", "before the kill", "ends early", "starts late"],
)
def test_losses_are_compared_bit_by_bit(
    page: ModuleType, steps: list[tuple[int, float]], *, is_equal: bool
) -> None:
    results = page.Results(num_images=8, num_epochs=2, batch_size=8)
    results.clean = [{"step": 1, "loss": 1.5}, {"step": 2, "loss": 1.25}, {"saved": 2}]
    results.faulty = [{"resumed": 0}, *({"step": step, "loss": loss} for step, loss in steps)]
    assert results.is_equal is is_equal
    assert ("DIFFER" in results.verdict) is not is_equal
