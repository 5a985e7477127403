"""Through a proxy, signatures hold."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

import aioflux
from tests.faults.gateway import Gateway

if TYPE_CHECKING:
    from tests.s3.conftest import Prefix

KEYS = ["a b  c", "50%25+ü~!*'()", "q?x=1&y=2#frag;p=3", "@:,$[x]"]


@pytest.mark.parametrize("user", ["", "user:word@"], ids=["without-a-user", "user"])
async def test_requests_are_signed_as_they_arrive(
    prefix: Prefix, monkeypatch: pytest.MonkeyPatch, user: str
) -> None:
    for name in ("NO_PROXY", "no_proxy"):
        monkeypatch.setenv(name, "")
    with Gateway() as gateway:
        monkeypatch.delenv("http_proxy", raising=False)
        monkeypatch.setenv("HTTP_PROXY", gateway.url.replace("//", f"//{user}"))
        async with aioflux.open_store(prefix.uri) as store:
            for key in KEYS:
                await store.put(key, key.encode(), metadata={"k": "v  w"})
                assert await store.get(key) == key.encode()
                assert await store.get_range(key, start=1, end=3) == key.encode()[1:3]
            assert [meta.key async for meta in store.list()] == sorted(KEYS)
            assert [key async for key, _ in store.get_many(KEYS)] == KEYS
            result = await store.delete_many([*KEYS, *map(str, range(10))])
            assert result.deleted == tuple(sorted(KEYS))
        assert gateway.num_requests["absolute"] > 10
