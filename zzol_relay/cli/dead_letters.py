"""Commands for dead letters: list, show, replay, discard, audit (Z13, G9)."""

from __future__ import annotations

import sys
import uuid
from collections.abc import Callable
from typing import Annotated

import orjson
import typer

from zzol_relay.app import Relay
from zzol_relay.cli.arguments import Json, Yes, agreed, duration
from zzol_relay.cli.context import open_relay, options_of
from zzol_relay.cli.failures import Exit
from zzol_relay.cli.output import aggregate_of, print_json, print_pairs, print_table, progress, record_fields, when
from zzol_relay.store.audit import AuditEntry
from zzol_relay.store.dead_letters import DeadLetterFilter
from zzol_relay.store.outbox import OutboxRecord

__all__ = ["app"]

app = typer.Typer(
    help="Look after events that failed too often and wait for an operator. ID is an event id.",
    no_args_is_help=True,
    rich_markup_mode=None,
)

EventIds = Annotated[list[uuid.UUID] | None, typer.Argument(metavar="ID", show_default=False)]
All = Annotated[bool, typer.Option("--all", help="All that match the filters, instead of IDs. Asks first.")]
OfStream = Annotated[str | None, typer.Option("--stream", help="Only of this stream.")]
OfType = Annotated[str | None, typer.Option("--type", help="Only of this event type.")]
OfAggregate = Annotated[str | None, typer.Option("--aggregate", metavar="TYPE:ID", help="Only of this aggregate.")]
WithError = Annotated[str | None, typer.Option("--error", help="Only where the last error holds this text.")]
OlderThan = Annotated[
    float | None,
    typer.Option(parser=duration, metavar="DURATION", help="Only those dead for longer, say 15m or 2h."),
]
NewerThan = Annotated[float | None, typer.Option(parser=duration, metavar="DURATION", help="Only those dead for less.")]


@app.command("list")
def list_(
    context: typer.Context,
    stream: OfStream = None,
    type: OfType = None,
    aggregate: OfAggregate = None,
    error: WithError = None,
    older_than: OlderThan = None,
    newer_than: NewerThan = None,
    limit: Annotated[int, typer.Option(min=1, max=10_000, help="Most rows to print.")] = 100,
    after: Annotated[int, typer.Option(min=0, help="Only rows whose number (not event id) is above this.")] = 0,
    count: Annotated[bool, typer.Option("--count", help="Print how many match, and nothing else.")] = False,
    json: Json = False,
) -> None:
    """List dead letters, oldest first, without their payloads."""
    wanted = _filter(stream, type, aggregate, error, older_than, newer_than)
    with open_relay(options_of(context)) as relay:
        if count:
            print(relay.dead_letters.count(wanted))
            return
        records = relay.dead_letters.list(wanted, limit=limit, after=after)
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
    """Show one dead letter, and how many events of its aggregate wait behind it.

    Its payload, which may hold personal data, is shown only with --payload.
    """
    with open_relay(options_of(context)) as relay:
        record = relay.dead_letters.show(event_id)
        waiting = relay.dead_letters.waiting_behind(event_id)
    if json:
        print_json({**record_fields(record, payload=payload), "waiting_behind": waiting})
        return
    fields = record_fields(record) | {"waiting_behind": waiting}
    times = ("occurred_at", "created_at", "updated_at", "published_at")
    fields |= {name: when(fields[name]) for name in times}
    if payload:
        fields["payload"] = orjson.dumps(orjson.loads(record.payload)).decode()
    print_pairs(list(fields.items()))


@app.command()
def replay(
    context: typer.Context,
    event_ids: EventIds = None,
    every: All = False,
    stream: OfStream = None,
    type: OfType = None,
    aggregate: OfAggregate = None,
    error: WithError = None,
    older_than: OlderThan = None,
    newer_than: NewerThan = None,
    yes: Yes = False,
) -> None:
    """Send dead letters again, all attempts anew; the entry in the stream says that it is a replay.

    A worker sends them. They stand outside their aggregate's order, unless the policy for dead letters is "block".
    """
    wanted = _filter(stream, type, aggregate, error, older_than, newer_than)
    ids = _chosen(event_ids, every, wanted)
    with open_relay(options_of(context)) as relay:
        if every:
            act = relay.dead_letters.replay_matching
            _all(relay, wanted, yes, "Replay", "replayed", lambda tell: act(wanted, progress=tell))
        else:
            _report("replayed", relay.dead_letters.replay(ids), len(ids))


@app.command()
def discard(
    context: typer.Context,
    event_ids: EventIds = None,
    every: All = False,
    stream: OfStream = None,
    type: OfType = None,
    aggregate: OfAggregate = None,
    error: WithError = None,
    older_than: OlderThan = None,
    newer_than: NewerThan = None,
    yes: Yes = False,
) -> None:
    """Give dead letters up for good. Asks first, unless --yes."""
    wanted = _filter(stream, type, aggregate, error, older_than, newer_than)
    ids = _chosen(event_ids, every, wanted)
    if not every:
        agreed(f"Discard {len(ids)} dead letter(s) for good?", yes)
    with open_relay(options_of(context)) as relay:
        if every:
            act = relay.dead_letters.discard_matching
            _all(relay, wanted, yes, "Discard for good", "discarded", lambda tell: act(wanted, progress=tell))
        else:
            _report("discarded", relay.dead_letters.discard(ids), len(ids))


@app.command()
def audit(
    context: typer.Context,
    limit: Annotated[int, typer.Option(min=1, max=10_000, help="Most entries to print.")] = 100,
    json: Json = False,
) -> None:
    """Show who replayed, discarded or republished what, the newest first."""
    with open_relay(options_of(context)) as relay:
        found = relay.dead_letters.audit(limit)
    if json:
        print_json(found)
        return
    print_table(("At", "Who", "Action", "Rows", "What"), [_audit_row(entry) for entry in found])


def _filter(
    stream: str | None,
    type: str | None,
    aggregate: str | None,
    error: str | None,
    older_than: float | None,
    newer_than: float | None,
) -> DeadLetterFilter:
    return DeadLetterFilter(
        stream=stream, type=type, aggregate=aggregate, error=error, older_than=older_than, newer_than=newer_than
    )


def _chosen(event_ids: list[uuid.UUID] | None, every: bool, wanted: DeadLetterFilter) -> list[uuid.UUID]:
    if every and event_ids:
        raise typer.BadParameter("give event ids or --all, not both")
    if not every and not event_ids:
        raise typer.BadParameter("give event ids, or --all with or without filters")
    if not every and wanted.given():
        raise typer.BadParameter("filters go with --all")
    return list(dict.fromkeys(event_ids or ()))


def _all(
    relay: Relay,
    wanted: DeadLetterFilter,
    yes: bool,
    verb: str,
    done: str,
    act: Callable[[Callable[[int], None]], int],
) -> None:
    count = relay.dead_letters.count(wanted)
    which = ", ".join(f"{name} {value}" for name, value in wanted.given().items()) or "all there are"
    if count:
        agreed(f"{verb}: {count} dead letter(s) ({which})?", yes)
    with progress(done, count) as tell:
        moved = act(tell)
    print(f"{done} {moved}")
    if not moved:
        raise typer.Exit(Exit.FAILED)


def _report(done: str, moved: int, given: int) -> None:
    if moved < given:
        print(f"zzol-relay: {given - moved} of {given} are no dead letters", file=sys.stderr)
    print(f"{done} {moved}")
    if not moved:
        raise typer.Exit(Exit.FAILED)


def _row(record: OutboxRecord) -> tuple[object, ...]:
    return (
        record.id,
        record.event_id,
        record.event_type,
        record.stream_key,
        aggregate_of(record),
        record.sequence,
        record.retry_count,
        when(record.updated_at),
        record.last_error,
    )


def _audit_row(entry: AuditEntry) -> tuple[object, ...]:
    ids = entry.detail.get("event_ids", [])
    rest = {name: value for name, value in entry.detail.items() if name != "event_ids" and value is not None}
    what = f"{ids[0]} and {len(ids) - 1} more" if len(ids) > 1 else ids[0] if ids else ""
    if rest:
        what = f"{orjson.dumps(rest).decode()} {what}".strip()
    return when(entry.at), entry.actor, entry.action, entry.affected, what
