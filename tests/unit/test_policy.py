"""Policies: validated when built, hashable, and the same after a pickle."""

from __future__ import annotations

import dataclasses
import math
import pickle
from typing import Any

import pytest

import aioflux
from aioflux import RetryPolicy, Timeouts, TransferOptions
from aioflux.options import MIB, CleanupTimeouts

POLICIES = [TransferOptions, RetryPolicy, Timeouts, CleanupTimeouts]
OUT_OF_RANGE = [
    pytest.param(policy, field.name, value, id=f"{policy.__name__}.{field.name}={value}")
    for policy in POLICIES
    for field in dataclasses.fields(policy)
    for value in {int: (0, -1), float: (0.0, -1.0, math.nan, math.inf)}.get(type(field.default), ())
]

each_policy = pytest.mark.parametrize("policy", POLICIES, ids=lambda policy: policy.__name__)


@each_policy
def test_defaults_are_valid(policy: type) -> None:
    policy()


@each_policy
def test_equal_policies_hash_alike(policy: type) -> None:
    assert policy() == policy()
    assert hash(policy()) == hash(policy())


@each_policy
def test_a_policy_survives_a_pickle(policy: type) -> None:
    assert pickle.loads(pickle.dumps(policy())) == policy()


@each_policy
def test_a_policy_cannot_be_changed(policy: type) -> None:
    name = dataclasses.fields(policy)[0].name
    with pytest.raises(dataclasses.FrozenInstanceError):
        setattr(policy(), name, 1)


@each_policy
def test_fields_go_by_name_only(policy: type) -> None:
    with pytest.raises(TypeError, match="positional"):
        policy(1)


@each_policy
def test_an_unknown_field_is_refused(policy: type) -> None:
    with pytest.raises(TypeError, match="max_flights"):
        policy(max_flights=1)


@pytest.mark.parametrize(("policy", "name", "value"), OUT_OF_RANGE)
def test_a_number_out_of_range_is_refused_by_name_and_value(
    policy: type, name: str, value: float
) -> None:
    with pytest.raises(ValueError, match=rf"{policy.__name__}\.{name} .*not {value!r}"):
        policy(**{name: value})


@pytest.mark.parametrize("size", [5 * MIB - 1, 5 * 1024 * MIB + 1])
def test_a_part_that_no_service_takes_is_refused(size: int) -> None:
    with pytest.raises(ValueError, match=f"part_size_bytes .*not {size}"):
        TransferOptions(part_size_bytes=size, max_buffered_bytes=2 * size)


@pytest.mark.parametrize("size", [5 * MIB, 5 * 1024 * MIB])
def test_the_limits_of_a_part_are_allowed(size: int) -> None:
    options = TransferOptions(part_size_bytes=size, max_buffered_bytes=size)
    assert options.part_size_bytes == size


def test_a_writer_must_hold_one_part() -> None:
    with pytest.raises(ValueError, match=r"max_buffered_bytes must be at least .*; set both"):
        TransferOptions(part_size_bytes=128 * MIB)


def test_one_attempt_switches_retries_off() -> None:
    assert RetryPolicy(max_attempts=1).max_attempts == 1


def test_delays_may_stay_constant_but_not_shrink() -> None:
    assert RetryPolicy(multiplier=1.0).multiplier == 1.0
    with pytest.raises(
        ValueError, match=r"multiplier must be a finite number of 1 or more, not 0\.5"
    ):
        RetryPolicy(multiplier=0.5)


@pytest.mark.parametrize("value", ["8", None, True, [1]], ids=repr)
def test_what_is_no_number_is_refused_by_name(value: Any) -> None:
    with pytest.raises(TypeError, match=r"RetryPolicy\.deadline_seconds must be a number, not"):
        RetryPolicy(deadline_seconds=value)


@pytest.mark.parametrize("value", [None, "no", 0], ids=repr)
def test_a_switch_is_a_bool(value: Any) -> None:
    with pytest.raises(TypeError, match=rf"TransferOptions\.verify must be a bool, not {value!r}"):
        TransferOptions(verify=value)


@pytest.mark.parametrize("value", [2.5, float("inf")])
def test_counts_and_sizes_are_whole(value: Any) -> None:
    with pytest.raises(TypeError, match=r"TransferOptions\.max_in_flight must be an int, not"):
        TransferOptions(max_in_flight=value)


def test_the_number_of_loops_has_a_limit() -> None:
    assert TransferOptions(num_loops=128).num_loops == 128
    with pytest.raises(ValueError, match="must be 128 or less, not 129"):
        TransferOptions(num_loops=129)


def test_no_time_is_not_a_number() -> None:
    with pytest.raises(ValueError, match="must be a finite number above 0, not nan"):
        Timeouts(progress_seconds=float("nan"))


def test_slow_requests_have_a_limit_above_zero_or_none() -> None:
    assert Timeouts(slow_seconds=None).slow_seconds is None
    with pytest.raises(ValueError, match=r"Timeouts\.slow_seconds must be a finite number above 0"):
        Timeouts(slow_seconds=0)


@pytest.mark.parametrize("name", ["transfer", "retry", "timeouts"])
def test_a_store_takes_no_dictionary_for_a_policy(name: str) -> None:
    with pytest.raises(TypeError, match=rf"{name} must be aioflux\.\w+\(\.\.\.\), not"):
        aioflux.open_store("memory://policies", **{name: {"max_attempts": 2}})


def test_times_of_clean_up_are_a_value_of_their_own() -> None:
    with pytest.raises(
        TypeError, match=r"Timeouts\.cleanup must be CleanupTimeouts\(\.\.\.\), not 5"
    ):
        Timeouts(cleanup=5)  # type: ignore[arg-type]
