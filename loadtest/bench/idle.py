"""What a poll costs that finds nothing, and how that grows with the table: ``python -m loadtest bench idle``."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

from sqlalchemy import Engine

from loadtest.bench.fill import Rows, analyze, fill
from loadtest.bench.harness import Bench, interleave, median_ratio, percentile
from loadtest.bench.report import Aim, Report
from loadtest.bench.services import Services, create_outbox
from zzol_relay import Settings
from zzol_relay.core.lifecycle import Status
from zzol_relay.store.claims import ClaimStore
from zzol_relay.store.database import Database

__all__ = ["BENCH"]

_SMALLER = 10
_DESCRIPTIONS = {
    "large": "an empty claim and its commit, beside all the rows",
    "small": f"the same beside a table {_SMALLER} times smaller",
}


def _polls(engine: Engine, prefix: str, published: int, waiting: int, count: int) -> Callable[[], list[float]]:
    """Fill tables of their own, and return what measures: milliseconds of each of ``count`` empty polls."""
    tables = create_outbox(engine, prefix)
    fill(engine, tables, Rows(published, Status.PUBLISHED, age=3600.0, in_turn=1000, each=10, name="P"))
    # In backoff for a day: they stand in the poller's own range of the index.
    fill(engine, tables, Rows(waiting, Status.PENDING, age=-86_400.0, in_turn=1000, each=10, name="W"))
    analyze(engine, tables)
    settings = Settings.load(table_prefix=prefix)
    claims = ClaimStore(Database(engine, settings), settings, "idle")

    def measure() -> list[float]:
        clock = time.perf_counter
        times = []
        for _ in range(count):
            started = clock()
            claim = claims.claim()
            times.append((clock() - started) * 1000)
            if claim.rows:
                raise RuntimeError(f"{len(claim.rows)} rows were due")
        return times

    return measure


def run(services: Services, quick: bool, rounds: int) -> Report:
    """Milliseconds of an empty claim with its commit, as the poller's thread waits for it."""
    rounds = rounds or (2 if quick else 20)
    published, waiting, count = (2_000, 1_000, 20) if quick else (1_000_000, 300_000, 200)
    engine = services.engine()
    samples = interleave(
        {
            "large": _polls(engine, "zzol_large_", published, waiting, count),
            "small": _polls(engine, "zzol_small_", published // _SMALLER, waiting // _SMALLER, count),
        },
        rounds=rounds,
    )
    medians = {name: [statistics.median(times) for times in each] for name, each in samples.items()}
    report = Report(
        bench="idle",
        quick=quick,
        settings={
            **services.settings(engine),
            "rounds": rounds,
            "polls_per_round": count,
            "published_rows": published,
            "waiting_rows": waiting,
            "smaller": _SMALLER,
        },
        versions=services.versions(engine),
        variants={
            name: {
                "median_ms": statistics.median(medians[name]),
                "p99_ms": percentile([value for times in each for value in times], 0.99),
            }
            for name, each in samples.items()
        },
        descriptions=_DESCRIPTIONS,
        aims={
            "median_ms": Aim(statistics.median(medians["large"]), "at most", 1.0),
            "growth": Aim(median_ratio(medians["large"], medians["small"]), "at most", 1.5),
        },
    )
    engine.dispose()
    return report


BENCH = Bench("idle", "what a poll costs that finds nothing", run)
