"""Results of the demo, and their page: one HTML file with inline SVG, which loads nothing."""

from __future__ import annotations

import os
import platform
from dataclasses import dataclass, field
from html import escape
from itertools import pairwise
from statistics import median
from typing import TYPE_CHECKING, Any

import aioflux

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence
    from pathlib import Path

PAGE = """<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8"/>
<meta name="viewport" content="width=device-width, initial-scale=1"/>
<title>aioflux demo</title>
<style>{style}</style>
</head>
<body>
<h1>Training during faults and a SIGKILL</h1>
{body}
</body>
</html>
"""
STYLE = """
:root { color-scheme: light dark; --text: #1c2430; --muted: #5b6675; --grid: #dde2e8;
  --page: #ffffff; --line: #1769d2; --pale: #a9c8f2; --fault: #8a5200; --kill: #c3202f;
  --resume: #1b7a3d; }
@media (prefers-color-scheme: dark) { :root { --text: #e4e8ee; --muted: #9aa5b4; --grid: #343c48;
  --page: #14181e; --line: #6aaeff; --pale: #2f517d; --fault: #e5a54b; --kill: #ff7a80;
  --resume: #5ecb85; } }
body { margin: 0 auto; padding: 1rem; max-width: 45rem; background: var(--page);
  color: var(--text); font: 1rem/1.5 system-ui, sans-serif; }
h1 { font-size: 1.5rem; line-height: 1.25; } h2 { font-size: 1.125rem; margin: 2rem 0 0; }
p { margin: .25rem 0 .75rem; } .muted { color: var(--muted); font-size: .875rem; }
svg { display: block; width: 100%; height: auto; } svg.narrow { display: none; }
@media (max-width: 36rem) { svg.wide { display: none; } svg.narrow { display: block; } }
text { fill: var(--muted); font-size: 12px; } .grid { stroke: var(--grid); }
.line, .band { fill: none; stroke: var(--line); stroke-width: 1.5; stroke-linejoin: round; }
.band { stroke: var(--pale); stroke-width: 7; }
.bar { fill: var(--line); } .pale { fill: var(--pale); }
.fault { --mark: var(--fault); } .kill { --mark: var(--kill); } .resume { --mark: var(--resume); }
path.mark { stroke: var(--mark); stroke-dasharray: 4 3; }
text.mark { fill: var(--mark); font-weight: 600; }
table { border-collapse: collapse; width: 100%; font-size: .9375rem; }
th, td { text-align: left; font-weight: normal; padding: .375rem .5rem .375rem 0;
  border-top: 1px solid var(--grid); vertical-align: top; }
th { width: 40%; color: var(--muted); } td { font-variant-numeric: tabular-nums; }
"""
WIDTHS = ((720, "wide"), (358, "narrow"))
"""Width of each chart in pixels, so that texts have the same size; the page shows one of them."""
HEIGHT = 230
LEFT, RIGHT, TOP, BOTTOM = 44, 12, 36, 38
"""Margins of a chart; the labels of marks are in the upper margin."""

Message = dict[str, Any]
Point = tuple[float, float]


@dataclass
class FaultResult:
    """One kind of fault: the reports of the training before and after it."""

    name: str
    kind: str
    before: Message
    num_injected: int = 0
    num_retries: int = 0
    num_skipped: int = 0

    def end(self, after: Message, injected: Mapping[Any, int]) -> None:
        """Set the counts of the server and of the dataset."""
        self.num_injected = injected[self.kind]
        self.num_retries = after["retries"] - self.before["retries"]
        self.num_skipped = after["skipped"]

    def __str__(self) -> str:
        counts = f"{self.num_retries} requests retried, {self.num_skipped} samples skipped"
        return f"{self.num_injected} x {self.name}; {counts}"


@dataclass
class Results:
    """The reports of all clients; times in seconds."""

    num_images: int
    num_epochs: int
    batch_size: int
    image_bytes: int = 0
    rates: dict[str, float] = field(default_factory=dict)
    clean: list[Message] = field(default_factory=list)
    faulty: list[Message] = field(default_factory=list)
    faults: list[FaultResult] = field(default_factory=list)
    killed: Message = field(default_factory=dict)
    seconds: float = 0.0

    @property
    def num_steps(self) -> int:
        """Number of steps of a training."""
        return -(-self.num_images // self.batch_size) * self.num_epochs

    @property
    def save_every(self) -> int:
        """Number of steps between two saves."""
        return max(1, self.num_steps // 10)

    @property
    def processes(self) -> list[list[Message]]:
        """The reports of each process of the training with faults; `resumed` is the first."""
        starts = [number for number, message in enumerate(self.faulty) if "resumed" in message]
        return [self.faulty[a:b] for a, b in pairwise([*starts, len(self.faulty)])]

    @property
    def resumed(self) -> Message:
        """The first report of the last process."""
        return self.processes[-1][0]

    @property
    def saves(self) -> list[Message]:
        """The committed saves of the training with faults."""
        return [message for message in self.faulty if "saved" in message]

    @property
    def is_equal(self) -> bool:
        """Return whether all losses are the same, bit by bit, in both trainings."""
        clean, faulty = dict(losses(self.clean)), dict(losses(self.faulty))
        repeated = all(loss == clean.get(step) for step, loss in losses(self.faulty))
        return clean == faulty and len(clean) == self.num_steps and repeated

    @property
    def verdict(self) -> str:
        """The result of the comparison."""
        return (
            f"All {self.num_steps} losses are bit-equal to those of the training without faults "
            "and kill."
            if self.is_equal
            else "The losses of both trainings DIFFER."
        )


def losses(messages: Iterable[Message]) -> list[tuple[int, float]]:
    """Return step and loss of each report of a step."""
    return [(message["step"], message["loss"]) for message in messages if "loss" in message]


class Chart:
    """Axes of one chart, and what is drawn on them."""

    def __init__(self, width: int, x_max: float, y_max: float, x_label: str) -> None:
        self._width, self._x_max, self._y_max = width, x_max, y_max
        self._parts: list[str] = []
        for tick in ticks(y_max, 4):
            y = self.y(tick)
            self._add(f'<path class="grid" d="M{LEFT} {y}H{width - RIGHT}"/>')
            self.text(LEFT - 6, y + 4, f"{tick:g}", anchor="end")
        for tick in ticks(x_max, width // 90):
            self.text(self.x(tick), HEIGHT - BOTTOM + 17, f"{tick:g}")
        self.text((LEFT + width - RIGHT) / 2, HEIGHT - 4, x_label)

    def x(self, value: float) -> float:
        """Return the horizontal position of a value."""
        return round(LEFT + value / self._x_max * (self._width - LEFT - RIGHT), 1)

    def y(self, value: float) -> float:
        """Return the vertical position of a value."""
        return round(HEIGHT - BOTTOM - value / self._y_max * (HEIGHT - TOP - BOTTOM), 1)

    def _add(self, part: str) -> None:
        self._parts.append(part)

    def text(
        self, x: float, y: float, text: str, *, anchor: str = "middle", name: str = ""
    ) -> None:
        """Write a text at a position."""
        self._add(f'<text x="{x}" y="{y}" text-anchor="{anchor}" class="{name}">{text}</text>')

    def line(self, points: Sequence[Point], name: str) -> None:
        """Draw a line through values."""
        if points:
            path = "L".join(f"{self.x(x)} {self.y(y)}" for x, y in points)
            self._add(f'<path class="{name}" d="M{path}"/>')

    def bar(self, x: float, x_end: float, y: float, y_end: float, name: str) -> None:
        """Draw a bar between values."""
        width, height = self.x(x_end) - self.x(x) - 1, self.y(y) - self.y(y_end)
        place = f'x="{self.x(x)}" y="{self.y(y_end)}" width="{width:.1f}" height="{height:.1f}"'
        self._add(f'<rect class="{name}" {place}/>')

    def mark(
        self, x: float, label: str, name: str, *, row: int = 0, anchor: str = "middle"
    ) -> None:
        """Draw a vertical line with a label above it."""
        at, top = self.x(x), 12 + 14 * row
        self._add(f'<path class="mark {name}" d="M{at} {top + 4}V{HEIGHT - BOTTOM}"/>')
        self.text(at, top, label, anchor=anchor, name=f"mark {name}")

    def svg(self, title: str, name: str) -> str:
        """Return the chart as an element."""
        return (
            f'<svg class="{name}" viewBox="0 0 {self._width} {HEIGHT}" role="img" '
            f'aria-label="{escape(title)}">{"".join(self._parts)}</svg>'
        )


def ticks(largest: float, at_most: int) -> list[float]:
    """Return round values from 0 up to the largest."""
    for exponent in range(-3, 9):
        for digit in (1, 2, 5):
            if largest / (digit * 10.0**exponent) <= at_most:
                size = digit * 10.0**exponent
                return [number * size for number in range(int(largest / size) + 1)]
    raise ValueError(f"{largest} is too large for an axis")


def loss_chart(results: Results, width: int) -> Chart:
    """Draw the losses of both trainings by step."""
    clean = losses(results.clean)
    chart = Chart(width, results.num_steps, 1.05 * max(loss for _, loss in clean), "step")
    chart.line(clean, "band")
    for messages in results.processes:
        chart.line(losses(messages), "line")
    resumed, killed = results.resumed["resumed"], results.killed["step"]
    chart.mark(resumed, f"resumed from {resumed}", "resume", anchor="end")
    chart.mark(killed, f"killed after {killed}", "kill", anchor="start")
    return chart


def rate_chart(results: Results, width: int) -> Chart:
    """Draw the objects per second of the training with faults, over time."""
    start = results.faulty[0]["time"]
    steps = [message for message in results.faulty if "loss" in message]
    duration = steps[-1]["time"] - start
    size = max(0.5, duration / 50)
    counts = [0] * (int(duration / size) + 1)
    for messages in results.processes:
        for before, after in pairwise(message for message in messages if "loss" in message):
            num_objects = after["objects"] - before["objects"]
            counts[int((after["time"] - start) / size)] += num_objects
    chart = Chart(width, duration, 1.05 * max(counts) / size, "seconds")
    for number, count in enumerate(counts):
        first, last = number * size, min((number + 1) * size, duration)
        if last - first > size / 2:  # the last one may be too short to tell a rate
            chart.bar(first, last, 0, count / (last - first), "bar")
    for number, fault in enumerate(results.faults):
        chart.mark(fault.before["time"] - start, "ABC"[number], "fault")
    chart.mark(results.killed["time"] - start, "kill", "kill", row=1)
    chart.mark(results.resumed["time"] - start, "resume", "resume")
    return chart


def save_chart(results: Results, width: int) -> Chart:
    """Draw the time of each save: blocked, and in the background."""
    times = [(save["blocked"] * 1e3, save["upload"] * 1e3) for save in results.saves]
    half = results.save_every / 4
    x_max = results.num_steps + half
    chart = Chart(width, x_max, 1.05 * max(map(sum, times)), "step of the save")
    for save, (blocked, upload) in zip(results.saves, times, strict=True):
        first, last = save["saved"] - half, save["saved"] + half
        chart.bar(first, last, 0, blocked, "bar")
        chart.bar(first, last, blocked, blocked + upload, "pale bar")
    chart.mark(results.killed["step"], "killed in this save; made again", "kill", anchor="end")
    return chart


def rows(results: Results) -> Iterable[tuple[str, str]]:
    """Yield the rows of the table of numbers."""
    image = f"{results.image_bytes / 1024:.0f} KiB"
    yield "Images", f"{results.num_images} JPEGs of {image}, read in {results.num_epochs} epochs"
    for name, rate in results.rates.items():
        megabytes = rate * results.image_bytes / 1e6
        yield f"Reading only, {name}", f"{rate:,.0f} objects/s, {megabytes:,.0f} MB/s"
    clean = [message for message in results.clean if "loss" in message]
    rate = (len(clean) - 1) * results.batch_size / (clean[-1]["time"] - clean[0]["time"])
    yield "Training without faults", f"{rate:,.0f} objects/s"
    for fault in results.faults:
        yield "Survived", str(fault)
    resumed, killed = results.resumed, results.killed
    seconds = resumed["time"] - killed["time"]
    yield "SIGKILL", f"after step {killed['step']}, right after the start of a save"
    yield (
        "Resumed from",
        f"step {resumed['resumed']}, the last commit, {seconds:.1f} s after the kill",
    )
    yield "Losses", results.verdict
    blocked = [save["blocked"] * 1e3 for save in results.saves]
    upload = [save["upload"] * 1e3 for save in results.saves]
    size = results.saves[-1]["num_bytes"] / 1e6
    yield "Saves", f"{len(blocked)} of {size:.1f} MB"
    longest = f"{max(blocked):.1f} ms (longest)"
    yield "A save blocked the training", f"{median(blocked):.1f} ms (median), {longest}"
    yield "Upload in the background", f"{median(upload):.0f} ms (median)"
    yield "Whole demo", f"{results.seconds:.0f} s"
    yield "Machine", f"{os.cpu_count()} CPUs, for server and client; {platform.platform()}"
    yield "Versions", f"aioflux {aioflux.__version__}, Python {platform.python_version()}"


LOSS_CAPTION = (
    "Wide line: without faults. Thin line: with faults; killed, and resumed from the last commit. "
    "The steps between were computed twice."
)
RATE_CAPTION = (
    "A: {}. B: {}. C: {}. During a restart nothing is read. At the start of an epoch the dataset "
    "reads up to 256 objects ahead."
)
SAVE_CAPTION = (
    "Lower part of a bar: save_async blocked the training while it copied the state. Upper part: "
    "upload and commit, in the background."
)
CHARTS: tuple[tuple[str, str, Callable[[Results, int], Chart]], ...] = (
    ("Loss", LOSS_CAPTION, loss_chart),
    ("Objects read per second, with faults", RATE_CAPTION, rate_chart),
    ("Duration of saves, in milliseconds", SAVE_CAPTION, save_chart),
)


def write_page(path: Path, results: Results) -> Path:
    """Write the page, and return its path."""
    parts = [f"<p><strong>{escape(results.verdict)}</strong></p>"]
    for title, caption, draw in CHARTS:
        text = escape(caption.format(*results.faults))
        parts.append(f'<h2>{title}</h2><p class="muted">{text}</p>')
        parts += [draw(results, width).svg(title, name) for width, name in WIDTHS]
    cells = (f"<tr><th>{escape(a)}</th><td>{escape(b)}</td></tr>" for a, b in rows(results))
    parts.append(f"<h2>Numbers</h2><table>{''.join(cells)}</table>")
    new = path.with_name(f"{path.name}.{os.getpid()}")
    new.write_text(PAGE.format(style=STYLE, body="\n".join(parts)), encoding="utf-8")
    new.replace(path)  # another demo may write the same page

    return path.resolve()
