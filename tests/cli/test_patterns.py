"""Patterns in arguments, `--include` and `--exclude`, and the options of all commands."""

from __future__ import annotations

import gzip
import json
import os
from pathlib import Path

import pytest

from aioflux.cli._arguments import NameFilter
from tests.cli.conftest import Screen, read_files, write_files

KEYS = ["a.txt", "b.txt", "c.bin", "p/a.txt", "p/q/a.txt", "p/q/b.bin", "r/a.txt", "x[1].txt"]


@pytest.fixture
def filled(bucket):
    for key in KEYS:
        bucket.put(key, key.encode())
    return bucket


@pytest.mark.parametrize(
    ("pattern", "found"),
    [
        ("*.txt", ["a.txt", "b.txt", "x[1].txt"]),
        ("?.bin", ["c.bin"]),
        ("[a-b].*", ["a.txt", "b.txt"]),
        ("{a,c}.*", ["a.txt", "c.bin"]),
        ("p/*", ["p/a.txt"]),
        ("*/a.txt", ["p/a.txt", "r/a.txt"]),
        ("p/**", ["p/a.txt", "p/q/a.txt", "p/q/b.bin"]),
        ("**/a.txt", ["p/a.txt", "p/q/a.txt", "r/a.txt"]),
        ("x[1].txt", ["x[1].txt"]),
    ],
)
@pytest.mark.parametrize("command", ["stat", "rm", "cp", "cat"])
def test_a_pattern_stands_for_the_objects_that_match(
    aioflux, filled, command, pattern, found
) -> None:
    uri = f"{filled.uri}/{pattern}"
    if command == "stat":
        rows = [json.loads(line) for line in aioflux("stat", "--json", uri).lines]
        assert [row["uri"] for row in rows] == [f"{filled.uri}/{key}" for key in found]
    elif command == "cat":
        assert aioflux("cat", uri).out == "".join(found)
    elif command == "rm":
        assert aioflux("rm", uri).status == 0
        assert filled.keys() == [key for key in KEYS if key not in found]
    else:
        names = [key.rpartition("/")[2] for key in found]
        ended = aioflux("cp", uri, "out/")
        assert sorted(read_files(Path("out"))) == sorted(set(names))
        assert ended.status == (1 if len(set(names)) < len(names) else 0)  # of one name each


@pytest.mark.parametrize(
    ("words", "found"),
    [
        (["ls", "*"], ["a.txt", "b.txt", "c.bin", "p/a.txt", "p/q/", "r/a.txt", "x[1].txt"]),
        (["ls", "*/q"], ["p/q/a.txt", "p/q/b.bin"]),
        (["ls", "*/"], ["p/a.txt", "p/q/", "r/a.txt"]),
        (["ls", "-r", "[pr]"], ["p/a.txt", "p/q/a.txt", "p/q/b.bin", "r/a.txt"]),
        (["ls", "*/*/*.bin"], ["p/q/b.bin"]),
    ],
)
def test_ls_takes_patterns_of_prefixes(aioflux, filled, words, found) -> None:
    ended = aioflux(*words[:-1], f"{filled.uri}/{words[-1]}")
    assert ended.lines == [f"{filled.uri}/{key}" for key in found]


def test_du_and_rm_take_patterns_of_prefixes(aioflux, filled) -> None:
    ended = aioflux("du", f"{filled.uri}/[pr]")
    assert [line.split()[1:] for line in ended.lines] == [
        ["3", f"{filled.uri}/p/"],
        ["1", f"{filled.uri}/r/"],
    ]
    assert aioflux("rm", "-r", f"{filled.uri}/[pr]").status == 0
    assert filled.keys() == [key for key in KEYS if "/" not in key]


def test_local_patterns(aioflux, bucket) -> None:
    write_files(Path("d"), {"a.txt": b"1", "b.txt": b"2", "e/c.txt": b"3", "f.bin": b"4"})
    assert aioflux("cat", "d/*.txt").out == "12"
    assert aioflux("cp", "d/**.txt", f"{bucket.uri}/").status == 0
    assert bucket.keys() == ["a.txt", "b.txt", "c.txt"]


PATTERNS = ["*.txt", "**.txt", "**/*.txt", "{a,b}.txt", "{d/e,d}/c.txt", "d/*", "?.txt", "*"]


@pytest.mark.parametrize("pattern", PATTERNS)
@pytest.mark.parametrize("command", ["cat", "du"])
def test_a_pattern_means_the_same_on_disk_and_in_a_bucket(
    aioflux, bucket, pattern, command
) -> None:
    names = ["a.txt", "b.txt", ".hidden.txt", "d/c.txt", "d/e/c.txt", "d/e/f.bin", "g"]
    for name in names:
        bucket.put(name, name.encode())
    write_files(Path("tree"), {name: name.encode() for name in names})
    os.chdir("tree")
    remote = aioflux(command, f"{bucket.uri}/{pattern}").out.replace(f"{bucket.uri}/", "")
    local = aioflux(command, pattern).out.replace(f"file://{os.getcwd()}/", "")
    local, remote = local.replace("/\n", "\n"), remote.replace("/\n", "\n")  # of directories
    assert sorted(local.splitlines()) == sorted(remote.splitlines())
    assert local


def test_many_matches_need_a_directory(aioflux, filled) -> None:
    ended = aioflux("cp", f"{filled.uri}/*.txt", "out")
    assert ended.status == 1
    assert "the pattern matches 3 names" in ended.err
    assert not Path("out").exists()


@pytest.mark.parametrize(
    ("include", "exclude", "admitted"),
    [
        ([], [], KEYS),
        (["*.bin"], [], ["c.bin", "p/q/b.bin"]),
        ([], ["q"], ["a.txt", "b.txt", "c.bin", "p/a.txt", "r/a.txt", "x[1].txt"]),
        (["p/*"], ["*.bin"], ["p/a.txt", "p/q/a.txt"]),
        (["p"], ["p/q"], ["p/a.txt"]),
        (["/a.txt", "r/"], [], ["a.txt", "r/a.txt"]),
    ],
)
def test_a_filter_admits_names_and_what_is_in_directories(include, exclude, admitted) -> None:
    names = NameFilter.parse(include, exclude)
    assert [key for key in KEYS if names.admits(key)] == admitted


@pytest.mark.parametrize("command", ["cp", "mv"])
def test_copies_and_moves_with_a_filter(aioflux, filled, command) -> None:
    words = ("-r", "--include", "*.txt", "--exclude", "q")
    assert aioflux(command, *words, filled.uri, "out").status == 0
    left = ["a.txt", "b.txt", "p/a.txt", "r/a.txt", "x[1].txt"]
    assert sorted(read_files(Path("out"))) == left
    assert filled.keys() == (KEYS if command == "cp" else [k for k in KEYS if k not in left])
    assert aioflux(command, "--include", "x", f"{filled.uri}/c.bin", "out").status == 2


def test_rm_with_a_filter(aioflux, filled) -> None:
    assert aioflux("rm", "-r", "--exclude", "*.txt", filled.uri).status == 0
    assert filled.keys() == [key for key in KEYS if key.endswith(".txt")]


# mv


def test_mv_renames_within_a_bucket(aioflux, filled) -> None:
    ended = aioflux("mv", f"{filled.uri}/a.txt", f"{filled.uri}/new")
    assert (ended.status, ended.err.startswith("moved 1 object, 5 B in ")) == (0, True)
    assert filled.get("new") == b"a.txt"
    assert "a.txt" not in filled.keys()  # noqa: SIM118  not a dict
    assert aioflux("mv", "-r", f"{filled.uri}/p", f"{filled.uri}/s/t").status == 0
    assert [key for key in filled.keys() if key[0] in "ps"] == [  # noqa: SIM118
        "s/t/a.txt",
        "s/t/q/a.txt",
        "s/t/q/b.bin",
    ]


def test_mv_between_disk_and_bucket(aioflux, bucket) -> None:
    tree = {"a": b"1", "d/b": b"2", "big": os.urandom(17 * 1024 * 1024)}
    write_files(Path("src"), tree)
    assert aioflux("mv", "-r", "src", f"{bucket.uri}/p").status == 0
    assert not Path("src").exists()
    assert bucket.contents() == {f"p/{key}": data for key, data in tree.items()}
    assert aioflux("mv", "-r", f"{bucket.uri}/p", "out").status == 0
    assert (bucket.keys(), read_files(Path("out"))) == ([], tree)


def test_mv_keeps_what_was_not_copied(aioflux, bucket, cli_server) -> None:
    write_files(Path("src"), {"a": b"1", "b": b"2"})
    with cli_server.faults.inject("objects.insert", bucket=bucket.name, key="p/a", status=403):
        assert aioflux("mv", "-r", "src", f"{bucket.uri}/p").status == 1
    assert (read_files(Path("src")), bucket.keys()) == ({"a": b"1"}, ["p/b"])
    bucket.put("p/a", b"other")
    ended = aioflux("mv", "-rn", "src", f"{bucket.uri}/p")
    assert (ended.status, read_files(Path("src"))) == (0, {"a": b"1"})
    assert "skipped src/a" in ended.err


def test_mv_keeps_a_source_that_was_overwritten_meanwhile(aioflux, bucket, cli_server) -> None:
    bucket.put("a", b"1")
    with cli_server.faults.inject("objects.delete", bucket=bucket.name, status=412):
        ended = aioflux("mv", f"{bucket.uri}/a", f"{bucket.uri}/b")
    assert ended.status == 1
    assert bucket.keys() == ["a", "b"]


def test_mv_needs_names(aioflux, bucket) -> None:
    assert aioflux("mv", "-", f"{bucket.uri}/a").status == 2
    assert aioflux("mv", f"{bucket.uri}/a", "-").status == 2
    ended = aioflux("mv", f"{bucket.uri}/a", f"{bucket.uri}/a")
    assert ended.status == 1


def test_mv_calls_fsync_before_it_deletes(aioflux, bucket, monkeypatch) -> None:
    bucket.put("a", b"1")
    synced = []
    fsync = os.fsync

    def record(descriptor: int) -> None:
        assert bucket.keys() == ["a"]
        synced.append(os.readlink(f"/proc/self/fd/{descriptor}"))
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", record)
    assert aioflux("mv", f"{bucket.uri}/a", "out").status == 0
    assert [".aioflux-" in path for path in synced] == [True, False]


def test_r_takes_no_pattern(aioflux, filled) -> None:
    for command in ("cp", "mv", "sync"):
        words = [] if command == "sync" else ["-r"]
        ended = aioflux(command, *words, f"{filled.uri}/p*", "out")
        assert (ended.status, "patterns are not expanded here" in ended.err) == (1, True)


# cp -n


@pytest.mark.parametrize("is_upload", [True, False])
def test_no_clobber_names_what_differs(aioflux, bucket, is_upload) -> None:
    tree = {"same": b"11", "size": b"2", "bytes": b"33"}
    write_files(Path("src"), tree)
    for key, data in {"same": b"11", "size": b"222", "bytes": b"34"}.items():
        bucket.put(key, data)
    sides = ["src", bucket.uri] if is_upload else [bucket.uri, "src"]
    ended = aioflux("cp", "-rn", *sides)
    assert ended.status == 0
    skipped = sorted(line.split()[1] for line in ended.err.splitlines()[:-1])
    assert skipped == [f"{sides[0]}/bytes:", f"{sides[0]}/size:"]
    assert ended.err.endswith(", 3 skipped, 2 of them different\n")


# rm asks


@pytest.fixture
def many(bucket):
    for number in range(1001):
        bucket.put(f"p/{number}", b"")
    return bucket


@pytest.mark.parametrize("words", [["-r", "/p"], ["-r", ""], ["/p/*"], ["/**"]])
def test_rm_of_many_needs_yes_without_a_terminal(aioflux, many, words) -> None:
    words = [*words[:-1], many.uri + words[-1]]
    ended = aioflux("rm", *words)
    assert ended.status == 1
    assert "more than 1,000 objects; add --yes" in ended.err
    assert len(many.keys()) == 1001
    assert aioflux("rm", "--dry-run", *words).status == 0
    assert aioflux("rm", "--yes", *words).status == 0
    assert many.keys() == []


def test_rm_deletes_nothing_that_it_could_not_count(aioflux, many, bucket, cli_server) -> None:
    with cli_server.faults.inject("objects.list", bucket=bucket.name, status=403, times=1):
        ended = aioflux("rm", "-r", f"{many.uri}/p")
    assert (ended.status, len(many.keys())) == (1, 1001)


def test_rm_of_a_thousand_does_not_ask(aioflux, many) -> None:
    assert aioflux("rm", f"{many.uri}/p/0").status == 0
    assert aioflux("rm", "-r", many.uri).status == 0
    assert many.keys() == []


# ls


def test_ls_sorts_limits_and_filters_by_age(aioflux, filled) -> None:
    filled.put("large", b"n" * 500)
    uri = f"{filled.uri}/large"
    assert aioflux("ls", "-r", "--sort", "size", filled.uri).lines[0] == uri
    assert len(aioflux("ls", "-r", "--limit", "3", filled.uri).lines) == 3
    assert aioflux("ls", "--limit", "0", filled.uri).lines == []
    assert len(aioflux("ls", "-r", "--newer", "1h", filled.uri).lines) == len(KEYS) + 1
    write_files(Path("d"), {"old": b"1", "new": b"2"})
    os.utime("d/old", (1, 1))
    assert [Path(each).name for each in aioflux("ls", "--newer", "1d", "d").lines] == ["new"]
    by_time = aioflux("ls", "--sort", "time", "d").lines
    assert [Path(each).name for each in by_time] == ["new", "old"]
    assert aioflux("ls", "--sort", "time", "--limit", "1", "d").lines == by_time[:1]
    assert aioflux("ls", "--sort", "colour", filled.uri).status == 2
    assert "500 B" in aioflux("ls", "-h", uri).lines[0]


# cat


def test_cat_uncompresses(aioflux, bucket) -> None:
    data = os.urandom(1000) * 9000
    bucket.put("a.gz", gzip.compress(data[:4_000_000]) + gzip.compress(data[4_000_000:]))
    bucket.put("b", b"plain")
    bucket.put("c", gzip.compress(data)[:-9])
    assert aioflux("cp", f"{bucket.uri}/a.gz", "a.gz").status == 0
    assert gzip.decompress(Path("a.gz").read_bytes()) == data
    for key, says in (("b", "is not gzip"), ("c", "its end is missing")):
        ended = aioflux("cat", "--decompress", f"{bucket.uri}/{key}")
        assert (ended.status, says in ended.err) == (1, True)
    assert aioflux("cat", "--decompress", "--range", "0-2", f"{bucket.uri}/a.gz").status == 2


def test_cat_uncompresses_all_members(command, bucket) -> None:
    data = os.urandom(1000) * 9000
    bucket.put("a.gz", gzip.compress(data[:4_000_000]) + gzip.compress(data[4_000_000:]))
    assert command("cat", "--decompress", f"{bucket.uri}/a.gz").stdout == data


# options of all commands


@pytest.mark.parametrize("is_before", [True, False])
def test_options_stand_before_or_after_the_command(
    aioflux, filled, cli_server, monkeypatch, is_before
) -> None:
    monkeypatch.setenv("STORAGE_EMULATOR_HOST", "http://127.0.0.1:1")
    options = ["--endpoint-url", cli_server.url, "--anonymous", "--max-in-flight", "2", "-q"]
    words = ["stat", f"{filled.uri}/a.txt"]
    ended = aioflux(*options, *words) if is_before else aioflux(*words, *options)
    assert (ended.status, ended.err) == (0, "")
    words = ["cp", f"{filled.uri}/a.txt", "out"]
    assert aioflux(*options, *words).err == ""  # no summary


def test_the_endpoint_is_in_the_environment(aioflux, filled, cli_server, monkeypatch) -> None:
    monkeypatch.delenv("STORAGE_EMULATOR_HOST")
    monkeypatch.setenv("AIOFLUX_ENDPOINT_URL", cli_server.url)
    assert aioflux("--anonymous", "stat", f"{filled.uri}/a.txt").status == 0
    assert aioflux("ls", ".").status == 0  # it is no error that a path needs none
    ended = aioflux("ls", filled.uri, "s3://bucket")
    assert "AIOFLUX_ENDPOINT_URL is for uris of one service" in ended.err


def test_logs_are_printed(aioflux, filled, cli_server) -> None:
    with cli_server.faults.inject("objects.get", bucket=filled.name, status=503, times=1):
        ended = aioflux("stat", "-v", f"{filled.uri}/a.txt")
    assert ended.status == 0
    assert ended.err.startswith("INFO aioflux.retry: ")
    assert aioflux("--log-level", "loud", "stat", f"{filled.uri}/a.txt").status == 2
    assert aioflux("--log-level", "error", "stat", f"{filled.uri}/a.txt").err == ""


def test_quiet_has_no_progress_on_a_terminal(aioflux, filled, monkeypatch) -> None:
    with Screen(monkeypatch) as screen:
        assert aioflux("cp", "-rq", filled.uri, "out").status == 0
    assert screen.text == ""


def test_a_wrong_deadline_in_the_environment_is_an_error(aioflux, filled, monkeypatch) -> None:
    monkeypatch.setenv("AIOFLUX_CONNECT_DEADLINE", "soon")
    ended = aioflux("ls", filled.uri)
    assert (ended.status, "AIOFLUX_CONNECT_DEADLINE=soon" in ended.err) == (2, True)


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completion_is_for_each_shell(aioflux, monkeypatch, shell) -> None:
    monkeypatch.setenv("_TYPER_COMPLETE_TEST_DISABLE_SHELL_DETECTION", "1")
    assert "_AIOFLUX_COMPLETE" in aioflux("--show-completion", shell).out


@pytest.mark.parametrize(
    "command",
    [
        *("ls", "cp", "mv", "sync", "rm", "cat", "stat", "du", "sign", "clean", "serve"),
        *(f"ckpt {name}" for name in ("list", "show", "verify", "prune", "history", "copy")),
    ],
)
def test_the_help_of_each_command_has_an_example(aioflux, command) -> None:
    text = " ".join(aioflux(*command.split(), "--help").out.split())
    assert f"aioflux {command} " in text.partition("Example")[2]
