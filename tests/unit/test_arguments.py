"""What callers pass by mistake is named before anything is sent."""

from __future__ import annotations

from typing import Any

import numpy
import pytest

import aioflux
import aioflux.sync
from aioflux._services.base import Source
from aioflux._transfer.arguments import (
    check_listing,
    check_mode,
    parse_attributes,
    parse_key,
    parse_prefix,
    parse_source,
    require_many_keys,
)
from aioflux._values.meta import ATTRIBUTE_NAMES, ObjectAttributes

META = aioflux.ObjectMeta(key="a", uri="gs://b/a", size=1, generation="5")


def test_a_key_is_a_name_or_metadata() -> None:
    assert parse_key("a") == ("a", None)
    assert parse_key(META) == ("a", META)


@pytest.mark.parametrize("key", [None, 5, b"a", ["a"]], ids=repr)
def test_a_key_is_nothing_else(key: Any) -> None:
    with pytest.raises(TypeError, match="a key is a string or an ObjectMeta, not"):
        parse_key(key)


def test_a_generation_is_that_of_metadata_or_is_given_with_a_name() -> None:
    assert parse_source("a") == Source(key="a")
    assert parse_source(META) == Source(key="a", generation="5")
    assert parse_source("a", "7") == Source(key="a", generation="7")
    generation: Any = 7
    for key, given in ((META, "7"), ("a", generation)):
        with pytest.raises(TypeError, match="a generation is text, given with a name"):
            parse_source(key, given)
    with pytest.raises(ValueError, match="None means the current one"):
        parse_source("a", "")


async def test_a_read_of_a_generation_that_was_replaced_finds_nothing() -> None:
    async with aioflux.open_store("memory://generations") as store:
        first = await store.put("a", b"1")
        assert await store.get("a", generation=first.generation) == b"1"
        second = await store.put("a", b"2")
        assert await store.head("a", generation=second.generation) == await store.head("a")
        with pytest.raises(aioflux.NotFoundError):
            await store.get("a", generation=first.generation)


def test_a_key_is_not_empty() -> None:
    with pytest.raises(ValueError, match="must not be empty"):
        parse_key("")


@pytest.mark.parametrize("keys", ["abc", b"abc"])
def test_one_string_is_not_several_keys(keys: Any) -> None:
    with pytest.raises(TypeError, match="put it in a list"):
        require_many_keys(keys)
    require_many_keys(["abc"])


@pytest.mark.parametrize("keys", ["ab", b"ab"])
def test_blocking_calls_with_one_string_touch_no_object(keys: Any) -> None:
    with aioflux.sync.open_store("memory://letters") as store:
        assert len(store.put_many([("a", b""), ("b", b"")])) == 2
        with pytest.raises(TypeError, match="put it in a list"):
            store.delete_many(keys)
        for method in ("get_many", "get_batches", "fetch_batches", "try_fetch_batches"):
            with pytest.raises(TypeError, match="put it in a list"):
                list(getattr(store, method)(keys))
        assert [meta.key for meta in store.list()] == ["a", "b"]


def test_a_prefix_is_a_string() -> None:
    assert parse_prefix("") == ""
    with pytest.raises(TypeError, match="a prefix is a string, not NoneType"):
        parse_prefix(None)  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["delimiter", "match_glob"])
def test_a_listing_is_narrowed_by_strings(name: str) -> None:
    given: dict[str, Any] = {"delimiter": "", "match_glob": ""}
    check_listing(**given)
    with pytest.raises(TypeError, match=f"{name} is a string, not bytes"):
        check_listing(**(given | {name: b"/"}))


def test_a_listing_is_narrowed_in_one_way() -> None:
    with pytest.raises(ValueError, match="exclude each other"):
        check_listing("/", "*.bin")


@pytest.mark.parametrize(
    ("mode", "generation", "error", "said"),
    [
        ("append", None, ValueError, 'mode must be "overwrite" or "create", not \'append\''),
        ("overwrite", 5, TypeError, "if_generation_match is a string, .* not 5"),
        ("overwrite", "", ValueError, "must not be empty"),
        ("overwrite", "0", ValueError, 'use mode="create" instead'),
        ("create", "5", ValueError, "exclude each other"),
    ],
)
def test_a_condition_that_cannot_be_meant_is_refused(
    mode: str, generation: Any, error: type[Exception], said: str
) -> None:
    with pytest.raises(error, match=said):
        check_mode(mode, generation)


def test_each_condition_that_can_be_meant_is_taken() -> None:
    check_mode("overwrite", None)
    check_mode("overwrite", "5")
    check_mode("create", None)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"content_type": 5}, "content_type is a string, not 5"),
        ({"storage_class": None}, "storage_class is a string, not None"),
        ({"metadata": ["a"]}, "mapping of strings"),
        ({"metadata": {"a": 5}}, "maps strings"),
        ({"metadata": {5: "a"}}, "maps strings"),
        ({"metadata": {"a": None}}, "maps strings"),
        ({"cache": "no-store"}, "unexpected keyword argument 'cache'"),
    ],
    ids=repr,
)
def test_attributes_are_strings(given: Any, said: str) -> None:
    with pytest.raises(TypeError, match=said):
        parse_attributes(given)


@pytest.mark.parametrize("name", sorted(set(ATTRIBUTE_NAMES) - {"metadata"}))
@pytest.mark.parametrize("value", ["a\r\nb: c", " a", "a ", "\x7f", "ü"])
def test_attributes_can_be_headers(name: Any, value: str) -> None:
    with pytest.raises(ValueError, match=f"{name} cannot be .*: it is sent as a header"):
        parse_attributes({name: value})  # type: ignore[misc]


def test_names_of_metadata_are_lowered() -> None:
    given = ObjectAttributes(cache_control="no-store", metadata={"a": "B"})
    assert parse_attributes({"cache_control": "no-store", "metadata": {"A": "B"}}) == given
    assert parse_attributes({}) == ObjectAttributes()


@pytest.mark.parametrize("name", ["start", "end"])
async def test_a_place_in_an_object_is_an_integer(name: str) -> None:
    async with aioflux.open_store("memory://places") as store:
        await store.put("a", b"0123456789")
        with pytest.raises(TypeError, match=rf"{name} is an integer, not 1\.5"):
            await store.get_range("a", **{"start": 0, "end": 2, name: 1.5})  # type: ignore[arg-type]
        with pytest.raises(TypeError, match=r"start is an integer, not 1\.5"):
            await store.get_into("a", bytearray(2), start=1.5)  # type: ignore[arg-type]


async def test_nothing_is_sent_after_a_mistake() -> None:
    async with aioflux.open_store("memory://mistakes") as store:
        with pytest.raises(TypeError, match="if_generation_match is a string"):
            await store.put("a", b"", if_generation_match=5)  # type: ignore[arg-type]
        assert store.stats.num_requests == 0


@pytest.mark.parametrize(
    "data", ["text", None, memoryview(b"abcd")[::2]], ids=lambda data: str(data)[:6]
)
async def test_data_that_is_not_contiguous_bytes_is_named_with_its_key(data: Any) -> None:
    async with aioflux.open_store("memory://data") as store:
        with pytest.raises(TypeError, match="the data of 'a' must be bytes"):
            await store.put("a", data)
        with pytest.raises(TypeError, match="the data of 'a' must be bytes"):
            await store.put_many([("a", data)])
        for zero_copy in (False, True):
            with pytest.raises(TypeError, match="the data of 'a' must be bytes"):
                async with store.open_writer("a", zero_copy=zero_copy) as writer:
                    await writer.write(data)


async def test_an_array_without_rows_is_stored_as_an_empty_object() -> None:
    async with aioflux.open_store("memory://rows") as store:
        assert (await store.put("a", memoryview(numpy.zeros((0, 3))))).size == 0


@pytest.mark.parametrize("pairs", [[("k",)], {"ab": b""}, "ab", [5], [("a", b"", b"")]], ids=repr)
async def test_put_many_needs_pairs(pairs: Any) -> None:
    with aioflux.sync.open_store("memory://pairs") as blocking:
        for given in (pairs, iter(pairs)):
            with pytest.raises(TypeError, match=r"put_many needs pairs \(key, data\), not"):
                blocking.put_many(given)
    async with aioflux.open_store("memory://pairs") as store:
        with pytest.raises(TypeError, match=r"put_many needs pairs \(key, data\), not"):
            await store.put_many(pairs)


READS = ["get_into", "readinto"]


def read_into(how: str, memory: Any) -> int:
    with aioflux.sync.open_store("memory://memory") as store:
        store.put("a", b"0123456789")
        if how == "get_into":
            return store.get_into("a", memory)
        with store.open_reader("a") as reader:
            return reader.readinto(memory)


@pytest.mark.parametrize("how", READS)
@pytest.mark.parametrize("shape", [0, (0, 5), (5, 0)], ids=str)
def test_reads_into_empty_memory_read_nothing(how: str, shape: Any) -> None:
    assert read_into(how, numpy.empty(shape)) == 0


@pytest.mark.parametrize("how", READS)
def test_reads_into_other_memory_name_what_is_needed(how: str) -> None:
    square = numpy.zeros((4, 4), numpy.uint8)
    for memory in (square.T[:, :2], square[:, ::2], numpy.asfortranarray(square), "text", [0]):
        with pytest.raises(TypeError, match=r"needs writable memory that is C-contiguous.*, not "):
            read_into(how, memory)
    for read_only in (b"text", b""):
        with pytest.raises(ValueError, match=r"needs writable memory .*; this bytes is read-only"):
            read_into(how, read_only)
