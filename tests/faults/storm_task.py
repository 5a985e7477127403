"""One task of a storm: its operations, and a model of its objects."""

from __future__ import annotations

import asyncio
import random
from typing import TYPE_CHECKING, Any

import aioflux
from tests.faults.model import ABSENT, Model

if TYPE_CHECKING:
    from collections.abc import Awaitable, Iterator

    from tests.faults.storm import Outcome, Storm

MIB = 1024 * 1024
SIZES = (0, 1, 1_000, 60_000, 400_000, MIB, 3 * MIB, 5 * MIB + 1, 12 * MIB, 20 * MIB)
SIZE_WEIGHTS = (4, 4, 20, 30, 15, 8, 6, 3, 1.5, 1)
MAX_BYTES = 20 * MIB


class AbandonedError(Exception):
    """Raised in a writer's body by the storm."""


class Task:
    """One task, with its keys and a model of their objects."""

    def __init__(self, store: aioflux.Store, storm: Storm, outcome: Outcome, number: int) -> None:
        self.store = store
        self.storm = storm
        self.outcome = outcome
        self.model = Model()
        self.rng = random.Random(storm.seed * 1_000 + number)
        self.prefix = f"{number:02}/"
        self.keys = [f"{self.prefix}{at}" for at in range(storm.keys_per_task)]
        self.num_races = 0
        for key in self.keys:
            self.model.became(key, ABSENT)

    async def run(self, budget: Iterator[int]) -> None:
        names = [name.removeprefix("do_") for name in dir(self) if name.startswith("do_")]
        weights = [3 if name in {"get", "put", "write"} else 1 for name in names]
        for _ in budget:
            [name] = self.rng.choices(names, weights)
            self.outcome.operations[name] += 1
            try:
                await getattr(self, f"do_{name}")()
            except (AssertionError, aioflux.AiofluxError) as exc:
                exc.add_note(f"in {name} of task {self.prefix}, seed {self.storm.seed}")
                raise

    # --- shared by operations ----------------------------------------------------------------

    def key(self) -> str:
        return self.rng.choice(self.keys)

    def data(self) -> bytes:
        [size] = self.rng.choices(SIZES, SIZE_WEIGHTS)
        return self.rng.randbytes(size)

    async def attempt(self, call: Awaitable[Any]) -> Any:
        """Return what the call returns, or the error that it raises."""
        try:
            return await call
        except AbandonedError as exc:
            return exc
        except aioflux.AiofluxError as exc:
            return exc

    def count_error(self, error: aioflux.AiofluxError) -> None:
        """Count an unexpected error; with retries, raise it."""
        if self.storm.has_retries:
            raise error
        self.outcome.errors[type(error).__name__] += 1

    async def write(self, key: str, content: bytes | None, call: Awaitable[Any]) -> None:
        result = await self.attempt(call)
        if isinstance(result, aioflux.AiofluxError):
            self.model.may_have_become(key, content)
            self.count_error(result)
            return
        self.model.became(key, content)
        if content is not ABSENT:
            assert (result.key, result.size) == (key, len(content))

    async def read(self, key: str, call: Awaitable[Any]) -> Any:
        """Return the result of a read, or None if it failed or there was no object."""
        result = await self.attempt(call)
        if isinstance(result, aioflux.NotFoundError):
            self.model.check(key, ABSENT)
            return None
        if isinstance(result, aioflux.AiofluxError):
            self.count_error(result)
            return None
        return result

    # --- reads --------------------------------------------------------------------------------

    async def do_head(self) -> None:
        key = self.key()
        meta = await self.read(key, self.store.head(key))
        if meta is not None:
            assert meta.size in {len(held) for held in self.model.possible(key) if held is not None}

    async def do_get(self) -> None:
        key = self.key()
        data = await self.read(key, self.store.get(key))
        if data is not None:
            self.model.check(key, data)

    async def do_get_by_meta(self) -> None:
        key = self.key()
        meta = await self.read(key, self.store.head(key))
        if meta is not None:
            data = await self.read(key, self.store.get(meta))
            if data is not None:
                self.model.check(key, data)

    async def do_get_into(self) -> None:
        key = self.key()
        buffer = bytearray(self.rng.choice((10, 100_000, MAX_BYTES)))
        size = await self.read(key, self.store.get_into(key, buffer))
        if size is not None:
            self.model.check_part(key, 0, len(buffer), bytes(buffer[:size]))

    async def do_get_range(self) -> None:
        key = self.key()
        start = self.rng.choice((0, 3, 50_000, 2 * MIB))
        end = start + self.rng.choice((1, 5_000, 100_000, 3 * MIB))
        part = await self.read(key, self.store.get_range(key, start=start, end=end))
        if part is not None:
            self.model.check_part(key, start, end, part)

    async def do_get_many(self) -> None:
        keys = [key for key in self.keys if ABSENT not in self.model.possible(key)]
        items: Any = keys
        if keys and self.rng.random() < 0.5:
            metas = await self.attempt(self.store.list_all(self.prefix))
            if isinstance(metas, aioflux.AiofluxError):
                return self.count_error(metas)
            items = metas
        try:
            async for key, data in self.store.get_many(items, ordered=self.rng.random() < 0.5):
                self.model.check(key, data)
        except aioflux.AiofluxError as exc:
            self.count_error(exc)
        return None

    async def do_list(self) -> None:
        metas = await self.attempt(self.store.list_all(self.prefix))
        if isinstance(metas, aioflux.AiofluxError):
            return self.count_error(metas)
        assert [meta.key for meta in metas] == sorted(meta.key for meta in metas)
        listed = {meta.key: meta.size for meta in metas}
        for key in self.keys:
            sizes = {None if held is None else len(held) for held in self.model.possible(key)}
            assert listed.get(key) in sizes, f"{key} is listed with another size"
        unknown = sorted(set(listed) - set(self.model.contents))
        assert not unknown, f"{unknown} is listed and was never written"
        return None

    async def do_open_reader(self) -> None:
        key = self.key()

        async def read() -> bytes:
            pieces = []
            async with self.store.open_reader(key) as reader:
                while piece := await reader.read(step):
                    pieces.append(piece)
                reader.seek(0)
                again = await reader.read(step)
                assert again == (pieces[0] if pieces else b"")
            return b"".join(pieces)

        step = self.rng.choice((70_000, 1_500_000, -1))
        data = await self.read(key, read())
        if data is not None:
            self.model.check(key, data)

    # --- writes -------------------------------------------------------------------------------

    async def do_put(self) -> None:
        key, data = self.key(), self.data()
        await self.write(key, data, self.store.put(key, data))

    async def do_put_many(self) -> None:
        pairs = {key: self.data() for key in self.rng.sample(self.keys, 3)}
        remaining = dict(pairs)
        try:
            async for batch in self.store.put_batches(pairs.items()):
                for meta in batch:
                    self.model.became(meta.key, remaining.pop(meta.key))
            assert not remaining
        except aioflux.AiofluxError as exc:
            for key, data in remaining.items():
                self.model.may_have_become(key, data)
            self.count_error(exc)

    async def _write_pieces(self, key: str, data: bytes, **settings: Any) -> aioflux.ObjectMeta:
        abandon = settings.pop("abandon", False)
        step = self.rng.choice((1_000_003, 6 * MIB, MAX_BYTES))
        async with self.store.open_writer(key, **settings) as writer:
            for start in range(0, len(data), step):
                await writer.write(memoryview(data)[start : start + step])
            if abandon:
                raise AbandonedError
        return writer.meta

    async def do_write(self) -> None:
        key, data = self.key(), self.data()
        await self.write(key, data, self._write_pieces(key, data))

    async def do_write_and_abandon(self) -> None:
        key, data = self.key(), self.data()
        result = await self.attempt(self._write_pieces(key, data, abandon=True))
        if not isinstance(result, AbandonedError):
            self.count_error(result)

    async def _create(self, key: str, data: bytes, call: Awaitable[Any]) -> None:
        before = set(self.model.possible(key))
        result = await self.attempt(call)
        if isinstance(result, aioflux.AlreadyExistsError):
            assert before != {ABSENT}, f"{key} was said to exist"
        elif isinstance(result, aioflux.AiofluxError):
            self.model.may_have_become(key, data)
            self.count_error(result)
        else:
            assert ABSENT in before, f"{key} was created over another"
            self.model.became(key, data)

    async def do_create(self) -> None:
        key, data = self.key(), self.data()
        await self._create(key, data, self.store.put(key, data, mode="create"))

    async def do_write_create(self) -> None:
        key, data = self.key(), self.data()
        await self._create(key, data, self._write_pieces(key, data, mode="create"))

    async def do_replace(self) -> None:
        """Replace the current generation, or another one."""
        key, data = self.key(), self.data()
        meta = await self.read(key, self.store.head(key))
        if meta is None:
            return
        is_stale = self.rng.random() < 0.3
        settings: Any = {"if_generation_match": "1" if is_stale else meta.generation}
        put = self.store.put if self.rng.random() < 0.5 else self._write_pieces
        call = put(key, data, **settings)
        if not is_stale:
            await self.write(key, data, call)
            return
        result = await self.attempt(call)
        if not isinstance(result, aioflux.PreconditionFailedError):
            assert isinstance(result, aioflux.AiofluxError), f"{key} was replaced in silence"
            self.count_error(result)

    def _sources(self) -> list[str]:
        keys = [key for key in self.keys if self.model.is_certain(key)]
        chosen = self.rng.choices(keys, k=self.rng.randint(1, 4)) if keys else []
        size = sum(len(self.model.certain(key) or b"") for key in chosen)
        return chosen if size <= MAX_BYTES else chosen[:1]

    async def do_compose(self) -> None:
        key, sources = self.key(), self._sources()
        if not sources:
            return
        await self._make(key, sources, self.store.compose(key, sources))

    async def do_copy(self) -> None:
        key, sources = self.key(), self._sources()[:1]
        if not sources:
            return
        mode: Any = self.rng.choice(("overwrite", "create"))
        call = self.store.copy(sources[0], key, mode=mode)
        data = self.model.certain(sources[0])
        if mode == "create" and data is not ABSENT:
            await self._create(key, data, call)
        elif mode == "create" and self.model.possible(key) != {ABSENT}:
            # The source is missing and the target exists: the service may report either error.
            result = await self.attempt(call)
            expected = (aioflux.NotFoundError, aioflux.AlreadyExistsError)
            if not isinstance(result, expected):
                assert isinstance(result, aioflux.AiofluxError)
                self.count_error(result)
        else:
            await self._make(key, sources, call)

    async def _make(self, key: str, sources: list[str], call: Awaitable[Any]) -> None:
        contents = [self.model.certain(source) for source in sources]
        if ABSENT not in contents:
            await self.write(key, b"".join(held or b"" for held in contents), call)
            return
        result = await self.attempt(call)
        if not isinstance(result, aioflux.NotFoundError):
            assert isinstance(result, aioflux.AiofluxError), "made of a missing object"
            self.count_error(result)

    async def do_delete(self) -> None:
        key = self.key()
        before = set(self.model.possible(key))
        result = await self.attempt(self.store.delete(key))
        if isinstance(result, aioflux.NotFoundError):
            assert ABSENT in before, f"{key} was said to be missing"
            self.model.became(key, ABSENT)
        elif isinstance(result, aioflux.AiofluxError):
            self.model.may_have_become(key, ABSENT)
            self.count_error(result)
        else:
            self.model.became(key, ABSENT)

    async def do_delete_many(self) -> None:
        keys = self.rng.sample(self.keys, 3)
        result = await self.store.delete_many(keys)
        assert {*result.deleted, *result.missing, *result.errors} == set(keys)
        for key in result.missing:
            self.model.check(key, ABSENT)
        for key in (*result.deleted, *result.missing):
            self.model.became(key, ABSENT)
        for key, error in result.errors.items():
            self.model.may_have_become(key, ABSENT)
            self.count_error(error)

    # --- races --------------------------------------------------------------------------------

    async def do_race(self) -> None:
        """Create one object four times concurrently: one call succeeds and sets the content."""
        self.num_races += 1
        key = f"{self.prefix}race-{self.num_races}"
        self.model.became(key, ABSENT)
        contents = [self.data() for _ in range(4)]
        puts = (self.store.put, self._write_pieces)
        calls = [
            self.attempt(puts[at % 2](key, data, mode="create")) for at, data in enumerate(contents)
        ]
        results = await asyncio.gather(*calls)
        winners = [
            data
            for data, result in zip(contents, results, strict=True)
            if isinstance(result, aioflux.ObjectMeta)
        ]
        assert len(set(winners)) <= 1, f"{key} was created twice"
        for data, result in zip(contents, results, strict=True):
            if isinstance(result, aioflux.AlreadyExistsError | aioflux.ObjectMeta):
                continue
            self.model.may_have_become(key, data)
            self.count_error(result)
        if winners:
            self.model.became(key, winners[0])
        elif self.storm.has_retries:
            raise AssertionError(f"no task created {key}")

    async def do_append(self) -> None:
        """Append to one object four times concurrently, with preconditions: no append is lost."""
        self.num_races += 1
        key = f"{self.prefix}log-{self.num_races}"
        result = await self.attempt(self.store.put(key, b""))
        if isinstance(result, aioflux.AiofluxError):
            self.model.became(key, ABSENT)
            self.model.may_have_become(key, b"")
            return self.count_error(result)
        attempts = await asyncio.gather(*(self._append(key, name) for name in "abcd"))
        done = [tag for tags in attempts for tag in tags["done"]]
        tried = [tag for tags in attempts for tag in tags["tried"]]
        data = await self.attempt(self.store.get(key))
        if isinstance(data, aioflux.AiofluxError):
            self.model.contents.pop(key, None)
            self.model.contents[key] = _AnyContent()
            return self.count_error(data)
        self.model.became(key, data)
        tags = data.decode().split()
        assert len(tags) == len(set(tags)), f"{key} has a tag twice: {tags}"
        assert set(done) <= set(tags) <= set(tried), f"{key} has {tags}, done were {done}"
        return None

    async def _append(self, key: str, name: str) -> dict[str, list[str]]:
        tags: dict[str, list[str]] = {"done": [], "tried": []}
        while not tags["done"] and len(tags["tried"]) < 20:
            tag = f"{name}{len(tags['tried'])}"
            tags["tried"].append(tag)

            async def once(tag: str = tag) -> aioflux.ObjectMeta:
                meta = await self.store.head(key)
                data = await self.store.get(meta)
                return await self.store.put(
                    key, data + f"{tag} ".encode(), if_generation_match=meta.generation
                )

            result = await self.attempt(once())
            if isinstance(result, aioflux.ObjectMeta):
                tags["done"].append(tag)
            elif not isinstance(result, aioflux.PreconditionFailedError | aioflux.NotFoundError):
                self.count_error(result)
        return tags


class _AnyContent(set[bytes | None]):
    """Means unknown content."""

    def __contains__(self, content: object) -> bool:
        return True
