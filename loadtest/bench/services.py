"""The private services of a benchmark, and what must be known of them to read its figures."""

from __future__ import annotations

import os
import platform
from contextlib import ExitStack
from importlib.metadata import version
from pathlib import Path
from typing import Any, Literal, Self, cast

import redis
from sqlalchemy import Engine, create_engine, text

from tests.support.mysql9 import DEFAULT_ROOT, ChrootMySQL, why_not
from zzol_relay.core.errors import EmbeddedServiceError
from zzol_relay.embedded import DatabaseServer, RedisServer
from zzol_relay.store.tables import Tables
from zzol_relay.version import __version__

__all__ = ["Services", "create_outbox"]

_PACKAGES = ("SQLAlchemy", "PyMySQL", "redis", "hiredis", "orjson")
_VARIABLES = ("innodb_flush_log_at_trx_commit", "innodb_buffer_pool_size", "log_bin", "sync_binlog")


class Services:
    """A private database server and a private Redis; both gone at the end.

    Every commit reaches the disk (``innodb_flush_log_at_trx_commit = 1``): a benchmark that does without would flatter
    whoever commits most.
    """

    def __init__(self, kind: str) -> None:
        self._kind = cast(Literal["mariadb", "mysql"], kind)
        self._stack = ExitStack()
        self.database_url = ""
        self.redis_url = ""

    def __enter__(self) -> Self:
        with ExitStack() as stack:
            self.database_url = stack.enter_context(_database(self._kind)).url
            self.redis_url = stack.enter_context(RedisServer()).url
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._stack.close()

    def engine(self, connections: int = 10) -> Engine:
        """An engine of the application's kind, with up to ``connections`` connections."""
        return create_engine(self.database_url, pool_size=connections, max_overflow=0)

    def settings(self, engine: Engine) -> dict[str, Any]:
        """The server's settings that decide what a commit costs, the number of CPUs, and the machine's load."""
        with engine.connect() as connection:
            row = connection.execute(text("SELECT " + ", ".join(f"@@{name}" for name in _VARIABLES))).one()
        # At the end of the run: a machine that others use at the same time gives ratios that scatter.
        load = round(os.getloadavg()[0], 2)
        return {**dict(zip(_VARIABLES, row, strict=True)), "cpus": os.cpu_count(), "load_average": load}

    def versions(self, engine: Engine) -> dict[str, str]:
        """Versions of everything that takes part."""
        with engine.connect() as connection:
            server = str(connection.execute(text("SELECT VERSION()")).scalar_one())
        client = redis.Redis.from_url(self.redis_url)
        try:
            info = client.info("server")
        finally:
            client.close()
        return {
            "zzol_relay": __version__,
            "python": platform.python_version(),
            "database": f"{self._kind} {server}",
            "redis-server": str(info["redis_version"]),
            **{package: version(package) for package in _PACKAGES},
        }


def _database(kind: Literal["mariadb", "mysql"]) -> DatabaseServer:
    options = ("innodb_flush_log_at_trx_commit=1",)
    try:
        return DatabaseServer(kind=kind, options=options)
    except EmbeddedServiceError:
        root = Path(os.environ.get("ZZOL_TEST_MYSQL_ROOT", DEFAULT_ROOT))
        if kind != "mysql" or why_not(root) is not None:
            raise
        # The MySQL of the tests, where this machine has no other.
        return ChrootMySQL(root, options=options)


def create_outbox(engine: Engine, prefix: str) -> Tables:
    """The relay's tables under ``prefix``."""
    tables = Tables(prefix, None)
    tables.metadata.create_all(engine)
    return tables
