"""The states of an outbox row and the transitions between them (Z11–Z13)."""

from __future__ import annotations

from enum import StrEnum

__all__ = ["SETTLED", "TRANSITIONS", "UNPUBLISHED", "Status", "can_move"]


class Status(StrEnum):
    """Where an outbox row stands. The names are the database's."""

    PENDING = "PENDING"
    """Committed, not yet in its stream; may be claimed from ``due_at`` on."""
    IN_PROGRESS = "IN_PROGRESS"
    """Claimed by a worker until ``due_at``."""
    PUBLISHED = "PUBLISHED"
    """Acknowledged by Redis."""
    DEAD_LETTER = "DEAD_LETTER"
    """Failed ``max_attempts`` times; waits for an operator."""
    DISCARDED = "DISCARDED"
    """Given up by an operator."""


UNPUBLISHED = frozenset({Status.PENDING, Status.IN_PROGRESS})
SETTLED = frozenset({Status.PUBLISHED, Status.DISCARDED})

TRANSITIONS: dict[Status, frozenset[Status]] = {
    Status.PENDING: frozenset({Status.PUBLISHED, Status.IN_PROGRESS, Status.DEAD_LETTER, Status.PENDING}),
    Status.IN_PROGRESS: frozenset({Status.PUBLISHED, Status.PENDING, Status.DEAD_LETTER, Status.IN_PROGRESS}),
    Status.PUBLISHED: frozenset(),
    Status.DEAD_LETTER: frozenset({Status.PENDING, Status.DISCARDED}),
    Status.DISCARDED: frozenset(),
}


def can_move(source: Status, target: Status) -> bool:
    """Whether ``source → target`` is a transition of the protocol."""
    return target in TRANSITIONS[source]
