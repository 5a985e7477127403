"""`python -m perf.pictures`: the pictures of `docs/images`, from the results of record.

Of each match the newest run in `perf/results` counts. The bars of a group are rates; a client
without a kept result has no bar. Also prints the tables of README and of `docs/performance.md`.
"""

from __future__ import annotations

import json
import math
import statistics
from datetime import datetime
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from perf._samples import Result, ratio_of
from perf.scenarios import SCENARIOS

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

__all__ = [
    "PICTURES",
    "STYLE",
    "Group",
    "bars_of",
    "cpu_table",
    "draw",
    "kept",
    "rate_table",
    "read_results",
]

ROOT = Path(__file__).parents[1]
_WIDTH, _LABEL_END, _BAR_START, _BAR_WIDTH = 440, 150, 156, 200
STYLE = """<style>
text { font: 14px system-ui, -apple-system, "Segoe UI", sans-serif; fill: #1f2328; }
.heading { font-weight: 600; }
.note { font-size: 13px; fill: #59636e; }
.on { fill: #ffffff; }
.ours { fill: #0969da; }
.theirs { fill: #9aa4ae; }
.line { fill: none; stroke: #59636e; stroke-width: 1.5; }
@media (prefers-color-scheme: dark) {
text { fill: #e6edf3; }
.note { fill: #9aa4ae; }
.ours { fill: #1f6feb; }
.theirs { fill: #57606a; }
.line { stroke: #9aa4ae; }
}
</style>"""
"""Colors for light and dark pages. The pictures that are drawn by hand begin with the same."""


class Group(NamedTuple):
    """Bars of one scenario: aioflux, and the other clients."""

    scenario: str
    about: str
    """Operation and size."""
    clients: Mapping[str, str]
    """Names of the other clients by their matches, in the order of the bars."""
    case: str = ""
    unit: str = ""
    """Unit of the rates; by default GB/s or objects/s."""


class Bar(NamedTuple):
    """Rate of one client."""

    client: str
    rate: float
    """Median, in the unit of the group."""
    share: float = 1.0
    """Rate divided by that of aioflux: the median over the pairs."""
    spread: tuple[float, float] = (1.0, 1.0)
    """Smallest and largest share of a pair."""


_GOOGLE, _GCSFS = "google-cloud-storage", {"gcsfs_checkpoint": "gcsfs"}
_SMALL = {"obstore": "obstore", "gcloud_aio": "gcloud-aio-storage", "google": _GOOGLE}
_LARGE = {"obstore": "obstore", "gcloud_aio": "gcloud-aio-storage", "transfer_manager": _GOOGLE}
_DATAFLUX = {"dataflux x16": "dataflux, 16 threads", "dataflux": "dataflux, default"}
_LOADERS = {"litdata": "litData", **_DATAFLUX, "direct": _GOOGLE}
_TORCH = {"obstore_torch": "obstore", **_GCSFS}
_STEPS, _DCP = {"gcsfs_steps": "DCP with gcsfs"}, {"gcsfs_dcp": "with gcsfs"}
_READS = (
    Group("get-1KiB", "reads of 1 KiB", _SMALL),
    Group("get-100KiB", "reads of 100 KiB", _SMALL),
    Group("get-100KiB-tls", "reads of 100 KiB, TLS 1.3", _SMALL),
    Group("get-1MiB", "reads of 1 MiB", _LARGE),
    Group("object-1GiB", "read of 1 GiB", _LARGE),
)
_WRITES = (
    Group("put-many", "writes of 100 KiB", _SMALL),
    Group("put-1GiB", "write of 1 GiB", _LARGE),
)
_BUFFER_AND_TLS = (
    Group("object-1GiB-tls", "read of 1 GiB, TLS 1.3", _LARGE),
    Group("get-into", "get_into of 1 GiB", _LARGE),
)
_EPOCHS = (
    Group("loader-100KiB", "epoch of objects of 100 KiB", _LOADERS),
    Group("list-1M", "listing of 1,000,000 objects", {"google": _GOOGLE}),
)
_CHECKPOINTS = (
    Group("ratio-save-298MB", "save, 298 MB", {**_GCSFS, "google_checkpoint": _GOOGLE}, "fp32"),
    Group("ratio-load-298MB", "load, 298 MB", _GCSFS, "fp32"),
    Group("torch-save-298MB", "torch.save, 298 MB", _TORCH),
    Group("torch-load-298MB", "torch.load, 298 MB", _TORCH),
    Group("save-small", "Checkpointer.save, 100 kB", _STEPS, unit="saves/s"),
    Group("load-small", "Checkpointer.load, 100 kB", _STEPS, unit="loads/s"),
    Group("dcp-save-1", "dcp.save, 256 MiB, one process", _DCP),
    Group("dcp-load-1", "dcp.load, 256 MiB, one process", _DCP),
    Group("dcp-save-4", "dcp.save, 256 MiB, four ranks", _DCP),
    Group("dcp-load-4", "dcp.load, 256 MiB, four ranks", _DCP),
)
_FAULTS = (
    Group(
        "faults",
        "reads of 100 KiB, 1 % 503 and 1 % resets",
        {"clean": "aioflux, no faults", **_SMALL},
    ),
)
PICTURES = {
    "reads.svg": ("Rates of reads", _READS),
    "writes.svg": ("Rates of writes, and of other reads", (*_WRITES, *_BUFFER_AND_TLS)),
    "loader.svg": ("Rates of epochs and listings", _EPOCHS),
    "checkpoints.svg": ("Rates of saves and loads", _CHECKPOINTS),
    "faults.svg": ("Rates of reads during faults", _FAULTS),
}
"""Title and groups of each picture."""

Runs = dict[tuple[str, str, str], tuple[dict[str, Any], list[dict[str, Any]]]]
"""Header and samples of the newest run of each match, by scenario, case and match."""


def kept(lines: Iterable[dict[str, Any]]) -> Runs:
    """Return the newest run of each match from the lines of results of record."""
    header: dict[str, Any] = {}
    found: Runs = {}
    for line in lines:
        if "command" in line:
            header = line
            continue
        key = line["scenario"], line["case"], line["match"]
        if key not in found or (
            found[key][0] is not header and found[key][1][0]["time"] < line["time"]
        ):
            found[key] = header, []
        if found[key][0] is header:
            found[key][1].append(line)
    return found


def bars_of(group: Group, runs: Runs) -> list[Bar]:
    """Return the bars of a group, that of aioflux first; empty if no result of it is kept."""
    unit = SCENARIOS[group.scenario].displayed_bytes / 1e9 or 1.0
    our_rates: list[float] = []
    bars = []
    for match, client in group.clients.items():
        pairs = _pairs(runs.get((group.scenario, group.case, match), ({}, []))[1])
        if pairs:
            our_rates += [ours.rate * unit for ours, _ in pairs]
            ratios = [ratio_of(ours, theirs, math.inf) for ours, theirs in pairs]
            rate = statistics.median(theirs.rate * unit for _, theirs in pairs)
            spread = 1 / max(ratios), 1 / min(ratios)
            bars.append(Bar(client, rate, 1 / statistics.median(ratios), spread))
    return [Bar("aioflux", statistics.median(our_rates)), *bars] if bars else []


def _pairs(lines: Iterable[Mapping[str, Any]]) -> list[tuple[Result, Result]]:
    """Return the results of the complete pairs that count."""
    sides: dict[str, dict[int, Result]] = {"ours": {}, "theirs": {}}
    for line in lines:
        if line["result"] and not line["is_warm_up"]:
            sides[line["side"]][line["pair"]] = Result.from_json(line["result"])
    ours, theirs = sides.values()
    return [(ours[pair], theirs[pair]) for pair in ours if pair in theirs]


def draw(title: str, groups: Sequence[Group], runs: Runs) -> str:
    """Return a picture with the bars of some groups as SVG. A group without results is left out."""
    y, words = 16, []
    note = "2.00x: twice the rate of this client, the median of pairs of runs"
    body = [f'<text y="{y}" class="note">{note}</text>']
    for group in groups:
        if bars := bars_of(group, runs):
            y += 26
            unit = _unit(group)
            body.append(f'<text y="{y}" class="heading">{escape(group.about)} ({unit})</text>')
            scale = _BAR_WIDTH / max(max(bar.share, bar.spread[1]) for bar in bars)
            for bar in bars:
                y += 22
                body += _draw_bar(bar, y, scale)
            y += 6
            rates = (f"{bar.client} {_rate(bar.rate)}" for bar in bars)
            words.append(f"{group.about}, in {unit}: {', '.join(rates)}.")
    for line in _sources(groups, runs):
        y += 20
        body.append(f'<text y="{y}" class="note">{escape(line)}</text>')
    start = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {y + 6}" width="480"'
    head = [
        f'{start} role="img" aria-labelledby="title desc">',
        f'<title id="title">{escape(title)}</title>',
        f'<desc id="desc">{escape(" ".join(words))}</desc>',
    ]
    return "\n".join([*head, STYLE, *body, "</svg>\n"])


def _draw_bar(bar: Bar, y: int, scale: float) -> Iterator[str]:
    kind = "ours" if bar.client == "aioflux" else "theirs"
    width, low, high = (scale * share for share in (bar.share, *bar.spread))
    yield f'<text x="{_LABEL_END}" y="{y}" text-anchor="end">{escape(bar.client)}</text>'
    yield f'<rect x="{_BAR_START}" y="{y - 13}" width="{width:.1f}" height="16" class="{kind}"/>'
    if high - low > 1:
        start, end = (f"{_BAR_START + at:.1f}" for at in (low, high))
        ticks = "".join(f"M{at} {y - 9}v8" for at in (start, end))
        yield f'<path d="M{start} {y - 5}H{end}{ticks}" class="line"/>'
    number = _rate(bar.rate) if bar.client == "aioflux" else _times(bar.share)
    yield f'<text x="{_BAR_START + max(width, high) + 5:.1f}" y="{y}">{number}</text>'


def _sources(groups: Iterable[Group], runs: Runs) -> Iterator[str]:
    """Yield lines with the dates, the machine and the commits of the results of some groups."""
    keys = [(group.scenario, group.case, match) for group in groups for match in group.clients]
    found = [runs[key] for key in keys if key in runs]
    if not found:
        return
    times = sorted(line["time"] for _, lines in found for line in lines)
    days = [datetime.fromisoformat(time) for time in (times[0], times[-1])]
    span = " to ".join(dict.fromkeys(f"{day.day} {day:%B %Y}" for day in days))
    machines = {"{cpu}, {num_cores} cores".format(**header["machine"]) for header, _ in found}
    yield f"{span}; {'; '.join(sorted(machines))}"
    commits = {h["commit"][:8] + "-dirty" * h.get("is_dirty", False) for h, _ in found}
    yield f"commit {', '.join(sorted(commits))}"


def _unit(group: Group) -> str:
    return group.unit or ("GB/s" if SCENARIOS[group.scenario].displayed_bytes else "objects/s")


def _times(share: float) -> str:
    return f"{1 / share:.{0 if share < 0.1 else 2}f}x"


def _rate(rate: float) -> str:
    """Return a rate with two or, from 100 on, three significant digits."""
    rounded = float(f"{rate:.{3 if rate >= 100 else 2}g}")
    return f"{rounded:,.0f}" if rounded >= 10 else f"{rounded:g}"


def rate_table(runs: Runs) -> str:
    """Return the table of the rates of reads and writes in Markdown."""
    clients = ["aioflux", *_SMALL.values()]
    rows = {}
    for group in (*_READS, *_WRITES):
        rates = {bar.client: _rate(bar.rate) for bar in bars_of(group, runs)}
        rows[f"{group.about} ({_unit(group)})"] = [rates.get(each, "") for each in clients]
    return _markdown(clients, rows)


def cpu_table(runs: Runs) -> str:
    """Return the table of the CPU times of reads and writes in Markdown."""
    clients = [*_SMALL.values(), "wrk"]
    rows = {}
    for group in (*_READS, *_BUFFER_AND_TLS, *_WRITES):
        is_large = _unit(group) == "GB/s"
        cells = dict.fromkeys(clients, "")
        for match, client in {**group.clients, "wrk": "wrk"}.items():
            if pairs := _pairs(runs.get((group.scenario, group.case, match), ({}, []))[1]):
                times = (
                    statistics.median(result.cpu_us for result in side)
                    for side in zip(*pairs, strict=True)
                )
                cells[client] = " / ".join(_rate(each / 1000**is_large) for each in times)
        rows[f"{group.about} ({'ms' if is_large else 'us'})"] = list(cells.values())
    return _markdown(clients, rows)


def _markdown(clients: Sequence[str], rows: Mapping[str, Sequence[str]]) -> str:
    lines = [f"| | {' | '.join(clients)} |", f"| --- |{' ---: |' * len(clients)}"]
    return "\n".join(lines + [f"| {name} | {' | '.join(cells)} |" for name, cells in rows.items()])


def read_results() -> Runs:
    """Return the newest run of each match in `perf/results`."""
    files = sorted((ROOT / "perf" / "results").glob("*.jsonl"))
    lines = (line for file in files for line in file.read_text(encoding="utf-8").splitlines())
    return kept(map(json.loads, lines))


def main() -> None:
    """Write the pictures, and print the tables."""
    runs = read_results()
    for name, (title, groups) in PICTURES.items():
        text = draw(title, groups, runs)
        (ROOT / "docs" / "images" / name).write_text(text, encoding="utf-8")
    print(rate_table(runs), cpu_table(runs), sep="\n\n")


if __name__ == "__main__":
    main()
