"""Messages for arguments that were typed in another way than the command takes them."""

from __future__ import annotations

import pytest


@pytest.fixture
def many(bucket):
    for number in range(50):
        bucket.put(f"p/{number:02}.txt")
    bucket.put("q/one")
    bucket.put("two", b"ab")
    return bucket


def test_cp_of_one_argument_misses_the_target(aioflux) -> None:
    ended = aioflux("cp", "one-argument")
    assert ended.status == 2
    assert ended.err == (
        "Error: Invalid value: the TARGET is missing; write SOURCE... TARGET "
        "(see aioflux cp --help)\n"
    )


def test_cp_of_nothing_misses_both(aioflux) -> None:
    ended = aioflux("cp")
    assert ended.status == 2
    assert "SOURCE and TARGET are missing" in ended.err


@pytest.mark.parametrize(
    ("command", "advice"),
    [
        (["rm"], "use -r to delete them"),
        (["rm", "--dry-run"], "use -r to delete them"),
        (["stat"], "use aioflux ls -r to list them"),
        (["cat"], "use aioflux ls -r to list them"),
        (["cp"], "use -r to copy them"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_a_prefix_instead_of_an_object_is_told_with_what_is_below(
    aioflux, many, command, advice
) -> None:
    rest = ["out"] if command == ["cp"] else []
    for key, below in (("p", "50 objects are"), ("q", "1 object is")):
        ended = aioflux(*command, f"{many.uri}/{key}", *rest)
        assert ended.status == 1
        assert ended.err.splitlines()[0] == (
            f"Error: {many.uri}/{key} is not an object; {below} below it: {advice}"
        )
    assert len(many.keys()) == 52


@pytest.mark.parametrize("command", ["rm", "stat", "cat"])
def test_a_bucket_that_does_not_exist_is_named(aioflux, command) -> None:
    ended = aioflux(command, "gs://bucket-that-is-not/a")
    assert ended.status == 1
    assert "the bucket does not exist" in ended.err


def test_more_objects_than_one_page_are_not_counted(aioflux, bucket) -> None:
    for number in range(1001):
        bucket.put(f"p/{number}")
    assert "1,000 objects or more are below it" in aioflux("stat", f"{bucket.uri}/p").err


@pytest.mark.parametrize("command", ["ls", "rm", "stat", "cat", "cp", "du", "mv", "sign"])
@pytest.mark.parametrize("pattern", ["p/*.tar", "p/9?.txt", "p/[!0-4]0.txt"])
def test_a_pattern_that_matches_nothing_is_an_error(aioflux, many, command, pattern) -> None:
    rest = ["out/"] if command in {"cp", "mv"} else []
    ended = aioflux(command, f"{many.uri}/{pattern}", *rest)
    assert ended.status == 1
    assert ended.err.splitlines()[0] == (
        f"Error: nothing matches {many.uri}/{pattern}; list the names with aioflux ls {many.uri}/p/"
    )


def test_an_object_whose_name_looks_like_a_pattern_is_one(aioflux, bucket) -> None:
    bucket.put("a*[1].txt", b"data")
    assert aioflux("cat", f"{bucket.uri}/a*[1].txt").out == "data"
    assert aioflux("rm", f"{bucket.uri}/a*[1].txt").status == 0


@pytest.mark.parametrize(
    ("text", "status"),
    [("50-60", 1), ("50-", 1), ("2-", 1), ("2-3", 1), ("1-60", 0), ("0-60", 0), ("0-", 0)],
)
def test_a_range_beyond_the_end_is_an_error(aioflux, many, text, status) -> None:
    ended = aioflux("cat", "--range", text, f"{many.uri}/two")
    assert ended.status == status
    if status:
        assert ended.out == ""
        assert ended.err == (
            f"Error: --range {text} begins beyond the end of {many.uri}/two, which has 2 bytes\n"
        )


def test_a_range_from_the_beginning_of_an_empty_object_is_empty(aioflux, bucket) -> None:
    bucket.put("empty", b"")
    ended = aioflux("cat", "--range", "0-10", f"{bucket.uri}/empty")
    assert (ended.status, ended.out, ended.err) == (0, "", "")


@pytest.mark.parametrize(
    ("command", "rest"),
    [
        (["ls"], []),
        (["ls", "-r"], []),
        (["stat"], []),
        (["cat"], []),
        (["rm"], []),
        (["rm", "-r"], []),
        (["cp"], ["out"]),
        (["cp", "-r"], ["out"]),
        (["clean"], []),
        (["ckpt", "list"], []),
    ],
    ids=lambda value: " ".join(value) or "-",
)
@pytest.mark.parametrize(
    ("typed", "meant"),
    [
        ("bucket", "gs://bucket"),
        ("bucket/train/a", "gs://bucket/train/a"),
        ("gs:/bucket/a", "gs://bucket/a"),
    ],
)
def test_a_bucket_without_its_scheme(aioflux, command, rest, typed, meant) -> None:
    ended = aioflux(*command, typed, *rest)
    assert ended.status == 1
    assert ended.err.splitlines()[0].endswith(f"did you mean {meant}?")


@pytest.mark.parametrize("typed", ["a.txt", "./bucket", "/bucket", "../bucket", "Bucket", "b"])
def test_a_path_that_is_no_bucket_has_no_suggestion(aioflux, typed) -> None:
    ended = aioflux("ls", typed)
    assert ended.status == 1
    assert "did you mean" not in ended.err
    assert "check the spelling" in ended.err


@pytest.mark.parametrize(
    ("typed", "meant"),
    [
        ("abfs://box@acct.dfs.core.windows.net/p/a", "az://acct/box/p/a"),
        ("https://storage.googleapis.com/bucket/a%20b", "gs://bucket/a b"),
    ],
)
def test_a_uri_of_another_kind(aioflux, typed, meant) -> None:
    ended = aioflux("ls", typed)
    assert ended.status == 1
    assert ended.err.endswith(f"did you mean {meant}?\n")


def test_a_listing_that_failed_has_no_total(aioflux, many) -> None:
    ended = aioflux("ls", "-l", "gs://bucket-that-is-not")
    assert (ended.status, ended.out) == (1, "")
    assert ended.err.count("\n") == 1
    ended = aioflux("ls", "-l", f"{many.uri}/q", "gs://bucket-that-is-not")
    assert ended.status == 1
    assert len(ended.lines) == 1
    assert aioflux("ls", "-l", f"{many.uri}/q").lines[-1] == "1 object, 4 bytes (4 B)"


def test_without_a_login_azure_is_one_line(command, environment) -> None:
    """azure-identity logs a line for each kind of credentials that it tried."""
    environment.update(PATH="", AZURE_TOKEN_CREDENTIALS="dev", AIOFLUX_DEBUG="0")
    environment.pop("AZURE_STORAGE_CONNECTION_STRING", None)
    ended = command("ls", "az://account/container")
    assert ended.returncode == 1
    [line] = ended.stderr.decode().splitlines()
    assert line.startswith("Error: could not list az://account/container/: ")
    assert "run 'az login'" in line
    environment["AIOFLUX_DEBUG"] = "1"
    assert b"Attempted credentials" in command("ls", "az://account/container").stderr
