"""The direct path on a real Redis: one pipeline a turn, order per key, at most once, honest refusals (Z19, Z20)."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Any

import pytest
import redis
from sqlalchemy import Engine

from tests.support.facts import Facts
from tests.support.proxy import TcpProxy
from tests.support.streams import entries
from zzol_relay import (
    BrokerError,
    BrokerUnavailableError,
    Event,
    InvalidEventError,
    PublishUncertainError,
    Settings,
    Stream,
    UnknownStreamError,
)
from zzol_relay.core.observer import DirectPublished
from zzol_relay.embedded import RedisServer, free_port
from zzol_relay.relay.recorder import complete
from zzol_relay.streams import direct
from zzol_relay.streams.direct import DirectPublisher


def tap(number: int = 0, room: str | None = "A", **changes: Any) -> Event:
    aggregate = {"aggregate_type": "room", "aggregate_id": room} if room else {}
    return Event(**{"type": "tap", "stream": "room", "data": {"n": number}} | aggregate | changes)


def publisher(url: str, stream: Stream | None = None, **options: Any) -> DirectPublisher:
    stream = stream or Stream(name="room")
    settings = Settings.load({}, redis_url=url, **options)
    return DirectPublisher(settings, {stream.name: stream}, complete, Facts())


def facts_of(publisher: DirectPublisher) -> Facts:
    facts = publisher._observe
    assert isinstance(facts, Facts)
    return facts


def test_what_one_turn_publishes_is_one_pipeline_in_the_order_of_the_calls(
    redis_server: RedisServer, redis_client: Any
) -> None:
    """Per key the order of the calls is the order of the stream; each call gets its own entry id."""

    async def scenario() -> tuple[list[str], Facts]:
        sender = publisher(redis_server.url, Stream(name="room", shards=3))
        ids = await asyncio.gather(*(sender.publish(tap(n, f"room{n % 7}")) for n in range(500)))
        await sender.close()
        return ids, facts_of(sender)

    ids, facts = asyncio.run(scenario())
    found = entries(redis_client, "room", 3)
    assert len(found) == 500
    by_number = {entry.data["n"]: entry for entry in found}
    assert [by_number[n].entry_id for n in range(500)] == ids
    for shard in range(3):
        of_shard = [int(fields["data"][5:-1]) for _, fields in redis_client.xrange(f"zzol:{{room:{shard}}}")]
        assert of_shard == sorted(of_shard)
    assert [fact.count for fact in facts.of(DirectPublished)] == [500]


def test_an_entry_is_laid_out_as_the_outbox_does_and_carries_no_sequence(
    redis_server: RedisServer, redis_client: Any
) -> None:
    async def scenario() -> Event:
        sender = publisher(redis_server.url, source="here")
        await sender.publish(tap(1, sequence=7))
        completed = sender.publish_soon(tap(2, correlation_id="c"))
        await sender.publish(tap(3, None))
        await sender.close()
        return completed

    completed = asyncio.run(scenario())
    given, plain, loose = (fields for _, fields in redis_client.xrange("zzol:{room:0}"))
    assert given["sequence"] == "00000000000000000007"
    assert "sequence" not in plain
    assert plain["subject"] == "room/A"
    assert plain["partitionkey"] == "A"
    assert plain["source"] == "here"
    assert plain["correlationid"] == "c"
    assert plain["id"] == str(completed.event_id)
    assert plain["specversion"] == "1.0"
    assert "subject" not in loose


def test_events_are_refused_before_anything_is_sent(redis_server: RedisServer, redis_client: Any) -> None:
    async def scenario() -> None:
        sender = publisher(redis_server.url)
        for event, error in (
            (tap(stream="nowhere"), UnknownStreamError),
            (tap(type="no spaces"), InvalidEventError),
            (tap(data=float("nan")), InvalidEventError),
            (tap(data="x" * 300_000), InvalidEventError),
        ):
            with pytest.raises(error):
                await sender.publish(event)
            with pytest.raises(error):
                sender.publish_soon(event)
        await sender.close()

    asyncio.run(scenario())
    assert redis_client.keys() == []


def test_the_stream_is_trimmed_by_its_retention_on_redis_own_clock(
    redis_server: RedisServer, redis_client: Any
) -> None:
    old = [f"{1000 + n}-0" for n in range(300)]
    for id_ in old:
        redis_client.xadd("zzol:{room:0}", {"f": "v"}, id=id_)

    async def scenario(retention: float) -> None:
        sender = publisher(redis_server.url, Stream(name="room", retention=retention))
        for n in range(3):
            await sender.publish(tap(n))
        await sender.close()

    asyncio.run(scenario(0))
    assert redis_client.xlen("zzol:{room:0}") == 303
    asyncio.run(scenario(600))
    assert redis_client.xlen("zzol:{room:0}") < 206


@pytest.mark.parametrize("away", ["nobody listens", "nobody answers"])
def test_an_unreachable_redis_is_said_within_the_timeout(away: str, own_redis: RedisServer) -> None:
    """Nothing was written, so ``BrokerUnavailableError``; also for those queued behind."""
    if away == "nobody answers":
        own_redis.pause()
    url = own_redis.url if away == "nobody answers" else f"redis://127.0.0.1:{free_port()}/0"

    async def scenario() -> float:
        sender = publisher(url, redis_timeout=0.5)
        started = time.monotonic()
        first = asyncio.create_task(sender.publish(tap(1)))
        await asyncio.sleep(0.1)
        answers = await asyncio.gather(first, sender.publish(tap(2)), return_exceptions=True)
        assert [type(answer) for answer in answers] == [BrokerUnavailableError] * 2
        took = time.monotonic() - started
        await sender.close()
        return took

    assert asyncio.run(scenario()) < 1.0


@pytest.mark.parametrize("loss", ["cut", "silence"])
def test_a_lost_reply_is_uncertain_and_nothing_is_sent_twice(
    loss: str, redis_server: RedisServer, redis_client: Any
) -> None:
    """redis-py's own retries would have left three entries."""

    async def scenario(proxy: TcpProxy) -> None:
        sender = publisher(f"redis://127.0.0.1:{proxy.port}/0", redis_timeout=0.5)
        await sender.publish(tap(0))
        await asyncio.to_thread(proxy.drop_replies, close=loss == "cut")
        lost = [asyncio.create_task(sender.publish(tap(n))) for n in (1, 2, 3)]
        answers = await asyncio.gather(*lost, return_exceptions=True)
        assert [type(answer) for answer in answers] == [PublishUncertainError] * 3
        await asyncio.to_thread(proxy.heal)
        await sender.publish(tap(4))
        await sender.close()

    with TcpProxy("127.0.0.1", redis_server.port) as proxy:
        asyncio.run(scenario(proxy))
    assert [entry.data["n"] for entry in entries(redis_client)] == [0, 1, 2, 3, 4]


def test_one_refused_event_does_not_fail_its_neighbours(redis_server: RedisServer, redis_client: Any) -> None:
    redis_client.set("zzol:{broken:0}", "no stream")

    async def scenario() -> None:
        settings = Settings.load({}, redis_url=redis_server.url)
        streams = {name: Stream(name=name) for name in ("room", "broken")}
        sender = DirectPublisher(settings, streams, complete)
        good, bad, last = await asyncio.gather(
            sender.publish(tap(1)),
            sender.publish(tap(2, stream="broken")),
            sender.publish(tap(3)),
            return_exceptions=True,
        )
        assert isinstance(good, str)
        assert isinstance(last, str)
        assert type(bad) is BrokerError
        # Refusing everybody is another matter.
        redis_client.config_set("maxmemory", "1")
        with pytest.raises(BrokerUnavailableError, match="OOM"):
            await sender.publish(tap(4))
        redis_client.config_set("maxmemory", "0")
        await sender.publish(tap(5))
        await sender.close()

    asyncio.run(scenario())
    assert [entry.data["n"] for entry in entries(redis_client)] == [1, 3, 5]


def test_it_finds_its_way_back_after_a_restart(own_redis: RedisServer) -> None:
    async def scenario() -> None:
        sender = publisher(own_redis.url)
        await sender.publish(tap(1))
        await asyncio.to_thread(own_redis.restart)
        # An idle connection that Redis has closed is noticed before anything is sent on it.
        await sender.publish(tap(2))
        await sender.close()

    asyncio.run(scenario())
    with redis.Redis.from_url(own_redis.url, decode_responses=True) as client:
        assert [entry.data["n"] for entry in entries(client)] == [1, 2]


def test_close_sends_what_is_queued_and_leaves_nobody_waiting(redis_server: RedisServer, redis_client: Any) -> None:
    async def scenario() -> None:
        sender = publisher(redis_server.url)
        waiting = [asyncio.create_task(sender.publish(tap(n))) for n in range(3)]
        await asyncio.sleep(0)
        await sender.close()
        assert all(isinstance(answer, str) for answer in await asyncio.gather(*waiting))
        with pytest.raises(BrokerUnavailableError):
            await sender.publish(tap(9))

        stuck = publisher(redis_server.url, redis_timeout=0.3)
        await stuck.publish(tap(3))
        await asyncio.to_thread(redis_server.pause)
        waiting = [asyncio.create_task(stuck.publish(tap(n))) for n in (4, 5)]
        await asyncio.sleep(0.05)
        await asyncio.wait_for(stuck.close(), 2.0)
        answers = await asyncio.wait_for(asyncio.gather(*waiting, return_exceptions=True), 1.0)
        assert [type(answer) for answer in answers] == [PublishUncertainError] * 2
        await asyncio.to_thread(redis_server.resume)

    asyncio.run(scenario())


def test_the_queue_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(direct, "MAX_PENDING", 3)

    async def scenario() -> None:
        sender = publisher(f"redis://127.0.0.1:{free_port()}/0")
        for n in range(3):
            sender.publish_soon(tap(n))
        with pytest.raises(BrokerUnavailableError, match="3 events wait"):
            sender.publish_soon(tap(3))
        await sender.close()
        # Their failures were counted, and nobody had to ask for them.
        await asyncio.sleep(0)
        assert sender.dropped == 3

    asyncio.run(scenario())


def test_cancelled_before_it_was_sent_it_is_not_sent(redis_server: RedisServer, redis_client: Any) -> None:
    async def scenario() -> None:
        sender = publisher(redis_server.url)
        first = asyncio.create_task(sender.publish(tap(1)))
        second = asyncio.create_task(sender.publish(tap(2)))
        await asyncio.sleep(0)
        first.cancel()
        await second
        await sender.close()

    asyncio.run(scenario())
    assert [entry.data["n"] for entry in entries(redis_client)] == [2]


def test_through_the_relay_in_asyncio(sqlite_engine: Engine, make_relay: Callable[..., Any], redis_client: Any) -> None:
    """``async with relay`` starts and stops threads without blocking the loop."""
    relay = make_relay(sqlite_engine, start=False)

    async def scenario() -> None:
        async with relay:
            entry = await relay.publish(tap(1))
            assert entry == redis_client.xrange("zzol:{room:0}")[0][0]
            relay.publish_soon(tap(2))

    asyncio.run(scenario())
    assert [entry.data["n"] for entry in entries(redis_client)] == [1, 2]
    assert relay.facts.of(DirectPublished)
