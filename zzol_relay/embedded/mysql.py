"""A private MariaDB or MySQL, and SQLite where there is neither."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import re
import secrets
import shutil
import subprocess
import tempfile
import weakref
from collections.abc import Iterable
from pathlib import Path
from typing import Literal, Self

from sqlalchemy import create_engine, text
from sqlalchemy.engine import URL
from sqlalchemy.exc import SQLAlchemyError
from sqlalchemy.pool import NullPool

from zzol_relay.core.errors import EmbeddedServiceError
from zzol_relay.embedded.process import HOST, Server, find_program, tail

__all__ = ["DatabaseProgram", "DatabaseServer", "StartedDatabase", "find_database", "sqlite_url", "start_database"]

Kind = Literal["mariadb", "mysql"]

_INSTALL = {
    "mariadb": "install MariaDB 10.6 or later (Debian: mariadb-server-core, mariadb-client-core)",
    "mysql": "install MySQL 8.0 or later",
    None: "install MariaDB 10.6 or later (Debian: mariadb-server-core, mariadb-client-core) or MySQL 8.0 or later",
}
_MINIMUM = {"mariadb": (10, 6), "mysql": (8, 0)}
_SHOWN = {"mariadb": "MariaDB", "mysql": "MySQL"}
_NAME = re.compile(r"[A-Za-z0-9_]{1,64}")
_USER = "zzol"
_DATABASE = "zzol"


@dataclasses.dataclass(frozen=True, slots=True)
class DatabaseProgram:
    """A database server's program: ``installer`` is MariaDB's ``mariadb-install-db``, None for MySQL."""

    kind: Kind
    path: str
    version: str
    installer: str | None = None


def find_database(kind: Kind | None = None) -> DatabaseProgram:
    """The server on PATH (or in a directory for system programs) of this kind, else MariaDB before MySQL.

    Raises ``EmbeddedServiceError`` that names what was found unfit and what to install.
    """
    refused = []
    for path in dict.fromkeys(filter(None, map(find_program, ("mariadbd", "mysqld")))):
        found, version = _identify(path)
        if found is None or (kind is not None and found != kind):
            continue
        if tuple(map(int, version.split(".")[:2])) < _MINIMUM[found]:
            refused.append(f"{path} is {_SHOWN[found]} {version}")
            continue
        if found == "mysql":
            return DatabaseProgram(found, path, version)
        installer = find_program("mariadb-install-db") or find_program("mysql_install_db")
        if installer is not None:
            return DatabaseProgram(found, path, version, installer)
        refused.append(f"{path} has no mariadb-install-db beside it")
    what = _SHOWN[kind] if kind else "MariaDB or MySQL"
    raise EmbeddedServiceError(f"no {what} found ({'; '.join(refused) or 'nothing on PATH'}): {_INSTALL[kind]}")


def _identify(path: str) -> tuple[Kind | None, str]:
    try:
        answer = subprocess.run(  # noqa: S603
            [path, "--no-defaults", "--version"], capture_output=True, text=True, timeout=10, check=False
        ).stdout
    except (OSError, subprocess.TimeoutExpired):
        return None, ""
    match = re.search(r"\bVer (\d+\.\d+\.\d+)", answer)
    if match is None:
        return None, ""
    return ("mariadb" if "MariaDB" in answer else "mysql"), match[1]


class DatabaseServer(Server):
    """A private MariaDB or MySQL on loopback, durable at every commit, without a binary log.

    ``kind`` None takes MariaDB before MySQL. ``options`` are further options of the server's command line
    (``"max_connections=300"``); they override ours. Its one user has a password that is fresh for each instance of
    this class.
    """

    name = "database"

    def __init__(
        self,
        directory: str | os.PathLike[str] | None = None,
        *,
        kind: Kind | None = None,
        port: int | None = None,
        options: Iterable[str] = (),
    ) -> None:
        super().__init__(directory, port=port)
        self._program = self._find(kind)
        self.kind: Kind = self._program.kind
        self.version = self._program.version
        self.name = f"{_SHOWN[self.kind]} {self.version}"
        self._options = [f"--{option.removeprefix('--')}" for option in options]
        self._password = secrets.token_urlsafe(18)
        self._refusal = ""

    @property
    def url(self) -> str:
        """SQLAlchemy URL of its first database, for PyMySQL."""
        return self.url_of(_DATABASE)

    def url_of(self, database: str) -> str:
        """SQLAlchemy URL of one of its databases, for PyMySQL."""
        return URL.create(
            "mysql+pymysql", _USER, self._password, HOST, self.port, database, {"charset": "utf8mb4"}
        ).render_as_string(hide_password=False)

    def create_database(self, name: str) -> str:
        """Create an empty database (utf8mb4); returns its URL. ``name`` is letters, digits and ``_``."""
        self._execute(f"CREATE DATABASE `{_checked(name)}` CHARACTER SET utf8mb4")
        return self.url_of(name)

    def drop_database(self, name: str) -> None:
        """Drop a database if it is there, after ending the connections that use it: they could hold its tables."""
        self._execute(
            f"DROP DATABASE IF EXISTS `{_checked(name)}`",
            before=f"SELECT id FROM information_schema.processlist WHERE db = '{name}'",  # noqa: S608
        )

    # -- its command line

    def _find(self, kind: Kind | None) -> DatabaseProgram:
        return find_database(kind)

    def _inside(self, path: Path) -> str:
        """``path`` as the server sees it."""
        return str(path)

    def _run(self, argv: list[str]) -> list[str]:
        """The command line that runs ``argv`` where the server lives."""
        return argv

    def _prepare(self) -> list[str]:
        (self.directory / "tmp").mkdir(mode=0o700, exist_ok=True)
        data = self.directory / "data"
        initialised = self.directory / "initialised"
        if not initialised.exists():
            shutil.rmtree(data, ignore_errors=True)
            self._initialise(data)
            initialised.touch()
        setup = self.directory / "setup.sql"
        setup.touch(mode=0o600)
        setup.write_text(self._setup(), encoding="utf-8")
        return self._run([self._program.path, "--no-defaults", *self._arguments(data, setup), *self._options])

    def _arguments(self, data: Path, setup: Path) -> list[str]:
        arguments = [
            f"--datadir={self._inside(data)}",
            f"--tmpdir={self._inside(self.directory / 'tmp')}",
            # Relative to the data directory: an absolute path could exceed what a socket's address holds (107 bytes).
            "--socket=server.sock",
            f"--pid-file={self._inside(self.directory / 'server.pid')}",
            f"--init-file={self._inside(setup)}",
            f"--port={self.port}",
            f"--bind-address={HOST}",
            "--skip-name-resolve",
            "--character-set-server=utf8mb4",
            "--innodb-flush-log-at-trx-commit=1",
            "--innodb-buffer-pool-size=128M",
            "--max-connections=300",
            "--skip-log-bin",
        ]
        if self.kind == "mysql":
            arguments += ["--mysqlx=OFF", "--secure-file-priv=NULL"]
        return arguments + self._identity()

    def _identity(self) -> list[str]:
        # Started by root, both refuse to run unless told which account to use; the directory is ours alone.
        return ["--user=root"] if os.geteuid() == 0 else []

    def _initialise(self, data: Path) -> None:
        where = f"--datadir={self._inside(data)}"
        if self._program.installer is not None:
            argv = [
                self._program.installer,
                "--no-defaults",
                where,
                "--auth-root-authentication-method=socket",
                "--skip-test-db",
                # Else it ends where the machine's own name is not in DNS, in many containers.
                "--force",
                "--skip-name-resolve",
            ]
        else:
            argv = [self._program.path, "--no-defaults", "--initialize-insecure", where, "--skip-log-bin"]
        log = self.directory / "initialise.log"
        with log.open("wb") as output:
            try:
                child = self._spawn(self._run([*argv, *self._identity()]), output)
                try:
                    code = child.process.wait(120)
                finally:
                    child.end()
            except (OSError, subprocess.TimeoutExpired) as error:
                raise EmbeddedServiceError(f"{argv[0]} could not be run: {error}") from error
        if code != 0:
            raise EmbeddedServiceError(
                f"{self.name} could not set up its data directory ({argv[0]} ended with {code});"
                f" its log ends:\n{tail(log)}{self._hint()}"
            )

    def _setup(self) -> str:
        # Run at each start, before the first connection is served. Root gets a password that nobody knows where it
        # would have none.
        user = f"'{_USER}'@'{HOST}'"
        statements = [
            f"CREATE USER IF NOT EXISTS {user} IDENTIFIED BY '{self._password}'",
            f"ALTER USER {user} IDENTIFIED BY '{self._password}'",
            f"GRANT ALL PRIVILEGES ON *.* TO {user} WITH GRANT OPTION",
            f"CREATE DATABASE IF NOT EXISTS `{_DATABASE}` CHARACTER SET utf8mb4",
        ]
        if self.kind == "mysql":
            statements.append(f"ALTER USER 'root'@'localhost' IDENTIFIED BY '{secrets.token_urlsafe(18)}'")
        return "".join(f"{statement};\n" for statement in statements)

    def _save(self) -> None:
        """Nothing to do: every commit is on disk."""

    def _wipe(self) -> None:
        (self.directory / "initialised").unlink(missing_ok=True)
        shutil.rmtree(self.directory / "data", ignore_errors=True)

    # -- talking to it

    def _answers(self) -> bool:
        try:
            self._execute("SELECT 1")
        except SQLAlchemyError as error:
            self._refusal = str(getattr(error, "orig", error))
            return False
        except RuntimeError as error:
            # PyMySQL cannot log in to MySQL 8 without the package cryptography.
            raise EmbeddedServiceError(f"cannot log in to {self.name}: {error}") from error
        return True

    def _execute(self, statement: str, *, before: str | None = None) -> None:
        engine = create_engine(
            self.url_of(""),
            poolclass=NullPool,
            isolation_level="AUTOCOMMIT",
            connect_args={"connect_timeout": 5, "read_timeout": 30},
        )
        with engine.connect() as connection:
            if before is not None:
                for (thread,) in connection.execute(text(before)).all():
                    # It may have ended by itself.
                    with contextlib.suppress(SQLAlchemyError):
                        connection.execute(text(f"KILL {int(thread)}"))
            connection.execute(text(statement))

    def _hint(self) -> str:
        hints = []
        if self._refusal:
            hints.append(f"the last attempt to connect: {self._refusal}")
        if "Permission denied" in tail(self.log, 50) or "errno: 13" in tail(self.log, 50):
            hints.append("a security profile (AppArmor, SELinux) may confine the server to its own directories")
        return "".join(f"\n{hint}" for hint in hints)


def _checked(name: str) -> str:
    if not _NAME.fullmatch(name):
        raise EmbeddedServiceError(f"database name {name!r}: use up to 64 letters, digits and underscores")
    return name


def sqlite_url(directory: str | os.PathLike[str]) -> str:
    """SQLAlchemy URL of a SQLite file in ``directory``, which is made when missing."""
    folder = Path(directory).absolute()
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    return URL.create("sqlite", database=str(folder / "zzol.db")).render_as_string()


class StartedDatabase:
    """What ``start_database`` chose; a context manager that stops it.

    ``kind`` is ``mariadb``, ``mysql`` or ``sqlite``, ``description`` says it for people, with the reason where SQLite
    stands in. ``server`` is None for SQLite.
    """

    def __init__(
        self,
        kind: Literal["mariadb", "mysql", "sqlite"],
        description: str,
        url: str,
        server: DatabaseServer | None = None,
        temporary: str | None = None,
    ) -> None:
        self.kind = kind
        self.description = description
        self.url = url
        self.server = server
        self._delete = weakref.finalize(self, shutil.rmtree, temporary, True) if temporary else None

    def stop(self) -> None:
        """Stop the server, and delete what was temporary; safe to call twice."""
        if self.server is not None:
            self.server.stop()
        if self._delete is not None:
            self._delete()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.stop()


def start_database(
    preferred: Literal["mariadb", "mysql", "sqlite"] | None = None,
    directory: str | os.PathLike[str] | None = None,
) -> StartedDatabase:
    """Start a private MariaDB, else MySQL, else take a SQLite file, and tell which.

    With ``preferred`` there is no second choice: raises ``EmbeddedServiceError`` when that one cannot be had.
    """
    kinds: tuple[Kind, ...] = ("mariadb", "mysql") if preferred is None else ()
    if preferred in ("mariadb", "mysql"):
        kinds = (preferred,)
    reasons = []
    for kind in kinds:
        try:
            server = DatabaseServer(Path(directory, kind) if directory is not None else None, kind=kind).start()
        except EmbeddedServiceError as error:
            if preferred is not None:
                raise
            reasons.append(str(error))
        else:
            return StartedDatabase(kind, server.name, server.url, server)
    reason = f": {'; '.join(reasons)}" if reasons else ""
    if directory is not None:
        return StartedDatabase("sqlite", f"SQLite{reason}", sqlite_url(directory))
    temporary = tempfile.mkdtemp(prefix="zzol-sqlite-")
    return StartedDatabase("sqlite", f"SQLite{reason}", sqlite_url(temporary), temporary=temporary)
