"""How fast one worker empties a backlog: ``python -m loadtest bench drain``."""

from __future__ import annotations

import itertools
import statistics
import time
import uuid
from collections.abc import Iterator
from datetime import datetime, timedelta
from typing import Any

import orjson
import pymysql
import redis
from sqlalchemy import Engine, create_engine, text

from loadtest.bench.harness import Bench, interleave, median_ratio
from loadtest.bench.report import Aim, Report
from loadtest.bench.services import Services, create_outbox
from zzol_relay import Relay, Settings, Stream
from zzol_relay.store.tables import Tables
from zzol_relay.streams.keys import shard_of, stream_key

__all__ = ["BENCH"]

_BATCH = 500
_SHARDS = 4
_SEQUENCES = 10
_ROOMS_AT_A_TIME = 100
_DESCRIPTIONS = {
    "bare": "PyMySQL and one redis-py pipeline: claim, XADDs, mark; no order, no dedup, no token",
    "relay": "Relay.run_once(): order proven, dedup script, fenced settle",
}


class _Backlog:
    """Due PENDING rows as an outage leaves them; ``reset`` puts all of them back.

    ``_ROOMS_AT_A_TIME`` rooms play at the same time and record in turn, ``_SEQUENCES`` events each; then the next
    ones. The rows are made once and copied from a table beside.
    """

    def __init__(self, engine: Engine, tables: Tables, rows: int) -> None:
        self._engine = engine
        self._outbox = tables.outbox.name
        self._aggregate = tables.aggregate.name
        self._saved = f"{self._outbox}_saved"
        self.rows = rows
        self._fill(tables)

    def reset(self) -> None:
        """Put every row back as it was at first."""
        with self._engine.begin() as connection:
            connection.execute(text(f"TRUNCATE TABLE {self._outbox}"))
            connection.execute(text(f"INSERT INTO {self._outbox} SELECT * FROM {self._saved} ORDER BY id"))
        with self._engine.connect() as connection:
            # So that neither side reads with the statistics of the empty table.
            connection.execute(text(f"ANALYZE TABLE {self._outbox}"))

    def unpublished(self) -> int:
        """How many rows are left."""
        with self._engine.connect() as connection:
            statement = text(f"SELECT COUNT(*) FROM {self._outbox} WHERE status <> 'PUBLISHED'")
            return int(connection.execute(statement).scalar_one())

    def _fill(self, tables: Tables) -> None:
        with self._engine.begin() as connection:
            for chunk in _chunks(self._rows(), 2000):
                connection.execute(tables.outbox.insert(), chunk)
            connection.execute(text(
                f"INSERT INTO {self._aggregate} SELECT 'room', aggregate_type, aggregate_id, MAX(sequence)"
                f" FROM {self._outbox} GROUP BY aggregate_type, aggregate_id"
            ))  # fmt: skip
        with self._engine.begin() as connection:
            connection.execute(text(f"CREATE TABLE {self._saved} LIKE {self._outbox}"))
            connection.execute(text(f"INSERT INTO {self._saved} SELECT * FROM {self._outbox} ORDER BY id"))

    def _rows(self) -> Iterator[dict[str, Any]]:
        with self._engine.connect() as connection:
            begun = connection.execute(text("SELECT UTC_TIMESTAMP(6) - INTERVAL 60 SECOND")).scalar_one()
        assert isinstance(begun, datetime)
        recorder = uuid.uuid4().bytes
        for number in range(self.rows):
            block, within = divmod(number, _ROOMS_AT_A_TIME * _SEQUENCES)
            sequence, place = divmod(within, _ROOMS_AT_A_TIME)
            room = f"R{block * _ROOMS_AT_A_TIME + place:08d}"
            at = begun + timedelta(microseconds=number)
            data = {"room": room, "round": sequence + 1, "game": "racing", "winner": "ann", "points": [30, 20, 10]}
            yield {
                "event_id": uuid.uuid4().bytes,
                "stream_key": stream_key("zzol", "room", shard_of(room, _SHARDS)),
                "aggregate_type": "room",
                "aggregate_id": room,
                "sequence": sequence + 1,
                "prev_sequence": sequence,
                "event_type": "round.finished",
                "schema_version": 1,
                "payload": orjson.dumps(data),
                "occurred_at": at,
                "status": "PENDING",
                "retry_count": 0,
                "replays": 0,
                # As record() leaves a row whose process is gone: born leased to it.
                "claimed_by": "game-7d9f8b6c5-x2x4v:1",
                "due_at": at + timedelta(seconds=2),
                "claim_token": recorder,
                "created_at": at,
                "updated_at": at,
            }


class _Bare:
    """The least a poller can do that claims, publishes and marks in batches."""

    def __init__(self, database_url: str, redis_url: str, outbox: str) -> None:
        # SQLAlchemy opens the connection, since it reads the URL; all else is PyMySQL's.
        self._engine = create_engine(database_url, isolation_level="READ COMMITTED")
        self._pooled = self._engine.raw_connection()
        connection = self._pooled.driver_connection
        assert isinstance(connection, pymysql.Connection)
        self._connection = connection
        self._client = redis.Redis.from_url(redis_url)
        self._claim = (
            "SELECT id, event_id, stream_key, event_type, aggregate_type, aggregate_id, sequence, occurred_at, payload"
            f" FROM {outbox} WHERE status = 'PENDING' AND due_at <= UTC_TIMESTAMP(6) ORDER BY due_at, id"
            f" LIMIT {_BATCH} FOR UPDATE SKIP LOCKED"
        )
        self._hold = (
            f"UPDATE {outbox} SET status = 'IN_PROGRESS', due_at = UTC_TIMESTAMP(6) + INTERVAL 30 SECOND,"
            " updated_at = UTC_TIMESTAMP(6) WHERE id IN ({})"
        )
        self._settle = (
            f"UPDATE {outbox} SET status = 'PUBLISHED', due_at = UTC_TIMESTAMP(6), updated_at = UTC_TIMESTAMP(6),"
            " published_at = UTC_TIMESTAMP(6) WHERE id IN ({})"
        )

    def drain(self) -> None:
        """Publish until nothing is due."""
        connection = self._connection
        while True:
            with connection.cursor() as cursor:
                cursor.execute(self._claim)
                rows = cursor.fetchall()
                ids = ",".join(str(row[0]) for row in rows)
                if rows:
                    cursor.execute(self._hold.format(ids))
            connection.commit()
            if not rows:
                return
            pipeline = self._client.pipeline(transaction=False)
            for _, event_id, key, type_, aggregate_type, aggregate_id, sequence, occurred_at, payload in rows:
                fields: dict[Any, Any] = {
                    "id": str(uuid.UUID(bytes=event_id)),
                    "type": type_,
                    "subject": f"{aggregate_type}/{aggregate_id}",
                    "sequence": sequence,
                    "time": occurred_at.isoformat(),
                    "data": payload,
                }
                pipeline.xadd(key, fields)
            pipeline.execute()
            with connection.cursor() as cursor:
                cursor.execute(self._settle.format(ids))
            connection.commit()

    def close(self) -> None:
        """Close both connections."""
        self._pooled.close()
        self._engine.dispose()
        self._client.close()


def run(services: Services, quick: bool, rounds: int) -> Report:
    """Rows a second, drained by one worker."""
    rounds = rounds or (1 if quick else 7)
    engine = services.engine()
    tables = create_outbox(engine, "zzol_")
    backlog = _Backlog(engine, tables, 2_000 if quick else 50_000)
    bare = _Bare(services.database_url, services.redis_url, tables.outbox.name)
    admin = redis.Redis.from_url(services.redis_url)
    settings = Settings.load(redis_url=services.redis_url, batch_rows=_BATCH)

    def prepare() -> None:
        backlog.reset()
        admin.flushdb()

    def bare_rate() -> float:
        prepare()
        started = time.perf_counter()
        bare.drain()
        return _rate(started)

    def relay_rate() -> float:
        prepare()
        # Started, as a worker's process is, so that the shards' epochs are known; its own poller is off.
        with Relay(engine, [Stream(name="room", shards=_SHARDS)], settings=settings, worker=False) as relay:
            started = time.perf_counter()
            relay.run_once()
            return _rate(started)

    def _rate(started: float) -> float:
        rate = backlog.rows / (time.perf_counter() - started)
        left = backlog.unpublished()
        entries = sum(int(admin.xlen(stream_key("zzol", "room", shard))) for shard in range(_SHARDS))
        if left or entries != backlog.rows:
            raise RuntimeError(f"{left} rows are left and {entries} entries stand there, of {backlog.rows}")
        return rate

    rates = interleave({"bare": bare_rate, "relay": relay_rate}, rounds=rounds, warmup=0 if quick else 1)
    bare.close()
    admin.close()
    report = Report(
        bench="drain",
        quick=quick,
        settings={
            **services.settings(engine),
            "rounds": rounds,
            "rows": backlog.rows,
            "aggregates": backlog.rows // _SEQUENCES,
            "sequences_per_aggregate": _SEQUENCES,
            "aggregates_in_turn": _ROOMS_AT_A_TIME,
            "batch_rows": _BATCH,
            "shards": _SHARDS,
            "fields_of_bare_entry": 6,
        },
        versions=services.versions(engine),
        variants={
            name: {
                "per_s": statistics.median(values),
                "us_per_row": 1e6 / statistics.median(values),
                "least_per_s": min(values),
                "most_per_s": max(values),
            }
            for name, values in rates.items()
        },
        descriptions=_DESCRIPTIONS,
        aims={"ratio_to_bare": Aim(median_ratio(rates["relay"], rates["bare"]), "at least", 0.8)},
        figures={"per_s": statistics.median(rates["relay"]), "bare_per_s": statistics.median(rates["bare"])},
    )
    engine.dispose()
    return report


def _chunks(rows: Iterator[dict[str, Any]], size: int) -> Iterator[list[dict[str, Any]]]:
    while chunk := list(itertools.islice(rows, size)):
        yield chunk


BENCH = Bench("drain", "how fast one worker empties a backlog", run)
