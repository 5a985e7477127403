"""Scenarios: names, goals, and parameters replaced from the command line."""

from __future__ import annotations

import json
import re
from dataclasses import asdict, replace

import pytest

from perf.__main__ import chosen_matches, chosen_scenarios, known_peers, listing, main, parser
from perf._pairs import warm_up_work
from perf.scenarios import GROUPS, SCENARIOS, Promise, Rival, Scenario
from perf.scenarios.get_many import GetMany
from perf.scenarios.latency import Latency
from perf.servers import ServerSpec
from perf.work import MAX_WARM_UP_OBJECTS, OPENING_BYTES, WARM_UP_BYTES, Work

NAMES = (
    "get-1KiB",
    "get-100KiB",
    "get-100KiB-tls",
    "get-1MiB",
    "object-1GiB",
    "object-1GiB-tls",
    "object-1GiB-tls-3-loops",
    "get-into",
    "latency",
    "paced",
    "put-1GiB",
    "put-many",
    "sync",
    "startup",
    "faults",
)
"""Those that run where none is named."""
LONG = (
    *("list-10", "list-10k", "list-1M", "parse-1M", "parse-1M-http"),
    *("loader-100KiB", "loader-500KiB", "loader-3MiB", "loader-150MiB"),
    *("epoch-100KiB", "epoch-500KiB", "epoch-3MiB", "epoch-150MiB"),
    *("epoch-own", "epoch-cached", "epoch-wait", "epoch-wait-inline", "epoch-wait-threads"),
    "epoch-images",
    *("checkpoint-save-76MB", "checkpoint-save-298MB", "checkpoint-save-2.5GB"),
    *("checkpoint-load-76MB", "checkpoint-load-298MB", "checkpoint-load-2.5GB"),
    *("checkpoint-async-stage", "checkpoint-async-train"),
    *("torch-load-298MB", "torch-load-298MB-tls", "torch-save-298MB", "torch-save-298MB-tls"),
    *("compression-bf16", "compression-fp32", "compression-master", "compression-adam"),
    *("dcp-save-1", "dcp-load-1", "dcp-save-4", "dcp-load-4", "dcp-reshard-4-3"),
    *("mlperf-unet3d", "mlperf-resnet50", "mlperf-cosmoflow", "mlperf-write", "mlperf-read"),
    "s3-startup",
    *("s3-get-100KiB", "s3-get-1MiB", "s3-map-100KiB", "s3-map-1MiB", "s3-lines-0", "s3-lines-4"),
    *("s3-save-1GiB", "s3-load-1GiB", "s3-dcp-save", "s3-dcp-load"),
    *("az-get-1MiB", "az-get-256MiB", "az-put-256MiB", "nebula-1GiB"),
    *("ratio-get-1KiB", "ratio-get-100KiB", "ratio-get-1MiB", "ratio-get-16MiB"),
    *("ratio-get-100KiB-tls", "ratio-get-1MiB-tls", "ratio-get-16MiB-tls"),
    *("ratio-get-range-64KiB", "ratio-get-range-1MiB", "ratio-get-range-8MiB"),
    *("ratio-get-1GiB", "ratio-get-1GiB-tls", "ratio-load-1GiB", "ratio-load-1GiB-tls"),
    *("ratio-put-1GiB", "ratio-put-1GiB-tls", "ratio-load-298MB", "ratio-save-298MB"),
    *("ratio-save-async", "ratio-save-async-first", "opening", "opening-tls"),
    *("gets-1M", "list-10M"),
    *("ray-read", "ray-write", "ray-train"),
    *("map-single", "save-small", "load-small"),
)
THREADS = {"dataflux x4": 3, "dataflux x8": 3, "dataflux x16": 3}


def chosen(*arguments: str) -> list[Scenario]:
    return chosen_scenarios(parser().parse_args(arguments))


def test_every_scenario_is_found_by_its_name() -> None:
    assert tuple(SCENARIOS) == NAMES + LONG
    assert [scenario.name for scenario in chosen()] == list(NAMES)
    assert [scenario.name for scenario in chosen(*LONG)] == list(LONG)


def test_a_group_stands_for_its_scenarios() -> None:
    assert tuple(name for names in GROUPS.values() for name in names) == LONG
    found = [scenario.name for scenario in chosen("epoch", "get-1KiB", "list")]
    assert found == [*GROUPS["epoch"], "get-1KiB", *LONG[:5]]


@pytest.mark.parametrize(
    ("name", "goals"),
    [
        ("get-1KiB", {"obstore": 2.5, "gcloud_aio": 3, "google": 15, "wrk": 0.5}),
        ("get-100KiB", {"obstore": 1.8, "gcloud_aio": 3, "google": 8, "wrk": 0.5}),
        ("get-100KiB-tls", {"obstore": 1.2, "gcloud_aio": 1.5}),
        ("get-1MiB", {"obstore": 1.1, "gcloud_aio": 1.4, "transfer_manager": 2}),
        ("object-1GiB", {"obstore": 1.1, "gcloud_aio": 1.4, "transfer_manager": 2}),
        ("object-1GiB-tls", {"obstore": 1.1, "gcloud_aio": 1.4, "transfer_manager": 2}),
        ("get-into", {"obstore": 1.2}),
        ("latency", {"bound": 0.9, "obstore": 1, "gcloud_aio": 1, "google": 1}),
        ("paced", {"bound": 0.9}),
        ("put-1GiB", {"obstore": 1.2, "gcloud_aio": 2, "transfer_manager": 2}),
        ("put-many", {"obstore": 1.5, "gcloud_aio": 3}),
        ("sync", {"async": 0.85}),
        ("startup", {"gcsfs": 3, "google": 2}),
        ("faults", {"clean": 0.9}),
        ("list-10", {}),
        ("list-10k", {"google": 2, "dataflux": 3}),
        ("list-1M", {"google": 5}),
        ("parse-1M", {}),
        ("parse-1M-http", {}),
        ("loader-100KiB", {"dataflux": 10, "direct": 40, **THREADS}),
        ("loader-500KiB", {"dataflux": 3, "direct": 10, **THREADS}),
        ("loader-3MiB", {"dataflux": 3, "direct": 8, **THREADS}),
        ("loader-150MiB", {"dataflux": 3, "direct": 5, "dataflux x16": 3}),
        ("epoch-100KiB", {"dataflux": 8, "litdata": 1.5}),
        ("epoch-500KiB", {"dataflux": 8}),
        ("epoch-3MiB", {"dataflux": 8}),
        ("epoch-150MiB", {"dataflux": 8}),
        ("epoch-own", {"map": 0.95, "workers": 0.8}),
        ("epoch-cached", {"first": 5}),
        ("epoch-wait", {"bound": 0.95}),
        ("epoch-wait-inline", {"bound": 0.95}),
        ("epoch-wait-threads", {"bound": 0.95}),
        ("epoch-images", {"workers": 1.3}),
        ("checkpoint-save-298MB", {"gcsfs_checkpoint": 8, "google_checkpoint": 4}),
        ("checkpoint-load-298MB", {"gcsfs_checkpoint": 4, "google_checkpoint": 2}),
        ("dcp-save-1", {"gcsfs_dcp": 4}),
        ("dcp-load-1", {"gcsfs_dcp": 3}),
        ("dcp-save-4", {"gcsfs_dcp": 4}),
        ("dcp-load-4", {"gcsfs_dcp": 3}),
        ("ratio-get-1KiB", {"obstore_crc32c": 3}),
        ("ratio-get-100KiB", {"obstore_crc32c": 1.8}),
        ("ratio-get-1MiB", {"obstore_crc32c": 1.5}),
        ("ratio-get-16MiB", {"obstore_crc32c": 1.5, "obstore": 1.2}),
        ("ratio-get-100KiB-tls", {"obstore_crc32c": 1.3}),
        ("ratio-get-1MiB-tls", {"obstore_crc32c": 1.1}),
        ("ratio-get-16MiB-tls", {"obstore_crc32c": 1.05, "obstore": 1.1}),
        ("ratio-get-range-64KiB", {"obstore": 1.3}),
        ("ratio-get-range-1MiB", {"obstore": 1.5}),
        ("ratio-get-range-8MiB", {"obstore": 1.0}),
        ("ratio-get-1GiB", {"obstore_ranges": 1.2}),
        ("ratio-load-1GiB-tls", {"obstore_ranges": 1.2}),
        ("ratio-put-1GiB-tls", {"obstore": 1.2}),
        ("ratio-load-298MB", {"gcsfs_checkpoint": 4}),
        ("ratio-save-298MB", {"gcsfs_checkpoint": 4, "google_checkpoint": 4}),
        ("ratio-save-async", {"memory_copy": 0.67}),
        ("gets-1M", {"100,000 objects": 0.9}),
        ("list-10M", {"1,000,000 objects": 0.9}),
        ("ray-read", {"gcsfs_ray": 3, "download_ray": 2}),
        ("ray-write", {"gcsfs_ray": 1.5}),
        ("ray-train", {"gcsfs_ray": 10}),
        ("save-small", {}),
        ("load-small", {}),
    ],
)
def test_scenario_promises(name: str, goals: dict[str, float]) -> None:
    matches = [match for match in SCENARIOS[name].matches() if not match.case.endswith("link")]
    found = {match.name: match.at_least for match in matches if match.at_least is not None}
    assert found == goals


@pytest.mark.parametrize(
    ("name", "goals"),
    [
        ("ratio-get-1KiB", {"obstore_crc32c": 0.25, "aioflux_unverified": 1.2}),
        ("ratio-get-100KiB", {"obstore_crc32c": 0.45, "aioflux_unverified": 1.2}),
        ("ratio-get-1MiB", {"obstore_crc32c": 0.5, "aioflux_unverified": 1.2}),
        ("ratio-get-16MiB", {"obstore_crc32c": 0.55, "aioflux_unverified": 1.2, "obstore": 0.8}),
        ("ratio-get-100KiB-tls", {"obstore_crc32c": 0.6, "aioflux_unverified": 1.06}),
        ("ratio-get-1MiB-tls", {"obstore_crc32c": 1.0, "aioflux_unverified": 1.06}),
        (
            "ratio-get-16MiB-tls",
            {"obstore_crc32c": 1.0, "aioflux_unverified": 1.06, "obstore": 0.95, "raw": 1.1},
        ),
    ],
)
def test_reads_limit_the_cpu_time(name: str, goals: dict[str, float]) -> None:
    matches = SCENARIOS[name].matches()
    found = {match.name: match.cpu_at_most for match in matches if match.cpu_at_most is not None}
    assert found == goals
    for match in matches:
        is_unverified = match.name in {"obstore", "raw"}
        assert match.case == ("unverified" if is_unverified else "")
        assert match.ours.work.peer == ("aioflux_unverified" if is_unverified else "aioflux")


def test_items_are_compared_with_reads_of_single_objects() -> None:
    matches = SCENARIOS["map-single"].matches()
    assert [(match.case, match.at_least) for match in matches] == [
        ("1 item", 0.625),
        ("8 items", 1.77),
    ]
    for match in matches:
        assert match.name == "sync.get"
        assert match.ours.server == match.theirs.server
        assert match.ours.work.num_objects == match.theirs.work.num_objects


def test_ranges_are_the_same_for_both() -> None:
    expected = {"64KiB": (64 << 10, 64), "1MiB": (1 << 20, 64), "8MiB": (8 << 20, 8)}
    for name, figures in expected.items():
        (match,) = SCENARIOS[f"ratio-get-range-{name}"].matches()
        works = (match.ours.work, match.theirs.work)
        assert {(each.range_size_bytes, each.in_flight) for each in works} == {figures}


def test_uploads_limit_the_memory() -> None:
    for name in ("ratio-put-1GiB", "ratio-put-1GiB-tls"):
        matches = SCENARIOS[name].matches()
        assert [match.memory_at_most for match in matches] == [1.0, None, None]
        assert [match.name for match in matches] == [
            "obstore",
            "obstore_crc32c",
            "aioflux_unverified",
        ]


def test_growth_is_measured_once_and_against_a_tenth() -> None:
    for name in ("gets-1M", "list-10M"):
        assert SCENARIOS[name].max_pairs == 1
        assert SCENARIOS[name].min_limit_seconds > 60
        for match in SCENARIOS[name].matches():
            assert match.ours.work.num_objects == 10 * match.theirs.work.num_objects
            assert match.ours.work.peer == match.theirs.work.peer


@pytest.mark.parametrize("name", ["checkpoint-save-298MB", "checkpoint-load-298MB"])
def test_a_state_is_moved_over_a_link_too(name: str) -> None:
    matches = [match for match in SCENARIOS[name].matches() if match.case == "fp32 link"]
    found = {match.name: match.at_least for match in matches}
    blob = 2 if name == "checkpoint-load-298MB" else None
    expected = {"bound": 0.9, "gcsfs_checkpoint": 5, "google_checkpoint": blob}
    assert found == {**expected, "dataflux_checkpoint": None}
    for match in matches:
        server = match.ours.server
        assert 100_000_000 in {server.connection_bytes_per_second, server.received_bytes_per_second}


@pytest.mark.parametrize("name", ["compression-bf16", "compression-fp32"])
def test_compression_is_held_against_none_on_a_link(name: str) -> None:
    matches = [match for match in SCENARIOS[name].matches() if match.case.endswith("link")]
    found = [(match.case, match.name, match.at_least) for match in matches]
    assert found == [("save, link", "uncompressed", 0.92), ("load, link", "uncompressed", 1)]
    for match in matches:
        server, work = match.ours.server, match.ours.work
        assert server == match.theirs.server
        rates = {server.connection_bytes_per_second, server.received_bytes_per_second}
        assert 400_000_000 in {work.in_flight * rate for rate in rates if rate}


def test_peers_of_a_state_are_chosen_with_and_without_a_link() -> None:
    (scenario,) = chosen("checkpoint-save-76MB", "--peers", "gcsfs_checkpoint", "--toy")
    found = [(match.case, match.name, match.at_least) for match in scenario.matches()]
    assert found == [
        ("bf16", "gcsfs_checkpoint", 8),
        ("bf16 link", "bound", 0.9),
        ("bf16 link", "gcsfs_checkpoint", 5),
    ]


def test_figures_of_ours_alone_are_promised() -> None:
    found = {name: one.promises() for name, one in SCENARIOS.items() if one.promises()}
    assert found == {
        "list-10": (Promise(figure="requests", at_most=1),),
        "parse-1M": (Promise(figure="objects/s", at_least=500_000),),
        "epoch-cached": (Promise(figure="requests", at_most=0),),
        "epoch-wait": (Promise(figure="waiting", at_most=0.05),),
        "epoch-wait-inline": (Promise(figure="waiting", at_most=0.05),),
        "epoch-wait-threads": (Promise(figure="waiting", at_most=0.05),),
        "compression-bf16": (Promise(figure="stored", at_most=0.69),),
        "compression-fp32": (Promise(figure="stored", at_most=0.85),),
        "compression-master": (Promise(figure="stored", at_most=0.35),),
        "compression-adam": (Promise(figure="stored", at_most=0.85),),
        "dcp-reshard-4-3": (Promise(figure="read", at_most=1.05),),
        "ratio-save-async-first": (Promise(figure="ms", at_most=60),),
        "save-small": (Promise(figure="requests", at_most=55),),
        "load-small": (Promise(figure="requests", at_most=33),),
    }


def test_a_step_bounds_the_rate_of_its_epoch() -> None:
    match, beside = SCENARIOS["epoch-wait"].matches()
    assert beside.theirs.work.step_seconds == beside.ours.work.step_seconds > 0
    assert match.cap_per_second * match.ours.work.step_seconds == match.ours.work.batch_size
    assert match.theirs.work.step_seconds == 0


def test_dataflux_meets_us_with_each_number_of_threads() -> None:
    (scenario,) = chosen("loader-100KiB", "--set", "threads=2,3", "--peers", "dataflux")
    works = [match.theirs.work for match in chosen_matches(scenario, ["dataflux"])]
    assert [work.num_threads for work in works] == [0, 2, 3]


@pytest.mark.parametrize("scenario", SCENARIOS.values(), ids=list(SCENARIOS))
def test_reads_find_their_objects_and_those_of_a_warm_up(scenario: Scenario) -> None:
    for match in (*scenario.matches(), *scenario.toy().matches()):
        for turn in (match.ours, match.theirs):
            if turn.work.operation.endswith("compress"):
                continue
            # Who loads what only it can read saves it first.
            saves = (
                "put",
                "write",
                "save",
                "stage",
                "train",
                "load_compressed",
                "load_plain",
                "load_dcp",
                "load_steps",
                "reshard_dcp",
            )
            if turn.work.operation.startswith(saves):
                assert turn.server.written_bytes > turn.work.size_bytes
                continue
            if turn.work.operation.startswith("lines"):
                for whole in (turn.work, warm_up_work(turn.work)):
                    for work in (whole, whole.warm_up()):
                        assert (work.size_bytes, work.num_objects) in turn.server.lines
                continue
            if turn.work.operation == "load_state":
                for work in (turn.work, turn.work.warm_up(), turn.work.opening()):
                    assert (work.dtype, work.size_bytes) in turn.server.states
                continue
            ready = {
                f"{size}/{index}" for size, count in turn.server.objects for index in range(count)
            }
            for whole in (turn.work, warm_up_work(turn.work)):
                for work in (whole, whole.warm_up()):
                    if work.is_set:
                        assert (work.size_bytes, work.num_objects) in turn.server.sets
                    else:
                        assert set(work.each_key()) | set(work.opening().each_key()) <= ready


def test_a_scenario_of_sets_has_one_server() -> None:
    matches = SCENARIOS["loader-100KiB"].matches()
    specs = {turn.server for match in matches for turn in (match.ours, match.theirs)}
    assert len(specs) == 1


def test_bound_of_latency_is_in_flight_by_latency() -> None:
    scenario = SCENARIOS["latency"].replaced({"in_flight": "10,20", "latency_seconds": "0.5"})
    bounds = [match for match in scenario.matches() if match.name == "bound"]
    assert [match.cap_per_second for match in bounds] == [20, 40]
    assert [match.theirs.server.latency_seconds for match in bounds] == [0, 0]
    assert [match.ours.server.latency_seconds for match in bounds] == [0.5, 0.5]


def test_rivals_with_a_pool_of_threads_meet_latency_once() -> None:
    cases = [match.case for match in SCENARIOS["latency"].matches() if match.name == "google"]
    assert cases == ["64 in flight"]


def test_bound_of_paced_is_the_bandwidth_of_all_connections() -> None:
    match = SCENARIOS["paced"].matches()[0]
    work = match.ours.work
    assert match.cap_per_second * work.size_bytes == pytest.approx(work.in_flight * 50e6)
    assert match.ours.server.connection_bytes_per_second == 50_000_000
    assert match.theirs.server.connection_bytes_per_second is None


@pytest.mark.parametrize(
    ("setting", "field", "value"),
    [
        ("num_objects=12", "num_objects", 12),
        ("size_bytes=3KiB", "size_bytes", 3072),
        ("size_bytes=1GiB", "size_bytes", 1 << 30),
        ("is_tls=true", "is_tls", True),
    ],
)
def test_set_replaces_a_field(setting: str, field: str, value: object) -> None:
    (scenario,) = chosen("get-1KiB", "--set", setting)
    assert getattr(scenario, field) == value


def test_set_takes_several_numbers_and_may_be_repeated() -> None:
    (scenario,) = chosen("latency", "--set", "in_flight=1,2", "--set", "latency_seconds=0.25")
    assert isinstance(scenario, Latency)
    assert (scenario.in_flight, scenario.latency_seconds) == ((1, 2), 0.25)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("nosuch",), "unknown scenario 'nosuch'; there are get-1KiB, "),
        (
            ("get-1KiB", "--set", "nosuch=1"),
            "get-1KiB has no 'nosuch'; it has scheme, size_bytes, ",
        ),
        (("get-1KiB", "--set", "name=x"), "get-1KiB has no 'name'"),
        (("get-1KiB", "--set", "rivals=x"), "get-1KiB has no 'rivals'"),
        (("get-1KiB", "--set", "num_objects"), "--set takes name=value, not 'num_objects'"),
        (("get-1KiB", "--set", "num_objects=x"), "must be a whole number, not 'x'"),
        (("get-1KiB", "--set", "num_objects=-1"), "must be at least 1, is '-1'"),
        (("get-1KiB", "--set", "num_objects=0"), "must be at least 1, is '0'"),
        (("get-1KiB", "--set", "is_tls=1"), "must be true or false, not '1'"),
        (("latency", "--set", "latency_seconds=nan"), "must be finite and not negative"),
        (
            ("get-1KiB", "--peers", "obstore", "nosuch"),
            "unknown peer 'nosuch'; there are aiobotocore, aioflux, ",
        ),
        (("get-1KiB", "--peers", "_parts"), "unknown peer '_parts'; there are "),
        (("get-1KiB", "--set", "in_flight=100001"), "in_flight of get-1KiB: must be at most 100,0"),
        (("latency", "--set", "in_flight=1,100000000000"), "must be at most 100,000, is 100,000,"),
        (("latency", "--set", "in_flight="), "must be one or more values"),
    ],
)
def test_bad_choice_says_what_there_is(arguments: tuple[str, ...], message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        chosen(*arguments)


@pytest.mark.parametrize("argument", ["--pairs=0", "--scale=0", "--scale=inf", "--server=apache"])
def test_bad_option_is_refused(argument: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parser().parse_args([argument])
    assert argument.partition("=")[0] in capsys.readouterr().err


def test_every_peer_can_be_chosen() -> None:
    assert {"aioflux", "obstore", "wrk", "transfer_manager"} <= set(known_peers())
    assert len(chosen("get-1KiB", "--peers", *known_peers())) == 1


def test_unknown_peer_ends_with_exit_status_2(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["get-1KiB", "--peers", "nosuch"])
    assert caught.value.code == 2
    assert (
        "there are aiobotocore, aioflux, aioflux_async, aioflux_checkpoint, aioflux_data, "
        in capsys.readouterr().err
    )


def test_scale_changes_the_number_of_objects() -> None:
    (scenario,) = chosen("get-1KiB", "--scale", "0.01")
    assert isinstance(scenario, GetMany)
    default = SCENARIOS["get-1KiB"]
    assert isinstance(default, GetMany)
    assert scenario.num_objects == default.num_objects // 100
    (one,) = chosen("object-1GiB", "--scale", "0.01")
    assert one.matches()[0].ours.work.num_objects == 1


def test_peers_limit_the_rivals_and_keep_their_goals() -> None:
    (scenario,) = chosen("get-1KiB", "--peers", "obstore", "gcsfs")
    found = {match.name: match.at_least for match in chosen_matches(scenario, ["obstore", "gcsfs"])}
    assert found == {"obstore": 2.5, "gcsfs": None}


def test_bounds_of_our_own_are_the_peer_aioflux() -> None:
    (scenario,) = chosen("latency", "--peers", "aioflux", "--set", "in_flight=3")
    (match,) = chosen_matches(scenario, ["aioflux"])
    assert match.name == "bound"
    (scenario,) = chosen("latency", "--peers", "obstore", "--set", "in_flight=3")
    (match,) = chosen_matches(scenario, ["obstore"])
    assert match.name == "obstore"


def test_slower_peer_moves_fewer_objects() -> None:
    assert Rival(peer="google").num_objects(1000) < 200
    assert Rival(peer="google", share=0.5).num_objects(1000) == 500
    assert Rival(peer="google").num_objects(1) == 1
    assert Rival(peer="wrk").num_objects(1000) == 1000


@pytest.mark.parametrize("name", ["get-100KiB", "get-100KiB-tls", "get-1MiB", "latency"])
def test_obstore_moves_as_many_objects_as_ours(name: str) -> None:
    for match in SCENARIOS[name].matches():
        if match.name == "obstore":
            assert match.theirs.work.num_objects == match.ours.work.num_objects


def test_list_names_scenarios_goals_and_parameters() -> None:
    text = listing()
    assert all(name in text for name in (*NAMES, *LONG, *GROUPS))
    assert "wrk >= 0.5x" in text
    assert "obstore_crc32c >= 3x, CPU <= 0.25x" in text
    assert "obstore >= 1.2x, memory <= 1x" in text
    assert "; waiting <= 5.0%" in text
    assert "; memory above idle <= 256 MiB" in text
    assert "in_flight=64,256,1024" in text
    assert "size_bytes=100KiB" in text


def test_work_travels_as_json() -> None:
    work = SCENARIOS["get-into"].matches()[0].ours.work
    assert Work(**{**json.loads(json.dumps(asdict(work))), "server_pids": ()}) == work


def test_warm_up_is_small() -> None:
    work = SCENARIOS["get-1KiB"].matches()[0].ours.work
    assert work.warm_up() == replace(work, num_objects=work.in_flight)
    assert replace(work, in_flight=1024).warm_up().num_objects == MAX_WARM_UP_OBJECTS
    large = SCENARIOS["object-1GiB"].matches()[0].ours.work
    assert (large.warm_up().size_bytes, large.warm_up().num_objects) == (WARM_UP_BYTES, 1)


def test_opening_uses_each_connection_once() -> None:
    work = SCENARIOS["get-1KiB"].matches()[0].ours.work
    assert work.opening() == replace(work, num_objects=work.in_flight)
    large = SCENARIOS["ratio-get-16MiB"].matches()[0].ours.work
    assert large.opening().num_objects * large.size_bytes == OPENING_BYTES
    one = SCENARIOS["object-1GiB"].matches()[0].ours.work
    assert one.opening().size_bytes == one.in_flight * one.range_size_bytes < one.size_bytes
    state = SCENARIOS["checkpoint-load-76MB"].matches()[0].ours.work
    assert state.opening() == replace(state, size_bytes=WARM_UP_BYTES)


def test_only_what_nginx_cannot_do_asks_for_the_embedded_server() -> None:
    kinds = {
        name: {turn.server.kind for match in one.matches() for turn in (match.ours, match.theirs)}
        for name, one in SCENARIOS.items()
    }
    embedded = {name for name, kind in kinds.items() if kind != {ServerSpec().kind}}
    kept = ("dcp-", "checkpoint-async-", "ratio-save-async", "nebula-", "s3-dcp-", "s3-lines-")
    stored = {name for name in SCENARIOS if name.startswith(kept)} | {"save-small", "load-small"}
    others = {"paced", "faults", "compression-bf16", "compression-fp32", "ray-write", "ray-train"}
    assert embedded == others | stored
