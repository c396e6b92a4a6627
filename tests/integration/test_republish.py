"""Redis losing what it acknowledged: found out, announced, and mended from the outbox (G7, G11, G24, Z34).

A real Redis is killed and comes back empty, or with an older dump.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
import redis
from sqlalchemy import Engine, event

from tests.support.facts import Facts
from tests.support.outbox import KEY, execute, record
from tests.support.streams import Entry, entries, outbox_rows, statuses
from zzol_relay import BrokerUnavailableError, ConfigurationError, Relay, Republished, Stream
from zzol_relay.core.observer import DataLossDetected, DeadLettered
from zzol_relay.embedded import RedisServer
from zzol_relay.relay.republish import slices
from zzol_relay.store import republish as store_of_republish
from zzol_relay.streams.publisher import ScriptPublisher

pytestmark = pytest.mark.usefixtures("relay_tables")

STREAMS = [Stream(name="room", shards=2, retention=0)]
ROOMS = "ABCDEF"


class Shaky:
    """A relay that publishes at commit, and a Redis of its own that can come back older."""

    def __init__(self, relay: Relay, engine: Engine, server: RedisServer, facts: Facts) -> None:
        self.relay = relay
        self.engine = engine
        self.server = server
        self.facts = facts
        self.dump = server.directory / "data" / "dump.rdb"
        self.kept = server.directory / "kept.rdb"
        self.recorded: list[str] = []

    def client(self) -> redis.Redis:
        return redis.Redis.from_url(self.server.url, decode_responses=True)

    def more(self, count: int) -> list[str]:
        """Record ``count`` events of each room; returns their ids once all are published and settled."""
        ids = [
            str(event.event_id)
            for _ in range(count)
            for code in ROOMS
            for event in record(self.relay, self.engine, code)
        ]
        self.recorded += ids
        self.facts.wait_until(lambda: statuses(self.engine) == {"PUBLISHED": len(self.recorded)})
        return ids

    def save(self) -> None:
        with self.client() as client:
            client.save()
        shutil.copyfile(self.dump, self.kept)

    def come_back(self, *, older: bool) -> None:
        """Kill Redis with all it had in memory; it starts empty, or with what ``save`` kept."""
        self.server.kill()
        self.dump.unlink(missing_ok=True)
        if older:
            shutil.copyfile(self.kept, self.dump)
        self.server.start()

    def entries(self) -> list[Entry]:
        with self.client() as client:
            return entries(client, shards=2)

    def epochs(self) -> dict[str, str]:
        with self.client() as client:
            return {key: str(client.hget(f"{key}:shard", "epoch")) for key in ("zzol:{room:0}", "zzol:{room:1}")}

    def republish(self, **options: Any) -> Republished:
        return self.relay.republish(datetime.now(UTC) - timedelta(hours=1), **options)


@pytest.fixture
def shaky(engine: Engine, make_relay: Callable[..., Relay], facts: Facts) -> Any:
    # "save" is set, but to what is never reached: so that the server keeps a dump that it finds.
    with RedisServer(config={"save": "86400 1000000"}) as server:
        # Another process's worth of time: retries of a born lease would only slow the test down.
        relay = make_relay(engine, STREAMS, redis_url=server.url, born_lease=0.5)
        yield Shaky(relay, engine, server, facts)
        relay.stop()


def check_all_there_once(shaky: Shaky) -> list[Entry]:
    """Every recorded event stands there once, its row says where, and each aggregate's order is kept in each part:
    what was restored stands behind."""
    found = shaky.entries()
    assert sorted(entry.event_id for entry in found) == sorted(shaky.recorded)
    assert {row.stream_entry_id for row in outbox_rows(shaky.engine)} == {entry.entry_id for entry in found}
    with shaky.client() as client:
        restored = {
            entry_id
            for shard in range(2)
            for entry_id, fields in client.xrange(f"zzol:{{room:{shard}}}")
            if fields.get("restored") == "true"
        }
    for subject in {entry.subject for entry in found}:
        for part in (True, False):
            sequences = [e.sequence for e in found if e.subject == subject and (e.entry_id in restored) is part]
            assert sequences == sorted(sequences), subject  # type: ignore[type-var]
    return [entry for entry in found if entry.entry_id in restored]


def test_a_redis_that_restarted_empty_gets_back_what_the_outbox_holds(shaky: Shaky) -> None:
    shaky.more(5)
    before = shaky.epochs()
    shaky.come_back(older=False)
    shaky.facts.clear()
    later = shaky.more(2)
    shaky.facts.wait_for(DataLossDetected)
    assert set(before.values()).isdisjoint(shaky.epochs().values())
    assert sorted(entry.event_id for entry in shaky.entries()) == sorted(later)
    assert shaky.facts.of(DeadLettered) == []

    looked = shaky.republish(dry_run=True)
    assert looked == Republished(examined=42, absent=30)
    assert len(shaky.entries()) == 12
    assert shaky.republish() == Republished(examined=42, absent=30, restored=30)
    restored = check_all_there_once(shaky)
    assert len(restored) == 30

    assert shaky.republish() == Republished(examined=42), "again sends nothing"
    shaky.more(1)
    check_all_there_once(shaky)


def test_a_redis_restored_from_an_older_dump_gets_back_exactly_what_is_absent(shaky: Shaky) -> None:
    """The epoch key comes back with the dump: the entries tell."""
    kept = shaky.more(3)
    shaky.save()
    lost = shaky.more(3)
    before = shaky.epochs()
    shaky.come_back(older=True)
    assert shaky.epochs() == before
    shaky.facts.clear()
    later = shaky.more(2)
    shaky.facts.wait_for(DataLossDetected)
    assert set(before.values()).isdisjoint(shaky.epochs().values())
    found = shaky.entries()
    assert [entry.event_id for entry in found if entry.event_id in lost] == []
    assert sorted(entry.event_id for entry in found) == sorted(kept + later), "what is there is not doubled"
    for subject in {entry.subject for entry in found}:
        sequences = [entry.sequence for entry in found if entry.subject == subject]
        assert sequences == [1, 2, 3, 7, 8]

    assert shaky.republish() == Republished(examined=48, absent=18, restored=18)
    restored = check_all_there_once(shaky)
    assert sorted(entry.event_id for entry in restored) == sorted(lost)
    assert shaky.republish() == Republished(examined=48)
    check_all_there_once(shaky)
    with shaky.client() as client:
        tails = {client.get(f"zzol:{{room:{shard}}}:tail:room:A") for shard in range(2)}
    assert tails == {None, "8"}, "restoring leaves the tail alone"


def test_a_process_that_starts_after_the_loss_finds_it_out_from_the_database(
    shaky: Shaky, engine: Engine, make_relay: Callable[..., Relay]
) -> None:
    """All processes died with Redis: nobody remembers, but the newest entry ids of the outbox do."""
    shaky.more(1)
    shaky.save()
    shaky.more(1)
    shaky.relay.stop()
    shaky.come_back(older=True)
    shaky.facts.clear()
    relay = make_relay(engine, [], redis_url=shaky.server.url)
    assert {fact.stream_key for fact in shaky.facts.of(DataLossDetected)} == set(shaky.epochs())
    # One loss is announced once, not by every process that starts while the stream is quiet.
    make_relay(engine, [], redis_url=shaky.server.url)
    assert len(shaky.facts.of(DataLossDetected)) == 2
    shaky.relay = relay
    assert shaky.republish().restored == 6
    check_all_there_once(shaky)


def test_restoring_before_anybody_noticed_does_not_hide_the_loss(
    shaky: Shaky, engine: Engine, make_relay: Callable[..., Relay]
) -> None:
    """The entries that are sent again make the stream look newer than what was lost."""
    shaky.more(1)
    shaky.save()
    shaky.more(1)
    shaky.relay.stop()
    before = shaky.epochs()
    shaky.come_back(older=True)
    shaky.relay = make_relay(engine, [], redis_url=shaky.server.url, start=False)
    assert shaky.republish(dry_run=True).absent == 6
    assert shaky.epochs() == before, "a dry run changes nothing"
    assert shaky.republish().restored == 6
    assert set(before.values()).isdisjoint(shaky.epochs().values())


def test_an_interrupted_run_is_repeated_without_doubles(shaky: Shaky, monkeypatch: pytest.MonkeyPatch) -> None:
    """It dies after Redis has the entries and before the rows say so: the script remembers."""
    shaky.more(2)
    shaky.come_back(older=False)
    store = shaky.relay.republish._store
    with monkeypatch.context() as patch:
        patch.setattr(store, "moved", lambda entries: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            shaky.republish()
    assert len(shaky.entries()) == 12
    assert shaky.republish() == Republished(examined=12, absent=12, remembered=12)
    assert shaky.republish() == Republished(examined=12)
    assert len(check_all_there_once(shaky)) == 12


def test_redis_away_is_an_error_and_changes_nothing(shaky: Shaky) -> None:
    shaky.more(1)
    before = outbox_rows(shaky.engine, "stream_entry_id")
    shaky.server.kill()
    with pytest.raises(BrokerUnavailableError):
        shaky.republish()
    assert outbox_rows(shaky.engine, "stream_entry_id") == before


def test_pages_and_batches_have_no_seams(shaky: Shaky, monkeypatch: pytest.MonkeyPatch) -> None:
    """Settling gives many rows one time: the pages go on by id within it."""
    shaky.more(9)
    execute(shaky.engine, "UPDATE zzol_outbox_event SET due_at = UTC_TIMESTAMP(6)")
    shaky.come_back(older=False)
    monkeypatch.setattr(store_of_republish, "PAGE", 7)
    monkeypatch.setattr("zzol_relay.relay.republish._BATCH", 5)
    heard: list[Republished] = []
    assert shaky.republish(progress=heard.append) == Republished(examined=54, absent=54, restored=54)
    assert [each.examined for each in heard[:3]] == [7, 14, 21]
    assert [each.restored for each in heard if each.restored][:2] == [5, 10]
    check_all_there_once(shaky)


def test_rows_are_restored_in_sequence_order_though_settled_in_another(
    shaky: Shaky, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A mark that came late, from another process, must not turn the aggregate around."""
    monkeypatch.setattr("zzol_relay.relay.republish._BATCH", 2)
    record(shaky.relay, shaky.engine, "A", 6)
    shaky.facts.wait_until(lambda: statuses(shaky.engine) == {"PUBLISHED": 6})
    execute(shaky.engine, "UPDATE zzol_outbox_event SET due_at = due_at - INTERVAL id SECOND")
    shaky.come_back(older=False)
    assert shaky.republish().restored == 6
    assert [entry.sequence for entry in shaky.entries()] == [1, 2, 3, 4, 5, 6]


def test_window_and_stream_limit_it(
    engine: Engine, make_relay: Callable[..., Relay], redis_client: redis.Redis
) -> None:
    """Z26: the stored key tells the logical stream; names that begin alike are not confused."""
    relay = make_relay(engine, [Stream(name="room", retention=0), Stream(name="room_2", retention=0)], mode="polling")
    record(relay, engine, "A", 2)
    execute(engine, "UPDATE zzol_outbox_event SET stream_key = 'zzol:{room_2:0}' WHERE sequence = 2")
    relay.run_once()
    redis_client.delete(KEY, "zzol:{room_2:0}")
    for key in redis_client.scan_iter("*:seen:*"):
        redis_client.delete(key)
    start = datetime.now(UTC)
    execute(engine, "UPDATE zzol_outbox_event SET due_at = due_at - INTERVAL 2 HOUR WHERE sequence = 2")
    hour = timedelta(hours=1)
    assert relay.republish(start - hour, dry_run=True).examined == 1
    assert relay.republish(start - 3 * hour, start - hour, dry_run=True).examined == 1
    assert relay.republish(start - 3 * hour, stream="room", dry_run=True).examined == 1
    assert relay.republish(start - 3 * hour, stream="room_2").restored == 1
    assert len(entries(redis_client, "room_2")) == 1
    assert entries(redis_client) == []
    with pytest.raises(ConfigurationError, match="time zone"):
        relay.republish(datetime(2026, 1, 1))


def test_trimmed_entries_are_not_lost(
    engine: Engine, make_relay: Callable[..., Relay], redis_client: redis.Redis, facts: Facts
) -> None:
    """A broadcast stream is trimmed by time: what is gone for its age is neither announced nor sent again."""
    relay = make_relay(engine, [Stream(name="room", retention=60)], mode="polling", start=False)
    relay._publisher.learn()
    record(relay, engine, "A", 4)
    assert relay.run_once() == 4
    # An hour later: the entries are as old as their ids say, and Redis has trimmed them.
    old = int(datetime.now(UTC).timestamp() * 1000) - 3_600_000
    for row in outbox_rows(engine, "id, stream_entry_id"):
        execute(engine, "UPDATE zzol_outbox_event SET stream_entry_id = :entry WHERE id = :id",
                entry=f"{old + row.id}-0", id=row.id)  # fmt: skip
    redis_client.xtrim(KEY, maxlen=0, approximate=False)
    for key in redis_client.scan_iter("*:seen:*"):
        redis_client.delete(key)
    record(relay, engine, "A", 1)
    assert relay.run_once() == 1

    make_relay(engine, [], worker=False)
    relay._publisher.learn((), relay._store.newest_entries())
    assert facts.of(DataLossDetected) == []
    since = datetime.now(UTC) - timedelta(hours=2)
    assert relay.republish(since) == Republished(examined=5, trimmed=4)
    assert len(entries(redis_client)) == 1
    assert relay.republish(since, include_trimmed=True) == Republished(examined=5, absent=4, restored=4)
    assert [entry.sequence for entry in entries(redis_client)] == [5, 1, 2, 3, 4]


def test_an_entry_id_that_now_belongs_to_another_event_is_absent(
    engine: Engine, make_relay: Callable[..., Relay], redis_client: redis.Redis
) -> None:
    """A Redis that came back with its clock behind gives ids a second time."""
    relay = make_relay(engine, [Stream(name="room", retention=0)], mode="polling", start=False)
    relay._publisher.learn()
    record(relay, engine)
    relay.run_once()
    (lost,) = entries(redis_client)
    redis_client.flushall()
    redis_client.xadd(KEY, {"type": "t", "data": "1", "id": "another"}, id=lost.entry_id)
    assert relay.republish(datetime.now(UTC) - timedelta(hours=1)).restored == 1
    assert [entry.event_id for entry in entries(redis_client)] == ["another", lost.event_id]


def test_a_row_that_somebody_else_has_moved_is_left_alone(engine: Engine, make_relay: Callable[..., Relay]) -> None:
    """The guard: whoever restored with older knowledge does not undo what came after."""
    relay = make_relay(engine, STREAMS, mode="polling", start=False)
    relay._publisher.learn()
    record(relay, engine, "A", 2)
    relay.run_once()
    first, second = outbox_rows(engine)
    moves = [(first.id, "1-1", "2-2"), (second.id, second.stream_entry_id, "3-3")]
    assert relay.republish._store.moved(moves) == 1
    assert [row.stream_entry_id for row in outbox_rows(engine)] == [first.stream_entry_id, "3-3"]


def test_a_row_without_entry_id_is_counted_and_left_alone(
    engine: Engine, make_relay: Callable[..., Relay], redis_client: redis.Redis
) -> None:
    """Settled as past when Redis had forgotten its id: there is nothing to look for."""
    relay = make_relay(engine, STREAMS, mode="polling", start=False)
    relay._publisher.learn()
    record(relay, engine)
    relay.run_once()
    execute(engine, "UPDATE zzol_outbox_event SET stream_entry_id = ''")
    assert relay.republish(datetime.now(UTC) - timedelta(hours=1)) == Republished(examined=1, unknown=1)


def test_it_is_audited_and_leaves_status_and_times_alone(
    engine: Engine, make_relay: Callable[..., Relay], redis_client: redis.Redis
) -> None:
    relay = make_relay(engine, STREAMS, mode="polling", start=False)
    relay._publisher.learn()
    record(relay, engine, "A", 3)
    relay.run_once()
    columns = "id, status, due_at, published_at, updated_at, retry_count, replays"
    before = outbox_rows(engine, columns)
    redis_client.flushall()
    since = datetime.now(UTC) - timedelta(hours=1)
    relay.republish(since, stream="room", actor="ann")
    assert outbox_rows(engine, columns) == before
    (entry,) = relay.dead_letters.audit()
    assert (entry.actor, entry.action, entry.affected) == ("ann", "republish", 3)
    assert (entry.detail["stream"], entry.detail["absent"], entry.detail["restored"]) == ("room", 3, 3)
    relay.republish(since, dry_run=True)
    assert len(relay.dead_letters.audit()) == 1


def test_two_who_restore_at_once_send_each_event_once(
    engine: Engine, make_relay: Callable[..., Relay], redis_client: redis.Redis
) -> None:
    """Both have found the same rows absent: the script remembers, and the rows are guarded by the entry they had."""
    relay, other = (make_relay(engine, STREAMS, mode="polling", start=False) for _ in range(2))
    relay._publisher.learn()
    record(relay, engine, "A", 3)
    relay.run_once()
    redis_client.flushall()
    since = datetime.now(UTC) - timedelta(hours=1)
    search = other.republish._search((since.replace(tzinfo=None), other.republish._store.now()), None, False, print)
    assert relay.republish(since).restored == 3
    assert list(other.republish._restore(search))[-1].remembered == 3
    found = entries(redis_client, shards=2)
    assert [entry.sequence for entry in found] == [1, 2, 3]
    assert {row.stream_entry_id for row in outbox_rows(engine)} == {entry.entry_id for entry in found}


def test_a_hole_in_the_stream_is_a_loss_though_others_have_written_since(
    engine: Engine, make_relay: Callable[..., Relay], redis_client: redis.Redis, facts: Facts
) -> None:
    """The direct path writes to the older stream before anybody has compared last ids (Z20)."""
    relay = make_relay(engine, [Stream(name="room", retention=0)], mode="polling", start=False)
    relay._publisher.learn()
    record(relay, engine, "A", 2)
    relay.run_once()
    lost = entries(redis_client)[-1]
    redis_client.xdel(KEY, lost.entry_id)
    redis_client.delete(f"{KEY}:seen:{lost.event_id}")
    redis_client.xadd(KEY, {"id": "direct", "type": "t", "data": "1"})
    before = redis_client.hget(f"{KEY}:shard", "epoch")
    relay._publisher.learn()
    (fact,) = facts.of(DataLossDetected)
    assert fact.reason == "an acknowledged entry is gone, while older ones are there"
    assert redis_client.hget(f"{KEY}:shard", "epoch") != before
    relay._publisher.learn((), {KEY: lost.entry_id})
    assert len(facts.of(DataLossDetected)) == 1, "announced once"
    assert relay.republish(datetime.now(UTC) - timedelta(hours=1)).restored == 1


def test_a_trimmed_head_is_no_hole(
    engine: Engine, make_relay: Callable[..., Relay], redis_client: redis.Redis, facts: Facts
) -> None:
    relay = make_relay(engine, [Stream(name="room", retention=0)], mode="polling", start=False)
    relay._publisher.learn()
    record(relay, engine, "A", 3)
    relay.run_once()
    first, newest = entries(redis_client)[0], entries(redis_client)[-1]
    redis_client.xtrim(KEY, maxlen=1, approximate=False)
    redis_client.xadd(KEY, {"id": "direct", "type": "t", "data": "1"})
    publisher: ScriptPublisher = make_relay(engine, [], start=False)._publisher
    publisher.learn((), {KEY: first.entry_id})
    redis_client.xtrim(KEY, maxlen=1, approximate=False)
    publisher.learn((), {KEY: newest.entry_id})
    relay._publisher.learn()
    assert facts.of(DataLossDetected) == []


def test_restoring_reads_the_index_in_its_own_order(engine: Engine, make_relay: Callable[..., Relay]) -> None:
    """Z28's index carries this too: no sort, whatever the table holds."""
    relay = make_relay(engine, STREAMS, mode="polling", start=False)
    asked: list[tuple[str, Any]] = []

    def listen(connection: Any, cursor: Any, statement: str, parameters: Any, *rest: Any) -> None:
        if statement.startswith("SELECT zzol_outbox_event.id"):
            asked.append((statement, parameters))

    event.listen(relay._database.engine, "before_cursor_execute", listen)
    list(relay.republish._store.published(datetime(2026, 1, 1), datetime(2027, 1, 1), "room"))
    ((statement, parameters),) = asked
    with engine.connect() as connection:
        plan = str(connection.exec_driver_sql(f"EXPLAIN FORMAT=JSON {statement}", parameters).scalar())
    assert "ix_zzol_outbox_event_due" in plan
    assert "sort" not in plan.replace('"using_filesort": false', "")


def test_slices_end_at_the_bytes_of_a_batch() -> None:
    sizes = {1: 40, 2: 40, 3: 40, 4: 500, 5: 1}
    assert list(slices(sizes, 100)) == [[1, 2], [3], [4], [5]]
    assert list(slices({}, 100)) == []
