"""Redis failing in every way it has, under running relays: nothing lost, nothing dead that should live, order kept.

(Z3, Z4, Z7, Z24, Z31; promise 4.)
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import redis
from sqlalchemy import Engine
from sqlalchemy.orm import Session

from tests.support.facts import Facts
from tests.support.proxy import TcpProxy
from tests.support.streams import check_order, entries, outbox_rows, statuses
from zzol_relay import Event, Relay, Stream
from zzol_relay.core.observer import CircuitChanged, DataLossDetected, DeadLettered, ShardUnusable

pytestmark = pytest.mark.usefixtures("relay_tables")

STREAMS = [Stream(name="room", shards=2, retention=0)]
ROOMS = "ABCDEF"


class Producers:
    """Threads that commit events of six aggregates until they are told to stop; counts what was committed."""

    def __init__(self, relay: Relay, engine: Engine) -> None:
        self._relay = relay
        self._engine = engine
        self._stop = threading.Event()
        self._lock = threading.Lock()
        self._grown = threading.Condition(self._lock)
        self.committed: list[str] = []
        self.errors: list[BaseException] = []
        self._threads = [threading.Thread(target=self._run, args=(n,)) for n in range(2)]
        for thread in self._threads:
            thread.start()

    def _run(self, number: int) -> None:
        n = 0
        try:
            while not self._stop.is_set() and n < 3000:
                n += 1
                with Session(self._engine) as session:
                    event = self._relay.record(
                        session,
                        Event(type="t", stream="room", aggregate_type="room", aggregate_id=ROOMS[n % 6], data=n),
                    )
                    session.commit()
                with self._grown:
                    self.committed.append(str(event.event_id))
                    self._grown.notify_all()
        except BaseException as error:
            self.errors.append(error)

    def more(self, count: int) -> None:
        """Wait until so many more events are committed."""
        with self._grown:
            target = len(self.committed) + count
            assert self._grown.wait_for(lambda: len(self.committed) >= target or self.errors, 30)
        assert self.errors == []

    def stop(self) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join(30)
        assert self.errors == []


def client_of(server: Any) -> redis.Redis:
    return redis.Redis.from_url(server.url, decode_responses=True)


def settle_all(engine: Engine, facts: Facts, count: int) -> None:
    facts.wait_until(lambda: statuses(engine) == {"PUBLISHED": count}, timeout=30)


Fault = Callable[[Any], None]


def readonly(client: redis.Redis) -> None:
    client.replicaof("127.0.0.1", 1)


def writable(client: redis.Redis) -> None:
    client.replicaof("NO", "ONE")


def out_of_memory(client: redis.Redis) -> None:
    client.config_set("maxmemory", 1)


def with_memory(client: redis.Redis) -> None:
    client.config_set("maxmemory", 0)


def no_replicas(client: redis.Redis) -> None:
    client.config_set("min-replicas-to-write", 2)


def replicas_not_needed(client: redis.Redis) -> None:
    client.config_set("min-replicas-to-write", 0)


def noauth(client: redis.Redis) -> None:
    client.config_set("requirepass", "secret")
    client.execute_command("AUTH", "secret")
    client.client_kill_filter(_type="normal", skipme=True)


def auth_again(client: redis.Redis) -> None:
    client.config_set("requirepass", "")


def no_permission(client: redis.Redis) -> None:
    client.execute_command("ACL", "SETUSER", "default", "-evalsha", "-eval")


def permission(client: redis.Redis) -> None:
    client.execute_command("ACL", "SETUSER", "default", "+@all")


@pytest.mark.parametrize(
    ("break_it", "mend_it"),
    [
        (readonly, writable),
        (out_of_memory, with_memory),
        (no_replicas, replicas_not_needed),
        (noauth, auth_again),
        (no_permission, permission),
    ],
    ids=["READONLY", "OOM", "NOREPLICAS", "NOAUTH", "NOPERM"],
)
def test_a_server_that_refuses_everybody_is_an_outage(
    engine: Engine, make_relay: Any, own_redis: Any, facts: Facts, break_it: Any, mend_it: Any
) -> None:
    relay: Relay = make_relay(engine, STREAMS, redis_url=own_redis.url, born_lease=0.5, max_attempts=2)
    client = client_of(own_redis)
    producers = Producers(relay, engine)
    producers.more(20)
    break_it(client)
    facts.wait_for(lambda fact: isinstance(fact, CircuitChanged) and fact.open)
    producers.more(40)
    facts.wait_for_beats("poller", 10)
    mend_it(client)
    facts.wait_for(lambda fact: isinstance(fact, CircuitChanged) and not fact.open)
    producers.more(20)
    producers.stop()
    settle_all(engine, facts, len(producers.committed))
    found = entries(client, shards=2)
    check_order(found)
    assert sorted(e.event_id for e in found) == sorted(producers.committed)
    assert facts.of(DeadLettered) == []
    assert {row.retry_count for row in outbox_rows(engine)} == {0}
    client.close()


def test_a_restart_with_data_loses_and_doubles_nothing(
    engine: Engine, make_relay: Any, facts: Facts, tmp_path: Any
) -> None:
    """Z4, Z7: with an append-only file, acknowledged entries survive; the rest comes from the outbox, in order."""
    from zzol_relay.embedded import RedisServer

    config = {"appendonly": "yes", "appendfsync": "always"}
    with RedisServer(tmp_path / "redis", config=config) as server:
        relay: Relay = make_relay(engine, STREAMS, redis_url=server.url, born_lease=0.5)
        producers = Producers(relay, engine)
        producers.more(30)
        for _ in range(2):
            server.kill()
            producers.more(30)
            server.start()
            producers.more(30)
        producers.stop()
        settle_all(engine, facts, len(producers.committed))
        client = client_of(server)
        found = entries(client, shards=2)
        client.close()
    check_order(found)
    assert sorted(e.event_id for e in found) == sorted(producers.committed)
    assert facts.of(DataLossDetected) == []


def test_a_restart_without_data_is_announced_and_goes_on_in_order(
    engine: Engine, make_relay: Any, own_redis: Any, facts: Facts
) -> None:
    """An empty Redis: a new epoch; what was not yet acknowledged arrives once and in order behind it."""
    relay: Relay = make_relay(engine, STREAMS, redis_url=own_redis.url, born_lease=0.5)
    producers = Producers(relay, engine)
    producers.more(30)
    own_redis.kill()
    facts.wait_for(lambda fact: isinstance(fact, CircuitChanged) and fact.open)
    producers.more(30)
    unpublished = {row.event_id for row in outbox_rows(engine) if row.status != "PUBLISHED"}
    own_redis.start()
    facts.wait_for(DataLossDetected)
    producers.more(30)
    producers.stop()
    settle_all(engine, facts, len(producers.committed))
    client = client_of(own_redis)
    found = entries(client, shards=2)
    client.close()
    check_order(found)
    import uuid

    assert {str(uuid.UUID(bytes=bytes(id_))) for id_ in unpublished} <= {e.event_id for e in found}
    assert facts.of(DeadLettered) == []


def test_scripts_flushed_again_and_again(engine: Engine, make_relay: Any, own_redis: Any, facts: Facts) -> None:
    relay: Relay = make_relay(engine, STREAMS, redis_url=own_redis.url)
    client = client_of(own_redis)
    producers = Producers(relay, engine)
    for _ in range(20):
        client.script_flush()
        producers.more(5)
    producers.stop()
    settle_all(engine, facts, len(producers.committed))
    check_order(entries(client, shards=2))
    assert len(entries(client, shards=2)) == len(producers.committed)
    assert [fact for fact in facts.of(CircuitChanged) if fact.open] == []
    client.close()


def test_a_shard_of_the_wrong_type_waits_and_the_other_goes_on(
    engine: Engine, make_relay: Any, own_redis: Any, facts: Facts
) -> None:
    """WRONGTYPE on the stream's own key is no event's fault: no attempt is counted, no circuit opens."""
    relay: Relay = make_relay(engine, STREAMS, redis_url=own_redis.url, born_lease=0.5, max_attempts=2)
    client = client_of(own_redis)
    client.set("zzol:{room:0}", "not a stream")
    producers = Producers(relay, engine)
    producers.more(60)
    producers.stop()
    facts.wait_for(ShardUnusable, count=3)
    facts.wait_for_beats("poller", 20)
    rows = outbox_rows(engine)
    assert {row.status for row in rows if row.stream_key == "zzol:{room:1}"} == {"PUBLISHED"}
    assert {row.status for row in rows if row.stream_key == "zzol:{room:0}"} <= {"PENDING", "IN_PROGRESS"}
    assert {row.retry_count for row in rows} == {0}
    client.delete("zzol:{room:0}")
    settle_all(engine, facts, len(producers.committed))
    check_order(entries(client, shards=2))
    assert [fact for fact in facts.of(CircuitChanged) if fact.open] == []
    client.close()


def test_ninety_seconds_of_outage_cost_no_attempt(
    engine: Engine, make_relay: Any, own_redis: Any, facts: Facts
) -> None:
    """Z4, Z13, Z27: ten attempts 500 ms apart would have dead-lettered everything after 5 s. 180 polls are 90 s."""
    relay: Relay = make_relay(engine, STREAMS, redis_url=own_redis.url, born_lease=0.3, poll_interval=0.01)
    own_redis.kill()
    producers = Producers(relay, engine)
    producers.more(50)
    producers.stop()
    facts.wait_for_beats("poller", 180)
    assert statuses(engine) == {"PENDING": len(producers.committed)}
    assert {row.retry_count for row in outbox_rows(engine)} == {0}
    own_redis.start()
    settle_all(engine, facts, len(producers.committed))
    client = client_of(own_redis)
    found = entries(client, shards=2)
    client.close()
    check_order(found)
    assert len(found) == len(producers.committed)


@pytest.mark.parametrize(
    "fault",
    [
        lambda proxy: proxy.cut_after(client_bytes=7_000),
        lambda proxy: proxy.cut_after(server_bytes=900),
        lambda proxy: proxy.drop_replies(after_bytes=500),
        lambda proxy: proxy.drop_replies(),
        lambda proxy: proxy.cut(reset=True),
    ],
    ids=["request cut mid-pipeline", "reply cut mid-pipeline", "half the replies lost", "all replies lost", "reset"],
)
def test_a_network_fault_in_the_middle_of_a_batch(
    engine: Engine, make_relay: Any, redis_server: Any, redis_client: redis.Redis, facts: Facts, fault: Any
) -> None:
    """G11, window 4: whatever part of the pipeline was executed, each event stands there once and in order."""
    producer: Relay = make_relay(engine, STREAMS, worker=False, mode="polling")
    with Session(engine) as session, session.begin():
        for n in range(120):
            producer.record(session, Event(type="t", stream="room", aggregate_type="room", aggregate_id=ROOMS[n % 6],
                                           data="x" * 50))  # fmt: skip
    with TcpProxy("127.0.0.1", redis_server.port) as proxy:
        worker: Relay = make_relay(engine, [], worker=False, redis_url=f"redis://127.0.0.1:{proxy.port}/0",
                                   redis_timeout=0.5)  # fmt: skip
        worker._publisher.learn(["zzol:{room:0}", "zzol:{room:1}"])
        fault(proxy)
        worker.run_once()
        proxy.heal()
        facts.wait_until(lambda: worker.run_once() >= 0 and statuses(engine) == {"PUBLISHED": 120})
    found = entries(redis_client, shards=2)
    check_order(found)
    assert len(found) == 120
    assert {row.retry_count for row in outbox_rows(engine)} == {0}


def test_stalls_of_two_seconds_lose_and_reorder_nothing(
    engine: Engine, make_relay: Any, redis_server: Any, redis_client: redis.Redis, facts: Facts
) -> None:
    with TcpProxy("127.0.0.1", redis_server.port) as proxy:
        relay: Relay = make_relay(engine, STREAMS, redis_url=f"redis://127.0.0.1:{proxy.port}/0", born_lease=0.5)
        producers = Producers(relay, engine)
        producers.more(20)
        timer = threading.Timer(2.0, proxy.resume)
        proxy.stall()
        timer.start()
        producers.more(10)
        timer.join()
        producers.more(20)
        producers.stop()
        settle_all(engine, facts, len(producers.committed))
    found = entries(redis_client, shards=2)
    check_order(found)
    assert sorted(e.event_id for e in found) == sorted(producers.committed)
