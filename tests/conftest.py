"""Servers for tests: started when first asked for, shared by the session, clean for each test.

A missing service skips on a laptop and fails where ``CI=true``; MySQL 9 alone may be missing everywhere, and the
summary says whether it ran.
"""

# ruff: noqa: E402

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, NoReturn

import pytest
import redis
from sqlalchemy import Engine, create_engine
from sqlalchemy.pool import NullPool

# ``tests.support`` is to be found however pytest was called.
_ROOT = str(Path(__file__).resolve().parents[1])
if _ROOT not in sys.path:
    sys.path.insert(0, _ROOT)

from tests.support.databases import Databases
from tests.support.facts import Facts
from tests.support.mysql9 import DEFAULT_ROOT
from tests.support.processes import Child
from zzol_relay import Relay, Settings, Stream
from zzol_relay.core.errors import EmbeddedServiceError
from zzol_relay.embedded import DatabaseServer, RedisServer
from zzol_relay.embedded import sqlite_url as make_sqlite_url
from zzol_relay.settings import ENV_PREFIX
from zzol_relay.store.tables import Tables

_MYSQL_ROOT = Path(os.environ.get("ZZOL_TEST_MYSQL_ROOT", DEFAULT_ROOT))
_mysql_line = pytest.StashKey[str]()

FAST: dict[str, Any] = {
    "poll_interval": 0.05,
    "recovery_interval": 0.2,
    "backoff_base": 0.05,
    "backoff_cap": 0.4,
    "blocked_delay": 0.05,
    "shard_retry": 0.2,
    "probe_base": 0.02,
    "probe_cap": 0.1,
    "heartbeat_interval": 0.5,
}
"""Settings of ``make_relay``: the pauses of production, made short."""


def pytest_configure(config: pytest.Config) -> None:
    # A developer's settings must not reach the tests, and the relay refuses names it does not know.
    for name in [name for name in os.environ if name.startswith(ENV_PREFIX)]:
        del os.environ[name]


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    terminalreporter.write_line(config.stash.get(_mysql_line, "MySQL 9: not run (no test asked for it)"))


def _missing(reason: str) -> NoReturn:
    if os.environ.get("CI") == "true":
        pytest.fail(reason, pytrace=False)
    pytest.skip(reason)


@pytest.fixture(scope="session")
def _databases() -> Iterator[Databases]:
    databases = Databases(_MYSQL_ROOT)
    yield databases
    databases.stop()


@pytest.fixture(scope="session", params=["mariadb", "mysql"])
def _database_kind(request: pytest.FixtureRequest) -> str:
    # Of session scope, so that pytest runs all tests of one server before those of the other.
    kind: str = request.param
    return kind


@pytest.fixture
def database_server(_database_kind: str, _databases: Databases, pytestconfig: pytest.Config) -> DatabaseServer:
    """The session's MariaDB, then its MySQL; one that an earlier test killed or froze runs again."""
    try:
        server = _databases.server(_database_kind)
    except EmbeddedServiceError as error:
        if _database_kind == "mariadb":
            _missing(str(error))
        pytestconfig.stash[_mysql_line] = f"MySQL 9: not run ({str(error).splitlines()[0]})"
        pytest.skip(str(error))
    if _database_kind == "mysql":
        pytestconfig.stash[_mysql_line] = f"{server.name}: ran"
    return server


class _Relays:
    """The relays that a test made; stopped before the engines that they use are disposed of."""

    def __init__(self) -> None:
        self.made: list[Relay] = []

    def stop(self) -> None:
        while self.made:
            self.made.pop().stop()


@pytest.fixture
def _relays() -> Iterator[_Relays]:
    relays = _Relays()
    yield relays
    relays.stop()


@pytest.fixture
def database_url(
    request: pytest.FixtureRequest, database_server: DatabaseServer, _databases: Databases, _relays: _Relays
) -> Iterator[str]:
    """A database of the test's own, on each server: empty, but for the relay's tables where the test asks for them."""
    with _databases.database(database_server, with_tables="relay_tables" in request.fixturenames) as url:
        yield url
        _relays.stop()


@pytest.fixture
def engine(database_url: str, _relays: _Relays) -> Iterator[Engine]:
    """An application's engine on the test's own database."""
    engine = create_engine(database_url, pool_pre_ping=True)
    yield engine
    _relays.stop()
    engine.dispose()


@pytest.fixture
def relay_tables(engine: Engine) -> Tables:
    """The relay's tables, without rows, in the database of ``engine``. Generated ids may go on from an earlier test."""
    tables = Tables("zzol_", None)
    tables.metadata.create_all(engine)
    return tables


@pytest.fixture
def sqlite_url(tmp_path: Path) -> str:
    """A SQLite file that does not exist yet."""
    return make_sqlite_url(tmp_path)


@pytest.fixture
def sqlite_engine(sqlite_url: str, _relays: _Relays) -> Iterator[Engine]:
    """An engine on a SQLite file, with the relay's tables."""
    engine = create_engine(sqlite_url, poolclass=NullPool)
    Tables("zzol_", None).metadata.create_all(engine)
    yield engine
    _relays.stop()
    engine.dispose()


class _SharedRedis:
    """The session's Redis and the configuration that it had at first."""

    def __init__(self) -> None:
        self.server = RedisServer(config={"enable-debug-command": "local"})
        self._config: dict[str, str] = {}

    def clean(self) -> None:
        if self.server.running:
            self.server.resume()
        else:
            self.server.start()
        with redis.Redis.from_url(self.server.url, decode_responses=True, socket_timeout=10) as client:
            client.execute_command("CLIENT", "UNPAUSE")
            client.execute_command("REPLICAOF", "NO", "ONE")
            config: dict[str, str] = client.config_get("*")
            self._config = self._config or config
            for name, value in self._config.items():
                if config[name] != value:
                    client.config_set(name, value)
            users = [user for user in client.acl_users() if user != "default"]
            if users:
                client.acl_deluser(*users)
            client.function_flush("SYNC")
            client.script_flush("SYNC")
            client.flushall()
            client.config_resetstat()


@pytest.fixture(scope="session")
def _shared_redis() -> Iterator[_SharedRedis]:
    try:
        shared = _SharedRedis()
        shared.server.start()
    except EmbeddedServiceError as error:
        _missing(str(error))
    yield shared
    shared.server.stop()


@pytest.fixture
def redis_server(_shared_redis: _SharedRedis) -> RedisServer:
    """The session's Redis: empty, without scripts, configured as at first; one that a test killed runs again."""
    _shared_redis.clean()
    return _shared_redis.server


@pytest.fixture
def own_redis() -> Iterator[RedisServer]:
    """A Redis of the test's own."""
    try:
        server = RedisServer(config={"enable-debug-command": "local"})
    except EmbeddedServiceError as error:
        _missing(str(error))
    with server:
        yield server


@pytest.fixture
def redis_client(redis_server: RedisServer) -> Iterator[redis.Redis]:
    """A plain client of ``redis_server`` that decodes replies."""
    with redis.Redis.from_url(redis_server.url, decode_responses=True) as client:
        yield client


class RelayUnderTest(Relay):
    """A relay with what it announced."""

    facts: Facts


@pytest.fixture
def facts() -> Facts:
    """What all relays of the test announced, together."""
    return Facts()


@pytest.fixture
def make_relay(redis_server: RedisServer, _relays: _Relays, facts: Facts) -> Callable[..., RelayUnderTest]:
    """``make_relay(engine, streams=…, start=True, **options) -> Relay``, stopped at the end of the test.

    ``options`` are settings, over ``FAST`` and the test's Redis, or ``worker``, ``name`` and ``observers`` of
    ``Relay``. ``relay.facts`` is the ``Facts`` of everything it announced. ``streams`` defaults to one stream ``room``
    of one shard. The tables must be there: ``relay_tables`` makes them.
    """

    def make(
        engine: Any,
        streams: Iterable[Stream] = (Stream(name="room"),),
        *,
        start: bool = True,
        observers: Iterable[Any] = (),
        worker: bool = True,
        name: str | None = None,
        **options: Any,
    ) -> RelayUnderTest:
        own = Facts()
        settings = Settings.load({}, **{"redis_url": redis_server.url, **FAST, **options})
        relay = RelayUnderTest(
            engine, streams, settings=settings, observers=(own, facts, *observers), worker=worker, name=name
        )
        relay.facts = own
        _relays.made.append(relay)
        if start:
            relay.start()
        return relay

    return make


@pytest.fixture
def run_child() -> Iterator[Callable[..., Child]]:
    """``run_child(script, *arguments, **env) -> Child``; killed at the end of the test.

    ``env`` are further environment variables: ``ZZOL_DATABASE_URL=database_url, ZZOL_REDIS_URL=redis_server.url``.
    """
    children: list[Child] = []

    def run(script: str | Path, *arguments: str, **env: str) -> Child:
        child = Child(script, *arguments, env={**os.environ, **env})
        children.append(child)
        return child

    yield run
    for child in children:
        child.close()
