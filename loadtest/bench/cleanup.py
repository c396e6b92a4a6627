"""What cleanup costs those who commit meanwhile: ``python -m loadtest bench cleanup``."""

from __future__ import annotations

import itertools
import statistics
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection

from sqlalchemy import Engine, text
from sqlalchemy.orm import Session

from loadtest.bench.crew import Crew
from loadtest.bench.fill import Rows, analyze, fill
from loadtest.bench.harness import Bench, median_ratio, percentile
from loadtest.bench.report import Aim, Report
from loadtest.bench.services import Services, create_outbox
from zzol_relay import Event, Relay, Stream
from zzol_relay.core.lifecycle import Status

__all__ = ["BENCH"]

_THREADS = 2
_DAY = 86_400.0
_PURGED = 1_000
_DESCRIPTIONS = {
    "alone": "2 threads that record and commit, one event a transaction",
    "beside_cleanup": "the same while another process deletes old rows, Relay.cleanup()",
    "in_process": "the same while a thread of the same process deletes them",
}


class _Producers:
    """Threads that commit until told to stop; each call of ``watch`` gives the commits' milliseconds meanwhile."""

    def __init__(self, engine: Engine, relay: Relay) -> None:
        self._engine = engine
        self._relay = relay
        self._rooms = itertools.count()

    def watch(self, run: Callable[[], None]) -> list[float]:
        """Milliseconds of each transaction that was committed while ``run`` ran."""
        ending = threading.Event()
        times: list[list[float]] = [[] for _ in range(_THREADS)]
        failures: list[BaseException] = []

        def produce(mine: list[float]) -> None:
            try:
                while not ending.is_set():
                    started = time.perf_counter()
                    self._transact()
                    mine.append((time.perf_counter() - started) * 1000)
            except BaseException as error:
                failures.append(error)

        threads = [threading.Thread(target=produce, args=(mine,)) for mine in times]
        for thread in threads:
            thread.start()
        try:
            run()
        finally:
            ending.set()
            for thread in threads:
                thread.join()
        if failures:
            raise failures[0]
        return [value for mine in times for value in mine]

    def _transact(self) -> None:
        event = Event(
            type="round.finished", stream="room", aggregate_type="room",
            aggregate_id=f"N{next(self._rooms) // 5:08d}", data={"winner": "ann", "points": [30, 20, 10]},
        )  # fmt: skip
        with Session(self._engine) as session, session.begin():
            self._relay.record(session, event)


def run(services: Services, quick: bool, rounds: int) -> Report:
    """The producers' p99 beside cleanup, over their p99 alone; and rows deleted a second."""
    rounds = rounds or (1 if quick else 5)
    rows = 4_000 if quick else 1_000_000
    # Each round deletes twice: once from another process, once from this one.
    share = rows // (2 * rounds)
    alone_for = 0.5 if quick else 8.0
    engine = services.engine()
    tables = create_outbox(engine, "zzol_")
    # One day's worth for each deletion, the oldest first; the youngest are a day past the default retention.
    shares = 2 * rounds
    for day in range(shares, 0, -1):
        fill(engine, tables, Rows(
            share, Status.PUBLISHED, age=(day + 1) * _DAY, in_turn=100, each=10, name=f"D{day:02d}"
        ))  # fmt: skip
    analyze(engine, tables)
    samples: dict[str, list[list[float]]] = {name: [] for name in _DESCRIPTIONS}
    rates: dict[str, list[float]] = {"beside_cleanup": [], "in_process": []}
    streams = [Stream(name="room", shards=4)]
    with Relay(engine, streams, redis_url=services.redis_url, worker=False) as relay:
        producers = _Producers(engine, relay)
        producers.watch(lambda: time.sleep(alone_for / 4))
        days = iter(range(shares, 0, -1))
        for _ in range(rounds):
            _wait_for_purge(engine)
            samples["alone"].append(producers.watch(lambda: time.sleep(alone_for)))
            for name, cleaner in (("beside_cleanup", _elsewhere), ("in_process", _here)):
                _wait_for_purge(engine)
                with cleaner(services, (next(days) + 0.5) * _DAY) as clean:
                    cleaned: list[tuple[int, float]] = []
                    samples[name].append(producers.watch(lambda clean=clean, found=cleaned: found.append(clean())))  # type: ignore[misc]
                deleted, seconds = cleaned[0]
                if deleted != share:
                    raise RuntimeError(f"{deleted} rows were deleted, of {share}")
                rates[name].append(deleted / seconds)
    p99 = {name: [percentile(times, 0.99) for times in each] for name, each in samples.items()}
    report = Report(
        bench="cleanup",
        quick=quick,
        settings={**services.settings(engine), "rounds": rounds, "rows": share * shares, "rows_per_deletion": share,
                  "producer_threads": _THREADS, "cleanup_batch": 1000, "seconds_alone": alone_for,
                  "relay_mode": "hybrid"},
        versions=services.versions(engine),
        variants={
            name: {
                "p50_ms": statistics.median(statistics.median(times) for times in each),
                "p99_ms": statistics.median(p99[name]),
                **({"deleted_per_s": statistics.median(rates[name])} if name in rates else {}),
            }
            for name, each in samples.items()
        },
        descriptions=_DESCRIPTIONS,
        aims={
            "p99_ratio": Aim(median_ratio(p99["beside_cleanup"], p99["alone"]), "at most", 1.5),
            "in_process_p99_ratio": Aim(median_ratio(p99["in_process"], p99["alone"]), "at most", 1.5),
        },
        figures={"deleted_per_s": statistics.median(rates["beside_cleanup"])},
    )  # fmt: skip
    engine.dispose()
    return report


@contextmanager
def _elsewhere(services: Services, retention: float) -> Iterator[Callable[[], tuple[int, float]]]:
    """Cleanup in another process, which has started already."""
    with Crew() as crew:
        crew.start(1, _cleaner, services.database_url, services.redis_url, retention)
        crew.hear(60.0)

        def clean() -> tuple[int, float]:
            crew.tell("go")
            (found,) = crew.hear(300.0)
            return int(found[0]), float(found[1])

        yield clean


@contextmanager
def _here(services: Services, retention: float) -> Iterator[Callable[[], tuple[int, float]]]:
    """Cleanup on a thread of this process, as where the application runs the worker too."""
    relay = Relay(services.database_url, redis_url=services.redis_url, worker=False, retention=retention)
    yield lambda: _clean(relay)
    relay.stop()


def _cleaner(pipe: Connection, number: int, database_url: str, redis_url: str, retention: float) -> None:
    relay = Relay(database_url, redis_url=redis_url, worker=False, retention=retention)
    pipe.send("ready")
    pipe.recv()
    pipe.send(_clean(relay))
    relay.stop()


def _clean(relay: Relay) -> tuple[int, float]:
    """Rows deleted, and seconds."""
    started = time.perf_counter()
    deleted = relay.cleanup()
    return deleted or 0, time.perf_counter() - started


def _wait_for_purge(engine: Engine) -> None:
    """Until the server has cleared away what was deleted: else the next window would pay for the last one."""
    deadline = time.monotonic() + 60.0
    statement = text("SELECT COUNT FROM information_schema.INNODB_METRICS WHERE NAME = 'trx_rseg_history_len'")
    with engine.connect() as connection:
        while time.monotonic() < deadline and int(connection.execute(statement).scalar_one()) > _PURGED:
            connection.rollback()
            time.sleep(0.2)


BENCH = Bench("cleanup", "what cleanup costs those who commit meanwhile", run)
