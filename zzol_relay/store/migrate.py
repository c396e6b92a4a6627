"""The schema's revisions: bringing a database up to date, and saying where it stands.

Migrations only expand: they add tables, columns that may be missing or have a default, and indexes. Nothing that a
running release reads or writes is renamed, narrowed or dropped before the release after it has gone, so that old and
new processes work on one schema during a rollout, and an older release works on a newer schema. There is no downgrade.

They are Alembic's, shipped in the wheel as ``zzol_relay/_migrations`` (in a checkout: ``migrations/relay``), and run
under the settings' table prefix and schema with a version table of their own, ``<prefix>alembic_version``.
"""

from __future__ import annotations

import hashlib
import io
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
from alembic import command
from alembic.config import Config
from alembic.migration import MigrationContext
from alembic.script import ScriptDirectory
from sqlalchemy import Connection, Engine, text
from sqlalchemy.ext.asyncio import AsyncEngine

from zzol_relay.core.errors import SchemaError
from zzol_relay.settings import Settings
from zzol_relay.store.database import Database

__all__ = ["current_revision", "head_revision", "migration_sql", "schema_fits", "upgrade"]

_LOCK_WAIT = 60
# An ALTER of a large table outlasts the timeout that suits the relay's short transactions.
_STATEMENT_TIMEOUT = 24 * 3600.0


def upgrade(database: Engine | AsyncEngine | str, settings: Settings) -> tuple[str, ...]:
    """Bring the schema to ``head_revision()``; returns the revisions applied, oldest first; none where it fits.

    Safe to run in several processes at once: one works, the others wait for up to 60 s and then find nothing to do.
    Safe to run again after a crash. A schema from a newer release is left as it is. Raises ``SchemaError`` where
    another process is at it for longer, and what SQLAlchemy raises.
    """
    with _database(database, settings) as db, db.engine.connect() as connection, _alone(db, connection):
        before = _current(connection, settings)
        if _fits(before):
            return ()
        config = _config(settings)
        config.attributes["connection"] = connection
        command.upgrade(config, "head")
        connection.commit()
        return _between(before)


def migration_sql(database: Engine | AsyncEngine | str, settings: Settings) -> str:
    """The SQL of all revisions for the database's dialect, to be run by hand; connects to nothing."""
    output = io.StringIO()
    config = _config(settings, output)
    with _database(database, settings) as db:
        config.attributes["dialect"] = db.engine.dialect.name
    command.upgrade(config, "head", sql=True)
    return output.getvalue()


def current_revision(database: Engine | AsyncEngine | str, settings: Settings) -> str | None:
    """The revision the database stands at; None where it was never migrated."""
    with _database(database, settings) as db, db.engine.connect() as connection:
        return _current(connection, settings)


def head_revision() -> str:
    """The newest revision this release knows."""
    head = _scripts().get_current_head()
    if head is None:
        raise SchemaError("this installation holds no migrations")
    return head


def schema_fits(database: Engine | AsyncEngine | str, settings: Settings) -> bool:
    """Whether this release can work on the schema: it is at head, or at a newer release's revision."""
    return _fits(current_revision(database, settings))


def _fits(revision: str | None) -> bool:
    return revision is not None and (revision == head_revision() or not _known(revision))


def _known(revision: str) -> bool:
    return any(script.revision == revision for script in _scripts().walk_revisions())


def _between(before: str | None) -> tuple[str, ...]:
    newest_first = [script.revision for script in _scripts().iterate_revisions("head", before or "base")]
    return tuple(reversed(newest_first))


def _current(connection: Connection, settings: Settings) -> str | None:
    options: dict[str, Any] = {"version_table": _version_table(settings), "version_table_schema": settings.schema}
    return MigrationContext.configure(connection, opts=options).get_current_revision()


def _version_table(settings: Settings) -> str:
    return f"{settings.table_prefix}alembic_version"


@contextmanager
def _database(database: Engine | AsyncEngine | str, settings: Settings) -> Iterator[Database]:
    patient = msgspec.structs.replace(settings, database_pool=1, database_timeout=_STATEMENT_TIMEOUT)
    db = Database(database, patient)
    try:
        yield db
    finally:
        db.dispose()


@contextmanager
def _alone(db: Database, connection: Connection) -> Iterator[None]:
    """Hold off other migrations. SQLite's transaction does it by itself: ours begins IMMEDIATE, and holds the DDL."""
    if db.is_sqlite:
        yield
        return
    # Waits for one another's metadata locks are a day by default, with every query of the table queued behind.
    connection.execute(text(f"SET SESSION lock_wait_timeout = {_LOCK_WAIT}"))
    target = f"{db.tables.schema or db.url.database}.{db.tables.prefix}"
    name = f"zzol-migrate-{hashlib.sha256(target.encode()).hexdigest()[:32]}"
    if connection.execute(text("SELECT GET_LOCK(:name, :wait)"), {"name": name, "wait": _LOCK_WAIT}).scalar() != 1:
        raise SchemaError(f"another process has been migrating for {_LOCK_WAIT} s; see whether it still runs")
    try:
        yield
    finally:
        # A connection that broke has let go of it already.
        if not connection.invalidated:
            connection.execute(text("DO RELEASE_LOCK(:name)"), {"name": name})


def _config(settings: Settings, output: io.StringIO | None = None) -> Config:
    config = Config(output_buffer=output)
    config.set_main_option("script_location", str(_location()).replace("%", "%%"))
    config.attributes["prefix"] = settings.table_prefix
    config.attributes["schema"] = settings.schema
    return config


def _scripts() -> ScriptDirectory:
    return ScriptDirectory(str(_location()))


def _location() -> Path:
    package = Path(__file__).parents[1]
    shipped = package / "_migrations"
    return shipped if shipped.is_dir() else package.parent / "migrations" / "relay"
