"""Compose, copy, delete and list: lost answers are resolved by looking, never by guessing."""

from __future__ import annotations

import uuid
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from aioflux import AlreadyExistsError, NotFoundError, PreconditionFailedError, TransientError
from aioflux._services.base import Precondition, Source, WriteRequest
from aioflux._services.memory import MemoryService
from aioflux._transfer.compose import compose, copy
from aioflux._transfer.delete import delete, delete_many
from aioflux._transfer.list import list_pages
from aioflux.errors import StorageError
from tests.transfer.scripted_service import LOSE, REFUSE, ScriptedService, refused_for_good

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

A_AND_B = [Source(key="a"), Source(key="b")]
ABSENT = Precondition(if_absent=True)


@pytest.fixture(autouse=True)
def objects(scripted: ScriptedService) -> None:
    scripted.put("a", b"1")
    scripted.put("b", b"2")


@pytest.mark.parametrize("fault", [REFUSE, LOSE], ids=["refused", "lost"])
async def test_an_append_is_never_made_twice(scripted: ScriptedService, fault: object) -> None:
    scripted.service.fail("compose", fault, fault)
    meta = await compose(scripted.session, WriteRequest("a"), A_AND_B)
    assert scripted.get("a") == b"12"
    assert meta.size == 2


async def test_an_append_that_somebody_else_made_meanwhile_is_not_ours(
    scripted: ScriptedService,
) -> None:
    scripted.service.fail("compose", REFUSE)
    scripted.service.fail("head", None, None, None)
    original = scripted.put("a", b"1")
    scripted.put("a", b"other")
    with pytest.raises(NotFoundError):
        await compose(
            scripted.session,
            WriteRequest("a"),
            [Source(key="a", generation=original.generation), Source(key="b")],
        )
    assert scripted.get("a") == b"other"


@pytest.mark.parametrize("fault", [REFUSE, LOSE], ids=["refused", "lost"])
async def test_a_creating_compose_knows_its_own_result(
    scripted: ScriptedService, fault: object
) -> None:
    scripted.service.fail("compose", fault)
    await compose(scripted.session, WriteRequest("c", ABSENT), A_AND_B)
    assert scripted.get("c") == b"12"
    with pytest.raises(AlreadyExistsError, match="/c"):
        await compose(scripted.session, WriteRequest("c", ABSENT), A_AND_B)


async def test_a_creating_compose_does_not_take_another_object_for_its_own(
    scripted: ScriptedService,
) -> None:
    scripted.put("c", b"other")
    scripted.service.fail("compose", REFUSE)
    with pytest.raises(AlreadyExistsError, match="/c"):
        await compose(scripted.session, WriteRequest("c", ABSENT), A_AND_B)


async def test_a_conditional_compose_survives_a_lost_answer(scripted: ScriptedService) -> None:
    seen = scripted.put("c", b"old").generation
    request = WriteRequest("c", Precondition(if_generation_match=seen))
    scripted.service.fail("compose", LOSE)
    await compose(scripted.session, request, A_AND_B)
    assert scripted.get("c") == b"12"
    with pytest.raises(PreconditionFailedError, match="/c"):
        await compose(scripted.session, request, A_AND_B)


async def test_a_missing_source_stays_missing(scripted: ScriptedService) -> None:
    scripted.service.fail("compose", REFUSE)
    with pytest.raises(NotFoundError, match="nothing"):
        await compose(scripted.session, WriteRequest("c"), [Source(key="nothing")])


@pytest.mark.parametrize("fault", [REFUSE, LOSE], ids=["refused", "lost"])
async def test_a_creating_copy_knows_its_own_result(
    scripted: ScriptedService, fault: object
) -> None:
    scripted.service.fail("copy", fault)
    await copy(scripted.session, Source(key="a"), "c", precondition=ABSENT)
    assert scripted.get("c") == b"1"
    scripted.put("c", b"other")
    scripted.service.fail("copy", REFUSE)
    with pytest.raises(AlreadyExistsError, match="/c"):
        await copy(scripted.session, Source(key="a"), "c", precondition=ABSENT)


async def test_a_delete_whose_answer_is_lost_has_deleted(scripted: ScriptedService) -> None:
    scripted.service.fail("delete", LOSE)
    await delete(scripted.session, "a")
    assert "a" not in scripted.bucket.objects
    with pytest.raises(NotFoundError):
        await delete(scripted.session, "a")


async def test_a_delete_in_a_generation_keeps_what_came_since(scripted: ScriptedService) -> None:
    seen = scripted.put("a", b"1").generation
    scripted.service.fail("delete", LOSE)
    await delete(scripted.session, "a", generation=seen)
    scripted.put("a", b"new")
    with pytest.raises(PreconditionFailedError):
        await delete(scripted.session, "a", generation=seen)
    assert scripted.get("a") == b"new"


async def test_deleting_many_goes_on_after_a_failure(scripted: ScriptedService) -> None:
    scripted.service.fail("delete", refused_for_good(), *[REFUSE] * 4)
    result = await delete_many(
        scripted.session, [Source(key=key) for key in "abcd"], max_in_flight=1
    )
    assert set(result.errors) == {"a", "b"}
    assert result.missing == ("c", "d")
    assert result.deleted == ()
    assert scripted.is_clean()


async def test_a_page_that_fails_is_asked_again(scripted: ScriptedService) -> None:
    for at in range(2500):
        scripted.put(f"p/{at:04}", b"")
    scripted.service.fail("list_page", REFUSE, None, LOSE, REFUSE)
    session = scripted.new_session(max_in_flight=1)
    pages = [page async for page in list_pages(session, "p/")]
    keys = [meta.key for page in pages for meta in page]
    assert keys == [f"p/{at:04}" for at in range(2500)]
    assert scripted.service.count("list_page") == 6


async def test_a_listing_gives_up_with_the_prefix_named(scripted: ScriptedService) -> None:
    scripted.service.fail("list_page", *[REFUSE] * 4)
    with pytest.raises(TransientError, match="4 attempts"):
        _ = [page async for page in list_pages(scripted.session, "p/")]
    assert scripted.is_clean()


class _Paged(MemoryService):
    """As services that delete many objects by one request."""

    capabilities = replace(MemoryService.capabilities, delete_page_size=100)

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
    scripted = ScriptedService(name, service=_Paged(name, ""))
    keys = [f"{number:02}" for number in range(12)]
    for key in keys:
        scripted.put(key, b"1")
    scripted.service.fail("delete", *[LOSE] * 4)
    result = await delete_many(
        scripted.session, [Source(key=key) for key in [*keys, "missing"]], max_in_flight=2
    )
    assert (result.deleted, result.missing, result.errors) == (tuple(keys), ("missing",), {})
    assert not scripted.bucket.objects
