"""`python -m perf`: benchmarks of aioflux and other clients (peers), in pairs of alternating runs.

Each run of aioflux or of a peer is a separate process. aioflux and one peer alternate (A B A B), so
that the noise of the machine affects both. The reported ratio is the rate of aioflux divided by the
rate of the peer, the median over all pairs. Output: a JSON line for each sample, a table in
Markdown, and a plot for each scenario.
"""

from __future__ import annotations

import argparse
import math
import pkgutil
import shlex
import sys
import time
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from perf import _machine, _plot, peers
from perf._pairs import play
from perf._report import lines_of, markdown, record_of, terminal_heading, terminal_row
from perf._samples import (
    goal_of,
    judge,
    judge_accelerators,
    judge_memory,
    judge_promise,
    memory_limit,
    promised,
    unplayed,
)
from perf.access import KINDS, SCHEMES
from perf.scenarios import GROUPS, SCENARIOS
from perf.servers import open_server

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from perf._samples import Pair, Row
    from perf.scenarios import Match, Scenario
    from perf.servers import Server, ServerSpec

__all__ = [
    "Run",
    "chosen_matches",
    "chosen_scenarios",
    "keep",
    "listing",
    "main",
    "parser",
    "play_match",
]

OUT = Path("perf/out")
RESULTS = Path("perf/results")
"""Directory of the results of record, which are committed."""


@dataclass
class Run:
    """Arguments and results of one call of this command."""

    args: argparse.Namespace
    name: str
    """Common part of the names of all output files."""
    circumstances: dict[str, Any]
    rows: list[Row] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    has_failed: bool = False
    """Whether one of our own samples failed."""

    def target(self, suffix: str) -> Path:
        """Return the path of the output file with this suffix."""
        return Path(self.args.out / f"{self.name}{suffix}")

    def note(self, text: str) -> None:
        """Print a note and add it to the table, unless the same note was added before."""
        if text not in self.notes:
            self.notes.append(text)
            print(f"    # {text}", flush=True)

    def add(self, row: Row) -> None:
        """Print a row and add it to the table."""
        self.rows.append(row)
        print(terminal_row(row), flush=True)


class Servers:
    """Servers of one scenario. A server starts when its spec is first requested."""

    def __init__(self, stack: ExitStack, run: Run) -> None:
        self._stack = stack
        self._run = run
        self._running: dict[ServerSpec, Server] = {}

    def __call__(self, spec: ServerSpec) -> Server:
        """Return the server for a spec."""
        if self._run.args.server and spec.kind != KINDS["az"]:
            spec = replace(spec, kind=self._run.args.server)
        if spec not in self._running:
            server = self._stack.enter_context(open_server(spec))
            self._running[spec] = server
            for note in server.notes:
                self._run.note(note)
        return self._running[spec]


def play_match(
    run: Run, scenario: Scenario, match: Match, servers: Callable[[ServerSpec], Server]
) -> list[Pair]:
    """Run one match, log its samples, print its row, and return its pairs.

    If the server does not start, the row contains the error.
    """
    with run.target(".jsonl").open("a") as log:

        def keep(pair: Pair) -> None:
            for line in lines_of(scenario, match, pair, run.notes, run.circumstances):
                log.write(line + "\n")
            log.flush()

        try:
            pairs = play(
                match,
                servers,
                num_pairs=1 if run.args.toy else min(run.args.pairs, scenario.max_pairs),
                # A search of accelerators has many runs, of which the first warms up.
                has_warm_up=not run.args.toy and not match.ours.work.utilization,
                limit_seconds=max(run.args.limit_seconds, scenario.min_limit_seconds),
                keep=keep,
            )
        except (OSError, RuntimeError) as exc:
            run.has_failed = True
            run.add(unplayed(scenario.name, match, f"{type(exc).__name__}: {exc}"))
            return []
    run.has_failed |= any(pair.ours.error for pair in pairs)
    run.add(judge(scenario.name, scenario.displayed_bytes, match, pairs))
    if row := judge_accelerators(scenario.name, match, pairs):
        run.add(row)
    return pairs


def run_scenario(run: Run, scenario: Scenario, matches: Sequence[Match]) -> None:
    """Run some matches of a scenario, one after the other, and draw the plot."""
    with ExitStack() as stack:
        servers = Servers(stack, run)
        played = [(match, play_match(run, scenario, match, servers)) for match in matches]
    every_pair = [pair for _, pairs in played for pair in pairs]
    if (goal := scenario.memory_goal()) is not None:
        run.add(judge_memory(scenario.name, goal, every_pair))
    for promise in scenario.promises():
        run.add(judge_promise(scenario.name, promise, every_pair))
    if _plot.is_possible():
        _plot.plot(scenario, played, run.target(f"-{scenario.name}.png"))
    else:
        run.note(_plot.MISSING)


def chosen_matches(scenario: Scenario, peers: Sequence[str]) -> list[Match]:
    """Return all matches, or only the matches against the given peers.

    The peer `aioflux` selects comparisons of aioflux with itself: a bound, or the blocking store.
    """
    matches = scenario.played()
    if not peers:
        return list(matches)
    return [match for match in matches if match.theirs.work.peer in peers]


def known_peers() -> list[str]:
    """Return the names of the peers: the public modules of `perf.peers`."""
    names = sorted(module.name for module in pkgutil.iter_modules(peers.__path__))
    return [name for name in names if not name.startswith("_")]


def chosen_scenarios(args: argparse.Namespace) -> list[Scenario]:
    """Return the scenarios to run, with the parameters of the command line.

    Raises:
        ValueError: The command line has an unknown scenario, peer or field, or an invalid value.
    """
    requested = args.scenarios or [
        name for name, scenario in SCENARIOS.items() if not scenario.is_by_name_only
    ]
    names = [name for group in requested for name in GROUPS.get(group, (group,))]
    if unknown := [name for name in names if name not in SCENARIOS]:
        known_names = ", ".join((*SCENARIOS, *GROUPS))
        raise ValueError(f"unknown scenario {unknown[0]!r}; there are {known_names}")
    known = known_peers()
    if unknown := [peer for peer in args.peers if peer not in known]:
        raise ValueError(f"unknown peer {unknown[0]!r}; there are {', '.join(known)}")
    settings: dict[str, str] = {"scheme": args.scheme} if args.scheme else {}
    for setting in args.set:
        name, equals, value = setting.partition("=")
        if not equals:
            raise ValueError(f"--set takes name=value, not {setting!r}")
        settings[name] = value
    chosen = []
    for name in names:
        scenario = SCENARIOS[name]
        if args.peers:
            scenario = scenario.against(tuple(args.peers))
        scenario = scenario.toy() if args.toy else scenario.scaled(args.scale)
        chosen.append(scenario.replaced(settings))
    return chosen


def _at_least_one(text: str) -> int:
    if (number := int(text)) < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, not {text}")
    return number


def _above_zero(text: str) -> float:
    if not 0 < (number := float(text)) < math.inf:
        raise argparse.ArgumentTypeError(f"must be above 0 and finite, not {text}")
    return number


def parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    found = argparse.ArgumentParser(prog="perf", description=(__doc__ or "").splitlines()[0])
    found.add_argument(
        "scenarios", nargs="*", metavar="scenario", help="see --list; default: all short ones"
    )
    found.add_argument(
        "--peers", nargs="+", action="extend", default=[], help="run only these peers"
    )
    found.add_argument(
        "--set",
        nargs="+",
        action="extend",
        default=[],
        metavar="NAME=VALUE",
        help="parameters of the scenarios",
    )
    found.add_argument("--scheme", choices=SCHEMES, help="the cloud; same as --set scheme=")
    found.add_argument(
        "--pairs", type=_at_least_one, default=5, help="pairs, in addition to the warm-up pair"
    )
    found.add_argument(
        "--scale", type=_above_zero, default=1.0, help="multiply the number of objects"
    )
    found.add_argument(
        "--server", choices=("nginx", "embedded"), help="use this server for all scenarios"
    )
    found.add_argument(
        "--toy", action="store_true", help="tiny sizes and one pair, to test the benchmarks"
    )
    found.add_argument(
        "--limit-seconds", type=_above_zero, default=30.0, help="time limit of one sample"
    )
    found.add_argument("--out", type=Path, default=OUT, help="directory of the output files")
    found.add_argument(
        "--keep", metavar="NAME", help=f"append the table and the samples to {RESULTS}/NAME"
    )
    found.add_argument("--list", action="store_true", help="list the scenarios and exit")
    return found


def keep(run: Run, table: str, command: str) -> None:
    """Append the table and the figures of all samples to the results of record."""
    RESULTS.mkdir(exist_ok=True)
    samples = run.target(".jsonl")
    lines = samples.read_text().splitlines() if samples.exists() else []
    with (RESULTS / f"{run.args.keep}.jsonl").open("a") as log:
        log.writelines(f"{line}\n" for line in record_of(lines, command, run.circumstances))
    with (RESULTS / f"{run.args.keep}.md").open("a") as tables:
        tables.write(f"{table}\n")


def listing() -> str:
    """Return the text of `--list`: the scenarios with their peers, goals and parameters."""
    lines = []
    for scenario in SCENARIOS.values():
        goals = [f"{match.name} {goal_of(match)}".rstrip() for match in scenario.played()]
        goals += [f"{each.figure} {promised(each)}" for each in scenario.promises()]
        if memory := scenario.memory_goal():
            above = "memory above idle" if memory.is_above_idle else "memory"
            goals.append(f"{above} {memory_limit(memory)}")
        lines.append(f"{scenario.name:<24} {'; '.join(dict.fromkeys(goals))}")
        lines.append(f"{'':<24} {scenario.parameters_in_words()}")
    lines += ["", "groups that run only if you name the group or one of its scenarios:"]
    lines += [f"{group:<24} {', '.join(names)}" for group, names in GROUPS.items()]
    return "\n".join(lines)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmarks that the command line selects.

    Returns:
        The exit status: 1 if a sample of aioflux failed. A missed goal is not a failure.
    """
    arguments = list(sys.argv[1:] if argv is None else argv)
    if arguments[:1] == ["cluster"]:
        from perf.cluster.__main__ import main as simulate

        return simulate(arguments[1:])
    commands = parser()
    args = commands.parse_args(arguments)
    if args.list:
        print(listing())
        return 0
    try:
        scenarios = chosen_scenarios(args)
    except ValueError as exc:
        commands.error(str(exc))
    args.out.mkdir(parents=True, exist_ok=True)
    name = time.strftime("perf-%Y%m%d-%H%M%S")
    run = Run(args=args, name=name, circumstances=_machine.describe())
    about = _machine.summary(run.circumstances)
    print(f"{about}\nmedian of {args.pairs} pairs\n{terminal_heading()}", flush=True)
    begun = time.monotonic()
    try:
        for scenario in scenarios:
            if matches := chosen_matches(scenario, args.peers):
                run_scenario(run, scenario, matches)
            else:
                run.note(f"{scenario.name} has no match against {', '.join(args.peers)}")
    except KeyboardInterrupt:
        run.note("interrupted")
        run.has_failed = True
    finally:
        command = shlex.join(["python", "-m", "perf", *arguments])
        text = markdown(run.rows, command=command, about=f"{about}.", notes=run.notes)
        run.target(".md").write_text(text)
        if args.keep:
            keep(run, text, command)
        print(f"{time.monotonic() - begun:.0f} s; samples, table and plots: {args.out}/{name}*")
    return int(run.has_failed)


if __name__ == "__main__":
    sys.exit(main())
