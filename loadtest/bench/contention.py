"""Many producers and many workers on few aggregates, with and without a failing Redis, and what became of each event:
``python -m loadtest bench contention``."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import random
import statistics
import time
from collections.abc import Iterator
from multiprocessing.connection import Connection

import redis
from sqlalchemy import Engine, create_engine, text
from sqlalchemy.exc import SQLAlchemyError

from loadtest.bench.crew import Crew
from loadtest.bench.fill import Rows, analyze, fill
from loadtest.bench.flapping import Flapping
from loadtest.bench.harness import Bench, interleave
from loadtest.bench.report import Aim, Report
from loadtest.bench.services import Services, create_outbox
from loadtest.bench.verdict import Verdict, judge
from zzol_relay import Event, Fact, Relay, Stream
from zzol_relay.core.lifecycle import Status
from zzol_relay.core.observer import LoopFailed
from zzol_relay.store.database import error_code
from zzol_relay.store.tables import Tables
from zzol_relay.streams.keys import stream_keys

__all__ = ["BENCH"]

_SHARDS = 4
_AGGREGATES = 50
_WORKERS = 4
_PRODUCERS = 4
_UNDONE = 0.02
_LOCK_ERRORS = (1213, 1205)
_PREFIX = "zzol_"
_COMMITTED = "bench_committed"
_SEED = 20_260_101
_DESCRIPTIONS = {
    "steady": "4 worker and 4 producer processes, one to three of 50 aggregates a transaction, from the first commit to"
    " the last mark",
    "record_only": "the same producers, polling mode and no worker: nobody publishes, to the last commit",
    "flapping": "steady, while Redis is killed, frozen and cut off, until it has been up long enough to drain",
    "drain_1": "1 worker on a backlog of 50 aggregates",
    "drain_4": "4 workers on the same",
    "drain_many_1": "1 worker on a backlog of many aggregates, 10 events each",
    "drain_many_4": "4 workers on the same",
}


@dataclasses.dataclass(frozen=True, slots=True)
class _Size:
    events: int
    backlog: int
    limit: float
    """Longest that the producers go on, and then that the drain may take, in seconds."""


@dataclasses.dataclass(frozen=True, slots=True)
class _Phase:
    per_s: float
    verdict: Verdict
    escaped: int
    failures: dict[str, int]
    cpu: dict[str, float]
    """Seconds of CPU time per kind of process."""


class _Undo(Exception):  # noqa: N818 - raised to roll a transaction back, not an error
    pass


def run(services: Services, quick: bool, rounds: int) -> Report:
    """Events a second, and what was lost, doubled or misplaced, by the rows and the entries themselves."""
    rounds = rounds or (1 if quick else 2)
    size = _Size(600, 1_000, 20.0) if quick else _Size(20_000, 10_000, 90.0)
    engine = services.engine()
    tables = create_outbox(engine, _PREFIX)
    with engine.begin() as connection:
        connection.execute(text(
            f"CREATE TABLE {_COMMITTED} (id BIGINT AUTO_INCREMENT PRIMARY KEY, event_ids VARBINARY(64) NOT NULL)"
        ))  # fmt: skip
    bench = _Contention(services, engine, tables, size)
    phases = interleave({"steady": bench.steady, "flapping": bench.flapping}, rounds=rounds, warmup=0)
    drains = interleave(
        {
            "record_only": bench.record_only,
            "drain_1": lambda: bench.drain(1, _AGGREGATES),
            "drain_4": lambda: bench.drain(_WORKERS, _AGGREGATES),
            "drain_many_1": lambda: bench.drain(1, size.backlog // 10),
            "drain_many_4": lambda: bench.drain(_WORKERS, size.backlog // 10),
        },
        rounds=rounds,
        warmup=0,
    )
    everything = [phase for each in phases.values() for phase in each]
    rates = {name: [phase.per_s for phase in each] for name, each in phases.items()} | drains
    total = {
        field.name: sum(getattr(phase.verdict, field.name) for phase in everything)
        for field in dataclasses.fields(Verdict)
    }
    report = Report(
        bench="contention",
        quick=quick,
        settings={
            **services.settings(engine),
            "rounds": rounds,
            "events_per_round": size.events,
            "aggregates": _AGGREGATES,
            "shards": _SHARDS,
            "workers": _WORKERS,
            "producers": _PRODUCERS,
            "backlog_rows": size.backlog,
            "relay_mode": "hybrid",
            "seed": _SEED,
            "redis_failures": [phase.failures for phase in phases["flapping"]],
        },
        versions=services.versions(engine),
        variants={
            name: {
                "per_s": statistics.median(each),
                "least_per_s": min(each),
                "most_per_s": max(each),
                **{
                    f"{kind}_cpu_us": statistics.median(
                        phase.cpu[kind] * 1e6 / phase.verdict.committed for phase in phases[name]
                    )
                    for kind in ("producers", "workers")
                    if name in phases
                },
            }
            for name, each in rates.items()
        },
        descriptions=_DESCRIPTIONS,
        aims={
            **{name: Aim(total[name], "at most", 0.0) for name in ("lost", "duplicates", "inversions")},
            "deadlocks_escaped": Aim(sum(phase.escaped for phase in everything), "at most", 0.0),
            **{name: Aim(total[name], "at most", 0.0) for name in ("phantoms", "unsettled")},
            "per_s": Aim(statistics.median(rates["steady"]), "at least", 5000.0),
        },
        figures={
            "flapping_per_s": statistics.median(rates["flapping"]),
            "committed": total["committed"],
            "entries": total["entries"],
            "deadlocks_seen": bench.deadlocks(),
        },
    )
    engine.dispose()
    return report


class _Contention:
    """The rounds of one run; each begins with empty tables and an empty Redis."""

    def __init__(self, services: Services, engine: Engine, tables: Tables, size: _Size) -> None:
        self._services = services
        self._engine = engine
        self._tables = tables
        self._size = size
        self._round = 0
        self._deadlocks = self._count_deadlocks()

    def steady(self) -> _Phase:
        """A Redis that stays up."""
        return self._produce(self._services.redis_url, None)

    def flapping(self) -> _Phase:
        """A Redis that fails while events are produced."""
        with Flapping(_SEED + self._round) as flapping:
            return self._produce(flapping.url, flapping)

    def drain(self, workers: int, aggregates: int) -> float:
        """Rows a second of so many workers on a backlog that nobody adds to."""
        redis_url, count = self._services.redis_url, self._size.backlog
        self._reset(redis_url)
        fill(self._engine, self._tables, Rows(
            count, Status.PENDING, age=60.0, in_turn=min(aggregates, 100) if aggregates > _AGGREGATES else aggregates,
            each=count // aggregates, shards=_SHARDS,
        ))  # fmt: skip
        analyze(self._engine, self._tables)
        with Crew() as crew:
            crew.start(workers, _worker, self._services.database_url, redis_url)
            crew.hear(60.0)
            with self._engine.connect() as connection:
                started = connection.execute(text("SELECT UTC_TIMESTAMP(6)")).scalar_one()
            crew.tell("go")
            self._wait_until_settled()
            crew.tell("stop")
            crew.hear(30.0)
        # Of a drain that has reached the limit, what it did until then.
        with self._engine.connect() as connection:
            published = connection.execute(text(
                f"SELECT COUNT(*) FROM {self._tables.outbox.name} WHERE status = 'PUBLISHED'"
            )).scalar_one()  # fmt: skip
        return int(published) / self._seconds("published_at", started)

    def record_only(self) -> float:
        """Rows a second that the producers commit when nobody publishes: an upper bound of ``steady``."""
        self._round += 1
        self._reset(self._services.redis_url)
        with Crew() as producers:
            self._start_producers(producers, self._services.redis_url, "polling")
            producers.hear(60.0)
            producers.tell("go")
            producers.hear(self._size.limit + 60.0)
        return self._size.events / self._seconds("created_at")

    def deadlocks(self) -> int:
        """Deadlocks that the server has resolved since the beginning, whoever was their victim."""
        return self._count_deadlocks() - self._deadlocks

    def _produce(self, redis_url: str, flapping: Flapping | None) -> _Phase:
        self._round += 1
        self._reset(redis_url)
        with Crew() as workers, Crew() as producers:
            workers.start(_WORKERS, _worker, self._services.database_url, redis_url)
            self._start_producers(producers, redis_url, "hybrid")
            workers.hear(60.0)
            producers.hear(60.0)
            workers.tell("go")
            producers.tell("go")
            if flapping is not None:
                flapping.begin()
            produced = producers.hear(self._size.limit + 60.0)
            if flapping is not None:
                flapping.end()
            self._wait_until_settled()
            workers.tell("stop")
            worked = workers.hear(30.0)
        verdict = judge(
            self._engine, self._tables.outbox.name, _COMMITTED, redis_url, stream_keys("zzol", "room", _SHARDS)
        )
        failures = {} if flapping is None else flapping.failures
        return _Phase(
            verdict.committed / self._seconds("published_at"),
            verdict,
            sum(escaped for escaped, _ in produced + worked),
            failures,
            {"producers": sum(cpu for _, cpu in produced), "workers": sum(cpu for _, cpu in worked)},
        )

    def _start_producers(self, crew: Crew, redis_url: str, mode: str) -> None:
        crew.start(
            _PRODUCERS, _producer, self._services.database_url, redis_url, mode,
            self._size.events // _PRODUCERS, self._size.limit, _SEED + 100 * self._round,
        )  # fmt: skip

    def _reset(self, redis_url: str) -> None:
        with self._engine.begin() as connection:
            for table in (self._tables.outbox.name, self._tables.aggregate.name, _COMMITTED):
                connection.execute(text(f"TRUNCATE TABLE {table}"))
        with redis.Redis.from_url(redis_url) as client:
            client.flushall()

    def _wait_until_settled(self) -> None:
        """Returns at the limit too: what is left then counts as unsettled, and as lost where it is in no stream."""
        deadline = time.monotonic() + self._size.limit
        left = text(f"SELECT 1 FROM {self._tables.outbox.name} WHERE status IN ('PENDING', 'IN_PROGRESS') LIMIT 1")
        while time.monotonic() < deadline:
            with self._engine.connect() as connection:
                if connection.execute(left).first() is None:
                    return
            time.sleep(0.05)

    def _seconds(self, until: str, since: object = None) -> float:
        """From ``since``, or the first row, to the last ``until``, by the database's clock."""
        statement = text(
            f"SELECT TIMESTAMPDIFF(MICROSECOND, COALESCE(:since, MIN(created_at)), MAX({until}))"
            f" FROM {self._tables.outbox.name}"
        )
        with self._engine.connect() as connection:
            return float(connection.execute(statement, {"since": since}).scalar_one()) / 1e6

    def _count_deadlocks(self) -> int:
        with self._engine.connect() as connection:
            return int(connection.execute(text(
                "SELECT COUNT FROM information_schema.INNODB_METRICS WHERE NAME = 'lock_deadlocks'"
            )).scalar_one())  # fmt: skip


class _Escaped:
    """Counts deadlocks and lock timeouts that came out of the relay's own loops."""

    def __init__(self) -> None:
        self.count = 0

    def __call__(self, fact: Fact) -> None:
        if isinstance(fact, LoopFailed) and any(f"({code}," in fact.error for code in _LOCK_ERRORS):
            self.count += 1


def _worker(pipe: Connection, number: int, database_url: str, redis_url: str) -> None:
    # A failing Redis is what is measured: its warnings would bury the report.
    logging.getLogger("zzol_relay").setLevel(logging.CRITICAL)
    escaped = _Escaped()
    relay = Relay(database_url, redis_url=redis_url, worker=True, observers=[escaped])
    pipe.send("ready")
    with contextlib.suppress(EOFError):
        pipe.recv()
        begun = time.process_time()
        with relay:
            pipe.recv()
        pipe.send((escaped.count, time.process_time() - begun))


def _producer(
    pipe: Connection,
    number: int,
    database_url: str,
    redis_url: str,
    mode: str,
    events: int,
    limit: float,
    seed: int,
) -> None:
    logging.getLogger("zzol_relay").setLevel(logging.CRITICAL)
    escaped = _Escaped()
    engine = create_engine(database_url, pool_size=1)
    streams = [Stream(name="room", shards=_SHARDS, retention=0)]
    with Relay(engine, streams, redis_url=redis_url, mode=mode, worker=False, observers=[escaped]) as relay:
        pipe.send("ready")
        pipe.recv()
        begun = time.process_time()
        refused = _transact_all(relay, engine, random.Random(seed + number), events, time.monotonic() + limit)
    # After the relay has stopped: what it still had to send and to mark is done.
    pipe.send((refused + escaped.count, time.process_time() - begun))
    engine.dispose()


def _transact_all(relay: Relay, engine: Engine, dice: random.Random, events: int, deadline: float) -> int:
    """Commit ``events`` events; returns how many transactions met a deadlock or a lock timeout, and ran again."""
    refused = 0
    note = text(f"INSERT INTO {_COMMITTED} (event_ids) VALUES (:ids)")
    for size in _sizes(dice, events):
        rooms = dice.sample(range(_AGGREGATES), size)
        undone = dice.random() < _UNDONE
        while time.monotonic() < deadline:
            try:
                with relay.begin(engine) as connection:
                    recorded = relay.record_all(connection, (_event(room) for room in rooms))
                    ids = b"".join(event.event_id.bytes for event in recorded if event.event_id is not None)
                    connection.execute(note, {"ids": ids})
                    if undone:
                        raise _Undo
                break
            except _Undo:
                undone = False
            except SQLAlchemyError as error:
                if error_code(error) not in _LOCK_ERRORS:
                    raise
                refused += 1
    return refused


def _sizes(dice: random.Random, events: int) -> Iterator[int]:
    while events > 0:
        size = min(events, dice.randint(1, 3))
        events -= size
        yield size


def _event(room: int) -> Event:
    return Event(
        type="round.finished", stream="room", aggregate_type="room", aggregate_id=f"R{room:08d}",
        data={"room": room, "winner": "ann", "points": [30, 20, 10]},
    )  # fmt: skip


BENCH = Bench("contention", "many producers and workers on few aggregates, with and without a failing Redis", run)
