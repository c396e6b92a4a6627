"""Commands about events: find, and republish after Redis lost some."""

from __future__ import annotations

import dataclasses
import uuid
from datetime import datetime
from typing import Annotated, Any, NoReturn

import orjson
import typer

from zzol_relay.cli.arguments import Json, Yes, agreed, moment
from zzol_relay.cli.context import open_relay, options_of
from zzol_relay.cli.failures import Exit
from zzol_relay.cli.output import (
    aggregate_of,
    print_json,
    print_pairs,
    print_table,
    progress,
    record_fields,
    seconds,
    when,
)
from zzol_relay.relay.events import Story
from zzol_relay.relay.republish import Republished
from zzol_relay.store.outbox import OutboxRecord

__all__ = ["find", "republish"]

_WHEN = "ISO 8601 (UTC unless it says otherwise), or a duration ago: 2h."


def find(
    context: typer.Context,
    event_id: Annotated[uuid.UUID | None, typer.Argument(metavar="ID", show_default=False)] = None,
    aggregate: Annotated[str | None, typer.Option(metavar="TYPE:ID", help="The events of this aggregate.")] = None,
    correlation: Annotated[str | None, typer.Option(help="The events of this correlation id (reads all rows).")] = None,
    stream: Annotated[str | None, typer.Option(help="With --aggregate: only of this stream.")] = None,
    limit: Annotated[int, typer.Option(min=1, max=10_000, help="Most events to print, the newest.")] = 100,
    json: Json = False,
    payload: Annotated[bool, typer.Option("--payload", help="With ID: print the event's data too.")] = False,
) -> None:
    """Tell what became of an event, or list those of an aggregate or a correlation id. Exit code 1: none is there.

    Settled events are kept for the retention (24 h).
    """
    if sum(given is not None for given in (event_id, aggregate, correlation)) != 1:
        raise typer.BadParameter("give an event id, --aggregate or --correlation")
    with open_relay(options_of(context)) as relay:
        if event_id is not None:
            story = relay.events.story(event_id)
            if story is None:
                _none(f"event {event_id} is not in the outbox; settled rows are deleted after the retention")
            _tell(story, json, payload)
            return
        if aggregate is not None:
            records = relay.events.of_aggregate(aggregate, stream=stream, limit=limit)
        else:
            records = relay.events.of_correlation(correlation or "", limit=limit)
    if json:
        print_json([record_fields(record) for record in records])
    else:
        print_table(
            ("No", "Event id", "Type", "Stream key", "Aggregate", "Sequence", "Status", "Attempts", "Recorded", "Took"),
            [_row(record) for record in records],
        )
    if not records:
        raise typer.Exit(Exit.FAILED)


def republish(
    context: typer.Context,
    since: Annotated[datetime, typer.Option(parser=moment, metavar="WHEN", help=f"Published since: {_WHEN}")],
    until: Annotated[
        datetime | None, typer.Option(parser=moment, metavar="WHEN", help="Published before. Default: now.")
    ] = None,
    stream: Annotated[str | None, typer.Option(help="Only of this stream.")] = None,
    include_trimmed: Annotated[
        bool, typer.Option("--include-trimmed", help="Also what is older than its stream's retention.")
    ] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only say what would be sent.")] = False,
    yes: Yes = False,
    json: Json = False,
) -> None:
    """Send again, in order, the published events whose entries Redis has lost; what is there is not doubled.

    Says what is absent and asks first. May be repeated. Exit code 1: Redis refused some.
    """
    window: dict[str, Any] = {"stream": stream, "include_trimmed": include_trimmed}
    with open_relay(options_of(context)) as relay:
        with progress("examined", None) as tell:
            found = relay.republish(since, until, dry_run=True, progress=lambda so_far: tell(so_far.examined), **window)
        if not json:
            print_pairs(_found(found))
        if found.absent and not dry_run:
            agreed(f"Send {found.absent} event(s) again?", yes)
            with progress("restored", found.absent) as tell:
                found = relay.republish(
                    since, until, progress=lambda so_far: tell(so_far.restored + so_far.remembered), **window
                )
            if not json:
                print_pairs([("Restored", found.restored), ("Remembered", found.remembered), ("Failed", found.failed)])
    if json:
        print_json({"dry_run": dry_run, **dataclasses.asdict(found)})
    if found.failed:
        raise typer.Exit(Exit.FAILED)


def _found(found: Republished) -> list[tuple[str, object]]:
    return [
        ("Examined", found.examined),
        ("Absent", found.absent),
        ("Trimmed", found.trimmed),
        ("Unknown", found.unknown),
    ]


def _none(reason: str) -> NoReturn:
    typer.echo(f"zzol-relay: {reason}", err=True)
    raise typer.Exit(Exit.FAILED)


def _tell(story: Story, json: bool, payload: bool) -> None:
    record = story.record
    if json:
        rest = {"entry": story.entry, "waiting_behind": story.waiting_behind, "audit": story.audit}
        print_json({**record_fields(record, payload=payload), **rest})
        return
    fields = record_fields(record)
    for name in ("occurred_at", "created_at", "updated_at", "published_at"):
        del fields[name]
    if payload:
        fields["payload"] = orjson.dumps(orjson.loads(record.payload)).decode()
    print_pairs([*fields.items(), ("entry", story.entry), ("waiting_behind", story.waiting_behind)])
    print()
    print_table(("When", "What"), [(when(moment), what) for moment, what in _timeline(story)])


def _timeline(story: Story) -> list[tuple[datetime, str]]:
    record = story.record
    steps = [(record.occurred_at, "occurred"), (record.created_at, "recorded")]
    steps += [(entry.at, f"{entry.action} by {entry.actor}") for entry in story.audit]
    if record.published_at is not None:
        took = seconds((record.published_at - record.created_at).total_seconds())
        steps.append((record.published_at, f"published, {took} after it was recorded, as {record.stream_entry_id}"))
    else:
        failed = f", {record.retry_count} attempt(s) failed: {record.last_error}" if record.retry_count else ""
        steps.append((record.updated_at, f"{record.status.value}{failed}"))
    return sorted(steps, key=lambda step: step[0])


def _row(record: OutboxRecord) -> tuple[object, ...]:
    published = record.published_at
    return (
        record.id,
        record.event_id,
        record.event_type,
        record.stream_key,
        aggregate_of(record),
        record.sequence,
        record.status.value,
        record.retry_count,
        when(record.created_at),
        seconds(None if published is None else (published - record.created_at).total_seconds()),
    )
