"""Scenarios: names, and parameters that the command line replaces."""

from __future__ import annotations

import re

import pytest

from perf.__main__ import chosen_matches, chosen_scenarios, listing, main, parser
from perf._pairs import warm_up_work
from perf.scenarios import GROUPS, SCENARIOS, Scenario


def chosen(*arguments: str) -> list[Scenario]:
    return chosen_scenarios(parser().parse_args(arguments))


def test_scenarios_run_by_their_names_and_groups() -> None:
    by_group = [name for names in GROUPS.values() for name in names]
    assert [one.name for one in chosen()] == [name for name in SCENARIOS if name not in by_group]
    assert [one.name for one in chosen("epoch", "get-1KiB")] == [*GROUPS["epoch"], "get-1KiB"]
    text = listing()
    assert all(name in text for name in (*SCENARIOS, *GROUPS))
    assert "obstore_crc32c >= 3x, CPU <= 0.25x" in text
    assert "size_bytes=100KiB" in text


@pytest.mark.parametrize(
    ("setting", "field", "value"),
    [
        ("num_objects=12", "num_objects", 12),
        ("size_bytes=3KiB", "size_bytes", 3072),
        ("is_tls=true", "is_tls", True),
    ],
)
def test_set_replaces_a_field(setting: str, field: str, value: object) -> None:
    (scenario,) = chosen("get-1KiB", "--set", setting)
    assert getattr(scenario, field) == value


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("nosuch",), "unknown scenario 'nosuch'; there are get-1KiB, "),
        (("get-1KiB", "--set", "nosuch=1"), "get-1KiB has no 'nosuch'; it has size_bytes, "),
        (("get-1KiB", "--set", "rivals=x"), "get-1KiB has no 'rivals'"),
        (("get-1KiB", "--set", "num_objects"), "--set takes name=value, not 'num_objects'"),
        (("get-1KiB", "--set", "num_objects=x"), "must be a whole number, not 'x'"),
        (("get-1KiB", "--set", "num_objects=0"), "must be at least 1, is '0'"),
        (("get-1KiB", "--set", "is_tls=1"), "must be true or false, not '1'"),
        (("faults", "--set", "fault_rate=nan"), "must be finite and not negative"),
        (("get-1KiB", "--set", "in_flight=100001"), "in_flight of get-1KiB: must be at most 100,0"),
        (("get-1KiB", "--peers", "_parts"), "unknown peer '_parts'; there are aioflux, "),
    ],
)
def test_bad_choice_says_what_there_is(
    arguments: tuple[str, ...], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        chosen(*arguments)
    with pytest.raises(SystemExit) as caught:
        main(arguments)
    assert caught.value.code == 2
    assert message in capsys.readouterr().err


def test_peers_limit_the_rivals_and_keep_their_goals() -> None:
    (scenario,) = chosen("get-1KiB", "--peers", "obstore", "gcsfs", "--scale", "0.1")
    found = {each.name: each for each in chosen_matches(scenario, ["obstore", "gcsfs"])}
    assert {name: each.at_least for name, each in found.items()} == {"obstore": 2.5, "gcsfs": None}
    assert found["obstore"].ours.work.num_objects == 600
    assert found["gcsfs"].theirs.work.num_objects == 60


@pytest.mark.parametrize("scenario", SCENARIOS.values(), ids=list(SCENARIOS))
def test_servers_have_what_is_read_or_the_room_for_what_is_written(scenario: Scenario) -> None:
    writes = ("put", "write", "save", "stage", "train", "load_dcp", "load_steps")
    for match in (*scenario.matches(), *scenario.toy().matches()):
        for side in (match.ours, match.theirs):
            work, server = side.work, side.server
            if work.operation.startswith(writes):
                assert server.written_bytes > work.size_bytes
            elif work.operation == "load_state":
                for one in (work, work.warm_up(), work.opening()):
                    assert (one.dtype, one.size_bytes) in server.states
            else:
                ready = {f"{size}/{at}" for size, count in server.objects for at in range(count)}
                for whole in (work, warm_up_work(work)):
                    for one in (whole, whole.warm_up()):
                        if one.is_set:
                            assert (one.size_bytes, one.num_objects) in server.sets
                        else:
                            assert {*one.each_key(), *one.opening().each_key()} <= ready
