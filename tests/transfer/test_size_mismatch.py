"""Sizes that a listing and the answers of the service do not agree on."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypeAlias

import pytest

import aioflux
from aioflux import ChecksumError, NotFoundError, TransientError
from tests.transfer.scripted_service import ScriptedService, pattern

if TYPE_CHECKING:
    from aioflux._services.base import ReadRequest

DATA = pattern(3500)


Key: TypeAlias = "str | aioflux.ObjectMeta"


async def get(store: aioflux.Store, key: Key) -> bytes:
    return await store.get(key)


async def get_range(store: aioflux.Store, key: Key) -> bytes:
    return await store.get_range(key, start=100, end=3500)


async def get_into(store: aioflux.Store, key: Key) -> bytes:
    buffer = bytearray(3400)
    num_read = await store.get_into(key, memoryview(buffer), start=100)
    return bytes(buffer[:num_read])


async def stream(store: aioflux.Store, key: Key) -> bytes:
    async with store.open_reader(key) as reader:
        return await reader.read()


async def stream_part(store: aioflux.Store, key: Key) -> bytes:
    async with store.open_reader(key) as reader:
        reader.seek(50)
        return await reader.read()


READS = [get, get_range, get_into, stream, stream_part]


@pytest.mark.parametrize("read", READS)
@pytest.mark.parametrize("size", [0, 90, 1500, 3499, 3501, 13_500])
async def test_a_listed_size_that_is_wrong_is_never_a_short_read(
    scripted: ScriptedService, read: Any, size: int
) -> None:
    meta = replace(scripted.put("a", DATA), size=size)
    if read in {stream, stream_part} and size <= 50:
        return  # nothing is asked for
    with pytest.raises(
        ChecksumError, match=rf"/a.* has {size} bytes in its metadata, but 3500"
    ) as raised:
        await read(scripted.store, meta)
    assert raised.value.uri.endswith("/a")
    assert scripted.is_clean()


async def test_a_size_that_a_look_before_the_read_reported_wrong_is_an_error(
    scripted: ScriptedService,
) -> None:
    wrong = replace(scripted.put("a", DATA), size=1500)

    async def head(key: str, generation: str = "") -> aioflux.ObjectMeta:
        return wrong

    scripted.service.head = head
    with pytest.raises(ChecksumError, match=r"1500 bytes in its metadata, but 3500"):
        await scripted.store.get_ranges("a", [(0, 10), (1400, 1500)], max_gap_bytes=0)


def answer_sizes(scripted: ScriptedService, *sizes: int, generation: str | None = None) -> None:
    """Let the next answers tell these sizes."""
    inner, rest = scripted.service.get, list(sizes)

    async def changed(request: ReadRequest, **settings: Any) -> Any:
        body = await inner(request, **settings)
        if generation is not None:
            body.generation = generation
        return replace(body, size=rest.pop(0)) if rest else body

    scripted.service.get = changed


@pytest.mark.parametrize("read", READS)
async def test_one_response_with_another_size_is_requested_again(
    scripted: ScriptedService, read: Any
) -> None:
    meta = scripted.put("a", DATA)
    expected = await read(scripted.store, meta)
    answer_sizes(scripted, 9500)
    assert await read(scripted.store, meta) == expected


async def test_answers_that_never_agree_give_up(scripted: ScriptedService) -> None:
    meta = scripted.put("a", DATA[:900])
    # The first answer, which tells a size that was not listed, is one that is read again.
    answer_sizes(scripted, 901, 902, 903, 904, 905)
    with pytest.raises(TransientError, match=r"900 bytes .* 905 .*4 attempts"):
        await get(scripted.store, meta)


async def test_without_generations_another_size_means_another_object(
    scripted: ScriptedService,
) -> None:
    meta = replace(scripted.put("a", DATA), generation="", size=3400)
    with pytest.raises(NotFoundError, match="replaced"):
        await get(scripted.store, meta)


async def test_without_generations_a_read_by_name_begins_again(scripted: ScriptedService) -> None:
    scripted.put("a", DATA)
    answer_sizes(scripted, 3400, generation="")
    assert await get(scripted.store, "a") == DATA
