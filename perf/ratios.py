"""`python -m perf.ratios FILE ...`: the tables of `perf/README.md`, from JSON lines of runs.

The files are results of record (`perf/results/NAME.jsonl`) or output files. If a scenario was run
several times, the newest run of each match counts, as in the pictures. Prints tables in Markdown.
"""

from __future__ import annotations

import argparse
import json
from collections import defaultdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from perf._report import HEADINGS, cells
from perf._samples import Pair, Result, Sample, judge, judge_promise
from perf.pictures import kept
from perf.scenarios import SCENARIOS

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from perf._samples import Row
    from perf.scenarios import Match, Side

__all__ = ["pairs_of", "reads_table", "table", "tables"]


def pairs_of(lines: Iterable[Mapping[str, Any]], match: Match) -> list[Pair]:
    """Return the complete pairs of a match from its JSON lines."""
    sides: dict[int, dict[str, Mapping[str, Any]]] = defaultdict(dict)
    for line in lines:
        sides[line["pair"]][line["side"]] = line
    return [
        Pair(
            index=index,
            is_warm_up=both["ours"]["is_warm_up"],
            ours=_sample(match.ours, both["ours"]),
            theirs=_sample(match.theirs, both["theirs"]),
        )
        for index, both in sides.items()
        if len(both) == 2
    ]


def _sample(side: Side, line: Mapping[str, Any]) -> Sample:
    result = Result.from_json(line["result"]) if line["result"] else None
    return Sample(work=side.work, result=result, error=line["error"])


def reads_table(rows: Mapping[str, Sequence[Row]]) -> str:
    """Return the table of reads of many objects: a row for each scenario, a column for each peer.

    Each cell has the ratio of rates with its spread and the ratio of CPU times, then their goals.
    """
    peers = list(dict.fromkeys(row.peer for each in rows.values() for row in each))
    lines = [_line(("command", "objects/s, CPU us", *peers))]
    lines.append(_line(["---"] * (2 + len(peers))))
    for name, each in rows.items():
        found = {row.peer: row for row in each}
        ours = next((row.ours for row in each if row.ours), None)
        first = f"{ours.rate:,.0f}, {ours.cpu_us:,.0f}" if ours else "-"
        lines.append(_line((f"`{name}`", first, *(_both(found.get(peer)) for peer in peers))))
    return "\n".join(lines)


def _both(row: Row | None) -> str:
    if row is None or row.ratio is None or row.spread is None:
        return "-"
    text = f"{row.ratio:.2f}x ({row.spread[0]:.2f}..{row.spread[1]:.2f})"
    if row.cpu_ratio is not None:
        text += f", CPU {row.cpu_ratio:.2f}x"
    return f"{text}; {row.goal} {'met' if row.is_met else 'MISSED'}" if row.goal else text


def table(rows: Mapping[str, Sequence[Row]]) -> str:
    """Return the table of the other scenarios, with a row for each match and each other goal."""
    lines = [_line(("command", "against", "ours/s", "ratio")), _line(["---"] * 4)]
    for name, each in rows.items():
        for row in each:
            words = dict(zip(HEADINGS, cells(row), strict=True))
            command = f"`{name}` ({row.case})" if row.case else f"`{name}`"
            figure = words["ratio (spread)"] if row.ratio is None else _both(row)
            if row.ratio is None and row.goal:
                figure += f"; {row.goal} {words['met']}"
            lines.append(_line((command, row.peer, words["ours/s"], figure)))
    return "\n".join(lines)


def _line(words: Iterable[str]) -> str:
    return f"| {' | '.join(words)} |"


def tables(lines: Sequence[dict[str, Any]]) -> str:
    """Return both tables from the JSON lines of runs."""
    rows: dict[str, list[Row]] = {}
    runs = kept(lines)
    for name, scenario in SCENARIOS.items():
        played = {
            match: pairs_of(runs.get((name, match.case, match.name), ({}, []))[1], match)
            for match in scenario.matches()
        }
        found = [
            judge(name, scenario.displayed_bytes, match, pairs)
            for match, pairs in played.items()
            if any(not pair.is_warm_up for pair in pairs)
        ]
        if found:
            every_pair = [pair for pairs in played.values() for pair in pairs]
            promises = [each for each in scenario.promises() if each.figure != "memory"]
            rows[name] = found + [judge_promise(name, each, every_pair) for each in promises]
    is_read = {name: any(each.peer == "raw" for each in SCENARIOS[name].rivals) for name in rows}
    reads = {name: each for name, each in rows.items() if is_read[name]}
    others = {name: each for name, each in rows.items() if not is_read[name]}
    return f"{reads_table(reads)}\n\n{table(others)}"


def main(argv: Sequence[str] | None = None) -> None:
    """Parse the command line and print the tables."""
    parser = argparse.ArgumentParser(prog="perf.ratios", description=__doc__.splitlines()[0])
    parser.add_argument("files", nargs="+", type=Path, metavar="FILE", help="JSON lines of runs")
    args = parser.parse_args(argv)
    lines = []
    for file in args.files:
        try:
            lines += [json.loads(line) for line in file.read_text().splitlines()]
        except OSError as exc:
            parser.error(f"cannot read {file}: {exc.strerror}")
        except ValueError as exc:
            parser.error(f"{file} has no JSON lines of `python -m perf`: {exc}")
    print(tables(lines))


if __name__ == "__main__":
    main()
