"""Dead letters by filter and in bulk, and what waits behind them (Z13, S9, G9)."""

from __future__ import annotations

import threading
import uuid
from collections.abc import Callable
from typing import Any

import pytest
import redis
from sqlalchemy import Engine, event

from tests.support.outbox import STREAMS, execute, record
from tests.support.streams import entries, outbox_rows, statuses
from zzol_relay import ConfigurationError, DeadLetterError, DeadLetterFilter, Event, Relay, Status, Stream
from zzol_relay.store import dead_letters as store

pytestmark = pytest.mark.usefixtures("relay_tables")


def bury(engine: Engine, where: str = "1 = 1", ago: float = 0, error: str = "ERR no") -> int:
    """Make rows dead letters, as the tenth failure does, ``ago`` seconds in the past."""
    return execute(
        engine,
        "UPDATE zzol_outbox_event SET status = 'DEAD_LETTER', retry_count = 10, last_error = :error,"
        f" due_at = UTC_TIMESTAMP(6) - INTERVAL :ago SECOND WHERE {where}",
        error=error,
        ago=ago,
    )


@pytest.fixture
def mixed(engine: Engine, make_relay: Callable[..., Relay]) -> Relay:
    """Six dead letters, one of them of ``room_2`` and one without aggregate, and a pending row."""
    relay = make_relay(engine, [*STREAMS, Stream(name="room_2")], mode="polling", start=False)
    with relay.begin(engine) as connection:
        for kind, stream, code in (
            ("room.created", "room", "A"),
            ("room.closed", "room", "A"),
            ("room.created", "room", "B"),
            ("room.created", "room", "b"),
            ("room.created", "room_2", "A"),
            ("log.line", "room", None),
            ("room.created", "room", "C"),
        ):
            aggregate = {} if code is None else {"aggregate_type": "room", "aggregate_id": code}
            relay.record(connection, Event(type=kind, stream=stream, **aggregate))  # type: ignore[arg-type]
    numbers = [row.id for row in outbox_rows(engine, "id")]
    for position, number in enumerate(numbers[:6]):
        bury(engine, f"id = {number}", ago=100 * position + 50, error=f"ERR Number_{position} 100% bad")
    return relay


@pytest.mark.parametrize(
    ("wanted", "positions"),
    [
        (DeadLetterFilter(), [0, 1, 2, 3, 4, 5]),
        (DeadLetterFilter(stream="room"), [0, 1, 2, 3, 5]),
        (DeadLetterFilter(stream="room_2"), [4]),
        (DeadLetterFilter(stream="roo"), []),
        (DeadLetterFilter(type="room.closed"), [1]),
        (DeadLetterFilter(aggregate="room:A"), [0, 1, 4]),
        (DeadLetterFilter(aggregate="room:b"), [3]),
        (DeadLetterFilter(aggregate="room:A", stream="room"), [0, 1]),
        (DeadLetterFilter(error="number_3"), [3]),
        (DeadLetterFilter(error="00% b"), [0, 1, 2, 3, 4, 5]),
        (DeadLetterFilter(error="0_% b"), []),
        (DeadLetterFilter(older_than=300), [3, 4, 5]),
        (DeadLetterFilter(newer_than=300), [0, 1, 2]),
        (DeadLetterFilter(older_than=100, newer_than=300), [1, 2]),
    ],
    ids=lambda value: str(value.given()) if isinstance(value, DeadLetterFilter) else "",
)
def test_filters(mixed: Relay, engine: Engine, wanted: DeadLetterFilter, positions: list[int]) -> None:
    """G9: an operator finds what failed by stream, type, aggregate, error and age; wildcards are plain characters."""
    numbers = [row.id for row in outbox_rows(engine, "id")]
    expected = [numbers[position] for position in positions]
    assert [record.id for record in mixed.dead_letters.list(wanted)] == expected
    assert mixed.dead_letters.count(wanted) == len(expected)
    assert mixed.dead_letters.discard_matching(wanted) == len(expected)
    gone = {row.id for row in outbox_rows(engine, "id, status") if row.status == "DISCARDED"}
    assert gone == set(expected)


def test_a_filter_that_means_nothing_is_refused() -> None:
    for wrong in ({"aggregate": "A"}, {"aggregate": ":A"}, {"older_than": -1}, {"newer_than": -0.1}):
        with pytest.raises(ConfigurationError):
            DeadLetterFilter(**wrong)


def test_the_list_goes_on_where_a_page_ended(mixed: Relay) -> None:
    wanted = DeadLetterFilter(stream="room")
    pages: list[list[Any]] = [mixed.dead_letters.list(wanted, limit=2)]
    while pages[-1]:
        pages.append(mixed.dead_letters.list(wanted, limit=2, after=pages[-1][-1].id))
    assert [len(page) for page in pages] == [2, 2, 1, 0]
    assert [r.id for page in pages for r in page] == [r.id for r in mixed.dead_letters.list(wanted)]


def test_bulk_moves_in_batches_each_committed_and_audited(
    engine: Engine, producer: Relay, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each batch is a transaction of its own: who looks in between sees it, and its audit beside it."""
    monkeypatch.setattr(store, "BATCH", 4)
    for code in "ABCDEFGHIJ":
        record(producer, engine, code)
    bury(engine)
    seen: list[tuple[int, int, int]] = []

    def look(moved: int) -> None:
        audited = sum(entry.affected for entry in producer.dead_letters.audit())
        seen.append((moved, statuses(engine)["PENDING"], audited))

    wanted = DeadLetterFilter(type="t", error="no")
    assert producer.dead_letters.replay_matching(wanted, actor="ann", progress=look) == 10
    assert seen == [(4, 4, 4), (8, 8, 8), (10, 10, 10)]
    rows = outbox_rows(engine)
    assert {(row.retry_count, row.replays) for row in rows} == {(0, 1)}
    audit = producer.dead_letters.audit()
    assert {(entry.actor, entry.action) for entry in audit} == {("ann", "replay")}
    assert {str(entry.detail["filter"]) for entry in audit} == {"{'type': 't', 'error': 'no'}"}
    named = [event_id for entry in audit for event_id in entry.detail["event_ids"]]
    assert sorted(named) == sorted(str(uuid.UUID(bytes=bytes(row.event_id))) for row in rows)
    assert len(producer.dead_letters.audit(limit=2)) == 2
    assert audit[0].id > audit[-1].id


def test_bulk_ends_though_what_it_replays_dies_again_at_once(
    engine: Engine, producer: Relay, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What becomes a dead letter while it runs is left alone."""
    monkeypatch.setattr(store, "BATCH", 3)
    for code in "ABCDEFG":
        record(producer, engine, code)
    bury(engine)

    heard: list[int] = []

    def die_again(moved: int) -> None:
        heard.append(moved)
        bury(engine, "status = 'PENDING'")

    assert producer.dead_letters.replay_matching(DeadLetterFilter(), progress=die_again) == 7
    assert heard == [3, 6, 7]
    assert statuses(engine) == {"DEAD_LETTER": 7}
    assert {row.replays for row in outbox_rows(engine)} == {1}


def test_bulk_is_bounded_by_a_limit(engine: Engine, producer: Relay, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store, "BATCH", 3)
    for code in "ABCDEFG":
        record(producer, engine, code)
    bury(engine)
    assert producer.dead_letters.discard_matching(DeadLetterFilter(), limit=4) == 4
    assert statuses(engine) == {"DEAD_LETTER": 3, "DISCARDED": 4}


@pytest.mark.parametrize(
    "change",
    ["status = 'DISCARDED'", "replays = 1, due_at = UTC_TIMESTAMP(6) + INTERVAL 1 SECOND"],
    ids=["discarded", "replayed and dead again"],
)
def test_a_row_taken_in_between_is_not_moved_twice(engine: Engine, producer: Relay, change: str) -> None:
    """The UPDATE restates the state that the SELECT saw."""
    record(producer, engine, "A")
    record(producer, engine, "B")
    bury(engine)

    def meanwhile(connection: Any, cursor: Any, statement: str, *rest: Any) -> None:
        # In the same transaction, so that its own lock does not stand in the way of showing it.
        if statement.startswith("SELECT") and "aggregate_type" in statement:
            connection.exec_driver_sql(f"UPDATE zzol_outbox_event SET {change} WHERE aggregate_id = 'A'")

    event.listen(producer._database.engine, "after_cursor_execute", meanwhile)
    assert producer.dead_letters.replay_matching(DeadLetterFilter()) == 1
    event.remove(producer._database.engine, "after_cursor_execute", meanwhile)
    kept = "DISCARDED" if "DISCARDED" in change else "DEAD_LETTER"
    assert {row.aggregate_id: row.status for row in outbox_rows(engine)} == {"A": kept, "B": "PENDING"}
    assert producer.dead_letters.audit()[0].affected == 1


def test_many_by_id_go_in_batches_and_only_dead_letters_move(
    engine: Engine, producer: Relay, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(store, "BATCH", 2)
    events = [e for code in "ABCDE" for e in record(producer, engine, code)]
    bury(engine, "aggregate_id <> 'C'")
    ids = [e.event_id for e in events if e.event_id is not None]
    heard: list[int] = []
    assert producer.dead_letters.replay([*ids, uuid.uuid4()], progress=heard.append) == 4
    assert heard == [2, 3, 4]
    assert producer.dead_letters.replay(ids) == 0
    assert producer.dead_letters.replay([]) == 0


def test_two_operators_at_once_move_each_row_once(
    engine: Engine, make_relay: Callable[..., Relay], producer: Relay, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(store, "BATCH", 5)
    for n in range(60):
        record(producer, engine, f"r{n}")
    bury(engine)
    relays = [make_relay(engine, [], worker=False, start=False) for _ in range(2)]
    moved = [0, 0]

    def work(index: int) -> None:
        moved[index] = relays[index].dead_letters.replay_matching(DeadLetterFilter())

    threads = [threading.Thread(target=work, args=(index,)) for index in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert sum(moved) == 60
    assert {row.replays for row in outbox_rows(engine)} == {1}


@pytest.fixture
def blocked(engine: Engine, make_relay: Callable[..., Relay], producer: Relay) -> Relay:
    """A worker under ``block``; the first of five events of room A is dead, and those behind were put off."""
    worker = make_relay(engine, [], worker=False, start=False, on_dead_letter="block", backoff_cap=60.0)
    record(producer, engine, "A", 5)
    record(producer, engine, "B", 2)
    bury(engine, "aggregate_id = 'A' AND sequence = 1")
    assert worker.run_once() == 2
    waiting = outbox_rows(engine, "status, due_at > UTC_TIMESTAMP(6) + INTERVAL 50 SECOND AS put_off")
    assert all(row.put_off for row in waiting if row.status == "PENDING")
    return worker


@pytest.mark.parametrize("action", ["replay", "discard", "replay_matching", "discard_matching"])
def test_under_block_what_waited_goes_at_once(
    blocked: Relay, engine: Engine, redis_client: redis.Redis, action: str
) -> None:
    """Under block the operator's word lets the aggregate go, not the end of a backoff."""
    (dead,) = blocked.dead_letters.list()
    assert blocked.dead_letters.waiting_behind(dead.event_id) == 4
    given: Any = DeadLetterFilter(aggregate="room:A") if action.endswith("matching") else [dead.event_id]
    assert getattr(blocked.dead_letters, action)(given) == 1
    replayed = action.startswith("replay")
    assert blocked.run_once() == (5 if replayed else 4)
    sequences = [entry.sequence for entry in entries(redis_client) if entry.subject == "room/A"]
    assert sequences == ([1, 2, 3, 4, 5] if replayed else [2, 3, 4, 5])
    assert {entry.replay for entry in entries(redis_client)} == {None}
    assert blocked.dead_letters.waiting_behind(dead.event_id) == 0


def test_only_waiting_rows_of_these_aggregates_are_released(blocked: Relay, engine: Engine, producer: Relay) -> None:
    record(producer, engine, "C", 2)
    execute(engine, "UPDATE zzol_outbox_event SET due_at = UTC_TIMESTAMP(6) + INTERVAL 40 SECOND"
                    " WHERE aggregate_id = 'C' OR sequence = 3")  # fmt: skip
    execute(engine, "UPDATE zzol_outbox_event SET status = 'IN_PROGRESS' WHERE sequence = 3")
    (dead,) = blocked.dead_letters.list()
    blocked.dead_letters.discard([dead.event_id])
    rows = outbox_rows(engine, "aggregate_id, sequence, due_at > UTC_TIMESTAMP(6) AS later")
    later = {(row.aggregate_id, row.sequence) for row in rows if row.later}
    assert later == {("A", 3), ("C", 1), ("C", 2)}


def test_a_row_claimed_in_between_is_not_released(blocked: Relay, engine: Engine) -> None:
    """A claim's due_at is its end: brought forward, it would be recovered under the worker that holds it."""

    def meanwhile(connection: Any, cursor: Any, statement: str, *rest: Any) -> None:
        if statement.startswith("SELECT") and "sequence > " in statement:
            connection.exec_driver_sql("UPDATE zzol_outbox_event SET status = 'IN_PROGRESS' WHERE sequence = 2")

    (dead,) = blocked.dead_letters.list()
    event.listen(blocked._database.engine, "after_cursor_execute", meanwhile)
    blocked.dead_letters.discard([dead.event_id])
    event.remove(blocked._database.engine, "after_cursor_execute", meanwhile)
    rows = outbox_rows(engine, "aggregate_id, sequence, due_at > UTC_TIMESTAMP(6) AS later")
    assert {row.sequence for row in rows if row.later and row.aggregate_id == "A"} == {2}


def test_under_skip_nothing_waits_and_nothing_is_released(
    producer: Relay, worker: Relay, engine: Engine, redis_client: redis.Redis
) -> None:
    record(producer, engine, "A", 3)
    bury(engine, "sequence = 1")
    (dead,) = worker.dead_letters.list()
    assert worker.run_once() == 2
    assert worker.dead_letters.waiting_behind(dead.event_id) == 0
    assert worker.dead_letters.replay([dead.event_id]) == 1
    assert worker.run_once() == 1
    assert [(e.sequence, e.replay) for e in entries(redis_client)] == [(2, None), (3, None), (1, "1")]


def test_waiting_behind_asks_for_an_event_that_is_there(producer: Relay, engine: Engine) -> None:
    (lone,) = record(producer, engine, None)
    assert lone.event_id is not None
    assert producer.dead_letters.waiting_behind(lone.event_id) == 0
    with pytest.raises(DeadLetterError, match="is not in the outbox"):
        producer.dead_letters.waiting_behind(uuid.uuid4())


def test_the_story_of_an_event(
    producer: Relay, worker: Relay, engine: Engine, redis_client: redis.Redis, redis_server: Any
) -> None:
    """What became of it: its row, its entry, what waits, and what operators did."""
    first, second = record(producer, engine, "A", 2, correlation_id="c-1")
    assert first.event_id is not None
    assert second.event_id is not None
    assert producer.events.story(uuid.uuid4()) is None
    bury(engine, "sequence = 1")
    worker.dead_letters.replay([first.event_id], actor="ann")
    story = worker.events.story(first.event_id)
    assert story is not None
    assert (story.entry, story.waiting_behind, [a.actor for a in story.audit]) == (None, 1, ["ann"])
    assert worker.run_once() == 1, "the second waits for the replay"
    story = worker.events.story(first.event_id)
    assert story is not None
    assert (story.record.status, story.entry, story.waiting_behind) == (Status.PUBLISHED, "present", 0)
    assert getattr(worker.events.story(second.event_id), "entry", "") is None
    redis_client.flushall()
    assert getattr(worker.events.story(first.event_id), "entry", None) == "absent"
    redis_server.kill()
    assert getattr(worker.events.story(first.event_id), "entry", None) == "unreachable"


def test_events_by_aggregate_and_correlation(
    engine: Engine, make_relay: Callable[..., Relay], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("zzol_relay.store.outbox._PIECE", 2)
    relay = make_relay(engine, [*STREAMS, Stream(name="other")], mode="polling", start=False)
    assert relay.events.of_correlation("c") == []
    a = record(relay, engine, "A", 3, correlation_id="c")
    record(relay, engine, "a", 1)
    with relay.begin(engine) as connection:
        other = relay.record(
            connection, Event(type="t", stream="other", aggregate_type="room", aggregate_id="A", correlation_id="c")
        )
    ids = [e.event_id for e in a]
    assert [r.event_id for r in relay.events.of_aggregate("room:A")] == [other.event_id, *ids]
    assert [r.event_id for r in relay.events.of_aggregate("room:A", stream="room", limit=2)] == ids[1:]
    assert [r.event_id for r in relay.events.of_correlation("c")] == [*ids, other.event_id]
    assert [r.event_id for r in relay.events.of_correlation("c", limit=2)] == [ids[2], other.event_id]
    with pytest.raises(ConfigurationError, match="type:id"):
        relay.events.of_aggregate("A")
