"""`aioflux serve`: a process, its output and its exit status."""

from __future__ import annotations

import signal
import socket
import subprocess
import sys
import urllib.error
import urllib.request

import pytest

from aioflux.testing import GCSServer, GCSServerProcess
from tests.command import run_command

COMMAND = [sys.executable, "-m", "aioflux", "serve"]


def read(url: str) -> bytes:
    with urllib.request.urlopen(url, timeout=60) as response:
        return response.read()


def test_process_serves_its_buckets_with_its_options_and_ends_with_0_on_sigterm():
    process = GCSServerProcess(buckets=("one", "two"), arguments=("--rate-limit", "0.001"))
    with process:
        assert b'"name":"two"' in read(f"{process.url}/storage/v1/b/two")
        with pytest.raises(urllib.error.HTTPError, match="429"):
            read(f"{process.url}/storage/v1/b/two")
        assert process.stop() == 0


def test_sigint_ends_it_with_130():
    with GCSServerProcess() as process:
        assert process.signal(signal.SIGINT) == 130


def test_it_prints_what_to_export_and_ends_when_standard_input_does():
    with subprocess.Popen(
        [*COMMAND, "--port", "0", "--until-stdin-closes"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout is not None
        assert process.stdin is not None
        url = process.stdout.readline().strip().removeprefix("Serving on ")
        assert url.startswith("http://127.0.0.1:")
        assert process.stdout.readline() == f"export STORAGE_EMULATOR_HOST={url}\n"
        process.stdin.close()
        assert process.wait(200) == 0


def test_port_in_use_is_one_line_and_status_1(capfd):
    with socket.create_server(("127.0.0.1", 0)) as sock:
        assert run_command(["serve", "--port", str(sock.getsockname()[1])]) == 1
    printed = capfd.readouterr()
    assert printed.out == ""
    assert printed.err.startswith("Error: cannot serve on 127.0.0.1:")
    assert printed.err.count("\n") == 1


@pytest.mark.parametrize(
    "arguments",
    [
        ["--port", "many"],
        ["--latency-ms", "-1"],
        ["--nonsense"],
        ["--certificate", __file__],
        ["--bucket", "A/B"],
    ],
    ids=" ".join,
)
def test_wrong_usage_is_status_2(arguments, capfd):
    assert run_command(["serve", *arguments]) == 2
    assert capfd.readouterr().out == ""


def test_process_that_cannot_start_says_why():
    with GCSServer() as server, pytest.raises(RuntimeError, match="cannot serve on"):
        GCSServerProcess(port=server.port).start()


def test_a_root_in_use_is_one_line_and_status_1(tmp_path, capfd):
    """Two servers on one directory are no crash."""
    with GCSServer(root=tmp_path):
        assert run_command(["serve", "--port", "0", "--root", str(tmp_path)]) == 1
    printed = capfd.readouterr()
    assert printed.out == ""
    assert "another server uses" in printed.err
    assert printed.err.count("\n") == 1


def test_a_damaged_root_is_one_line_and_status_1(tmp_path, capfd):
    """So is a file that a loss of power has cut short."""
    with GCSServer(root=tmp_path, buckets=("bucket",)) as server:
        server.put("bucket", "key", b"data")
    [generations] = tmp_path.rglob("generation*")
    generations.write_bytes(b"{")
    assert run_command(["serve", "--port", "0", "--root", str(tmp_path)]) == 1
    printed = capfd.readouterr()
    assert printed.out == ""
    assert str(tmp_path) in printed.err
    assert printed.err.count("\n") == 1


def test_missing_typer_is_one_line_that_names_the_extra():
    code = "import sys; sys.modules['typer'] = None; from aioflux.cli import main; main()"
    command = [sys.executable, "-c", code]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=200, check=False)
    assert ended.returncode == 1
    assert "pip install 'aioflux-storage[cli]'" in ended.stderr
    assert ended.stderr.count("\n") == 1
