"""The outbox, its aggregates, and the tables of the relay's upkeep.

May be run again after it was cut short: MySQL commits each statement by itself.
"""

from __future__ import annotations

from typing import Any

import sqlalchemy as sa
from alembic import context, op
from sqlalchemy.dialects import mysql

revision = "0001"
down_revision = None
branch_labels = None
depends_on = None

OPTIONS: dict[str, Any] = {
    "mysql_engine": "InnoDB",
    "mysql_charset": "utf8mb4",
    "mariadb_engine": "InnoDB",
    "mariadb_charset": "utf8mb4",
}


def big_id() -> Any:
    return sa.BigInteger().with_variant(sa.Integer(), "sqlite")


def moment() -> Any:
    return sa.DateTime().with_variant(mysql.DATETIME(fsp=6), "mysql", "mariadb")


def ascii_name(length: int) -> Any:
    binary = mysql.VARCHAR(length, charset="ascii", collation="ascii_bin")
    return sa.String(length).with_variant(binary, "mysql", "mariadb")


def unicode_name(length: int) -> Any:
    binary = mysql.VARCHAR(length, charset="utf8mb4", collation="utf8mb4_bin")
    return sa.String(length).with_variant(binary, "mysql", "mariadb")


def blob() -> Any:
    return sa.LargeBinary().with_variant(mysql.MEDIUMBLOB(), "mysql", "mariadb")


def token() -> Any:
    return sa.LargeBinary(16).with_variant(mysql.BINARY(16), "mysql", "mariadb")


def create_index(name: str, table: str, columns: list[str], schema: str | None) -> None:
    # MySQL has no CREATE INDEX IF NOT EXISTS.
    if not context.is_offline_mode():
        there = sa.inspect(op.get_bind()).get_indexes(table, schema=schema)
        if any(index["name"] == name for index in there):
            return
    op.create_index(name, table, columns, schema=schema)


def upgrade() -> None:
    prefix: str = context.config.attributes["prefix"]
    schema: str | None = context.config.attributes["schema"]

    outbox = f"{prefix}outbox_event"
    op.create_table(
        outbox,
        sa.Column("id", big_id(), primary_key=True, autoincrement=True),
        sa.Column("event_id", token(), nullable=False),
        sa.Column("stream_key", ascii_name(128), nullable=False),
        sa.Column("aggregate_type", ascii_name(64)),
        sa.Column("aggregate_id", unicode_name(128)),
        sa.Column("sequence", sa.BigInteger()),
        sa.Column("prev_sequence", sa.BigInteger()),
        sa.Column("event_type", ascii_name(128), nullable=False),
        sa.Column("schema_version", sa.Integer(), nullable=False),
        sa.Column("payload", blob(), nullable=False),
        sa.Column("correlation_id", unicode_name(128)),
        sa.Column("causation_id", unicode_name(128)),
        sa.Column("traceparent", ascii_name(64)),
        sa.Column("occurred_at", moment(), nullable=False),
        sa.Column(
            "status",
            sa.Enum(
                "PENDING",
                "IN_PROGRESS",
                "PUBLISHED",
                "DEAD_LETTER",
                "DISCARDED",
                name="outbox_status",
                create_constraint=False,
            ),
            nullable=False,
        ),
        sa.Column("retry_count", sa.SmallInteger(), nullable=False),
        sa.Column("last_error", unicode_name(500)),
        sa.Column("due_at", moment(), nullable=False),
        sa.Column("claim_token", token()),
        sa.Column("claimed_by", unicode_name(64)),
        sa.Column("replays", sa.SmallInteger(), nullable=False),
        sa.Column("created_at", moment(), nullable=False),
        sa.Column("updated_at", moment(), nullable=False),
        sa.Column("published_at", moment()),
        sa.Column("stream_entry_id", ascii_name(41)),
        sa.UniqueConstraint("event_id", name=f"uq_{outbox}_event_id"),
        sa.UniqueConstraint("stream_key", "aggregate_type", "aggregate_id", "sequence", name=f"uq_{outbox}_sequence"),
        schema=schema,
        if_not_exists=True,
        **OPTIONS,
    )
    create_index(f"ix_{outbox}_due", outbox, ["status", "due_at", "id"], schema)

    op.create_table(
        f"{prefix}outbox_aggregate",
        sa.Column("stream", ascii_name(64), nullable=False),
        sa.Column("aggregate_type", ascii_name(64), nullable=False),
        sa.Column("aggregate_id", unicode_name(128), nullable=False),
        sa.Column("last_sequence", sa.BigInteger(), nullable=False),
        sa.PrimaryKeyConstraint("stream", "aggregate_type", "aggregate_id"),
        schema=schema,
        if_not_exists=True,
        **OPTIONS,
    )

    op.create_table(
        f"{prefix}relay_instance",
        sa.Column("instance_id", token(), primary_key=True),
        sa.Column("name", unicode_name(64), nullable=False),
        sa.Column("version", ascii_name(32), nullable=False),
        sa.Column("role", ascii_name(16), nullable=False),
        sa.Column("circuit", ascii_name(8), nullable=False),
        sa.Column("counters", blob(), nullable=False),
        sa.Column("started_at", moment(), nullable=False),
        sa.Column("beat_at", moment(), nullable=False),
        schema=schema,
        if_not_exists=True,
        **OPTIONS,
    )

    op.create_table(
        f"{prefix}relay_duty",
        sa.Column("name", ascii_name(32), primary_key=True),
        sa.Column("holder", token()),
        sa.Column("lease_until", moment()),
        sa.Column("last_run_at", moment()),
        schema=schema,
        if_not_exists=True,
        **OPTIONS,
    )

    audit = f"{prefix}relay_audit"
    op.create_table(
        audit,
        sa.Column("id", big_id(), primary_key=True, autoincrement=True),
        sa.Column("at", moment(), nullable=False),
        sa.Column("actor", unicode_name(128), nullable=False),
        sa.Column("action", ascii_name(32), nullable=False),
        sa.Column("affected", sa.Integer(), nullable=False),
        sa.Column("detail", blob(), nullable=False),
        schema=schema,
        if_not_exists=True,
        **OPTIONS,
    )
    create_index(f"ix_{audit}_at", audit, ["at"], schema)
