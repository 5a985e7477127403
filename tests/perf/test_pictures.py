"""The pictures of `docs/images`: bars from kept results, and the committed files."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any
from xml.etree import ElementTree as ET

import pytest

from aioflux.data._sharding import Reader, shard
from aioflux.data._shuffle import permutation
from perf.pictures import (
    PICTURES,
    STYLE,
    Group,
    bars_of,
    cpu_table,
    draw,
    kept,
    rate_table,
    read_results,
)

ROOT = Path(__file__).parents[2]
IMAGES = ROOT / "docs" / "images"
GROUP = Group("get-1KiB", "get_many", {"obstore": "obstore", "google": "google <1>"})
HEADER = {"command": "", "machine": {"cpu": "a", "num_cores": 2}, "commit": "1234567890"}


def run(
    day: int, *pairs: tuple[float, float], match: str = "obstore", **header: Any
) -> list[dict[str, Any]]:
    """Return the lines of one run; a pair has the rates of aioflux and of the other client."""
    lines: list[dict[str, Any]] = [{**HEADER, **header}]
    for index, pair in enumerate(((1e9, 1.0), *pairs)):
        for side, rate in zip(("ours", "theirs"), pair, strict=True):
            names = ("cpu_seconds", "server_cpu_seconds", "num_bytes", "idle_bytes", "peak_bytes")
            result = {**dict.fromkeys(names, 0), "seconds": 1.0, "num_objects": rate}
            line = {"scenario": "get-1KiB", "case": "", "match": match, "side": side}
            line |= {"pair": index, "is_warm_up": index == 0, "result": result if rate else None}
            lines.append({**line, "time": f"2026-11-{day:02}T00:00:00+0000"})
    return lines


def test_a_share_is_the_median_over_the_pairs_without_the_warm_up() -> None:
    ours, theirs = bars_of(GROUP, kept(run(1, (100, 50), (300, 60), (120, 30))))
    assert (ours.client, ours.rate, ours.share) == ("aioflux", 120, 1)
    assert (theirs.client, theirs.rate, theirs.share) == ("obstore", 50, 0.25)
    assert theirs.spread == (0.2, 0.5)


def test_a_picture_names_days_machine_and_commits() -> None:
    lines = run(2, (100, 50)) + run(1, (100, 50), match="google", is_dirty=True)
    text = draw("t", [GROUP], kept(lines))
    assert "1 November 2026 to 2 November 2026; a, 2 cores" in text
    assert "commit 12345678, 12345678-dirty" in text
    assert "in objects/s: aioflux 100, obstore 50, google &lt;1&gt; 50." in text


@pytest.mark.parametrize("name", PICTURES)
def test_the_committed_picture_is_drawn_from_the_kept_results(name: str) -> None:
    """If this fails, run `python -m perf.pictures`."""
    assert (IMAGES / name).read_text(encoding="utf-8") == draw(*PICTURES[name], read_results())


@pytest.mark.parametrize(
    ("page", "table"), [("README.md", rate_table), ("docs/performance.md", cpu_table)]
)
def test_the_table_of_a_page_is_made_from_the_kept_results(page: str, table: Any) -> None:
    """If this fails, copy the table that `python -m perf.pictures` prints."""
    assert table(read_results()) in (ROOT / page).read_text(encoding="utf-8")


@pytest.mark.parametrize("path", sorted(IMAGES.glob("*.svg")), ids=lambda path: path.name)
def test_pictures_look_alike_and_have_a_text(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    title, description = ET.fromstring(text)[:2]
    assert STYLE in text and title.text and description.text  # noqa: PT018


def test_the_picture_of_an_epoch_shows_the_shares_of_the_code() -> None:
    text = (IMAGES / "epoch.svg").read_text(encoding="utf-8")
    order = permutation(9, seed=0, epoch=0).tolist()
    shares = re.findall(r"rank (\d), worker (\d): ([A-I ]+)", text)
    assert len(shares) == 4
    for rank, worker, letters in shares:
        indices = shard(9, Reader(int(rank), 2, int(worker), 2), tail="pad").tolist()
        assert letters == " ".join("ABCDEFGHI"[order[index % 9]] for index in indices)
