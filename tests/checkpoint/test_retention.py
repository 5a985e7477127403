"""Which steps are kept, and that a removal which is interrupted leaves only loadable steps."""

from __future__ import annotations

import math
from contextlib import suppress

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import structs

from aioflux import RetryPolicy, checkpoint, open_store
from aioflux.checkpoint import Checkpointer
from aioflux.checkpoint._format.commit import FORMAT, StepInfo, encode_commit, step_prefix
from aioflux.checkpoint._store.retention_rules import Retention, plan_prune
from aioflux.errors import AiofluxError, PermissionDeniedError, PreconditionFailedError
from aioflux.testing.gcs_server import Hook
from tests.checkpoint.saves import METADATA, save_id, save_step
from tests.patience import PATIENT

pytestmark = pytest.mark.clouds("gs", "s3", "az")

NOW = 1000.0


def records(steps, *, broken=(), losses=None):
    return [
        StepInfo(
            step=step,
            created=NOW - 100 + step,
            metrics={} if losses is None else {"loss": losses[step]},
            problem="damaged" if step in broken else "",
        )
        for step in steps
    ]


def kept(steps, retention, **options):
    removed = plan_prune(steps, retention, now=NOW, **options)
    assert removed == sorted(removed)
    return [each.step for each in steps if each.step not in removed]


STEPS = [10, 20, 25, 30, 40]


@pytest.mark.parametrize(
    ("rules", "stay"),
    [
        ({}, STEPS),
        ({"keep_last": 1}, [40]),
        ({"keep_last": 2}, [30, 40]),
        ({"keep_last": 9}, STEPS),
        ({"keep_every": 20}, [20, 40]),
        ({"keep_last": 1, "keep_every": 25}, [25, 40]),
        ({"ttl_seconds": 75.0}, [30, 40]),
        ({"ttl_seconds": 0.5}, [40]),
        ({"keep_best": ("loss", "min")}, [20, 40]),
        ({"keep_best": ("loss", "max")}, [30, 40]),
        ({"keep_best": ("loss", "max", 2)}, [10, 30, 40]),
        ({"keep_best": ("accuracy", "max")}, [40]),
    ],
)
def test_a_step_stays_that_one_rule_keeps(rules, stay) -> None:
    losses = {10: 5.0, 20: 1.0, 25: math.nan, 30: 9.0, 40: 2.0}
    assert kept(records(STEPS, losses=losses), Retention(**rules)) == stay


def test_of_equal_metrics_the_newest_stays() -> None:
    steps = records(STEPS, losses=dict.fromkeys(STEPS, 1.0) | {40: 2.0})
    assert kept(steps, Retention(keep_best=("loss", "min"))) == [30, 40]


def test_what_does_not_verify_takes_the_place_of_none() -> None:
    assert kept(records(STEPS, broken={30}), Retention(keep_last=2)) == [25, 40]


def test_steps_newer_than_the_newest_valid_one_stay() -> None:
    assert kept(records(STEPS, broken={30, 40}), Retention(keep_last=1)) == [25, 30, 40]


def test_where_nothing_verifies_nothing_is_removed() -> None:
    assert kept(records(STEPS, broken=set(STEPS)), Retention(keep_last=1)) == STEPS


def test_protected_steps_stay() -> None:
    assert kept(records(STEPS), Retention(keep_last=1), protected={10, 99}) == [10, 40]


@given(
    steps=st.lists(
        st.builds(
            StepInfo,
            step=st.integers(0, 50),
            created=st.floats(0, 2000),
            metrics=st.dictionaries(st.just("loss"), st.floats(), max_size=1),
            problem=st.sampled_from(["", "damaged"]),
        ),
        max_size=12,
        unique_by=lambda each: each.step,
    ),
    retention=st.builds(
        Retention,
        keep_last=st.none() | st.integers(1, 5),
        keep_every=st.none() | st.integers(1, 20),
        keep_best=st.none() | st.sampled_from([("loss", "min"), ("loss", "max", 3)]),
        ttl_seconds=st.none() | st.floats(0.1, 2000),
    ),
    protected=st.sets(st.integers(0, 50), max_size=3),
)
def test_a_valid_step_always_stays_the_newest_and_the_protected_too(
    steps, retention, protected
) -> None:
    removed = plan_prune(steps, retention, now=NOW, protected=protected)
    assert removed == sorted(set(removed))
    assert not protected & set(removed)
    valid = [each.step for each in steps if not each.problem]
    left = sorted(set(valid) - set(removed))
    if not valid:
        assert removed == []
        return
    assert max(valid) in left
    if retention.has_rules:
        assert len(left) >= min(retention.keep_last or 1, len(valid))
    again = [each for each in steps if each.step not in removed]
    assert plan_prune(again, retention, now=NOW, protected=protected) == []


@pytest.mark.parametrize(
    "rules",
    [
        {"keep_last": 0},
        {"keep_last": 1.5},
        {"keep_last": True},
        {"keep_every": -1},
        {"ttl_seconds": 0},
        {"ttl_seconds": math.nan},
        {"keep_best": "loss"},
        {"keep_best": ("loss", "least")},
        {"keep_best": ("loss", "min", 0)},
    ],
    ids=str,
)
def test_a_rule_that_makes_no_sense_is_refused(rules) -> None:
    with pytest.raises(ValueError, match=next(iter(rules))):
        Retention(**rules)


@pytest.fixture
async def store(server):
    async with open_store(f"{server.root}/run", timeouts=PATIENT) as store:
        yield store


def prune(store, *, dry_run=False, **rules):
    with Checkpointer(store.uri, **rules) as checkpointer:
        return checkpointer.prune(dry_run=dry_run)


def steps(store):
    with Checkpointer(store.uri) as checkpointer:
        return checkpointer.steps()


def clean(store):
    return checkpoint.clean(store.uri, older_than_seconds=0).removed


FOREIGN = (
    "step-00000001/notes.txt",
    "step-00000001/logs/__0_0.distcp",
    f"step-00000001/inner/{save_id(0)}/__0_0.distcp",
    "step-00000010/.metadata",
)


async def test_a_removed_step_is_gone_with_all_that_its_saves_left(store) -> None:
    for key in FOREIGN:
        await store.put(key, b".")
    await store.put(f"step-00000001/{save_id(1)}/__3_0.distcp", b"killed before")
    await save_step(store, 1, number=2)  # an overwrite leaves what it replaced
    await save_step(store, 1, number=3)
    await store.put(f"step-00000001/{save_id(3)}/rank-00000.json", b"manifest")
    under_way = f"step-00000001/{save_id(4)}/__0_0.distcp"
    await store.put(under_way, b"a newer save")
    other = await save_step(store, 2)
    result = prune(store, keep_last=1)
    assert (result.removed, result.errors) == ((1,), {})
    left = {meta.key for meta in await store.list_all()}
    assert left == {*FOREIGN, under_way, *other.keys, other.meta.key}


async def test_of_a_damaged_commit_object_the_rest_is_left_to_clean(store) -> None:
    saved = await save_step(store, 1)
    data = bytearray(await store.get(saved.meta.key))
    data[-30] ^= 1
    await store.put(saved.meta.key, data)
    await save_step(store, 2)
    assert prune(store, keep_last=1).removed == (1,)
    left = [meta.key for meta in await store.list_all(step_prefix(1))]
    assert left == saved.keys
    assert clean(store) == tuple(saved.keys)


async def test_prune_removes_by_the_rules_and_nothing_of_other_programs(store) -> None:
    for step in (1, 2, 3, 4):
        await save_step(store, step)
    await store.put(step_prefix(0) + ".metadata", METADATA)
    await store.put(step_prefix(0) + "__0_0.distcp", b"stock")
    result = prune(store, keep_last=1, keep_every=2, dry_run=True)
    assert (result.removed, result.kept, result.errors) == ((1, 3), (2, 4), {})
    assert steps(store) == [0, 1, 2, 3, 4]
    assert prune(store, keep_last=1, keep_every=2) == result
    assert steps(store) == [0, 2, 4]
    assert len(await store.list_all(step_prefix(0))) == 2
    assert clean(store) == ()


async def test_steps_of_a_newer_format_stay_with_all_their_objects(store) -> None:
    for step in (1, 2, 3):
        saved = await save_step(store, step)
    newer = structs.replace(saved.commit, format=FORMAT + 1)
    await store.put(step_prefix(3) + ".metadata", encode_commit(METADATA, newer))
    assert prune(store, keep_last=1).removed == (1,)
    assert steps(store) == [2, 3]
    assert clean(store) == ()
    assert len(await store.list_all(step_prefix(3))) == 1 + len(newer.objects)


async def test_prune_counts_on_no_step_that_does_not_verify(store) -> None:
    """Two newest of five are broken: the rules reach further back, and nothing newer goes."""
    saved = [await save_step(store, step, metrics={"loss": -step}) for step in (1, 2, 3, 4, 5)]
    for each in saved[3:]:
        await store.put(each.keys[0], b"broken")
    result = prune(store, keep_last=2, keep_best=("loss", "min"))
    assert (result.removed, result.kept, result.errors) == ((1,), (2, 3, 4, 5), {})


class BeforeDelete(Hook):
    """Changes the bucket just before objects of some keys are deleted."""

    def __init__(self, server, changes) -> None:
        self._changes = changes
        server.app.hooks = (self, *server.app.hooks)

    def before(self, request):
        if request.method == "DELETE":
            change = self._changes.pop(request.params.get("object"), None)
            if change is not None:
                change()
        return


@pytest.mark.clouds("gs")
async def test_a_step_that_cannot_be_removed_is_reported_and_keeps_no_other(store, server) -> None:
    saved = [await save_step(store, step) for step in (1, 2, 3, 4, 5)]
    first, second, third = (f"run/{each.meta.key}" for each in saved[:3])
    server.faults.add("objects.delete", key=first, status=403)
    again = server.get("bucket", third)
    changes = {
        second: lambda: server.state.delete("bucket", second),  # another process was faster
        third: lambda: server.put("bucket", third, again),  # it was saved again
    }
    BeforeDelete(server, changes)
    result = prune(store, keep_last=1)
    assert changes == {}
    assert result.removed == (4,)
    assert {uri.removeprefix(store.uri): type(error) for uri, error in result.errors.items()} == {
        "step-00000001/": PermissionDeniedError,
        "step-00000002/": PreconditionFailedError,
        "step-00000003/": PreconditionFailedError,
    }
    assert steps(store) == [1, 3, 5]


@pytest.mark.clouds("gs")
async def test_a_damaged_step_that_is_saved_again_meanwhile_stays(store, server) -> None:
    saved = await save_step(store, 1)
    key = f"run/{saved.meta.key}"
    good = server.get("bucket", key)
    damaged = bytearray(good)
    damaged[-30] ^= 1
    server.put("bucket", key, bytes(damaged))
    await save_step(store, 2)
    BeforeDelete(server, {key: lambda: server.put("bucket", key, good)})
    result = prune(store, keep_last=1)
    assert [type(error) for error in result.errors.values()] == [PreconditionFailedError]
    assert steps(store) == [1, 2]


@pytest.mark.clouds("gs")
async def test_prune_looks_no_closer_than_it_must(store, server) -> None:
    for step in range(1, 21):
        await save_step(store, step, num_objects=1, size=10)
    server.stats.reset()
    prune(store, keep_every=1)
    summary = server.stats.total.requests
    assert summary <= 1 + 2 * 20
    server.stats.reset()
    prune(store, keep_last=1, keep_every=2, dry_run=True)
    assert server.stats.total.requests <= summary + 3


@pytest.mark.clouds("gs")
@pytest.mark.parametrize("layout", ["dcp", "both"])
async def test_a_removal_killed_at_any_request_leaves_only_loadable_steps(server, layout) -> None:
    """And all that it leaves is found by `clean`."""
    for at in range(50):
        async with open_store(f"{server.root}/run-{at}") as store:
            if layout == "both":
                await save_step(store, 1, number=1)
                # As an overwrite that cleans up: the older layout cannot be loaded any more.
                for meta in await store.list_all(f"{step_prefix(1)}{save_id(1)}"):
                    await store.delete(meta)
                await save_step(store, 1, number=2, layout="safetensors")
            else:
                await save_step(store, 1, layout=layout)
            await save_step(store, 2)
            is_done = False
            with (
                Checkpointer(store.uri, keep_last=1, retry=RetryPolicy(max_attempts=1)) as killed,
                server.faults.inject("*", status=503, skip=at),
                suppress(AiofluxError),
            ):
                is_done = not killed.prune().errors
            left = steps(store)
            assert all(checkpoint.verify(f"{store.uri}{step_prefix(s)}").is_valid for s in left), at
            assert left in ([2], [1, 2])
            if left == [2]:
                clean(store)
                keys = [meta.key for meta in await store.list_all()]
                assert all(key.startswith(step_prefix(2)) for key in keys)
        if is_done:
            assert left == [2]
            assert at > 3
            return
    pytest.fail("a removal never ended")
