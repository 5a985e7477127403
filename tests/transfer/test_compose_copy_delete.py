"""Compose, copy, delete and list: lost answers are resolved by looking, never by guessing."""

from __future__ import annotations

import uuid
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from aioflux import AlreadyExistsError, NotFoundError, PreconditionFailedError, TransientError
from aioflux.errors import StorageError
from aioflux.testing.faults import FlakyService
from tests.transfer.scripted_service import (
    LOSE,
    REFUSE,
    ScriptedService,
    refused_for_good,
    service_of,
)

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from aioflux._services.base import Service, Source

A_AND_B = ["a", "b"]


@pytest.fixture(autouse=True)
def objects(scripted: ScriptedService) -> None:
    scripted.put("a", b"1")
    scripted.put("b", b"2")


@pytest.mark.parametrize("fault", [REFUSE, LOSE], ids=["refused", "lost"])
async def test_an_append_is_never_made_twice(scripted: ScriptedService, fault: object) -> None:
    scripted.service.fail("compose", fault, fault)
    meta = await scripted.store.compose("a", A_AND_B)
    assert scripted.get("a") == b"12"
    assert meta.size == 2


async def test_an_append_that_another_client_made_meanwhile_is_not_ours(
    scripted: ScriptedService,
) -> None:
    scripted.service.fail("compose", REFUSE)
    scripted.service.fail("head", None, None, None)
    original = scripted.put("a", b"1")
    scripted.put("a", b"other")
    with pytest.raises(NotFoundError):
        await scripted.store.compose("a", [original, "b"])
    assert scripted.get("a") == b"other"


@pytest.mark.parametrize("fault", [REFUSE, LOSE], ids=["refused", "lost"])
async def test_a_creating_compose_knows_its_own_result(
    scripted: ScriptedService, fault: object
) -> None:
    scripted.service.fail("compose", fault)
    await scripted.store.compose("c", A_AND_B, mode="create")
    assert scripted.get("c") == b"12"
    with pytest.raises(AlreadyExistsError, match="/c"):
        await scripted.store.compose("c", A_AND_B, mode="create")


async def test_a_creating_compose_does_not_take_another_object_for_its_own(
    scripted: ScriptedService,
) -> None:
    scripted.put("c", b"other")
    scripted.service.fail("compose", REFUSE)
    with pytest.raises(AlreadyExistsError, match="/c"):
        await scripted.store.compose("c", A_AND_B, mode="create")


async def test_a_conditional_compose_survives_a_lost_answer(scripted: ScriptedService) -> None:
    seen = scripted.put("c", b"old").generation
    scripted.service.fail("compose", LOSE)
    await scripted.store.compose("c", A_AND_B, if_generation_match=seen)
    assert scripted.get("c") == b"12"
    with pytest.raises(PreconditionFailedError, match="/c"):
        await scripted.store.compose("c", A_AND_B, if_generation_match=seen)


async def test_a_missing_source_stays_missing(scripted: ScriptedService) -> None:
    scripted.service.fail("compose", REFUSE)
    with pytest.raises(NotFoundError, match="nothing"):
        await scripted.store.compose("c", ["nothing"])


@pytest.mark.parametrize("fault", [REFUSE, LOSE], ids=["refused", "lost"])
async def test_a_creating_copy_knows_its_own_result(
    scripted: ScriptedService, fault: object
) -> None:
    scripted.service.fail("copy", fault)
    await scripted.store.copy("a", "c", mode="create")
    assert scripted.get("c") == b"1"
    scripted.put("c", b"other")
    scripted.service.fail("copy", REFUSE)
    with pytest.raises(AlreadyExistsError, match="/c"):
        await scripted.store.copy("a", "c", mode="create")


async def test_a_delete_whose_answer_is_lost_has_deleted(scripted: ScriptedService) -> None:
    scripted.service.fail("delete", LOSE)
    await scripted.store.delete("a")
    assert "a" not in scripted.bucket.objects
    with pytest.raises(NotFoundError):
        await scripted.store.delete("a")


async def test_a_delete_in_a_generation_keeps_what_came_since(scripted: ScriptedService) -> None:
    seen = scripted.put("a", b"1")
    scripted.service.fail("delete", LOSE)
    await scripted.store.delete(seen)
    scripted.put("a", b"new")
    with pytest.raises(PreconditionFailedError):
        await scripted.store.delete(seen)
    assert scripted.get("a") == b"new"


async def test_deleting_many_goes_on_after_a_failure(scripted: ScriptedService) -> None:
    scripted.service.fail("delete", refused_for_good(), *[REFUSE] * 4)
    result = await scripted.new_store(max_in_flight=1).delete_many(list("abcd"))
    assert set(result.errors) == {"a", "b"}
    assert result.missing == ("c", "d")
    assert result.deleted == ()
    assert scripted.is_clean()


async def test_a_page_that_fails_is_retried(scripted: ScriptedService) -> None:
    for at in range(2500):
        scripted.put(f"p/{at:04}", b"")
    scripted.service.fail("list_page", REFUSE, None, LOSE, REFUSE)
    store = scripted.new_store(max_in_flight=1)
    pages = [page async for page in store.list_pages("p/")]
    keys = [meta.key for page in pages for meta in page]
    assert keys == [f"p/{at:04}" for at in range(2500)]
    assert scripted.service.count("list_page") == 6


async def test_a_listing_gives_up_with_the_prefix_named(scripted: ScriptedService) -> None:
    scripted.service.fail("list_page", *[REFUSE] * 4)
    with pytest.raises(TransientError, match="4 attempts"):
        _ = [page async for page in scripted.store.list_pages("p/")]
    assert scripted.is_clean()


class _Paged(FlakyService):
    """As services that delete many objects by one request."""

    def __init__(self, inner: Service) -> None:
        super().__init__(inner)
        self.capabilities = replace(inner.capabilities, delete_page_size=100)

    async def delete_page(self, sources: Sequence[Source]) -> Mapping[str, StorageError]:
        failed: dict[str, StorageError] = {}
        for source in sources:
            try:
                await self.delete(source.key, generation=source.generation)
            except StorageError as exc:
                failed[source.key] = exc
        return failed


async def test_what_a_request_for_many_deleted_is_deleted_though_its_answers_were_lost() -> None:
    """Then each is deleted by itself, and is not there any more."""
    name = uuid.uuid4().hex
    scripted = ScriptedService(name, service=_Paged(service_of(f"memory://{name}")))
    keys = [f"{number:02}" for number in range(12)]
    for key in keys:
        scripted.put(key, b"1")
    scripted.service.fail("delete", *[LOSE] * 4)
    result = await scripted.new_store(max_in_flight=2).delete_many([*keys, "missing"])
    assert (result.deleted, result.missing, result.errors) == (tuple(keys), ("missing",), {})
    assert not scripted.bucket.objects
