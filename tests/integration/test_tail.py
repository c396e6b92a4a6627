"""The tail on a real Redis: every entry once and in order, over restarts and silences (Z1); one listener's exception
is that listener's alone (ZZOL's postmortem)."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import redis
from sqlalchemy import Engine

from tests.support.facts import Facts
from tests.support.proxy import TcpProxy
from zzol_relay import Entry, Settings, Stream, Tail, UnknownStreamError
from zzol_relay.core.observer import DataLossDetected, LoopBeat, LoopFailed
from zzol_relay.embedded import RedisServer

KEY = "zzol:{room:0}"


class Heard:
    """A listener that keeps what it hears, and wakes whoever waits for it."""

    def __init__(self) -> None:
        self.numbers: list[int] = []
        self.entries: list[Entry] = []
        self.batches = 0
        self.news = asyncio.Event()

    def __call__(self, stream: str, entries: Sequence[Entry]) -> None:
        assert stream == "room"
        self.batches += 1
        self.entries += entries
        self.numbers += [int(entry.data) for entry in entries]
        self.news.set()

    async def wait(self, count: int, timeout: float = 10.0) -> list[int]:
        async with asyncio.timeout(timeout):
            while len(self.numbers) < count:
                self.news.clear()
                await self.news.wait()
        return self.numbers


def add(client: Any, *numbers: int, key: str = KEY, id: str = "*") -> None:
    for number in numbers:
        client.xadd(key, {"id": f"e{number}", "type": "t", "data": str(number)}, id=id)


def tail(url: str, listener: Any, shards: int = 1, observe: Any = lambda fact: None) -> Tail:
    settings = Settings.load({}, redis_url=url, redis_timeout=0.5, probe_base=0.02, probe_cap=0.1)
    return Tail(settings, Stream(name="room", shards=shards), (listener,), observe)


def test_it_begins_at_the_end_and_reads_every_shard_in_order(redis_server: RedisServer, redis_client: Any) -> None:
    async def scenario() -> None:
        add(redis_client, 1, 2)
        heard = Heard()
        async with tail(redis_server.url, heard, shards=3) as reader:
            for number in range(3, 1203):
                add(redis_client, number, key=f"zzol:{{room:{number % 3}}}")
            numbers = await heard.wait(1200)
            assert sorted(numbers) == list(range(3, 1203))
            for shard in range(3):
                of_shard = [number for number in numbers if number % 3 == shard]
                assert of_shard == sorted(of_shard)
            last = {key: redis_client.xinfo_stream(key)["last-generated-id"] for key in reader.positions}
            assert reader.positions == last
        add(redis_client, 9999)
        await asyncio.sleep(0.05)
        assert 9999 not in heard.numbers

    asyncio.run(scenario())


def test_a_backlog_comes_in_batches(redis_server: RedisServer, redis_client: Any) -> None:
    """No more than one read of 500 is held at a time."""

    async def scenario() -> None:
        heard = Heard()
        async with tail(redis_server.url, heard):
            pipeline = redis_client.pipeline()
            for number in range(1300):
                pipeline.xadd(KEY, {"data": str(number)})
            pipeline.execute()
            assert await heard.wait(1300) == list(range(1300))
        assert heard.batches >= 3

    asyncio.run(scenario())


def test_entries_are_parsed_when_asked(redis_server: RedisServer, redis_client: Any) -> None:
    async def scenario() -> Entry:
        heard = Heard()
        async with tail(redis_server.url, heard):
            redis_client.xadd(
                KEY,
                {
                    "id": "e",
                    "type": "room.created",
                    "subject": "room/A/1",
                    "partitionkey": "A/1",
                    "sequence": "00000000000000000012",
                    "time": "2026-01-01T00:00:00.000000Z",
                    "schemaversion": "3",
                    "causationid": "before",
                    "data": "5",
                },
                id="1700000000123-4",
            )
            redis_client.xadd(KEY, {"data": "6"})
            await heard.wait(2)
        return heard.entries[0] if not heard.entries[1].event_id else pytest.fail("not ours, but has an id")

    entry = asyncio.run(scenario())
    assert (entry.id, entry.milliseconds) == ("1700000000123-4", 1700000000123)
    assert (entry.event_id, entry.type, entry.aggregate_type, entry.aggregate_id) == (
        "e",
        "room.created",
        "room",
        "A/1",
    )
    assert (entry.sequence, entry.schema_version, entry.causation_id, entry.correlation_id) == (12, 3, "before", None)
    assert (entry.data, entry.json(), entry.time) == (b"5", 5, "2026-01-01T00:00:00.000000Z")


def test_a_listener_that_raises_affects_itself_alone(
    redis_server: RedisServer, redis_client: Any, caplog: pytest.LogCaptureFixture
) -> None:
    async def scenario() -> None:
        calls = 0

        def broken(stream: str, entries: Sequence[Entry]) -> None:
            nonlocal calls
            calls += 1
            raise ValueError("mine")

        heard = Heard()
        reader = tail(redis_server.url, broken)
        reader.add(heard)
        async with reader:
            add(redis_client, 1)
            await heard.wait(1)
            add(redis_client, 2)
            assert await heard.wait(2) == [1, 2]
            assert calls == reader.listener_errors == 2
            reader.remove(broken)
            add(redis_client, 3)
            await heard.wait(3)
            assert calls == 2

    asyncio.run(scenario())
    assert "a listener raised" in caplog.text


@pytest.mark.parametrize("how", ["restart", "kill"])
def test_a_restart_of_redis_neither_skips_nor_repeats(how: str) -> None:
    async def scenario(server: RedisServer) -> None:
        facts, heard = Facts(), Heard()
        with redis.Redis.from_url(server.url) as client:
            async with tail(server.url, heard, observe=facts):
                add(client, 1, 2)
                await heard.wait(2)
                if how == "restart":
                    await asyncio.to_thread(server.restart)
                else:
                    await asyncio.to_thread(server.kill)
                    await asyncio.to_thread(facts.wait_for, LoopFailed)
                    await asyncio.to_thread(server.start)
                # Before the tail is back, and after.
                add(client, 3, 4)
                assert await heard.wait(4) == [1, 2, 3, 4]
                add(client, 5)
                assert await heard.wait(5) == [1, 2, 3, 4, 5]
        assert not facts.of(DataLossDetected)

    with RedisServer(config={"appendonly": "yes"}) as server:
        asyncio.run(scenario(server))


def test_it_begins_at_the_time_of_its_start_where_redis_is_away_then(own_redis: RedisServer) -> None:
    """A game server that starts during an outage must see the backlog of that outage."""

    async def scenario() -> None:
        with redis.Redis.from_url(own_redis.url) as client:
            add(client, 1)
            await asyncio.to_thread(own_redis.stop, keep_data=True)
            # The entry above must be older than the start, whatever the clocks' grain.
            await asyncio.sleep(0.05)
            heard = Heard()
            async with tail(own_redis.url, heard):
                await asyncio.sleep(0.05)
                await asyncio.to_thread(own_redis.start)
                add(client, 2)
                assert await heard.wait(1) == [2]
                add(client, 3)
                assert await heard.wait(2) == [2, 3]

    asyncio.run(scenario())


def test_a_silent_connection_is_given_up(
    redis_server: RedisServer, redis_client: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Connected and deaf: nothing comes, nothing fails."""
    monkeypatch.setattr("zzol_relay.streams.tail._BLOCK", 0.2)

    async def scenario(proxy: TcpProxy) -> None:
        facts, heard = Facts(), Heard()
        async with tail(f"redis://127.0.0.1:{proxy.port}/0", heard, observe=facts):
            add(redis_client, 1)
            await heard.wait(1)
            await asyncio.to_thread(proxy.stall, "server")
            add(redis_client, 2)
            await asyncio.to_thread(facts.wait_for, LoopFailed)
            await asyncio.to_thread(proxy.heal)
            add(redis_client, 3)
            assert await heard.wait(3) == [1, 2, 3]

    with TcpProxy("127.0.0.1", redis_server.port) as proxy:
        asyncio.run(scenario(proxy))


def test_an_emptied_redis_is_read_from_its_beginning(own_redis: RedisServer) -> None:
    """Its new entries may stand below the last id read, where its clock is behind; that id says nothing any more."""

    async def scenario() -> None:
        facts, heard = Facts(), Heard()
        with redis.Redis.from_url(own_redis.url) as client:
            async with tail(own_redis.url, heard, observe=facts):
                add(client, 1)
                await heard.wait(1)
                await asyncio.to_thread(own_redis.kill)
                await asyncio.to_thread(own_redis.start)
                add(client, 2, id="1000-0")
                assert await heard.wait(2) == [1, 2]
                add(client, 3, id="1000-1")
                assert await heard.wait(3) == [1, 2, 3]
        (loss,) = facts.of(DataLossDetected)
        assert loss.stream_key == KEY

    asyncio.run(scenario())


def test_a_flush_under_a_live_connection_is_noticed(
    redis_server: RedisServer, redis_client: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("zzol_relay.streams.tail._BLOCK", 0.1)

    async def scenario() -> None:
        facts, heard = Facts(), Heard()
        async with tail(redis_server.url, heard, observe=facts):
            add(redis_client, 1)
            await heard.wait(1)
            redis_client.flushall()
            await asyncio.to_thread(facts.wait_for, DataLossDetected)
            add(redis_client, 2, id="1000-0")
            assert await heard.wait(2) == [1, 2]

    asyncio.run(scenario())


def test_stopping_is_quick_and_complete(redis_server: RedisServer, redis_client: Any) -> None:
    async def scenario() -> None:
        facts, heard = Facts(), Heard()
        reader = await tail(redis_server.url, heard, shards=8, observe=facts).start()
        add(redis_client, 1)
        await heard.wait(1)
        started = time.monotonic()
        await reader.stop()
        await reader.stop()
        assert time.monotonic() - started < 0.5
        assert len(asyncio.all_tasks()) == 1
        assert facts.of(LoopBeat)

    asyncio.run(scenario())


def test_the_relay_makes_tails_and_stops_them(
    sqlite_engine: Engine, make_relay: Callable[..., Any], redis_client: Any
) -> None:
    relay = make_relay(sqlite_engine, start=False)
    with pytest.raises(UnknownStreamError):
        relay.tail("nowhere")

    async def scenario() -> None:
        heard = Heard()
        async with relay:
            await relay.tail("room", heard).start()
            add(redis_client, 1)
            await heard.wait(1)
        add(redis_client, 2)
        await asyncio.sleep(0.05)
        assert heard.numbers == [1]

    asyncio.run(scenario())
