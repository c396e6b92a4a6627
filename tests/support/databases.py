"""The session's database servers, and a clean database for each test."""

from __future__ import annotations

import re
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from sqlalchemy import Connection, Engine, create_engine, text
from sqlalchemy.exc import SQLAlchemyError
from sqlalchemy.pool import NullPool

from tests.support.mysql9 import ChrootMySQL, why_not
from zzol_relay.core.errors import EmbeddedServiceError
from zzol_relay.embedded import DatabaseServer
from zzol_relay.store.tables import Tables

__all__ = ["Databases"]

_MANY = 1000


class Databases:
    """One server of each kind, started when first asked for; ``mysql_root`` is the tree with MySQL 9.

    A database with the relay's tables is kept per server and emptied for the next test: that takes 15 ms, making one
    200. It is replaced when a test has changed anything but rows in it, or left so many that they could show in the
    statistics of the next test's plans.
    """

    def __init__(self, mysql_root: Path) -> None:
        self._mysql_root = mysql_root
        self._servers: dict[str, DatabaseServer] = {}
        self._failures: dict[str, EmbeddedServiceError] = {}
        self._kept: dict[str, tuple[str, list[str]]] = {}

    def server(self, kind: str) -> DatabaseServer:
        """The running server of a kind; one that was killed or frozen runs again. Raises ``EmbeddedServiceError``."""
        if kind in self._failures:
            raise self._failures[kind]
        if kind not in self._servers:
            try:
                self._servers[kind] = self._make(kind).start()
            except EmbeddedServiceError as error:
                self._failures[kind] = error
                raise
        server = self._servers[kind]
        _revive(server)
        return server

    def stop(self) -> None:
        """Stop every server."""
        for server in self._servers.values():
            server.stop()

    @contextmanager
    def database(self, server: DatabaseServer, *, with_tables: bool) -> Iterator[str]:
        """The URL of a database that is empty, or has the relay's tables without rows."""
        if with_tables:
            yield self._ready(server)
            return
        name = _name()
        yield server.create_database(name)
        _revive(server)
        server.drop_database(name)

    def _make(self, kind: str) -> DatabaseServer:
        if kind == "mariadb":
            return DatabaseServer(kind="mariadb")
        try:
            return DatabaseServer(kind="mysql")
        except EmbeddedServiceError as error:
            reason = why_not(self._mysql_root)
            if reason is not None:
                raise EmbeddedServiceError(f"{error}; {reason}") from None
            return ChrootMySQL(self._mysql_root)

    def _ready(self, server: DatabaseServer) -> str:
        name, shape = self._kept.pop(server.kind, ("", []))
        if name and _emptied(server.url_of(name), name, shape):
            self._kept[server.kind] = name, shape
            return server.url_of(name)
        if name:
            server.drop_database(name)
        name = _name()
        with _engine(server.create_database(name)).connect() as connection:
            Tables("zzol_", None).metadata.create_all(connection)
            self._kept[server.kind] = name, _shape(connection)
        return server.url_of(name)


def _revive(server: DatabaseServer) -> None:
    if server.running:
        server.resume()
    else:
        server.start()


def _name() -> str:
    return f"test_{uuid.uuid4().hex[:12]}"


def _engine(url: str) -> Engine:
    return create_engine(url, poolclass=NullPool, isolation_level="AUTOCOMMIT", connect_args={"read_timeout": 20})


def _emptied(url: str, name: str, shape: list[str]) -> bool:
    """Delete all rows; False if the database is gone or not as it was made."""
    try:
        with _engine(url).connect() as connection:
            _end_others(connection, name)
            if _shape(connection) != shape:
                return False
            tables = [table.name for table in Tables("zzol_", None).metadata.sorted_tables]
            if any(connection.execute(text(f"SELECT 1 FROM {table} LIMIT {_MANY}, 1")).all() for table in tables):
                return False
            for table in tables:
                connection.execute(text(f"DELETE FROM {table}"))
    except SQLAlchemyError:
        return False
    return True


def _end_others(connection: Connection, name: str) -> None:
    # What a test has left open could hold locks.
    others = text("SELECT id FROM information_schema.processlist WHERE db = :name AND id <> CONNECTION_ID()")
    for thread in connection.execute(others, {"name": name}).scalars().all():
        with suppress(SQLAlchemyError):
            connection.execute(text(f"KILL {int(thread)}"))


def _shape(connection: Connection) -> list[str]:
    """What is in the database besides rows."""
    shape = []
    for (table,) in connection.execute(text("SHOW TABLES")).all():
        definition = connection.execute(text(f"SHOW CREATE TABLE `{table}`")).all()[0][1]
        shape.append(re.sub(r" AUTO_INCREMENT=\d+", "", definition))
    shape += [f"trigger {row[0]}" for row in connection.execute(text("SHOW TRIGGERS")).all()]
    return shape
