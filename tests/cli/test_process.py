"""The command as a process: signals, pipes, terminals, and what it loads."""

from __future__ import annotations

import os
import pty
import re
import select
import signal
import subprocess
import sys
import time
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from aioflux.testing import GCSServer
from aioflux.testing.gcs_server import Network
from tests.cli.conftest import FAR_SECONDS, PROGRAM, read_files, write_files

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

pytestmark = pytest.mark.more


MIB = 1024 * 1024


@contextmanager
def slow(server: GCSServer, bytes_per_second: int) -> Iterator[None]:
    """Give the signal time to meet a copy."""
    before = server.network
    server.network = Network(bytes_per_second=bytes_per_second)
    try:
        yield
    finally:
        server.network = before


class Terminal:
    """A process with a terminal of its own, as people run it."""

    def __init__(self, environment: dict[str, str], *arguments: object) -> None:
        self._ours, theirs = pty.openpty()
        self.process = subprocess.Popen(
            [*PROGRAM, *map(str, arguments)],
            stdin=theirs,
            stdout=theirs,
            stderr=theirs,
            env={**environment, "TERM": "xterm", "COLUMNS": "100"},
            start_new_session=True,
        )
        os.close(theirs)
        self.text = ""

    def read(self, until: str | Callable[[], bool] = "") -> bool:
        """Read until a pattern is there or something is so, or to the end; return whether it is."""

        def is_so() -> bool:
            if callable(until):
                return until()
            return bool(until and re.search(until, self.text))

        deadline = time.monotonic() + FAR_SECONDS
        while time.monotonic() < deadline:
            if is_so():
                return True
            if not select.select([self._ours], [], [], 0.05)[0]:
                continue
            try:
                data = os.read(self._ours, 65536)
            except OSError:  # the other end is closed
                break
            self.text += re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", data.decode(errors="replace"))
        return is_so()

    def write(self, data: bytes) -> None:
        os.write(self._ours, data)

    def end(self) -> int:
        """Read to the end, and return the exit status."""
        self.read()
        status = self.process.wait(FAR_SECONDS)
        os.close(self._ours)
        return status


def test_the_copy_shows_its_progress_on_a_terminal(environment, bucket, tmp_path) -> None:
    for at in range(300):
        bucket.put(f"s/{at:03}", b"x" * 1000)
    bucket.put("s/big", b"y" * 40 * MIB)
    terminal = Terminal(environment, "cp", "-r", f"{bucket.uri}/s", tmp_path / "out")
    assert terminal.end() == 0, terminal.text
    assert re.search(r"of 40\.3 MiB, \d+ of 301", terminal.text)
    assert re.search(r"MiB/s +eta (-:--:--|0:00:\d\d)", terminal.text)
    assert re.search(r"copied 301 objects, 40\.3 MiB in .* \(.*/s\)\s*$", terminal.text)
    assert len(read_files(tmp_path / "out")) == 301


@pytest.mark.parametrize("moment", [0.0, 0.4, 0.8])
def test_ctrl_c_leaves_whole_files_of_a_download(environment, bucket, tmp_path, moment) -> None:
    contents = {f"{at:03}/{at}": b"x" * 1000 for at in range(300)} | {"big": b"y" * 40 * MIB}
    for key, data in contents.items():
        bucket.put(key, data)
    with slow(bucket.server, 30 * MIB):
        terminal = Terminal(environment, "cp", "-r", bucket.uri, tmp_path / "out")
        assert terminal.read(until=r"\d%"), terminal.text
        time.sleep(moment)  # the moment is what differs, and no event has it
        terminal.process.send_signal(signal.SIGINT)
        status = terminal.end()
    arrived = read_files(tmp_path / "out")
    partial = {name for name in arrived if name.startswith(".aioflux-partial-")}
    assert len(partial) <= 1  # of "big"
    arrived = {name: data for name, data in arrived.items() if name not in partial}
    assert arrived == {key: contents[key] for key in arrived}
    assert not [
        path for path in (tmp_path / "out").rglob("*") if path.is_dir() and not any(path.iterdir())
    ]
    assert status == 130 or (status == 0 and arrived == contents)
    assert "Traceback" not in terminal.text


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_a_large_download_continues(environment, bucket, tmp_path, number) -> None:
    data = os.urandom(96 * MIB)
    bucket.put("big", data)
    (tmp_path / "big").write_bytes(b"old")
    os.chmod(tmp_path / "big", 0o600)
    program = [*PROGRAM, "cp", f"{bucket.uri}/big", tmp_path / "big"]
    with slow(bucket.server, 60 * MIB):
        process = subprocess.Popen(program, env=environment, stderr=subprocess.DEVNULL)
        while sum(path.stat().st_blocks for path in tmp_path.iterdir()) * 512 < 48 * MIB:
            assert process.poll() is None
            time.sleep(0.01)
        process.send_signal(number)
        process.wait(FAR_SECONDS)
    assert (tmp_path / "big").read_bytes() == b"old"
    found = tmp_path.glob(".aioflux-partial-*")
    assert [path.stat().st_mode & 0o777 for path in found] == [0o600]
    before = bucket.server.stats.total.bytes_out
    subprocess.run(program, env=environment, check=True, stderr=subprocess.DEVNULL)
    assert bucket.server.stats.total.bytes_out - before < len(data)
    assert read_files(tmp_path) == {"big": data}
    assert (tmp_path / "big").stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize("moment", [0.0, 0.4, 0.8])
def test_ctrl_c_leaves_nothing_of_an_upload(environment, bucket, tmp_path, moment) -> None:
    contents = {f"{at:03}": b"x" * 1000 for at in range(300)} | {"big": b"y" * 40 * MIB}
    write_files(tmp_path, contents)
    with slow(bucket.server, 30 * MIB):
        terminal = Terminal(environment, "cp", "-r", tmp_path, bucket.uri)
        assert terminal.read(until=r"\d%"), terminal.text
        time.sleep(moment)  # the moment is what differs, and no event has it
        terminal.process.send_signal(signal.SIGINT)
        status = terminal.end()
    stored = bucket.contents()
    assert stored == {key: contents[key] for key in stored}
    assert bucket.num_uploads() == 0
    assert status == 130 or (status == 0 and stored == contents)
    assert "Traceback" not in terminal.text


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_signals_end_a_download_that_would_never_end(environment, bucket, tmp_path, number) -> None:
    bucket.put("big", b"y" * 40 * MIB)
    faults = bucket.server.faults
    before = faults.injected["stall"]
    with faults.inject("objects.media", bucket=bucket.name, stall_at=MIB):
        terminal = Terminal(environment, "cp", f"{bucket.uri}/big", tmp_path / "out" / "big")
        assert terminal.read(until=lambda: faults.injected["stall"] > before), terminal.text
        terminal.process.send_signal(number)
        assert terminal.end() == 128 + number, terminal.text
    assert list(tmp_path.iterdir()) == []
    assert "Traceback" not in terminal.text


def test_ctrl_c_ends_an_upload_that_would_never_end(environment, bucket, tmp_path) -> None:
    write_files(tmp_path, {"big": b"y" * 40 * MIB})
    faults = bucket.server.faults
    before = faults.injected["delay"]
    with faults.inject("multipart.part", bucket=bucket.name, delay_seconds=3600.0):
        terminal = Terminal(environment, "cp", tmp_path / "big", f"{bucket.uri}/big")
        assert terminal.read(until=lambda: faults.injected["delay"] > before), terminal.text
        terminal.process.send_signal(signal.SIGINT)
        assert terminal.end() == 130, terminal.text
    assert bucket.keys() == []
    assert bucket.num_uploads() == 0
    assert "Traceback" not in terminal.text


def test_ctrl_c_does_not_wait_for_standard_input(environment, bucket) -> None:
    terminal = Terminal(environment, "cp", "-", f"{bucket.uri}/k")
    assert terminal.read(until="0 of 1"), terminal.text
    terminal.process.send_signal(signal.SIGINT)
    assert terminal.end() == 130
    assert bucket.keys() == []


def test_ctrl_c_does_not_wait_for_the_reader_of_a_pipe(environment, bucket) -> None:
    bucket.put("big", b"y" * 20 * MIB)
    with subprocess.Popen(
        [*PROGRAM, "cat", f"{bucket.uri}/big"], stdout=subprocess.PIPE, env=environment
    ) as process:
        assert process.stdout is not None
        assert process.stdout.read(1) == b"y"
        process.send_signal(signal.SIGINT)
        assert process.wait(FAR_SECONDS) == 130


@pytest.mark.parametrize("arguments", [["cat"], ["ls", "-r"], ["cp"]], ids=" ".join)
def test_a_closed_pipe_is_not_an_error(environment, bucket, arguments) -> None:
    bucket.put("big", b"y\n" * 5 * MIB)
    for at in range(3000):
        bucket.put(f"{at:05}")
    uri = bucket.uri if "ls" in arguments else f"{bucket.uri}/big"
    with subprocess.Popen(
        [*PROGRAM, *arguments, uri, *(["-"] if "cp" in arguments else [])],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=environment,
    ) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.readline()
        process.stdout.close()
        assert process.wait(FAR_SECONDS) == 128 + signal.SIGPIPE
        assert process.stderr.read() == b""


def test_help_loads_no_torch_and_no_cloud_sdk(environment) -> None:
    code = (
        "import sys; from aioflux.cli._app import run_app; sys.argv[1:] = ['--help']; run_app(); "
        "print(*sys.modules, file=sys.stderr)"
    )
    ended = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True
    )
    loaded = {name.split(".")[0] for name in ended.stderr.split()}
    assert not loaded & {"torch", "numpy", "gcloud", "google", "aiohttp"}
    for name in ("ls", "cat", "cp", "rm", "stat", "serve", "clean"):
        assert re.search(rf"\b{name}\b", ended.stdout)


@pytest.mark.parametrize("arguments", [["ls", "memory://b"], ["--debug", "ls", "memory://b"]])
def test_a_command_imports_itself_only(arguments, environment) -> None:
    code = (
        f"import sys; from aioflux.cli._app import run_app; sys.argv[1:] = {arguments!r}\n"
        "run_app(); print(*sys.modules, file=sys.stderr)"
    )
    ended = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True
    )
    loaded = set(ended.stderr.split())
    assert "aioflux.cli._ls" in loaded
    assert not loaded & {"aioflux.cli._cp", "aioflux.cli._ckpt", "aiohttp", "gcloud", "jwt", "rich"}


def test_an_unexpected_error_is_one_line_too(environment) -> None:
    code = (
        "import os, sys\n"
        "from aioflux.cli._app import app, run_app\n"
        "@app.command()\n"
        "def broken() -> int:\n"
        "    return {}['x']\n"
        "sys.argv[1:] = ['broken']\n"
        "assert run_app() == 1\n"
        "print('--', file=sys.stderr)\n"
        "os.environ['AIOFLUX_DEBUG'] = '1'\n"
        "sys.exit(run_app())"
    )
    ended = subprocess.run(
        [sys.executable, "-c", code],
        env={**environment, "AIOFLUX_DEBUG": "0"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert ended.returncode == 1
    plain, _, shown = ended.stderr.partition("--\n")
    assert plain == "Error: unexpected KeyError: 'x' (set AIOFLUX_DEBUG=1 for the traceback)\n"
    assert "Traceback" in shown


def test_files_without_permission_are_reported(command, bucket, tmp_path) -> None:
    if os.geteuid() == 0:
        pytest.skip("root may read everything")
    write_files(tmp_path, {"a": b"1", "b": b"2"})
    Path(tmp_path / "a").chmod(0)
    ended = command("cp", "-r", tmp_path, bucket.uri)
    assert ended.returncode == 1
    assert b"Permission denied" in ended.stderr
    assert bucket.keys() == ["b"]


@pytest.fixture(scope="module")
def public() -> Iterator[GCSServer]:
    """A server that the command does not know to be an emulator: requests carry credentials."""
    with GCSServer(tls=True, buckets=["public"]) as server:
        yield server


@pytest.mark.parametrize("name", ["ls", "cat", "stat", "cp", "clean", "rm"])
def test_public_buckets_are_reached_without_credentials(
    aioflux, public, tmp_path, monkeypatch, name
) -> None:
    public.put("public", "k", b"data")
    for variable in tuple(os.environ):
        if variable.startswith(("CLOUDSDK_", "GCE_", "GOOGLE_", "STORAGE_")):
            monkeypatch.delenv(variable)
    monkeypatch.setenv("GOOGLE_APPLICATION_CREDENTIALS", "/nowhere/key.json")
    monkeypatch.setenv("SSL_CERT_FILE", str(public.ca_file))
    uri = "gs://public" if name in {"ls", "clean"} else "gs://public/k"
    command = [name, uri, *(["-"] if name == "cp" else []), "--endpoint-url", public.url]
    denied = aioflux(*command)
    assert denied.status == 1
    assert "--anonymous" in denied.err
    ended = aioflux(*command, "--anonymous")
    assert ended.status == 0, ended.err


@pytest.mark.parametrize(
    "arguments",
    [["ls", "-r", "--json"], ["rm", "-r", "--dry-run"], ["clean", "--dry-run", "--older-than=0s"]],
    ids=" ".join,
)
def test_ctrl_c_does_not_wait_for_the_reader_of_lines(environment, bucket, arguments) -> None:
    for at in range(3000):
        bucket.put(f".aioflux-uploads/{at:05}" if "clean" in arguments else f"{at:05}")
    with subprocess.Popen(
        [*PROGRAM, *arguments, bucket.uri], stdout=subprocess.PIPE, env=environment
    ) as process:
        assert process.stdout is not None
        assert process.stdout.read(1)
        process.send_signal(signal.SIGINT)
        assert process.wait(FAR_SECONDS) == 130


@pytest.mark.parametrize(
    ("command", "status"),
    [
        ("ls {uri} >&-", 1),
        ("ls {uri}/none 2>&-", 1),
        ("rm {uri}/a >&- 2>&- <&-", 0),
        ("cp - {uri}/b <&-", 1),
        ("cat {uri}/a >&-", 1),
        ("cat {uri}/a <&- 2>&-", 0),
    ],
)
def test_closed_standard_streams_are_errors_if_they_are_used(
    environment, bucket, command, status
) -> None:
    bucket.put("a")
    ended = subprocess.run(
        ["/bin/sh", "-c", f"{' '.join(PROGRAM)} {command.format(uri=bucket.uri)}"],
        env=environment,
        capture_output=True,
        timeout=FAR_SECONDS,
        check=False,
    )
    assert ended.returncode == status, ended.stderr
    assert bucket.keys() in (["a"], [])
    if status and "2>" not in command:
        assert b"Bad file descriptor" in ended.stderr
        assert ended.stderr.count(b"\n") <= 2


def test_what_the_terminal_cannot_show_is_escaped(environment, bucket) -> None:
    bucket.put("\u20ac-\xe9")
    ended = subprocess.run(
        [*PROGRAM, "ls", bucket.uri],
        env={**environment, "PYTHONIOENCODING": "latin-1"},
        capture_output=True,
        timeout=FAR_SECONDS,
        check=False,
    )
    assert ended.stdout == f"{bucket.uri}/\\u20ac-\xe9\n".encode("latin-1")
    assert ended.returncode == 0


@pytest.mark.parametrize(("answer", "status"), [(b"y\n", 0), (b"\n", 130), (b"", 130)])
def test_rm_asks_on_a_terminal(environment, bucket, answer, status) -> None:
    for number in range(1001):
        bucket.put(f"p/{number}", b"")
    terminal = Terminal(environment, "rm", "-r", f"{bucket.uri}/p")
    assert terminal.read(until=r"Delete more than 1,000 objects\? \[y/N\] $")
    assert len(bucket.keys()) == 1001
    if answer:
        terminal.write(answer)
    else:
        terminal.process.send_signal(signal.SIGINT)
    assert terminal.end() == status, terminal.text
    assert len(bucket.keys()) == (1001 if status else 0)


def test_the_help_of_all_commands_loads_no_store() -> None:
    """Its import takes 90 ms; a command imports it when it runs."""
    code = "import sys; from aioflux.cli import _app; _app._add_commands([]); "
    code += "print([name for name in sys.modules if name.startswith('aioflux.store')])"
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, check=True)
    assert ended.stdout == b"[]\n"
