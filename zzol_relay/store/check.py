"""Reading what ``zzol-relay check`` judges of the database; changes nothing."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from datetime import UTC, datetime
from typing import Any

from sqlalchemy import Connection, Table, delete, false, insert, literal, select, text, update
from sqlalchemy.exc import DBAPIError, SQLAlchemyError

from zzol_relay.core.checks import DatabaseFacts
from zzol_relay.core.errors import RelayError, SchemaError
from zzol_relay.settings import Settings, mask_url
from zzol_relay.store.database import Database, is_missing_table
from zzol_relay.store.dialect import utc_now
from zzol_relay.store.gauges import GaugeStore
from zzol_relay.store.migrate import current_revision, head_revision, schema_fits

__all__ = ["read_database"]

_DENIED = (1142, 1143, 1044, 1227)
_VARIABLES = (
    "transaction_isolation", "tx_isolation", "log_bin", "binlog_format", "read_only", "super_read_only",
    "innodb_read_only", "innodb_flush_log_at_trx_commit", "max_allowed_packet",
)  # fmt: skip


def read_database(settings: Settings) -> DatabaseFacts:
    """The facts of the database at ``settings.database_url``, asked as the relay would ask; never raises for what the
    database does."""
    database = Database(settings.database_url, settings)
    try:
        return _read(database, settings)
    except (SQLAlchemyError, RelayError, RuntimeError) as error:
        # PyMySQL raises a RuntimeError where MySQL 8's logins need the cryptography package.
        return DatabaseFacts(error=_told(error))
    finally:
        database.dispose()


def _read(database: Database, settings: Settings) -> DatabaseFacts:
    with database.engine.connect() as connection:
        ahead = _clock_ahead(connection)
        if database.is_sqlite:
            version, variables = str(connection.exec_driver_sql("SELECT sqlite_version()").scalar()), {}
        else:
            version, variables = str(connection.execute(text("SELECT VERSION()")).scalar()), _variables(connection)
    fault = _schema_fault(database)
    denied = tuple(_denied(database)) if fault is None else ()
    packet = variables.get("max_allowed_packet")
    return DatabaseFacts(
        sqlite=database.is_sqlite,
        version=version,
        isolation=variables.get("transaction_isolation", variables.get("tx_isolation")),
        log_bin=_is_on(variables, "log_bin"),
        binlog_format=variables.get("binlog_format"),
        read_only=any(_is_on(variables, name) for name in ("read_only", "super_read_only", "innodb_read_only")),
        flush_at_commit=variables.get("innodb_flush_log_at_trx_commit"),
        max_packet=None if packet is None else int(packet),
        clock_ahead=ahead,
        revision=current_revision(settings.database_url, settings),
        head=head_revision(),
        schema_fits=schema_fits(settings.database_url, settings),
        schema_fault=fault,
        denied=denied,
    )


def _variables(connection: Connection) -> dict[str, str]:
    statement = text("SHOW VARIABLES WHERE Variable_name IN :names").bindparams(names=_VARIABLES)
    return {str(name).lower(): str(value) for name, value in connection.execute(statement)}


def _is_on(variables: Mapping[str, str], name: str) -> bool:
    # MariaDB's read_only has further values that say ON, each stricter than the last.
    return variables.get(name, "OFF").upper() not in ("OFF", "0")


def _clock_ahead(connection: Connection) -> float:
    """The server's clock less ours, by the fastest of three questions."""
    measured = []
    for _ in range(3):
        asked = time.time()
        told: datetime = connection.execute(select(utc_now())).scalar_one()
        answered = time.time()
        measured.append((answered - asked, told.replace(tzinfo=UTC).timestamp() - (asked + answered) / 2))
    return min(measured)[1]


def _schema_fault(database: Database) -> str | None:
    try:
        return GaugeStore(database).schema_fault()
    except DBAPIError as error:
        if _code(error) in _DENIED:
            # They may well be there: the privileges will tell.
            return None
        raise


def _denied(database: Database) -> Iterator[str]:
    """What the relay may not do to its tables. Each statement is tried on no row, and rolled back."""
    for table in database.tables.metadata.sorted_tables:
        for name, statement in _tries(table):
            with database.engine.connect() as connection:
                try:
                    connection.execute(statement)
                except DBAPIError as error:
                    if _code(error) not in _DENIED and not is_missing_table(error):
                        raise
                    yield f"{name} on {table.name}"


def _tries(table: Table) -> Iterator[tuple[str, Any]]:
    columns = list(table.columns)
    yield "SELECT", select(*columns).where(false())
    yield "INSERT", insert(table).from_select(columns, select(*(literal(None) for _ in columns)).where(false()))
    yield "UPDATE", update(table).values({columns[-1]: columns[-1]}).where(false())
    yield "DELETE", delete(table).where(false())


def _code(error: DBAPIError) -> int | None:
    args: tuple[Any, ...] = getattr(error.orig, "args", ())
    return args[0] if args and isinstance(args[0], int) else None


def _told(error: Exception) -> str:
    if isinstance(error, SchemaError | RelayError):
        return mask_url(str(error))
    args: tuple[Any, ...] = getattr(getattr(error, "orig", error), "args", ())
    line = f"{args[1]} ({args[0]})" if len(args) == 2 else str(error)
    return mask_url(" ".join(line.split()))
