"""`python -m perf`: benchmarks of aioflux and other clients (peers), in pairs of alternating runs.

Each run of aioflux or of a peer is a separate process. aioflux and one peer alternate (A B A B), so
that the noise of the machine affects both. The reported ratio is the rate of aioflux divided by the
rate of the peer, the median over all pairs. Output: a table, and a JSON line for each sample.
"""

from __future__ import annotations

import argparse
import json
import math
import pkgutil
import shlex
import sys
import time
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

from perf import _machine, peers
from perf._pairs import play
from perf._report import lines_of, terminal_heading, terminal_row
from perf._samples import goal_of, judge, judge_promise, promised, unplayed
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
    "known_peers",
    "listing",
    "main",
    "parser",
    "play_match",
]

OUT = Path("perf/out")
LIMIT_SECONDS = 120.0
"""Time limit of a sample, unless the scenario has a longer one."""
RESULTS = Path("perf/results")
"""Directory of the results of record, which are committed."""


@dataclass
class Run:
    """Arguments and results of one call of this command."""

    args: argparse.Namespace
    log: Path
    """File with a JSON line for the run and for each sample."""
    notes: list[str] = field(default_factory=list)
    has_failed: bool = False
    """Whether one of our own samples failed."""

    def note(self, text: str) -> None:
        """Print a note, unless the same note was printed before."""
        if text not in self.notes:
            self.notes.append(text)
            print(f"    # {text}", flush=True)

    def add(self, row: Row) -> None:
        """Print a row of the table."""
        print(terminal_row(row), flush=True)


class Servers:
    """Servers of one scenario. A server starts when its spec is first requested."""

    def __init__(self, stack: ExitStack, run: Run) -> None:
        self._stack = stack
        self._run = run
        self._running: dict[ServerSpec, Server] = {}

    def __call__(self, spec: ServerSpec) -> Server:
        """Return the server for a spec."""
        if self._run.args.server:
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
    with run.log.open("a") as log:

        def keep(pair: Pair) -> None:
            log.writelines(f"{line}\n" for line in lines_of(scenario, match, pair, run.notes))
            log.flush()

        try:
            pairs = play(
                match,
                servers,
                num_pairs=1 if run.args.toy else min(run.args.pairs, scenario.max_pairs),
                has_warm_up=not run.args.toy,
                limit_seconds=max(LIMIT_SECONDS, scenario.min_limit_seconds),
                keep=keep,
            )
        except (OSError, RuntimeError) as exc:
            run.has_failed = True
            run.add(unplayed(scenario.name, match, f"{type(exc).__name__}: {exc}"))
            return []
    run.has_failed |= any(pair.ours.error for pair in pairs)
    run.add(judge(scenario.name, scenario.displayed_bytes, match, pairs))
    return pairs


def run_scenario(run: Run, scenario: Scenario, matches: Sequence[Match]) -> None:
    """Run some matches of a scenario, one after the other."""
    with ExitStack() as stack:
        servers = Servers(stack, run)
        pairs = [pair for match in matches for pair in play_match(run, scenario, match, servers)]
    for promise in scenario.promises():
        run.add(judge_promise(scenario.name, promise, pairs))


def chosen_matches(scenario: Scenario, peers: Sequence[str]) -> list[Match]:
    """Return all matches, or only the matches against the given peers.

    The peer `aioflux` selects comparisons of aioflux with itself: a bound, or the blocking store.
    """
    matches = scenario.matches()
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
    settings: dict[str, str] = {}
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
    found.add_argument("--out", type=Path, default=OUT, help="directory of the output files")
    found.add_argument("--keep", metavar="NAME", help=f"append the samples to {RESULTS}/NAME.jsonl")
    found.add_argument("--list", action="store_true", help="list the scenarios and exit")
    return found


def listing() -> str:
    """Return the text of `--list`: the scenarios with their peers, goals and parameters."""
    lines = []
    for scenario in SCENARIOS.values():
        goals = [f"{match.name} {goal_of(match)}".rstrip() for match in scenario.matches()]
        goals += [f"{each.figure} {promised(each)}" for each in scenario.promises()]
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
    if arguments[:1] == ["cli"]:
        from perf.cli import main as compare

        return compare(arguments[1:])
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
    run = Run(args=args, log=args.out / time.strftime("perf-%Y%m%d-%H%M%S.jsonl"))
    circumstances = _machine.describe()
    command = shlex.join(["python", "-m", "perf", *arguments])
    run.log.write_text(json.dumps({"command": command, **circumstances}) + "\n")
    about = _machine.summary(circumstances)
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
        if args.keep:
            RESULTS.mkdir(exist_ok=True)
            with (RESULTS / f"{args.keep}.jsonl").open("a") as kept:
                kept.write(run.log.read_text())
        print(f"{time.monotonic() - begun:.0f} s; samples: {run.log}")
    return int(run.has_failed)


if __name__ == "__main__":
    sys.exit(main())
