"""Scenarios on S3 and Azure: who plays there, on which server, and that they do."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest

from perf.__main__ import chosen_matches, chosen_scenarios, main, parser
from perf.access import connection_string, sign_in
from perf.scenarios import SCENARIOS
from perf.servers import ServerSpec
from perf.servers._open import choose
from perf.servers._spec import lines_of
from perf.work import Work

if TYPE_CHECKING:
    from pathlib import Path

    from perf.scenarios import Match

pytestmark = pytest.mark.more


def played(*arguments: str) -> tuple[Match, ...]:
    [scenario] = chosen_scenarios(parser().parse_args(arguments))
    return tuple(chosen_matches(scenario, parser().parse_args(arguments).peers))


@pytest.mark.parametrize(("scheme", "kind"), [("s3", "seaweedfs"), ("az", "azurite")])
def test_a_scenario_moves_to_another_cloud_with_who_speaks_there(scheme: str, kind: str) -> None:
    matches = played("get-100KiB", "--scheme", scheme)
    assert [match.name for match in matches] == ["obstore"]
    for match in matches:
        for turn in (match.ours, match.theirs):
            assert turn.work.scheme == scheme
            assert turn.server.kind == kind
    assert played("get-100KiB", "--set", f"scheme={scheme}") == matches
    assert {match.name for match in played("get-100KiB")} >= {"google", "gcsfs", "wrk"}


def test_other_peers_of_a_cloud_can_be_named() -> None:
    names = [match.name for match in played("put-many", "--scheme", "s3", "--peers", "boto3")]
    assert names == ["boto3"]
    assert played("put-many", "--scheme", "az", "--peers", "boto3") == ()


def test_a_scheme_that_is_none_is_refused() -> None:
    with pytest.raises(ValueError, match="scheme of get-1KiB: must be one of gs, s3, az, not 'x'"):
        played("get-1KiB", "--set", "scheme=x")


def test_a_cloud_is_another_root_of_the_uri() -> None:
    work = Work(peer="", operation="", url="http://h", size_bytes=1, num_objects=1)
    assert work.uri("a") == "gs://perf/a"
    assert Work(**{**vars(work), "scheme": "s3"}).uri() == "s3://perf"
    assert Work(**{**vars(work), "scheme": "az"}).uri("a") == "az://devstoreaccount1/perf/a"


def test_keys_are_found_in_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    environment: dict[str, str] = {}
    monkeypatch.setattr("os.environ", environment)
    work = Work(peer="", operation="", url="http://h", size_bytes=1, num_objects=1)
    sign_in(work)
    assert environment == {}
    sign_in(Work(**{**vars(work), "scheme": "s3"}))
    assert environment.keys() >= {"AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_REGION"}
    sign_in(Work(**{**vars(work), "scheme": "az"}))
    assert environment["AZURE_STORAGE_CONNECTION_STRING"] == connection_string("http://h")


@pytest.mark.parametrize("size", [1, 100, 1560, 5_000, 156_000])
def test_text_is_as_long_as_it_is_to_be(size: int) -> None:
    data = lines_of(size)
    assert len(data) == size
    assert data.endswith(b"\n")
    assert b"\r" not in data
    assert max(map(len, data.splitlines(keepends=True))) <= 1560


def test_servers_of_clouds_say_what_they_do_not_do() -> None:
    assert choose(ServerSpec(kind="azurite"), "") == (ServerSpec(kind="azurite"), ())
    _, notes = choose(ServerSpec(kind="seaweedfs", latency_seconds=0.02), "")
    assert notes == ("seaweedfs adds no latency and has no bandwidth limit",)
    with pytest.raises(RuntimeError, match="seaweedfs supports neither TLS nor faults"):
        choose(ServerSpec(kind="seaweedfs", tls=True), "")


@pytest.mark.parametrize(
    ("name", "peer"),
    [
        ("s3-get-100KiB", "obstore"),
        ("s3-lines-0", "s3torchconnector_data"),
        ("az-get-1MiB", "azure_blob"),
    ],
)
def test_a_scenario_runs_on_a_cloud(name: str, peer: str, tmp_path: Path) -> None:
    if peer.startswith("s3torchconnector"):
        pytest.importorskip("s3torchconnector", reason="the `perf-s3` extra brings it")
    status = main([name, "--peers", peer, "--toy", "--pairs", "1", "--out", str(tmp_path)])
    [table] = tmp_path.glob("*.md")
    if " is missing: " in table.read_text():
        pytest.skip("a server or a peer is missing; the `perf-s3` extra and npm bring them")
    assert status == 0
    [log] = tmp_path.glob("*.jsonl")
    samples = [json.loads(line) for line in log.read_text().splitlines()]
    assert [sample["error"] for sample in samples] == ["", ""]
    for sample in samples:
        assert sample["work"]["scheme"] == SCENARIOS[name].scheme
        assert sample["result"]["num_objects"] == sample["work"]["num_objects"]
