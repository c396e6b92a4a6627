"""The relay's tables (Z8, G4, S5). ``migrations/relay`` creates the same; a test proves it.

All times are the database's clock, UTC, microseconds. No row is ever claimed, settled or recovered by its age in
``created_at``: that serves retention and metrics alone (Z10).
"""

from __future__ import annotations

from typing import Any, TypeVar

from sqlalchemy import (
    BigInteger,
    Column,
    Enum,
    Index,
    Integer,
    MetaData,
    PrimaryKeyConstraint,
    Select,
    SmallInteger,
    Table,
    UniqueConstraint,
)

from zzol_relay.core.events import MAX_AGGREGATE_ID, MAX_NAME, MAX_TYPE
from zzol_relay.core.lifecycle import Status
from zzol_relay.store.dialect import ascii_name, big_id, blob, moment, token, unicode_name

T = TypeVar("T", bound=tuple[Any, ...])

__all__ = ["MAX_ERROR", "Tables"]

MAX_ERROR = 500
"""Characters of ``last_error`` that are kept."""

_OPTIONS: dict[str, Any] = {
    "mysql_engine": "InnoDB",
    "mysql_charset": "utf8mb4",
    "mariadb_engine": "InnoDB",
    "mariadb_charset": "utf8mb4",
}


class Tables:
    """The tables under one prefix and schema."""

    def __init__(self, prefix: str, schema: str | None) -> None:
        self.prefix = prefix
        self.schema = schema
        self.metadata = MetaData(schema=schema)
        self.outbox = self._outbox()
        self.aggregate = self._aggregate()
        self.instance = self._instance()
        self.duty = self._duty()
        self.audit = self._audit()

    def by_due(self, statement: Select[T]) -> Select[T]:
        """Make a query of the outbox read its one index, in ``(due_at, id)`` order.

        Without the hint a server picks no index on a tiny table, and a locking read then locks every row of it.
        """
        hint = f"FORCE INDEX (ix_{self.outbox.name}_due)"
        statement = statement.order_by(self.outbox.c.due_at, self.outbox.c.id)
        return statement.with_hint(self.outbox, hint, "mysql").with_hint(self.outbox, hint, "mariadb")

    def _outbox(self) -> Table:
        name = f"{self.prefix}outbox_event"
        return Table(
            name,
            self.metadata,
            Column("id", big_id(), primary_key=True, autoincrement=True),
            Column("event_id", token(), nullable=False),
            # The Redis key itself: a worker needs no configuration to know where a row goes, and the key leads back
            # to its logical stream (Z26).
            Column("stream_key", ascii_name(128), nullable=False),
            Column("aggregate_type", ascii_name(MAX_NAME)),
            Column("aggregate_id", unicode_name(MAX_AGGREGATE_ID)),
            Column("sequence", BigInteger),
            Column("prev_sequence", BigInteger),
            Column("event_type", ascii_name(MAX_TYPE), nullable=False),
            Column("schema_version", Integer, nullable=False),
            Column("payload", blob(), nullable=False),
            Column("correlation_id", unicode_name(MAX_TYPE)),
            Column("causation_id", unicode_name(MAX_TYPE)),
            Column("traceparent", ascii_name(64)),
            Column("occurred_at", moment(), nullable=False),
            Column(
                "status",
                Enum(*[status.value for status in Status], name="outbox_status", create_constraint=False),
                nullable=False,
            ),
            Column("retry_count", SmallInteger, nullable=False),
            Column("last_error", unicode_name(MAX_ERROR)),
            Column("due_at", moment(), nullable=False),
            Column("claim_token", token()),
            Column("claimed_by", unicode_name(64)),
            Column("replays", SmallInteger, nullable=False),
            Column("created_at", moment(), nullable=False),
            Column("updated_at", moment(), nullable=False),
            Column("published_at", moment()),
            Column("stream_entry_id", ascii_name(41)),
            UniqueConstraint("event_id", name=f"uq_{name}_event_id"),
            UniqueConstraint("stream_key", "aggregate_type", "aggregate_id", "sequence", name=f"uq_{name}_sequence"),
            # One index carries claim, recovery and cleanup, each reading it in its own order. Read ORDER BY id, the
            # claim would sort or crawl over every row in backoff (240-460 ms at 300,000 instead of 0.15).
            Index(f"ix_{name}_due", "status", "due_at", "id"),
            **_OPTIONS,
        )

    def _aggregate(self) -> Table:
        name = f"{self.prefix}outbox_aggregate"
        return Table(
            name,
            self.metadata,
            Column("stream", ascii_name(MAX_NAME), nullable=False),
            Column("aggregate_type", ascii_name(MAX_NAME), nullable=False),
            Column("aggregate_id", unicode_name(MAX_AGGREGATE_ID), nullable=False),
            Column("last_sequence", BigInteger, nullable=False),
            PrimaryKeyConstraint("stream", "aggregate_type", "aggregate_id"),
            **_OPTIONS,
        )

    def _instance(self) -> Table:
        return Table(
            f"{self.prefix}relay_instance",
            self.metadata,
            Column("instance_id", token(), primary_key=True),
            Column("name", unicode_name(64), nullable=False),
            Column("version", ascii_name(32), nullable=False),
            Column("role", ascii_name(16), nullable=False),
            Column("circuit", ascii_name(8), nullable=False),
            Column("counters", blob(), nullable=False),
            Column("started_at", moment(), nullable=False),
            Column("beat_at", moment(), nullable=False),
            **_OPTIONS,
        )

    def _duty(self) -> Table:
        return Table(
            f"{self.prefix}relay_duty",
            self.metadata,
            Column("name", ascii_name(32), primary_key=True),
            Column("holder", token()),
            Column("lease_until", moment()),
            Column("last_run_at", moment()),
            **_OPTIONS,
        )

    def _audit(self) -> Table:
        name = f"{self.prefix}relay_audit"
        return Table(
            name,
            self.metadata,
            Column("id", big_id(), primary_key=True, autoincrement=True),
            Column("at", moment(), nullable=False),
            Column("actor", unicode_name(128), nullable=False),
            Column("action", ascii_name(32), nullable=False),
            Column("affected", Integer, nullable=False),
            Column("detail", blob(), nullable=False),
            Index(f"ix_{name}_at", "at"),
            **_OPTIONS,
        )
