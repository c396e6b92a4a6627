"""Relays across fork: the child shares neither threads, locks, identity nor connections with its parent."""

from __future__ import annotations

from typing import Any

import pytest
import redis
from sqlalchemy import Engine

from tests.support.streams import check_order, entries, outbox_rows, statuses
from zzol_relay.embedded import RedisServer

pytestmark = pytest.mark.usefixtures("relay_tables")

HEAD = """
    import multiprocessing, os, signal, sys, threading, time, traceback
    from sqlalchemy import create_engine, text
    from sqlalchemy.orm import Session
    from zzol_relay import Event, Relay, Stream

    engine = create_engine(os.environ["DATABASE_URL"])
    streams = [Stream(name="room", retention=0)]
    options = {"redis_url": os.environ["REDIS_URL"], "poll_interval": 0.05}

    def record(relay, data, code="A"):
        with Session(engine) as session, session.begin():
            relay.record(session, Event(type="t", stream="room", aggregate_type="room", aggregate_id=code, data=data))

    def connections(relay):
        with relay._database.begin() as connection:
            sql = connection.execute(text("SELECT CONNECTION_ID()")).scalar()
        return sql, relay._publisher._client.client_id()

    def in_child(work):
        pid = os.fork()
        if pid == 0:
            code = 1
            # A child that hangs would keep the output open, and the test waiting for its end.
            signal.alarm(40)
            try:
                engine.dispose(close=False)
                work()
                code = 0
            except BaseException:
                traceback.print_exc()
            finally:
                os._exit(code)
        return pid

    def join(pid):
        assert os.waitpid(pid, 0)[1] == 0, "the child failed"
"""
"""What each script begins with."""


@pytest.fixture
def fork(engine: Engine, redis_server: RedisServer, run_child: Any) -> Any:
    def run(script: str) -> Any:
        url = engine.url.render_as_string(hide_password=False)
        return run_child(HEAD + script, DATABASE_URL=url, REDIS_URL=redis_server.url)

    return run


def test_made_before_the_fork_and_started_in_each_child(fork: Any, engine: Engine, redis_client: redis.Redis) -> None:
    """As gunicorn --preload does: each child has its own identity, connections and claim token."""
    child = fork("""
    relay = Relay(engine, streams, worker=False, **options)
    together, end = os.pipe()

    def work():
        os.close(end)
        with relay:
            record(relay, os.getpid())
            relay.beat()
            print("CHILD", relay.name, relay._id.hex(), *connections(relay), len(relay.status().instances), flush=True)
            os.read(together, 1)

    pids = [in_child(work) for _ in range(3)]
    sys.stdin.readline()
    os.close(end)
    for pid in pids:
        join(pid)
    print("DONE", flush=True)
    """)
    child.wait_for_line("CHILD", count=3)
    told = [line.split() for line in child.lines if line.startswith("CHILD")]
    for column in (1, 2, 3, 4):
        assert len({line[column] for line in told}) == 3, told
    assert sorted(e.data for e in entries(redis_client)) == sorted(int(line[1].split(":")[1]) for line in told)
    child.send("go")
    child.wait_for_line("DONE")
    assert child.wait() == 0
    check_order(entries(redis_client))


def test_started_before_the_fork(fork: Any, engine: Engine, redis_client: redis.Redis) -> None:
    """The child's rows are left to the pollers at once; ``start()`` there works; the parent's goes on unharmed."""
    child = fork("""
    relay = Relay(engine, streams, **options).start()
    record(relay, "parent before")
    before = connections(relay)
    facts = []
    relay.observe(facts.append)

    def work():
        record(relay, "child, not started")
        assert [f.reason for f in facts if type(f).__name__ == "Deferred"] == ["stopping"], facts
        assert relay._state == "new"
        assert not set(before) & set(connections(relay)), "the parent's connections"
        relay.start()
        record(relay, "child, started", code="B")
        assert any(type(f).__name__ == "Published" for f in facts), facts
        relay.stop()

    join(in_child(work))
    assert connections(relay) == before, "the parent's connections were closed"
    record(relay, "parent after", code="C")
    while relay.status().backlog.oldest_unpublished_age is not None:
        time.sleep(0.02)
    print("INSTANCES", len(relay.status().instances), flush=True)
    relay.stop()
    print("DONE", flush=True)
    """)
    child.wait_for_line("DONE")
    assert child.wait() == 0
    assert {e.data for e in entries(redis_client)} == {
        "parent before", "child, not started", "child, started", "parent after",
    }  # fmt: skip
    check_order(entries(redis_client))
    assert statuses(engine) == {"PUBLISHED": 4}
    # The child signed off its own row, not the parent's.
    assert "INSTANCES 1" in child.lines


def test_the_childs_rows_are_not_leased(fork: Any, engine: Engine) -> None:
    """Nobody publishes them after the commit, so the pollers need not wait; the commit waits for nothing."""
    child = fork("""
    relay = Relay(engine, streams, worker=False, born_lease=600, claim_lease=30, dedup_window=700, **options).start()
    join(in_child(lambda: record(relay, 1)))
    print("DONE", flush=True)
    os._exit(0)
    """)
    child.wait_for_line("DONE")
    (row,) = outbox_rows(engine, "status, due_at <= UTC_TIMESTAMP(6) AS due")
    assert (row.status, row.due) == ("PENDING", 1)


def test_a_lock_that_another_thread_held_at_the_fork_stops_nobody(fork: Any, engine: Engine) -> None:
    child = fork("""
    relay = Relay(engine, streams, worker=False, **options).start()
    held = threading.Event()

    def hold():
        with relay._after_commit._wake, relay._counters._lock, relay._state_lock, relay._publisher._lock:
            held.set()
            threading.Event().wait()

    threading.Thread(target=hold, daemon=True).start()
    held.wait()

    def work():
        record(relay, 1)
        with relay:
            record(relay, 2)

    join(in_child(work))
    print("DONE", flush=True)
    os._exit(0)
    """)
    child.wait_for_line("DONE")
    assert len(outbox_rows(engine)) == 2


def test_a_child_of_multiprocessing(fork: Any, redis_client: redis.Redis) -> None:
    child = fork("""
    relay = Relay(engine, streams, worker=False, **options).start()
    record(relay, "parent")

    def work():
        engine.dispose(close=False)
        with relay:
            record(relay, "child")

    process = multiprocessing.get_context("fork").Process(target=work)
    process.start()
    process.join()
    assert process.exitcode == 0
    record(relay, "parent again")
    relay.stop()
    print("DONE", flush=True)
    """)
    child.wait_for_line("DONE")
    assert [e.data for e in entries(redis_client)] == ["parent", "child", "parent again"]


def test_leaving_the_parents_with_block_in_the_child_harms_nobody(fork: Any, redis_client: redis.Redis) -> None:
    child = fork("""
    with Relay(engine, streams, worker=False, **options) as relay:
        record(relay, "parent")
        relay.beat()
        pid = os.fork()
        if pid:
            join(pid)
            print("INSTANCES", len(relay.status().instances), flush=True)
            record(relay, "parent again")
    print("DONE", flush=True)
    os._exit(0)
    """)
    child.wait_for_line("DONE", count=2)
    assert "INSTANCES 1" in child.lines
    assert [e.data for e in entries(redis_client)] == ["parent", "parent again"]


def test_a_stopped_relay_stays_stopped(fork: Any) -> None:
    child = fork("""
    from zzol_relay import ConfigurationError
    relay = Relay(engine, streams, worker=False, **options).start()
    relay.stop()

    def work():
        try:
            relay.start()
        except ConfigurationError as error:
            print("REFUSED", error, flush=True)

    join(in_child(work))
    """)
    assert "stopped" in child.wait_for_line("REFUSED")
    assert child.wait() == 0
