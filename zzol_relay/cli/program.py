"""The program: its global options and its commands."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated

import typer

from zzol_relay.cli import check, dead_letters, events, operations, worker
from zzol_relay.cli.context import Options
from zzol_relay.cli.failures import reported
from zzol_relay.settings import Settings
from zzol_relay.version import __version__

__all__ = ["app", "main"]

_HELP = """Operate the relay: migrate its tables, run workers, look after dead letters.

Settings come from ZZOL_<NAME>, or from a file that ZZOL_<NAME>_FILE names (for secrets: a command line is seen by
every user of the machine), and from the options below, which win.

\b
Exit codes:
  0  done
  1  failed, or nothing matched
  2  wrong usage or settings
  3  the database or Redis cannot be reached
  4  the tables are missing or too old: run "zzol-relay migrate"
"""


class LogLevel(StrEnum):
    """Levels of Python's logging."""

    DEBUG = "debug"
    INFO = "info"
    WARNING = "warning"
    ERROR = "error"


app = typer.Typer(
    help=_HELP,
    no_args_is_help=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.command("migrate")(operations.migrate)
app.command("worker")(worker.worker)
app.command("check")(check.check)
app.command("status")(operations.status)
app.add_typer(dead_letters.app, name="dead-letters")
app.command("find")(events.find)
app.command("republish")(events.republish)
app.command("recover")(operations.recover)
app.command("cleanup")(operations.cleanup)


def _version(wanted: bool) -> None:
    if wanted:
        print(f"zzol-relay {__version__}")
        raise typer.Exit


@app.callback()
def configure(
    context: typer.Context,
    database_url: Annotated[str | None, typer.Option(help="SQLAlchemy URL of the outbox's database.")] = None,
    redis_url: Annotated[str | None, typer.Option(help="URL of Redis.")] = None,
    table_prefix: Annotated[str | None, typer.Option(help="In front of every table's name.")] = None,
    schema: Annotated[str | None, typer.Option(help="The database that holds the tables.")] = None,
    key_prefix: Annotated[str | None, typer.Option(help="In front of every Redis key.")] = None,
    log_level: Annotated[LogLevel | None, typer.Option(help="Default: info for worker, else warning.")] = None,
    log_json: Annotated[bool, typer.Option("--log-json", help="Log one JSON object a line.")] = False,
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Show the version and exit.")
    ] = False,
) -> None:
    """Validate the settings for the command that follows."""
    given = {
        "database_url": database_url,
        "redis_url": redis_url,
        "table_prefix": table_prefix,
        "schema": schema,
        "key_prefix": key_prefix,
    }
    settings = Settings.load(**{name: value for name, value in given.items() if value is not None})
    context.obj = Options(settings, log_level.value if log_level else None, log_json)


def main() -> None:
    """Run the program on ``sys.argv``; always ends in ``SystemExit``."""
    with reported():
        app(prog_name="zzol-relay")
