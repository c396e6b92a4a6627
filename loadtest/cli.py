"""The command line: ``python -m loadtest bench NAME``."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated

import orjson
import typer
from rich.console import Console

from loadtest.bench import BENCHES
from loadtest.bench.report import table
from loadtest.bench.services import Services

__all__ = ["app"]

app = typer.Typer(add_completion=False, no_args_is_help=True, help="Benchmarks of zzol_relay.")


class Database(StrEnum):
    """Database servers a benchmark can start."""

    MARIADB = "mariadb"
    MYSQL = "mysql"


@app.callback()
def _main() -> None:
    # With a callback, typer keeps `bench` a subcommand although it is the only one.
    pass


@app.command()
def bench(
    name: Annotated[str, typer.Argument(help="Which benchmark, see --list; all where left out.")] = "",
    listing: Annotated[bool, typer.Option("--list", help="Name the benchmarks and stop.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the JSON object alone.")] = False,
    db: Annotated[Database, typer.Option(help="The private database server to start.")] = Database.MARIADB,
    quick: Annotated[bool, typer.Option(help="Few and small rounds: shows that it runs, measures nothing.")] = False,
    rounds: Annotated[int, typer.Option(min=0, help="Rounds to run; 0 takes the benchmark's own number.")] = 0,
) -> None:
    """Run a benchmark on private services of its own; its last line of output is one JSON object."""
    if listing:
        for known in BENCHES.values():
            typer.echo(f"{known.name:10} {known.summary}")
        return
    if name and name not in BENCHES:
        raise typer.BadParameter(f"{name!r} is none of: {', '.join(BENCHES)}", param_hint="NAME")
    for chosen in [BENCHES[name]] if name else BENCHES.values():
        with Services(db.value) as services:
            report = chosen.run(services, quick, rounds)
        if not as_json:
            Console().print(table(report))
        typer.echo(orjson.dumps(report.as_json()).decode())
