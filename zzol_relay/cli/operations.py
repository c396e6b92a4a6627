"""Commands that do one thing and end: migrate, status, recover, cleanup."""

from __future__ import annotations

import dataclasses
from typing import Annotated

import typer

from zzol_relay.cli.context import make_relay, open_relay, options_of
from zzol_relay.cli.failures import Exit
from zzol_relay.cli.health import report
from zzol_relay.cli.output import print_json, print_pairs, print_table, seconds, when
from zzol_relay.core.errors import BrokerUnavailableError
from zzol_relay.store.migrate import current_revision, head_revision, migration_sql, upgrade

__all__ = ["cleanup", "migrate", "recover", "status"]


def migrate(
    context: typer.Context,
    sql: Annotated[bool, typer.Option("--sql", help="Print the SQL instead; connects to nothing.")] = False,
) -> None:
    """Create or update the relay's tables. Several processes may do it at once."""
    options = options_of(context)
    # Refuses a missing or wrong URL as every command does.
    make_relay(options.settings)
    options.start_logging("warning")
    if sql:
        print(migration_sql(options.settings.database_url, options.settings), end="")
        return
    applied = upgrade(options.settings.database_url, options.settings)
    print(f"applied {', '.join(applied)}" if applied else "nothing to do")


def status(
    context: typer.Context,
    json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    health: Annotated[bool, typer.Option("--health", help="Only judge: exit code 0 or 1.")] = False,
) -> None:
    """Show the backlog, the processes, and whether Redis can be reached (exit code 3 where not)."""
    options = options_of(context)
    if health:
        report(options, json=json)
        return
    with open_relay(options) as relay:
        found = relay.status()
        revision = current_revision(options.settings.database_url, options.settings)
        try:
            relay.ping_redis()
            redis_error = None
        except BrokerUnavailableError as error:
            redis_error = str(error)
    backlog = found.backlog
    if json:
        print_json(
            {
                "backlog": dataclasses.asdict(backlog),
                "redis": {"reachable": redis_error is None, "error": redis_error},
                "schema": {"revision": revision, "head": head_revision()},
                "instances": [dataclasses.asdict(instance) for instance in found.instances],
            }
        )
    else:
        pairs: list[tuple[str, object]] = list(backlog.by_status.items())
        pairs += [
            ("Oldest unpublished", seconds(backlog.oldest_unpublished_age)),
            ("Last published", when(backlog.last_published_at)),
            ("Redis", redis_error or "up"),
            ("Schema", f"{revision} (newest known: {head_revision()})"),
        ]
        print_pairs(pairs)
        print_table(
            ("Instance", "Role", "Version", "Circuit", "Started", "Last beat"),
            [(i.name, i.role, i.version, i.circuit, when(i.started_at), seconds(i.beat_age)) for i in found.instances],
        )
    if redis_error is not None:
        raise typer.Exit(Exit.UNREACHABLE)


def recover(context: typer.Context) -> None:
    """Return expired claims to PENDING now. A worker does it by itself."""
    with open_relay(options_of(context)) as relay:
        print(f"recovered {relay.recover()}")


def cleanup(context: typer.Context) -> None:
    """Delete settled rows past their retention now. A worker does it daily."""
    with open_relay(options_of(context)) as relay:
        deleted = relay.cleanup()
    print("another process is cleaning up" if deleted is None else f"deleted {deleted}")
