"""`aioflux ckpt`: output, effect and exit status of each command."""

from __future__ import annotations

import asyncio
import csv
import io
import json
import re
import subprocess
import sys

import pytest

from aioflux import open_store
from tests.checkpoint.saves import METADATA, save_id, save_step
from tests.cli.conftest import FAR_SECONDS, Screen

CREATED = 1_769_860_800.0  # 2026-01-31T12:00:00Z


def on(uri, act):
    """Run a coroutine on the store of a uri."""

    async def work():
        async with open_store(uri) as store:
            return await act(store)

    return asyncio.run(work())


@pytest.fixture
def run(aioflux, bucket):
    """The uri of a run of three steps."""

    async def fill(store):
        for step, loss in ((100, 0.5), (200, 0.25), (300, 0.75)):
            await save_step(store, step, created=CREATED + step, metrics={"loss": loss})

    uri = f"{bucket.uri}/run"
    on(uri, fill)
    return uri


def break_step(bucket, step):
    prefix = f"run/step-{step:08d}/"
    key = next(key for key in bucket.contents() if key.startswith(prefix) and "distcp" in key)
    bucket.put(key, b"x" * 100_000)
    return f"{bucket.uri}/{key}"


def keys_of_steps(bucket):
    return sorted({key.split("/")[1] for key in bucket.contents() if key.startswith("run/step-")})


def test_list_is_a_table_of_the_steps(aioflux, run) -> None:
    ended = aioflux("ckpt", "list", run)
    assert ended.status == 0
    header, first, *_, last = ended.lines
    assert header.split() == ["STEP", "CREATED", "SIZE", "OBJECTS", "RANKS", "LAYOUT", "METRICS"]
    assert first.split() == [
        *("100", "2026-01-31T12:01:40.000Z", "195.3", "KiB", "2", "2", "dcp", "loss=0.5")
    ]
    assert last.split()[0] == "300"
    assert ended.err == "3 steps, 585.9 KiB\n"


def test_list_json_has_these_fields(aioflux, run) -> None:
    rows = [json.loads(line) for line in aioflux("ckpt", "list", "--json", run).lines]
    assert [row["step"] for row in rows] == [100, 200, 300]
    assert rows[0] == {
        "type": "checkpoint",
        "uri": f"{run}/step-00000100/",
        "step": 100,
        "created": "2026-01-31T12:01:40.000Z",
        "size": 200_000,
        "num_objects": 2,
        "world_size": 2,
        "layout": "dcp",
        "save_id": save_id(100),
        "metrics": {"loss": 0.5},
        "problem": "",
    }


def test_list_names_a_step_that_cannot_be_read(aioflux, run, bucket) -> None:
    bucket.put("run/step-00000200/.metadata", METADATA)
    ended = aioflux("ckpt", "list", run)
    assert ended.status == 1
    assert ended.lines[2].split() == ["200", *"-----", "cannot", "be", "read"]
    assert "step-00000200/.metadata has no commit of aioflux" in ended.err


@pytest.mark.parametrize("command", ["list", "verify", "show", "prune", "history", "copy"])
def test_nothing_there_is_an_error(aioflux, bucket, command) -> None:
    more = {"prune": ["--keep-last", "1"], "copy": ["gs://elsewhere/x"]}.get(command, [])
    ended = aioflux("ckpt", command, f"{bucket.uri}/none", *more)
    if command == "prune":
        assert (ended.status, ended.err) == (0, "deleted 0 steps, 0 kept\n")
        return
    assert ended.status == 1
    assert "none" in ended.err
    assert aioflux("ckpt", command, "no-such-directory", *more).status == 1


def test_show_is_of_the_newest_valid_step(aioflux, run, bucket) -> None:
    break_step(bucket, 300)
    ended = aioflux("ckpt", "show", run)
    assert (ended.status, ended.err) == (0, "")
    assert ended.lines[0] == f"{run}/step-00000200/"
    assert "  size:        200000 (195.3 KiB)" in ended.lines
    assert "  metrics:     loss=0.25" in ended.lines
    assert ended.lines[-1].split()[-1] == f"{save_id(200)}/__1_0.distcp"
    assert aioflux("ckpt", "show", f"{run}/step-00000200").out == ended.out
    assert aioflux("ckpt", "show", run, "--step", 100).lines[0] == f"{run}/step-00000100/"
    assert aioflux("ckpt", "show", run, "--step", 101).status == 1


def test_show_json_lists_the_objects(aioflux, run) -> None:
    lines = aioflux("ckpt", "show", "--json", run).lines
    whole, first, _ = [json.loads(line) for line in lines]
    assert (whole["type"], whole["step"], whole["num_objects"]) == ("checkpoint", 300, 2)
    assert list(first) == ["type", "uri", "size", "crc32c", "generation", "rank", "num_items"]
    assert first["uri"] == f"{run}/step-00000300/{save_id(300)}/__0_0.distcp"


@pytest.mark.parametrize("deep", [[], ["--deep"]], ids=["shallow", "deep"])
def test_verify_prints_a_line_for_each_step(aioflux, run, bucket, deep) -> None:
    ended = aioflux("ckpt", "verify", run, *deep)
    assert ended.status == 0
    assert [line.split()[0] for line in ended.lines] == ["ok"] * 3
    broken = break_step(bucket, 200)
    ended = aioflux("ckpt", "verify", run, *deep)
    assert ended.status == 1
    assert [line.split()[0] for line in ended.lines] == ["ok", "broken", "ok"]
    assert broken in ended.err
    assert "crc32c" in ended.err
    assert "1 failed" in ended.err
    assert aioflux("ckpt", "verify", f"{run}/step-00000300", *deep).status == 0
    assert aioflux("ckpt", "verify", run, "--step", "100", "--step", "300", *deep).status == 0
    assert aioflux("ckpt", "verify", run, "--step", "150", *deep).status == 1


def test_verify_json_names_the_problems(aioflux, run, bucket) -> None:
    broken = break_step(bucket, 200)
    ended = aioflux("ckpt", "verify", run, "--step", "200", "--json")
    [row] = [json.loads(line) for line in ended.lines]
    assert ended.status == 1
    assert list(row) == ["type", "uri", "step", "is_valid", "num_objects", "size", "problems"]
    assert (row["step"], row["is_valid"]) == (200, False)
    [problem] = row["problems"]
    assert (problem["kind"], problem["uri"]) == ("crc32c", broken)


def test_prune_removes_what_no_rule_keeps(aioflux, run, bucket) -> None:
    arguments = ["ckpt", "prune", run, "--keep-last", "1", "--keep-best", "loss:min"]
    plan = aioflux(*arguments, "--dry-run")
    assert (plan.status, plan.lines) == (0, [f"would delete {run}/step-00000100/"])
    assert plan.err == "would delete 1 step, 2 kept\n"
    assert len(keys_of_steps(bucket)) == 3
    done = aioflux(*arguments, "--json")
    [row] = [json.loads(line) for line in done.lines]
    assert row == {"type": "checkpoint", "uri": f"{run}/step-00000100/", "step": 100}
    assert keys_of_steps(bucket) == ["step-00000200", "step-00000300"]
    assert aioflux("ckpt", "prune", run, "--ttl", "1s", "--protect", "200").status == 0
    assert keys_of_steps(bucket) == ["step-00000200", "step-00000300"]


@pytest.mark.parametrize(
    "rules",
    [[], ["--keep-last", "0"], ["--keep-best", "loss"], ["--keep-best", "a:min:0"], ["--ttl", "x"]],
    ids=" ".join,
)
def test_prune_without_a_valid_rule_is_wrong_usage(aioflux, run, rules) -> None:
    ended = aioflux("ckpt", "prune", run, *rules)
    assert ended.status == 2
    assert ended.err.endswith("(see aioflux ckpt prune --help)\n")


@pytest.fixture
def saved(run, bucket):
    """The uri of a run with the outcomes of three saves."""
    records = [
        {
            "record_id": save_id(number),
            "time": f"2026-01-31T12:00:0{number}Z",
            "step": number * 100,
            "outcome": "failed" if number == 1 else "committed",
            "num_bytes": number * 2**20,
            "upload_seconds": 2.0,
            "error": "no space,\nat all" if number == 1 else "",
        }
        for number in range(3)
    ]
    bucket.put("run/.checkpoint-history/history.json", json.dumps(records).encode())
    return run


def test_history_is_a_table(aioflux, saved) -> None:
    ended = aioflux("ckpt", "history", saved)
    assert (ended.status, ended.err) == (0, "")
    assert ended.lines[0].split()[:3] == ["TIME", "STEP", "OUTCOME"]
    assert ended.lines[2].endswith("no space,\\nat all")
    assert ended.lines[-1] == "3 saves, 1 failed"


def test_history_as_json_and_csv(aioflux, saved) -> None:
    rows = [json.loads(line) for line in aioflux("ckpt", "history", "--json", saved).lines]
    assert [row["step"] for row in rows] == [0, 100, 200]
    assert rows[2]["bytes_per_second"] == 2**20
    text = aioflux("ckpt", "history", "--csv", saved).out
    assert [row["outcome"] for row in csv.DictReader(io.StringIO(text))] == [
        *("committed", "failed", "committed")
    ]
    assert aioflux("ckpt", "history", "--csv", "--json", saved).status == 2


def test_history_as_bars(aioflux, saved) -> None:
    ended = aioflux("ckpt", "history", "--plot", saved)
    assert ended.status == 0
    first, second, third = ended.lines
    assert "failed: no space" in second
    assert third.startswith("200  " + third[5] * 40 + "  1.0 MiB/s")
    assert first.rstrip() == "  0" + " " * 44 + "0 B/s"


def test_history_as_a_picture(aioflux, saved, tmp_path) -> None:
    pytest.importorskip("matplotlib")
    picture = tmp_path / "history.png"
    assert aioflux("ckpt", "history", saved, "--picture", picture).status == 0
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_a_picture_without_matplotlib_says_what_to_install(aioflux, saved, monkeypatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    ended = aioflux("ckpt", "history", saved, "--picture", "x.png")
    assert (ended.status, ended.err.count("\n")) == (1, 1)
    assert "pip install 'aioflux-storage[plot]'" in ended.err


def test_copy_of_a_run_to_disk_and_of_a_checkpoint_back(aioflux, run, bucket, tmp_path) -> None:
    ended = aioflux("ckpt", "copy", run, tmp_path / "new" / "copy", "--step", 100, "--step", 300)
    assert ended.status == 0
    assert [line.split()[0] for line in ended.lines] == ["copied", "copied"]
    assert ended.err == "copied 2 checkpoints, 390.6 KiB\n"
    assert aioflux("ckpt", "verify", "--deep", tmp_path / "new" / "copy").status == 0
    again = aioflux("ckpt", "copy", run, tmp_path / "new" / "copy", "--step", 100)
    assert again.lines[0].startswith("exists")
    back = f"{bucket.uri}/back"
    ended = aioflux("ckpt", "copy", tmp_path / "new" / "copy" / "step-00000300", back)
    assert ended.status == 0
    assert aioflux("ckpt", "verify", "--deep", back).status == 0


def test_copy_continues_after_a_broken_step(aioflux, run, bucket) -> None:
    broken = break_step(bucket, 200)
    ended = aioflux("ckpt", "copy", run, f"{bucket.uri}/copy/")
    assert ended.status == 1
    assert broken in ended.err
    assert len(ended.lines) == 2
    assert aioflux("ckpt", "verify", "--deep", f"{bucket.uri}/copy").status == 0
    assert aioflux("ckpt", "show", f"{bucket.uri}/copy").lines[0].endswith("/step-00000300/")


def test_copy_keeps_another_checkpoint_without_overwrite(aioflux, run, bucket) -> None:
    steps = [f"{run}/step-00000100", f"{run}/step-00000300"]
    target = f"{bucket.uri}/one"
    assert aioflux("ckpt", "copy", steps[0], target).status == 0
    ended = aioflux("ckpt", "copy", steps[1], target)
    assert ended.status == 1
    assert "is not replaced" in ended.err
    assert aioflux("ckpt", "copy", steps[1], target, "--overwrite").status == 0
    assert aioflux("ckpt", "show", target, "--json").out.count('"step": 300') == 1


def test_progress_is_shown_on_a_terminal(aioflux, run, bucket, tmp_path, monkeypatch) -> None:
    broken = break_step(bucket, 200)
    with Screen(monkeypatch) as screen:
        assert aioflux("ckpt", "verify", "--deep", run).status == 1
    assert re.search(r"195\.3 KiB .*/s", screen.text)
    assert broken in re.sub(r"\s", "", screen.text)
    with Screen(monkeypatch) as screen:
        assert aioflux("ckpt", "copy", f"{run}/step-00000300", tmp_path / "copy").status == 0
    assert re.search(r"195\.3 KiB .*/s", screen.text)


def test_prune_and_list_of_one_checkpoint_are_rejected(aioflux, run) -> None:
    for command in (["list"], ["prune", "--keep-last", "1"], ["verify", "--step", "3"]):
        ended = aioflux("ckpt", *command, f"{run}/step-00000300")
        assert ended.status == 1
        assert "is one checkpoint" in ended.err


def test_clean_finds_what_killed_saves_left(aioflux, run, bucket) -> None:
    key = f"run/step-00000400/{save_id(400)}/__0_0.distcp"
    bucket.put(key)
    assert aioflux("clean", bucket.uri).err == "aborted 0 uploads, deleted 0 objects\n"
    ended = aioflux("clean", bucket.uri, "--older-than", "0s")
    assert ended.lines == [f"deleted {bucket.uri}/{key}"]
    assert aioflux("ckpt", "verify", "--deep", run).status == 0


def test_clean_keeps_what_a_damaged_commit_object_may_name(aioflux, run, bucket) -> None:
    data = bytearray(bucket.get("run/step-00000100/.metadata"))
    data[-30] ^= 1
    bucket.put("run/step-00000100/.metadata", bytes(data))
    ended = aioflux("clean", bucket.uri, "--older-than", "0s")
    assert ended.status == 1
    assert (ended.out, "kept 2 objects" in ended.err) == ("", True)


def test_no_command_for_checkpoints_loads_torch(run, environment) -> None:
    code = (
        "import sys; from aioflux.cli._app import run_app\n"
        "for command in (['ckpt', 'verify', '--deep'], ['ckpt', 'list'], ['clean']):\n"
        f"    sys.argv[1:] = [*command, {run!r}]\n"
        "    assert run_app() == 0\n"
        "sys.exit('torch' in sys.modules or 'matplotlib' in sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        env=environment,
        timeout=FAR_SECONDS,
        capture_output=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
