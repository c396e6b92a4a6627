"""The database's clock in SQL: UTC, microseconds, whatever the session's time zone.

MySQL and MariaDB are the default; SQLite, the stand-in, has millisecond clocks and its own spelling.
"""

from __future__ import annotations

from typing import Any

from sqlalchemy import BigInteger, DateTime, Float, Integer, LargeBinary, String
from sqlalchemy.dialects import mysql
from sqlalchemy.ext.compiler import compiles
from sqlalchemy.sql.functions import FunctionElement
from sqlalchemy.types import TypeEngine

__all__ = ["ascii_name", "big_id", "blob", "moment", "seconds_since", "token", "unicode_name", "utc_after", "utc_now"]


class utc_now(FunctionElement[Any]):  # noqa: N801 - reads as SQL
    """The database's present time."""

    type = DateTime()
    inherit_cache = True


class utc_after(FunctionElement[Any]):  # noqa: N801
    """The database's present time plus the given microseconds (an integer expression; may be negative)."""

    type = DateTime()
    inherit_cache = True


class seconds_since(FunctionElement[Any]):  # noqa: N801
    """Seconds from the given time to now, a float."""

    type = Float()
    inherit_cache = True


@compiles(utc_now)
def _now(element: utc_now, compiler: Any, **kw: Any) -> str:
    return "UTC_TIMESTAMP(6)"


@compiles(utc_now, "sqlite")
def _now_sqlite(element: utc_now, compiler: Any, **kw: Any) -> str:
    return "(strftime('%Y-%m-%d %H:%M:%f', 'now') || '000')"


@compiles(utc_after)
def _after(element: utc_after, compiler: Any, **kw: Any) -> str:
    return f"(UTC_TIMESTAMP(6) + INTERVAL {compiler.process(element.clauses, **kw)} MICROSECOND)"


@compiles(utc_after, "sqlite")
def _after_sqlite(element: utc_after, compiler: Any, **kw: Any) -> str:
    micros = compiler.process(element.clauses, **kw)
    return f"(strftime('%Y-%m-%d %H:%M:%f', 'now', (({micros}) / 1000000.0) || ' seconds') || '000')"


@compiles(seconds_since)
def _since(element: seconds_since, compiler: Any, **kw: Any) -> str:
    return f"(TIMESTAMPDIFF(MICROSECOND, {compiler.process(element.clauses, **kw)}, UTC_TIMESTAMP(6)) / 1e6)"


@compiles(seconds_since, "sqlite")
def _since_sqlite(element: seconds_since, compiler: Any, **kw: Any) -> str:
    return f"((julianday('now') - julianday({compiler.process(element.clauses, **kw)})) * 86400.0)"


def big_id() -> TypeEngine[int]:
    """A 64-bit key; SQLite auto-increments INTEGER only."""
    return BigInteger().with_variant(Integer(), "sqlite")


def moment() -> TypeEngine[Any]:
    """A UTC time to the microsecond."""
    return DateTime().with_variant(mysql.DATETIME(fsp=6), "mysql", "mariadb")


def ascii_name(length: int) -> TypeEngine[str]:
    """A name compared byte by byte, one byte a character."""
    return String(length).with_variant(
        mysql.VARCHAR(length, charset="ascii", collation="ascii_bin"), "mysql", "mariadb"
    )


def unicode_name(length: int) -> TypeEngine[str]:
    """Any text compared byte by byte; ``utf8mb4``, whatever the server's default."""
    return String(length).with_variant(
        mysql.VARCHAR(length, charset="utf8mb4", collation="utf8mb4_bin"), "mysql", "mariadb"
    )


def blob() -> TypeEngine[bytes]:
    """Up to 16 MiB; MySQL's TEXT and BLOB would cut at 64 KiB."""
    return LargeBinary().with_variant(mysql.MEDIUMBLOB(), "mysql", "mariadb")


def token() -> TypeEngine[bytes]:
    """16 raw bytes: an event id, a claim token, an instance id."""
    return LargeBinary(16).with_variant(mysql.BINARY(16), "mysql", "mariadb")
