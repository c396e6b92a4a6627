"""Printing: tables on a terminal, tab-separated lines elsewhere, JSON on request."""

from __future__ import annotations

import dataclasses
import sys
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from typing import Any

import orjson
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

from zzol_relay.store.outbox import OutboxRecord

__all__ = ["aggregate_of", "print_json", "print_pairs", "print_table", "progress", "record_fields", "seconds", "when"]


def print_json(value: object) -> None:
    """``value`` as indented JSON; times as ISO 8601 in UTC."""
    option = orjson.OPT_INDENT_2 | orjson.OPT_NAIVE_UTC | orjson.OPT_UTC_Z
    sys.stdout.write(orjson.dumps(value, option=option, default=_other).decode() + "\n")


def print_table(columns: Sequence[str], rows: Sequence[Sequence[object]], *, title: str = "") -> None:
    """A table; piped, a header and lines with tabs between the values, nothing cut."""
    console = Console()
    if not console.is_terminal:
        for row in ([column.lower().replace(" ", "_") for column in columns], *rows):
            print("\t".join(map(_clean, row)))
        return
    table = Table(title=title or None, title_justify="left", header_style="bold")
    for column in columns:
        table.add_column(column, overflow="fold")
    for row in rows:
        table.add_row(*(Text(_clean(value)) for value in row))
    console.print(table)


def print_pairs(pairs: Sequence[tuple[str, object]]) -> None:
    """Names and values, one a line; piped, with a tab between them."""
    console = Console()
    width = max((len(name) for name, _ in pairs), default=0)
    for name, value in pairs:
        if console.is_terminal:
            console.print(Text.assemble((name.ljust(width), "bold"), "  ", _clean(value)), soft_wrap=True)
        else:
            print(f"{name.lower().replace(' ', '_')}\t{_clean(value)}")


def record_fields(record: OutboxRecord, *, payload: bool = False) -> dict[str, Any]:
    """A row as JSON-ready fields; ``payload``, decoded, only where it is asked for: it may hold personal data."""
    fields = {field.name: getattr(record, field.name) for field in dataclasses.fields(record)}
    fields["status"] = record.status.value
    del fields["payload"]
    if payload:
        fields["payload"] = orjson.loads(record.payload)
    return fields


@contextmanager
def progress(what: str, total: int | None) -> Iterator[Callable[[int], None]]:
    """A bar on stderr, where that is a terminal: yields what to tell how many are done. ``total`` None: unknown."""
    console = Console(stderr=True)
    if not console.is_terminal:
        yield lambda done: None
        return
    columns = (TextColumn(what), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task(what, total=total)
        yield lambda done: bar.update(task, completed=done)


def aggregate_of(record: OutboxRecord) -> str | None:
    """``type:id``; None where the event has no aggregate."""
    return None if record.aggregate_id is None else f"{record.aggregate_type}:{record.aggregate_id}"


def when(moment: datetime | None) -> str:
    """A time of the database, in UTC, or ``-``."""
    return "-" if moment is None else moment.replace(tzinfo=UTC).isoformat(timespec="milliseconds")


def seconds(age: float | None) -> str:
    """An age for people: ``0.8 s``, ``12 min``, or ``-``."""
    if age is None:
        return "-"
    for limit, divisor, unit in ((120.0, 1.0, "s"), (7200.0, 60.0, "min"), (172800.0, 3600.0, "h")):
        if age < limit:
            return f"{age / divisor:.3g} {unit}"
    return f"{age / 86400.0:.3g} d"


def _clean(value: object) -> str:
    # What stands in the database must not steer the terminal, nor break a line.
    text = "-" if value is None else str(value)
    return "".join(char if char.isprintable() else repr(char)[1:-1] for char in text)


def _other(value: object) -> object:
    if isinstance(value, uuid.UUID):
        return str(value)
    raise TypeError(f"{type(value).__name__} is not JSON")
