"""Commands for dead letters: list, show, replay, discard (Z13, G9)."""

from __future__ import annotations

import sys
import uuid
from typing import Annotated

import orjson
import typer

from zzol_relay.cli.context import open_relay, options_of
from zzol_relay.cli.failures import Exit
from zzol_relay.cli.output import print_json, print_pairs, print_table, record_fields, when
from zzol_relay.store.outbox import OutboxRecord

__all__ = ["app"]

app = typer.Typer(
    help="Look after events that failed too often and wait for an operator. ID is an event id.",
    no_args_is_help=True,
    rich_markup_mode=None,
)

Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]
EventIds = Annotated[list[uuid.UUID], typer.Argument(metavar="ID", show_default=False)]


@app.command("list")
def list_(
    context: typer.Context,
    limit: Annotated[int, typer.Option(min=1, max=10_000, help="Most rows to print.")] = 100,
    after: Annotated[int, typer.Option(min=0, help="Only rows whose number (not event id) is above this.")] = 0,
    json: Json = False,
) -> None:
    """List dead letters, oldest first, without their payloads."""
    with open_relay(options_of(context)) as relay:
        records = relay.dead_letters.list(limit=limit, after=after)
    if json:
        print_json([record_fields(record) for record in records])
        return
    print_table(
        ("No", "Event id", "Type", "Stream key", "Aggregate", "Sequence", "Attempts", "Since", "Error"),
        [_row(record) for record in records],
    )


@app.command()
def show(
    context: typer.Context,
    event_id: Annotated[uuid.UUID, typer.Argument(metavar="ID", show_default=False)],
    json: Json = False,
    payload: Annotated[bool, typer.Option("--payload", help="Print the event's data too.")] = False,
) -> None:
    """Show one dead letter; its payload, which may hold personal data, only with --payload."""
    with open_relay(options_of(context)) as relay:
        record = relay.dead_letters.show(event_id)
    if json:
        print_json(record_fields(record, payload=payload))
        return
    fields = record_fields(record)
    times = ("occurred_at", "created_at", "updated_at", "published_at")
    fields |= {name: when(fields[name]) for name in times}
    if payload:
        fields["payload"] = orjson.dumps(orjson.loads(record.payload)).decode()
    print_pairs(list(fields.items()))


@app.command()
def replay(context: typer.Context, event_ids: EventIds) -> None:
    """Send dead letters again, all attempts anew; the entry in the stream says that it is a replay.

    A worker sends them. They stand outside their aggregate's order, unless the policy for dead letters is "block".
    """
    with open_relay(options_of(context)) as relay:
        moved = relay.dead_letters.replay(_distinct(event_ids))
    _report("replayed", moved, len(_distinct(event_ids)))


@app.command()
def discard(
    context: typer.Context,
    event_ids: EventIds,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")] = False,
) -> None:
    """Give dead letters up for good. Asks first, unless --yes."""
    ids = _distinct(event_ids)
    if not yes:
        if not sys.stdin.isatty():
            raise typer.BadParameter("nobody can be asked here; give --yes")
        typer.confirm(f"Discard {len(ids)} dead letter(s) for good?", abort=True)
    with open_relay(options_of(context)) as relay:
        moved = relay.dead_letters.discard(ids)
    _report("discarded", moved, len(ids))


def _distinct(event_ids: list[uuid.UUID]) -> list[uuid.UUID]:
    return list(dict.fromkeys(event_ids))


def _report(done: str, moved: int, given: int) -> None:
    if moved < given:
        print(f"zzol-relay: {given - moved} of {given} are no dead letters", file=sys.stderr)
    print(f"{done} {moved}")
    if not moved:
        raise typer.Exit(Exit.FAILED)


def _row(record: OutboxRecord) -> tuple[object, ...]:
    aggregate = None if record.aggregate_id is None else f"{record.aggregate_type}:{record.aggregate_id}"
    return (
        record.id,
        record.event_id,
        record.event_type,
        record.stream_key,
        aggregate,
        record.sequence,
        record.retry_count,
        when(record.updated_at),
        record.last_error,
    )
