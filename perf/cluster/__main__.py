"""`python -m perf cluster`: requests of 8,000 ranks to one bucket, simulated with the real code.

Prints a row for each case, and writes plots of the requests per second.
"""

from __future__ import annotations

import argparse
import importlib.util
import logging
import sys
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Final

from perf.cluster.bucket import GCS, S3, Bucket
from perf.cluster.reads import Reads, ReadsReport, simulate_reads
from perf.cluster.save import Save, SaveReport, simulate_save

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["CASES", "Case", "Result", "main", "run_case"]

OUT: Final = Path("perf/out")
_TOY_RANKS: Final = 80
_RANKS: Final = 8_000


@dataclass(frozen=True, kw_only=True)
class Case:
    """One simulation."""

    name: str
    parameters: Save | Reads
    divisor: int = 1
    """Divisor of the ranks and of the rates of the bucket, for cases with millions of retries.
    Figures are multiplied by it."""

    def scaled(self, num_ranks: int) -> Save | Reads:
        """Return the parameters of the case with `num_ranks` ranks.

        The rates of a bucket that is read shrink with the number of ranks. Those of saves do not,
        because the protocol spreads its requests by the number of ranks.
        """
        parameters = self.parameters
        share = num_ranks / parameters.num_ranks
        if isinstance(parameters, Save):
            ranks = parameters.slow_rank, parameters.dead_rank
            slow, dead = (rank if rank is None else int(rank * share) for rank in ranks)
            return replace(parameters, num_ranks=num_ranks, slow_rank=slow, dead_rank=dead)
        profile = parameters.profile
        rates = replace(
            profile,
            reads_per_second=profile.reads_per_second * share / self.divisor,
            writes_per_second=profile.writes_per_second * share / self.divisor,
        )
        return replace(parameters, num_ranks=max(1, num_ranks // self.divisor), profile=rates)


_SAVE: Final = Save(num_ranks=_RANKS)
_START: Final = Reads(num_ranks=_RANKS, end_seconds=40.0)
_OUTAGE: Final = replace(_START, outage=(40.0, 100.0), end_seconds=170.0, max_attempts=16)
_PACE: Final = 0.9 * GCS.reads_per_second / _RANKS
"""Limit of each rank: less than its share, because the seconds of thousands of ranks vary."""
_LISTED: Final = replace(
    _START, listing="every", num_objects=100_000, end_seconds=240.0, seconds_per_object=1_000.0
)

CASES: Final = (
    Case(name="start-every-rank-lists", parameters=_LISTED, divisor=20),
    Case(name="start-without-pace", parameters=_START, divisor=20),
    Case(
        name="start",
        parameters=replace(_START, listing="once", max_requests_per_second=_PACE),
    ),
    Case(
        name="start-s3",
        parameters=replace(_START, listing="once", profile=S3, max_requests_per_second=_PACE),
    ),
    Case(name="save", parameters=_SAVE),
    Case(name="save-slow-rank", parameters=replace(_SAVE, slow_rank=3_000)),
    Case(name="save-dead-rank", parameters=replace(_SAVE, slow_rank=3_000, dead_rank=5_000)),
    Case(name="save-s3", parameters=replace(_SAVE, profile=S3)),
    Case(name="outage-without-pace", parameters=_OUTAGE, divisor=20),
    Case(name="outage", parameters=replace(_OUTAGE, max_requests_per_second=_PACE), divisor=10),
)


@dataclass(kw_only=True)
class Result:
    """Result of one simulation, with figures of all ranks."""

    case: Case
    bucket: Bucket
    figures: dict[str, str]
    cpu_seconds: float

    @property
    def requests(self) -> int:
        """Requests of all ranks, rejected ones included."""
        return sum(self.bucket.requests.values()) * self.case.divisor

    def row(self) -> str:
        """Return the row of the table."""
        bucket, divisor = self.bucket, self.case.divisor
        excess = bucket.excess_seconds()
        peaks = [f"{max(sent.values(), default=0) * divisor:,}" for sent in bucket.sent.values()]
        rejected = sum(bucket.rejected.values()) * divisor
        dollars = bucket.profile.dollars(bucket.requests) * divisor
        figures = ", ".join(f"{name} {value}" for name, value in self.figures.items())
        operations = ", ".join(
            f"{operation} {number * divisor:,}"
            for operation, number in bucket.requests.most_common()
        )
        cells = (
            f"`{self.case.name}`" + (f" (1:{divisor})" if divisor > 1 else ""),
            f"{self.requests:,}",
            f"{rejected:,}",
            " / ".join(peaks),
            " / ".join(f"{seconds} s" for seconds in excess.values()),
            f"${dollars:.2f}",
            operations,
            figures,
        )
        return f"| {' | '.join(cells)} |"


HEADER: Final = (
    "| case | requests | rejected | most in a second, reads / writes | longest time above the "
    "rate | cost | operations | figures |\n| --- | --- | --- | --- | --- | --- | --- | --- |"
)


def run_case(case: Case, num_ranks: int) -> Result:
    """Simulate a case with `num_ranks` ranks, divided by its divisor."""
    started = time.process_time()
    parameters = case.scaled(num_ranks)
    report: SaveReport | ReadsReport
    if isinstance(parameters, Save):
        report = simulate_save(parameters)
        figures = _figures_of_save(report)
    else:
        report = simulate_reads(parameters)
        figures = _figures_of_reads(report, case.divisor)
    return Result(
        case=case,
        bucket=report.bucket,
        figures=figures,
        cpu_seconds=time.process_time() - started,
    )


def _figures_of_save(report: SaveReport) -> dict[str, str]:
    figures = {"last upload": f"{report.uploaded_at[-1]:.1f} s"}
    if report.committed_at is not None:
        figures["commit"] = f"{report.committed_at:.1f} s"
    if report.ended:
        figures["end on the last rank"] = f"{max(report.ended.values()):.0f} s"
    if report.errors:
        figures["ranks with an error"] = f"{len(report.errors):,}"
    return figures


def _figures_of_reads(report: ReadsReport, divisor: int) -> dict[str, str]:
    reads = report.reads
    figures = {"ranks that gave up": f"{len(report.failed) * divisor:,}"}
    if reads.listing != "known":
        figures["listing on the last rank"] = f"{max(report.listed_at.values(), default=0):.1f} s"
        figures["list requests"] = f"{report.bucket.requests['list'] * divisor:,}"
    if reads.outage is None:
        figures["first object on the last rank"] = (
            f"{max(report.first_at.values()):.1f} s"
            if len(report.first_at) == reads.num_ranks
            else f"not on {(reads.num_ranks - len(report.first_at)) * divisor:,} ranks"
        )
        return figures
    start, end = map(int, reads.outage)
    steady = reads.steady_rate
    figures["steady reads"] = f"{steady * divisor:,.0f} /s"
    figures["most in the outage"] = f"{report.peak(start, end) / steady:.2f}x"
    figures["most after it"] = f"{report.peak(end, int(reads.end_seconds)) / steady:.2f}x"
    return figures


def draw(results: Sequence[Result], target: Path) -> None:
    """Draw the requests per second of some cases, and the documented rates, to a PNG file."""
    import matplotlib as mpl  # here, so that runs work without matplotlib

    mpl.use("Agg")
    texts = ("text.color", "axes.labelcolor", "axes.edgecolor", "xtick.color", "ytick.color")
    mpl.rcParams.update(dict.fromkeys(texts, "#7d8590") | {"legend.framealpha": 0})
    from matplotlib import pyplot

    figure, all_axes = pyplot.subplots(
        1, len(results), figsize=(3.6 * len(results), 2.8), layout="constrained", squeeze=False
    )
    for axes, result in zip(all_axes[0], results, strict=True):
        bucket, divisor = result.bucket, result.case.divisor
        profile = bucket.profile
        rates = {"reads": profile.reads_per_second, "writes": profile.writes_per_second}
        for (kind, sent), colour in zip(bucket.sent.items(), ("#1f77b4", "#d62728"), strict=True):
            if not sent:
                continue
            seconds = range(max(sent) + 1)
            axes.plot(seconds, [sent[each] * divisor for each in seconds], color=colour, label=kind)
            axes.axhline(rates[kind] * divisor, color=colour, linestyle=":", linewidth=1)
        axes.set_title(result.case.name, fontsize=9)
        axes.set_xlabel("s", fontsize=8)
        axes.tick_params(labelsize=7)
        axes.legend(fontsize=7)
    all_axes[0][0].set_ylabel("requests/s (dotted: documented rate)", fontsize=8)
    figure.savefig(target, dpi=70, transparent=True)  # for light and dark pages
    pyplot.close(figure)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the cases that the command line selects.

    Returns:
        0; unexpected errors are raised.
    """
    parser = argparse.ArgumentParser(prog="perf cluster", description=__doc__.splitlines()[0])
    names = [case.name for case in CASES]
    parser.add_argument("cases", nargs="*", metavar="case", help=f"{', '.join(names)}; or all")
    parser.add_argument("--ranks", type=int, default=_RANKS, help="number of ranks (8,000)")
    parser.add_argument("--toy", action="store_true", help=f"{_TOY_RANKS} ranks, to test it")
    parser.add_argument("--out", type=Path, default=OUT, help="directory of the plots")
    args = parser.parse_args(argv)
    if unknown := [name for name in args.cases if name not in names]:
        parser.error(f"unknown case {unknown[0]!r}; there are {', '.join(names)}")
    args.out.mkdir(parents=True, exist_ok=True)
    print(HEADER, flush=True)
    groups: dict[str, list[Result]] = {}
    for case in CASES:
        if args.cases and case.name not in args.cases:
            continue
        logging.disable(logging.WARNING)  # thousands of ranks log what they retry
        try:
            result = run_case(case, _TOY_RANKS if args.toy else args.ranks)
        finally:
            logging.disable(logging.NOTSET)
        print(result.row(), flush=True)
        groups.setdefault(case.name.partition("-")[0], []).append(result)
    for group, results in groups.items():
        if importlib.util.find_spec("matplotlib"):
            draw(results, args.out / f"cluster-{group}.png")
        else:
            print("no plots: matplotlib is missing (pip install matplotlib)")
    seconds = sum(result.cpu_seconds for results in groups.values() for result in results)
    print(f"\n{seconds:.0f} s of CPU time; plots: {args.out}/cluster-*.png")
    return 0


if __name__ == "__main__":
    sys.exit(main())
