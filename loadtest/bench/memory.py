"""How much a worker's memory grows over a long backlog: ``python -m loadtest bench memory``."""

from __future__ import annotations

import os
import resource
import statistics
import time
from multiprocessing.connection import Connection
from pathlib import Path

import redis
from sqlalchemy import text

from loadtest.bench.crew import Crew
from loadtest.bench.fill import Rows, analyze, fill
from loadtest.bench.harness import Bench
from loadtest.bench.report import Aim, Report
from loadtest.bench.services import Services, create_outbox
from zzol_relay import Fact, Relay
from zzol_relay.core.lifecycle import Status
from zzol_relay.core.observer import Settled
from zzol_relay.streams.keys import stream_keys

__all__ = ["BENCH"]

_SHARDS = 4
_MIB = 1024 * 1024
_DESCRIPTIONS = {"worker": "one worker's process, Relay.run_once() until nothing is due"}


def run(services: Services, quick: bool, rounds: int) -> Report:
    """MiB that the resident set grows from after the first batch to its peak."""
    rounds = rounds or 1
    rows = 3_000 if quick else 1_000_000
    engine = services.engine()
    tables = create_outbox(engine, "zzol_")
    admin = redis.Redis.from_url(services.redis_url)
    found: list[dict[str, float]] = []
    for _ in range(rounds):
        admin.flushdb()
        with engine.begin() as connection:
            connection.execute(text(f"TRUNCATE TABLE {tables.outbox.name}"))
            connection.execute(text(f"TRUNCATE TABLE {tables.aggregate.name}"))
        fill(engine, tables, Rows(rows, Status.PENDING, age=60.0, in_turn=100, each=10, shards=_SHARDS))
        analyze(engine, tables)
        with Crew() as crew:
            crew.start(1, _worker, services.database_url, services.redis_url)
            crew.hear(60.0)
            crew.tell("go")
            found += crew.hear(900.0)
        entries = sum(int(admin.xlen(key)) for key in stream_keys("zzol", "room", _SHARDS))
        if entries != rows:
            raise RuntimeError(f"{entries} entries stand there, of {rows}")
    admin.close()
    figures = {name: statistics.median(one[name] for one in found) for name in found[0]}
    figures["per_s"] = rows / figures["seconds"]
    report = Report(
        bench="memory",
        quick=quick,
        settings={**services.settings(engine), "rounds": rounds, "rows": rows, "aggregates": rows // 10,
                  "batch_rows": 500, "shards": _SHARDS},
        versions=services.versions(engine),
        variants={"worker": figures},
        descriptions=_DESCRIPTIONS,
        aims={"rss_growth_mib": Aim(max(one["rss_growth_mib"] for one in found), "at most", 50.0)},
        figures={"per_s": figures["per_s"]},
    )  # fmt: skip
    engine.dispose()
    return report


class _Resident:
    """Watches this process's resident set at the end of each batch, when the batch is still held."""

    def __init__(self) -> None:
        self.first = 0
        self.peak = 0

    def __call__(self, fact: Fact) -> None:
        if isinstance(fact, Settled):
            now = _resident()
            self.first = self.first or now
            self.peak = max(self.peak, now)


def _worker(pipe: Connection, number: int, database_url: str, redis_url: str) -> None:
    resident = _Resident()
    with Relay(database_url, redis_url=redis_url, worker=False, observers=[resident]) as relay:
        pipe.send("ready")
        pipe.recv()
        started = time.perf_counter()
        relay.run_once()
        seconds = time.perf_counter() - started
    pipe.send({
        "rss_growth_mib": (resident.peak - resident.first) / _MIB,
        "rss_first_mib": resident.first / _MIB,
        "rss_peak_mib": resident.peak / _MIB,
        # What the system has seen, start-up included: a peak between two looks shows here.
        "rss_highest_mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
        "seconds": seconds,
    })  # fmt: skip


def _resident() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


BENCH = Bench("memory", "how much a worker's memory grows over a long backlog", run)
