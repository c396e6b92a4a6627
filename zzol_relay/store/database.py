"""The relay's own small pool and its transactions.

The pool is derived from the user's engine: it opens connections through the same creator, so that TLS arguments and
token-based credentials survive, but shares none with the application; a busy application cannot starve the relay, nor
the relay the application (Z29).
"""

from __future__ import annotations

import logging
import random
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

from sqlalchemy import Connection, Engine, create_engine, event, make_url
from sqlalchemy.engine import URL
from sqlalchemy.exc import DBAPIError, SQLAlchemyError
from sqlalchemy.ext.asyncio import AsyncEngine
from sqlalchemy.pool import NullPool

from zzol_relay.core.errors import ConfigurationError, SchemaError
from zzol_relay.core.observer import DeadlockRetried, Fact
from zzol_relay.settings import Settings, mask_url
from zzol_relay.store.tables import Tables

__all__ = ["Database", "error_code", "is_missing_table", "is_retryable"]

_log = logging.getLogger("zzol_relay.store")

T = TypeVar("T")

_DEADLOCK = 1213
_LOCK_WAIT = 1205
_NO_TABLE = 1146
_RETRIES = 5
_MYSQL = ("mysql", "mariadb")


def error_code(error: BaseException) -> int | None:
    """The server's error number, where the driver gives one."""
    args = getattr(getattr(error, "orig", None), "args", ())
    return args[0] if args and isinstance(args[0], int) else None


def is_retryable(error: BaseException) -> bool:
    """Whether the whole transaction may simply run again: a deadlock's victim, a lock waited for too long, or
    SQLite's one writer."""
    if not isinstance(error, DBAPIError):
        return False
    return error_code(error) in (_DEADLOCK, _LOCK_WAIT) or "database is locked" in str(error.orig)


def is_missing_table(error: BaseException) -> bool:
    """Whether a table is not there."""
    return isinstance(error, DBAPIError) and (error_code(error) == _NO_TABLE or "no such table" in str(error.orig))


class Database:
    """Transactions of the relay's own, READ COMMITTED, on a pool of ``settings.database_pool`` connections.

    ``engine`` is the application's ``Engine`` or ``AsyncEngine``, or a URL. From an ``AsyncEngine`` only the URL can
    be taken over; where its ``connect_args`` matter, give the relay a synchronous engine with the same ones.
    Raises ``ConfigurationError`` for a database other than MySQL, MariaDB and a SQLite file.
    """

    def __init__(
        self,
        engine: Engine | AsyncEngine | str,
        settings: Settings,
        observe: Callable[[Fact], None] = lambda fact: None,
    ) -> None:
        self.tables = Tables(settings.table_prefix, settings.schema)
        self._observe = observe
        self._random = random.Random()
        self.source = engine.sync_engine if isinstance(engine, AsyncEngine) else engine
        url = make_url(self.source) if isinstance(self.source, str) else self.source.url
        self.is_sqlite = url.get_backend_name() == "sqlite"
        if not self.is_sqlite and url.get_backend_name() not in _MYSQL:
            raise ConfigurationError(
                f"the outbox needs MySQL 8.0+, MariaDB 10.6+ or a SQLite file, not {url.get_backend_name()!r}"
            )
        if self.is_sqlite and (url.database in (None, "", ":memory:") or "mode=memory" in str(url)):
            raise ConfigurationError("SQLite must be a file: the relay's threads need connections of their own")
        self.engine = self._derive(url, settings)

    def _derive(self, url: URL, settings: Settings) -> Engine:
        if self.is_sqlite:
            engine = create_engine(
                url.set(drivername="sqlite"),
                connect_args={"timeout": 15},
                poolclass=NullPool,
                hide_parameters=True,
            )
            event.listen(engine, "begin", _begin_immediate)
            event.listen(engine, "connect", _prepare_sqlite)
            return engine
        options: dict[str, Any] = {
            "isolation_level": "READ COMMITTED",
            "pool_size": settings.database_pool,
            "max_overflow": 0,
            "pool_timeout": settings.database_timeout,
            "pool_recycle": 1800,
            # What a failed statement was given must not stand in a log.
            "hide_parameters": True,
        }
        source = self.source
        if isinstance(source, Engine) and not source.dialect.is_async:
            pool = source.pool
            engine = create_engine(url, creator=lambda record: pool._invoke_creator(record), **options)
        else:
            sync_url = url.set(drivername="mysql+pymysql") if url.get_driver_name() != "pymysql" else url
            engine = create_engine(sync_url, connect_args={"connect_timeout": 5}, **options)

        def prepare(connection: Any, record: Any) -> None:
            # A server that hangs must not hang our loops: PyMySQL reads these at each call.
            for name in ("_read_timeout", "_write_timeout"):
                if getattr(connection, name, 0) is None:
                    setattr(connection, name, settings.database_timeout)
            with connection.cursor() as cursor:
                # The session's time zone and mode are the user's; on our own connections we set ours.
                cursor.execute(
                    "SET SESSION time_zone = '+00:00', sql_mode = 'STRICT_ALL_TABLES,NO_ENGINE_SUBSTITUTION',"
                    " innodb_lock_wait_timeout = 5, autocommit = 0"
                )

        event.listen(engine, "connect", prepare)
        return engine

    @property
    def url(self) -> URL:
        """The database's URL as the relay uses it; its ``str()`` masks the password."""
        return self.engine.url

    @contextmanager
    def begin(self) -> Iterator[Connection]:
        """One transaction on a connection of the relay's own; commits, or rolls back when the block raises."""
        with self.engine.begin() as connection:
            yield connection

    def run(self, operation: str, work: Callable[[Connection], T]) -> T:
        """Run ``work`` in a transaction; again, up to five times, when it was a deadlock's victim or waited too long.

        ``work`` must be safe to run again from its start. Never used inside the caller's transaction. Raises
        ``SchemaError`` where a table is missing, else what SQLAlchemy raised last.
        """
        for attempt in range(1, _RETRIES + 1):
            try:
                with self.engine.begin() as connection:
                    return work(connection)
            except SQLAlchemyError as error:
                if is_missing_table(error):
                    raise SchemaError(
                        f"the relay's tables are not in {mask_url(str(self.url))}; run 'zzol-relay migrate'"
                    ) from error
                if not is_retryable(error) or attempt == _RETRIES:
                    raise
                self._observe(DeadlockRetried(operation))
                _log.info(
                    "transaction runs again",
                    extra={"operation": operation, "attempt": attempt, "code": error_code(error)},
                )
                time.sleep(self._random.uniform(0.001, 0.01) * attempt)
        raise AssertionError("unreachable")

    def dispose(self) -> None:
        """Close the pool's idle connections."""
        self.engine.dispose()


def _prepare_sqlite(connection: Any, record: Any) -> None:
    connection.execute("PRAGMA journal_mode=WAL")
    connection.execute("PRAGMA synchronous=NORMAL")
    # The driver must not begin by itself, so that our own BEGIN IMMEDIATE is the one that counts.
    connection.isolation_level = None


def _begin_immediate(connection: Connection) -> None:
    # A deferred transaction that reads and then writes fails at once when another writer came between.
    connection.exec_driver_sql("BEGIN IMMEDIATE")
