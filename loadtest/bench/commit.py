"""What an event costs the transaction that records it: ``python -m loadtest bench commit``."""

from __future__ import annotations

import itertools
import json
import statistics
import threading
import time
import uuid
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any

import redis
from sqlalchemy import Engine, Table, update
from sqlalchemy.orm import DeclarativeBase, Mapped, Session, mapped_column
from sqlalchemy.types import String

from loadtest.bench.harness import Bench, interleave, median_ratio, percentile
from loadtest.bench.report import Aim, Report
from loadtest.bench.services import Services, create_outbox
from zzol_relay import Event, Fact, Relay, Stream
from zzol_relay.core.observer import Settled
from zzol_relay.store.dialect import utc_after, utc_now

__all__ = ["BENCH"]

_EVENTS_PER_AGGREGATE = 5
_THREADS = 8
_SHARDS = 4
_DESCRIPTIONS = {
    "business_row": "one row of the application's, by the ORM",
    "outbox_row": "the same, and an outbox row inserted by SQLAlchemy Core",
    "relay": "the same row, and relay.record(): sequence, order, dedup, published before commit() returns",
    "zzol": "business and outbox row, XADD after the commit, PUBLISHED in a transaction of its own",
}


class _Base(DeclarativeBase):
    pass


class _Result(_Base):
    """A game's result: what an application writes beside its event."""

    __tablename__ = "bench_result"

    id: Mapped[int] = mapped_column(primary_key=True)
    room: Mapped[str] = mapped_column(String(32))
    round: Mapped[int]
    winner: Mapped[str] = mapped_column(String(32))
    points: Mapped[int]


class _Rooms:
    """The room of each next event: a new one every ``_EVENTS_PER_AGGREGATE``, per thread, as games come and go."""

    def __init__(self) -> None:
        self._numbers = itertools.count()
        self._local = threading.local()

    def next(self) -> tuple[str, int]:
        """A room's code, and the number of the event within it, from 1."""
        local = self._local
        played = getattr(local, "played", _EVENTS_PER_AGGREGATE)
        if played == _EVENTS_PER_AGGREGATE:
            played = 0
            local.room = f"R{next(self._numbers):08d}"
        local.played = played + 1
        return local.room, played + 1


def _result(room: str, number: int) -> _Result:
    return _Result(room=room, round=number, winner="ann", points=number * 10)


def _data(room: str, number: int) -> dict[str, Any]:
    players = [{"name": name, "rank": rank, "points": 40 - rank} for rank, name in enumerate(("ann", "bob", "cyd"), 1)]
    return {"room": room, "round": number, "game": "racing", "players": players}


class _BusinessRow:
    """(a) The application's row alone."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._rooms = _Rooms()

    def transact(self) -> None:
        with Session(self._engine) as session, session.begin():
            session.add(_result(*self._rooms.next()))


class _OutboxRow:
    """(b) The application's row and a plain outbox row; nobody publishes it."""

    def __init__(self, engine: Engine, outbox: Table) -> None:
        self._engine = engine
        self._outbox = outbox
        self._rooms = _Rooms()
        self._insert = outbox.insert().values(
            status="PENDING", retry_count=0, replays=0, schema_version=1, event_type="round.finished",
            aggregate_type="room", due_at=utc_after(2_000_000), created_at=utc_now(), updated_at=utc_now(),
        )  # fmt: skip

    def transact(self) -> None:
        self._record()

    def _record(self) -> tuple[int, dict[str, Any]]:
        room, number = self._rooms.next()
        row = {
            "event_id": uuid.uuid4().bytes,
            "stream_key": f"plain:{number % _SHARDS}",
            "aggregate_id": room,
            "sequence": number,
            "prev_sequence": number - 1,
            "payload": json.dumps(_data(room, number)).encode(),
            "occurred_at": datetime.now(UTC).replace(tzinfo=None),
        }
        with Session(self._engine) as session, session.begin():
            session.add(_result(room, number))
            row_id = session.connection().execute(self._insert, row).lastrowid
        return row_id, row


class _Zzol(_OutboxRow):
    """(d) As ZZOL does it: publish after the commit, then mark the row in a transaction of its own (Z23, Z25)."""

    def __init__(self, engine: Engine, outbox: Table, redis_url: str) -> None:
        super().__init__(engine, outbox)
        self._client = redis.Redis.from_url(redis_url)
        self._mark = update(outbox).values(status="PUBLISHED", updated_at=utc_now(), published_at=utc_now())

    def transact(self) -> None:
        row_id, row = self._record()
        self._client.xadd(
            row["stream_key"],
            {
                "id": str(uuid.UUID(bytes=row["event_id"])),
                "type": "round.finished",
                "subject": f"room/{row['aggregate_id']}",
                "sequence": row["sequence"],
                "time": row["occurred_at"].isoformat(),
                "data": row["payload"],
            },
        )
        with self._engine.begin() as connection:
            connection.execute(self._mark.where(self._outbox.c.id == row_id))


class _Relay:
    """(c) The relay; ``settled`` waits until the rows it published are marked."""

    def __init__(self, engine: Engine, relay: Relay) -> None:
        self._engine = engine
        self._relay = relay
        self._rooms = _Rooms()
        self._changed = threading.Condition()
        self._recorded = 0
        self._settled = 0
        relay.observe(self._hear)

    def transact(self) -> None:
        room, number = self._rooms.next()
        event = Event(
            type="round.finished", stream="room", aggregate_type="room", aggregate_id=room, data=_data(room, number)
        )
        with Session(self._engine) as session, session.begin():
            session.add(_result(room, number))
            self._relay.record(session, event)

    def settled(self, recorded: int) -> None:
        with self._changed:
            self._recorded += recorded
            if not self._changed.wait_for(lambda: self._settled >= self._recorded, 30.0):
                raise TimeoutError(f"{self._recorded - self._settled} rows were not marked within 30 s")

    def _hear(self, fact: Fact) -> None:
        if isinstance(fact, Settled):
            with self._changed:
                self._settled += len(fact.event_ids)
                self._changed.notify_all()


def _latencies(transact: Callable[[], None], count: int, finish: Callable[[int], None]) -> list[float]:
    """Milliseconds of each of ``count`` transactions, one after the other."""
    clock = time.perf_counter
    times = []
    for _ in range(count):
        started = clock()
        transact()
        times.append((clock() - started) * 1000)
    # The marks that are still on their way are paid before the next variant's turn, not in it.
    finish(count)
    return times


def _throughput(transact: Callable[[], None], count: int, finish: Callable[[int], None]) -> float:
    """Transactions a second of ``_THREADS`` threads, until the last row is marked."""
    each = max(1, count // _THREADS)
    barrier = threading.Barrier(_THREADS + 1)
    errors: list[BaseException] = []

    def run() -> None:
        barrier.wait()
        try:
            for _ in range(each):
                transact()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run) for _ in range(_THREADS)]
    for thread in threads:
        thread.start()
    barrier.wait()
    started = time.perf_counter()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
    finish(each * _THREADS)
    return each * _THREADS / (time.perf_counter() - started)


def _nothing(count: int) -> None:
    return None


def run(services: Services, quick: bool, rounds: int) -> Report:
    """One thread: latencies of a transaction. Eight threads: transactions a second."""
    rounds = rounds or (2 if quick else 24)
    per_round, per_round_threaded = (5, 16) if quick else (100, 800)
    threaded_rounds = max(1, rounds // 3)
    engine = services.engine(_THREADS + 2)
    _Base.metadata.create_all(engine)
    plain, zzol = create_outbox(engine, "plain_").outbox, create_outbox(engine, "zzol_design_").outbox
    create_outbox(engine, "zzol_")
    relay = Relay(
        engine, [Stream(name="room", shards=_SHARDS)], redis_url=services.redis_url, mode="hybrid", worker=True
    )
    with relay:
        ours = _Relay(engine, relay)
        variants: dict[str, tuple[Callable[[], None], Callable[[int], None]]] = {
            "business_row": (_BusinessRow(engine).transact, _nothing),
            "outbox_row": (_OutboxRow(engine, plain).transact, _nothing),
            "relay": (ours.transact, ours.settled),
            "zzol": (_Zzol(engine, zzol, services.redis_url).transact, _nothing),
        }
        times = interleave(
            {name: _one(_latencies, variant, per_round) for name, variant in variants.items()}, rounds=rounds
        )
        rates = interleave(
            {name: _one(_throughput, variant, per_round_threaded) for name, variant in variants.items()},
            rounds=threaded_rounds,
        )
        counters = relay.status().counters
    p50 = {name: [statistics.median(one) for one in samples] for name, samples in times.items()}
    report = Report(
        bench="commit",
        quick=quick,
        settings={
            **services.settings(engine),
            "rounds": rounds,
            "transactions_per_round": per_round,
            "threads": _THREADS,
            "threaded_rounds": threaded_rounds,
            "transactions_per_threaded_round": per_round_threaded // _THREADS * _THREADS,
            "events_per_aggregate": _EVENTS_PER_AGGREGATE,
            "shards": _SHARDS,
            "payload_bytes": len(json.dumps(_data("R00000001", 1))),
            "relay_mode": "hybrid",
            "relay_counters": counters,
        },
        versions=services.versions(engine),
        variants={
            name: {
                "p50_ms": statistics.median(p50[name]),
                "p99_ms": percentile([value for one in samples for value in one], 0.99),
                "threads_per_s": statistics.median(rates[name]),
            }
            for name, samples in times.items()
        },
        descriptions=_DESCRIPTIONS,
        aims={
            "ratio_to_outbox_row": Aim(median_ratio(p50["relay"], p50["outbox_row"]), "at most", 1.4),
            "ratio_to_zzol": Aim(median_ratio(p50["relay"], p50["zzol"]), "at most", 0.75),
            "throughput_ratio_to_zzol": Aim(median_ratio(rates["relay"], rates["zzol"]), "at least", 1.2),
        },
    )
    engine.dispose()
    return report


def _one(
    measure: Callable[[Callable[[], None], int, Callable[[int], None]], Any],
    variant: tuple[Callable[[], None], Callable[[int], None]],
    count: int,
) -> Callable[[], Any]:
    transact, finish = variant
    return lambda: measure(transact, count, finish)


BENCH = Bench("commit", "what an event costs the transaction that records it", run)
