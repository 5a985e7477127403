"""The text stream as its page says: each document arrives once, and tokens lose nothing."""

from __future__ import annotations

import importlib.util
import math
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from types import ModuleType

pytestmark = pytest.mark.more

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "examples" / "text_stream" / "text_stream.py"


def run() -> str:
    environment = {
        key: value for key, value in os.environ.items() if key != "STORAGE_EMULATOR_HOST"
    }
    done = subprocess.run(
        [sys.executable, SCRIPT],
        capture_output=True,
        text=True,
        env={**environment, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert not done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def example() -> ModuleType:
    spec = importlib.util.spec_from_file_location("text_stream", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_it_streams_each_document_once_an_epoch(example: ModuleType) -> None:
    said = run()
    texts = [text for shard in range(example.NUM_SHARDS) for text in example.made_documents(shard)]
    tokeniser = example.Tokeniser.learned(example.made_documents(0))
    num_tokens = sum(len(tokeniser.encode(text)) + 1 for text in texts)
    counts = f"{len(texts):,}", f"{num_tokens:,}"
    streamed = re.findall(r"epoch (\d),.* ([\d,]+) documents +([\d,]+) tokens", said)
    assert streamed == [("0", *counts), ("1", *counts)]
    assert len(re.findall(r"[\d,]+ tokens/s$", said, re.MULTILINE)) == 2


def test_it_leaves_nothing_in_another_place(
    example: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(example, "NUM_SHARDS", 1)
    monkeypatch.setattr(example, "GOAL", math.inf)
    monkeypatch.setattr(sys, "argv", ["text_stream.py", "--uri", f"file://{tmp_path}"])
    example.main()
    assert not any(path.is_file() for path in tmp_path.rglob("*"))


@pytest.mark.parametrize(
    "text", ["", "The chido gruvus a dofe.", "  two\nlines\t", "Ünïcödé \N{SNOWMAN}, and 42 more"]
)
def test_text_comes_back_from_its_tokens(example: ModuleType, text: str) -> None:
    tokeniser = example.Tokeniser.learned(example.made_documents(0))
    assert tokeniser.decode(tokeniser.encode(text)) == text


@pytest.mark.parametrize("lengths", [[1], [63], [64], [65], [1, 2, 3], [200, 1, 64]])
def test_packed_rows_hold_all_tokens_in_order(example: ModuleType, lengths: list[int]) -> None:
    documents: list[Any] = [[number + 1] * length for number, length in enumerate(lengths)]
    rows, num_documents, num_tokens = example.pack(documents)
    predicted = rows[:, 1:].flatten().tolist()
    tokens = [token for document in documents for token in document]
    assert predicted[: len(tokens)] == tokens
    assert not any(predicted[len(tokens) :])
    assert (num_documents, num_tokens) == (len(documents), len(tokens))
    assert len(predicted) - len(tokens) < example.ROW_TOKENS
