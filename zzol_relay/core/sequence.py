"""Order per aggregate: which claimed rows may be sent, and in which mode (Z9, G18).

A row is *proven* when the row just before it in its aggregate (its ``prev_sequence``) is settled, gone, or, where the
policy says ``skip``, dead. ``SKIP LOCKED`` alone proves nothing: another worker may hold the predecessor.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from enum import StrEnum
from typing import Generic, Literal, Protocol, TypeVar

from zzol_relay.core.lifecycle import SETTLED, Status

__all__ = ["Mode", "OrderedRow", "Plan", "Planned", "aggregate_order", "plan_batch", "predecessor_done"]

DeadLetterPolicy = Literal["skip", "block"]


class Mode(StrEnum):
    """How the script is to treat a command; the values are ARGV of ``publish.lua``."""

    NEXT = "next"
    """Publish if the stream's tail is the predecessor."""
    HEAD = "head"
    """Order was proven in the database: publish any sequence above the tail."""
    REPLAY = "replay"
    """An operator's wish: outside the order, deduplicated by replay number."""
    RESTORE = "restore"
    """Mending lost data: respects dedup, leaves order and tail alone."""
    UNORDERED = "unordered"
    """An event without aggregate."""


class OrderedRow(Protocol):
    """What the decisions here need to know of a row."""

    @property
    def id(self) -> int: ...
    @property
    def aggregate_key(self) -> tuple[str, str, str] | None: ...
    @property
    def sequence(self) -> int | None: ...
    @property
    def prev_sequence(self) -> int | None: ...
    @property
    def retry_count(self) -> int: ...
    @property
    def replays(self) -> int: ...
    @property
    def size(self) -> int: ...


R = TypeVar("R", bound=OrderedRow)


@dataclasses.dataclass(frozen=True, slots=True)
class Planned(Generic[R]):
    """A row to send, and the mode to send it in."""

    row: R
    mode: Mode


@dataclasses.dataclass(frozen=True, slots=True)
class Plan(Generic[R]):
    """What to do with the rows a claim has locked.

    ``send`` is in the order to send. ``wait`` holds rows whose predecessor is not ready: they get a short ``due_at``,
    so that they do not fill the window of every claim†. ``leave`` holds ready rows that do not fit this batch.
    """

    send: tuple[Planned[R], ...]
    wait: tuple[R, ...]
    leave: tuple[R, ...]


def aggregate_order(row: OrderedRow) -> tuple[tuple[str, str, str], int]:
    """Sort key: aggregate by aggregate, in sequence order within."""
    return (row.aggregate_key or ("", "", ""), row.sequence or 0)


def predecessor_done(status: Status | None, policy: DeadLetterPolicy) -> bool:
    """Whether a predecessor in ``status`` (``None``: gone or never there) lets its successor go.

    A replayed row is PENDING again and so counts as unpublished.
    """
    if status is None or status in SETTLED:
        return True
    return status is Status.DEAD_LETTER and policy == "skip"


def plan_batch(
    rows: Sequence[R],
    predecessors: Mapping[int, Status],
    policy: DeadLetterPolicy,
    *,
    max_bytes: int,
) -> Plan[R]:
    """Decide what a claim keeps of the rows it has locked, given in claim order (``due_at, id``).

    ``predecessors`` maps a row's id to the status of its predecessor, read *after* the locks were taken†; a row that
    is missing there has none. The first row of an aggregate goes as ``head``, those behind it as ``next``, in
    sequence order†. A row that has cost an attempt goes alone†, so that one that kills its worker takes no neighbour
    with it. At least one ready row is sent whatever its size; beyond that the batch ends at ``max_bytes``.
    """
    in_batch: dict[tuple[tuple[str, str, str] | None, int | None], R] = {
        (row.aggregate_key, row.sequence): row for row in rows if row.aggregate_key is not None
    }
    verdicts: dict[int, Mode | None] = {}

    def verdict(row: R) -> Mode | None:
        if row.id in verdicts:
            return verdicts[row.id]
        if row.aggregate_key is None:
            mode: Mode | None = Mode.REPLAY if row.replays and policy == "skip" else Mode.UNORDERED
        elif row.replays and policy == "skip":
            mode = Mode.REPLAY
        elif predecessor_done(predecessors.get(row.id), policy):
            mode = Mode.HEAD
        else:
            mode = None
        verdicts[row.id] = mode
        return mode

    ready: list[Planned[R]] = []
    wait: list[R] = []
    # Sequence order within the aggregate, so that a mate's verdict stands before its follower asks for it.
    for row in sorted(rows, key=aggregate_order):
        mode = verdict(row)
        if mode is None and row.aggregate_key is not None:
            mate = in_batch.get((row.aggregate_key, row.prev_sequence))
            if mate is not None and verdicts.get(mate.id) in (Mode.HEAD, Mode.NEXT):
                mode = verdicts[row.id] = Mode.NEXT
        if mode is None:
            wait.append(row)
        else:
            ready.append(Planned(row, mode))
    if not ready:
        return Plan((), tuple(wait), ())

    by_claim_order = {row.id: position for position, row in enumerate(rows)}
    first = min(ready, key=lambda planned: by_claim_order[planned.row.id])
    if first.row.retry_count and first.mode is not Mode.NEXT:
        return Plan((first,), tuple(wait), tuple(p.row for p in ready if p is not first))

    send: list[Planned[R]] = []
    leave: list[R] = []
    dropped: set[int] = set()
    size = 0
    for planned in ready:
        row = planned.row
        mate = in_batch.get((row.aggregate_key, row.prev_sequence)) if planned.mode is Mode.NEXT else None
        behind_dropped = mate is not None and mate.id in dropped
        if behind_dropped or row.retry_count or (send and size + row.size > max_bytes):
            leave.append(row)
            dropped.add(row.id)
        else:
            send.append(planned)
            size += row.size
    if not send:
        # Every ready row either has cost an attempt or stands behind one that has: the first head among them goes.
        alone = next(planned for planned in ready if planned.mode is not Mode.NEXT)
        return Plan((alone,), tuple(wait), tuple(p.row for p in ready if p is not alone))
    return Plan(tuple(send), tuple(wait), tuple(leave))
