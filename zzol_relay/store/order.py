"""The order proof's reads, and putting off what is not ready.

They run on the connection of the claim, after its locks†: a second statement at READ COMMITTED sees what was committed
up to now, the locking SELECT itself an older snapshot.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from sqlalchemy import Connection, Table, bindparam, literal, select, update

from zzol_relay.core.lifecycle import Status
from zzol_relay.core.sequence import OrderedRow
from zzol_relay.settings import Settings
from zzol_relay.store.dialect import seconds_since, utc_after

__all__ = ["prove", "put_off", "read_predecessors"]


def put_off(connection: Connection, outbox: Table, rows: Sequence[OrderedRow], settings: Settings) -> None:
    """Give rows whose predecessor is not ready a later ``due_at``, at no cost†. ``rows`` are in sequence order per
    aggregate, and locked."""
    # Not before its predecessor: else what stands behind a row in backoff, or behind a dead letter, would be
    # claimed and put off five times a second.
    t = outbox
    ids = [row.id for row in rows]
    delays = _blocked_for(connection, t, ids, settings.backoff_cap)
    due: dict[tuple[Any, int | None], float] = {}
    groups: dict[int, list[int]] = {}
    for row in rows:
        delay = max(settings.blocked_delay, delays.get(row.id, 0.0))
        delay = max(delay, due.get((row.aggregate_key, row.prev_sequence), 0.0))
        due[row.aggregate_key, row.sequence] = delay
        # In steps of 50 ms, so that a crowd is put off in a handful of statements.
        groups.setdefault(math.ceil(delay / 0.05), []).append(row.id)
    for step, members in groups.items():
        connection.execute(
            update(t)
            .where(t.c.id.in_(members), t.c.status == Status.PENDING.value)
            .values(due_at=utc_after(literal(step * 50_000)))
        )


def prove(connection: Connection, outbox: Table, rows: Sequence[OrderedRow]) -> dict[int, Status]:
    """The status of the predecessor of each locked row that has one; absent where it is gone."""
    locked = {(row.aggregate_key, row.sequence) for row in rows}
    statuses: dict[int, Status] = {}
    others = []
    for row in rows:
        if not row.prev_sequence:
            continue
        if (row.aggregate_key, row.prev_sequence) in locked:
            # We hold its lock and have read its status under it: nobody else can have changed it.
            statuses[row.id] = Status.PENDING
        else:
            others.append(row.id)
    statuses.update(read_predecessors(connection, outbox, others))
    return statuses


def read_predecessors(connection: Connection, outbox: Table, ids: Sequence[int]) -> dict[int, Status]:
    """The status of the predecessor of each of these rows; a row that has none, or whose is gone, is absent.

    By the unique key of the predecessor, row by row of the primary key: a question for "any earlier event
    unpublished" over a hot aggregate of 300,000 rows takes 196-358 ms.
    """
    if not ids:
        return {}
    row, before = outbox.alias("r"), outbox.alias("p")
    statement = select(row.c.id, before.c.status).select_from(row.join(before, _is_before(before, row)))
    statement = statement.where(row.c.id.in_(bindparam("ids", expanding=True, literal_execute=True)))
    return {id_: Status(status) for id_, status in connection.execute(statement, {"ids": ids})}


def _blocked_for(connection: Connection, outbox: Table, ids: Sequence[int], dead: float) -> dict[int, float]:
    """Seconds until the predecessor of each of these rows may itself be claimed; absent where that is soon or unknown.

    That of a predecessor in backoff, or one that waits in its turn, is its ``due_at``; of a dead letter, ``dead``. One
    that somebody holds may be done at any moment.
    """
    row, before = outbox.alias("r"), outbox.alias("p")
    waits = (before.c.status == Status.PENDING.value) & before.c.claim_token.is_(None)
    statement = (
        select(row.c.id, before.c.status, seconds_since(before.c.due_at))
        .select_from(row.join(before, _is_before(before, row)))
        .where(row.c.id.in_(ids), waits | (before.c.status == Status.DEAD_LETTER.value))
    )
    return {
        id_: dead if status == Status.DEAD_LETTER.value else max(0.0, -float(since))
        for id_, status, since in connection.execute(statement)
    }


def _is_before(before: Any, row: Any) -> Any:
    return (
        (before.c.stream_key == row.c.stream_key)
        & (before.c.aggregate_type == row.c.aggregate_type)
        & (before.c.aggregate_id == row.c.aggregate_id)
        & (before.c.sequence == row.c.prev_sequence)
    )
