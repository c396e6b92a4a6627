"""Many outbox rows at once, made by the database itself."""

from __future__ import annotations

import dataclasses
import secrets

from sqlalchemy import Engine, text

from zzol_relay.core.lifecycle import Status
from zzol_relay.store.tables import Tables

__all__ = ["Rows", "analyze", "fill"]

_PIECE = 100_000


@dataclasses.dataclass(frozen=True, slots=True)
class Rows:
    """``count`` rows in ``status``, in the streams of ``stream`` with ``shards`` shards, due ``age`` seconds ago.

    ``in_turn`` aggregates record in turn, ``each`` events apiece, then the next ones do; a negative ``age`` is a time
    to come. Published rows name no entry, so that nobody misses it in Redis. ``name`` begins the aggregates' ids, and
    so keeps two fills of one table apart.
    """

    count: int
    status: Status
    age: float
    in_turn: int
    each: int
    stream: str = "room"
    shards: int = 4
    name: str = "R"


def fill(engine: Engine, tables: Tables, rows: Rows) -> None:
    """Insert the rows, in due order, and the counters of their aggregates."""
    outbox, aggregate, prefix = tables.outbox.name, tables.aggregate.name, secrets.token_hex(8)
    insert = text(
        f"INSERT INTO {outbox} (event_id, stream_key, aggregate_type, aggregate_id, sequence, prev_sequence,"
        " event_type, schema_version, payload, occurred_at, status, retry_count, due_at, replays, created_at,"
        " updated_at, published_at)"
        # Ids in time order, as those of record() are.
        " SELECT UNHEX(CONCAT(:prefix, LPAD(HEX(n), 16, '0'))),"
        " CONCAT('zzol:{', :stream, ':', CRC32(room) MOD :shards, '}'), 'room', room, place + 1, place,"
        """ 'round.finished', 1, CONCAT('{"room":"', room, '","round":', place + 1, ',"winner":"ann"}'),"""
        " at, :status, 0, at, 0, at, at, IF(:published, at, NULL)"
        " FROM (SELECT n, (n MOD (:in_turn * :each)) DIV :in_turn AS place,"
        " CONCAT(:name, LPAD(n DIV (:in_turn * :each) * :in_turn + n MOD :in_turn, 8, '0')) AS room,"
        " :now + INTERVAL :age SECOND + INTERVAL n MICROSECOND AS at FROM"
        f" (SELECT :start + {' + '.join(f'{10**i} * d{i}.d' for i in range(5))} AS n FROM"
        f" {', '.join(f'{_DIGITS} d{i}' for i in range(5))}) numbers WHERE n < :stop ORDER BY n) made"
    )
    with engine.begin() as connection:
        now = connection.execute(text("SELECT UTC_TIMESTAMP(6)")).scalar_one()
    # Piece by piece: one transaction of a million rows would be undone for minutes if it were interrupted.
    for start in range(0, rows.count, _PIECE):
        with engine.begin() as connection:
            connection.execute(insert, {
                "prefix": prefix, "stream": rows.stream, "shards": rows.shards, "status": rows.status.value,
                "published": rows.status is Status.PUBLISHED, "in_turn": rows.in_turn, "each": rows.each,
                "name": rows.name, "now": now, "age": -rows.age, "start": start,
                "stop": min(rows.count, start + _PIECE),
            })  # fmt: skip
    with engine.begin() as connection:
        connection.execute(
            text(
                f"INSERT INTO {aggregate} SELECT :stream, aggregate_type, aggregate_id, MAX(sequence) FROM {outbox}"
                " WHERE aggregate_id LIKE :like GROUP BY aggregate_type, aggregate_id"
            ),
            {"stream": rows.stream, "like": f"{rows.name}%"},
        )


def analyze(engine: Engine, tables: Tables) -> None:
    """Let the server know the table as it is now, so that nobody reads with the statistics of an empty one."""
    with engine.connect() as connection:
        connection.execute(text(f"ANALYZE TABLE {tables.outbox.name}")).all()


_DIGITS = "(SELECT 0 AS d UNION ALL " + " UNION ALL ".join(f"SELECT {d}" for d in range(1, 10)) + ")"
