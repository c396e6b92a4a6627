"""Facts the relay announces after they are durable; tests, metrics and logs hear the same ones.

An observer is any callable that takes a ``Fact``. It is called on the thread where the fact came to be, must be quick,
and cannot break anything: what it raises is logged and counted. Facts are batches, so that their cost does not grow
with the rate.
"""

from __future__ import annotations

import dataclasses
import logging
import uuid
from collections.abc import Callable, Iterable
from typing import Literal

__all__ = [
    "CircuitChanged",
    "ClaimLost",
    "Claimed",
    "CleanedUp",
    "DataLossDetected",
    "DeadLettered",
    "DeadlockRetried",
    "Deferred",
    "DirectPublished",
    "DuplicatesSuppressed",
    "Fact",
    "Failed",
    "LoopBeat",
    "LoopFailed",
    "Observer",
    "Observers",
    "Published",
    "Recorded",
    "Recovered",
    "Settled",
    "ShardUnusable",
]

Path = Literal["after_commit", "poller"]

_log = logging.getLogger("zzol_relay.observer")


@dataclasses.dataclass(frozen=True, slots=True)
class Recorded:
    """Outbox rows were committed. ``waited`` is how long the commit was held for their publishing, in seconds."""

    event_ids: tuple[uuid.UUID, ...]
    waited: float


@dataclasses.dataclass(frozen=True, slots=True)
class Published:
    """Redis acknowledged new entries. ``ages`` are seconds from the row's creation to its acknowledgement."""

    path: Path
    event_ids: tuple[uuid.UUID, ...]
    ages: tuple[float, ...]


@dataclasses.dataclass(frozen=True, slots=True)
class DuplicatesSuppressed:
    """The script had these already (G11, G12)."""

    path: Path
    event_ids: tuple[uuid.UUID, ...]


@dataclasses.dataclass(frozen=True, slots=True)
class Deferred:
    """Rows were left to the poller, or given back by it, without costing an attempt."""

    path: Path
    event_ids: tuple[uuid.UUID, ...]
    reason: Literal["circuit", "outage", "order", "timeout", "overflow", "shard", "stopping", "outer", "epoch", "error"]


@dataclasses.dataclass(frozen=True, slots=True)
class Settled:
    """Rows were marked PUBLISHED in the database."""

    path: Path
    event_ids: tuple[uuid.UUID, ...]


@dataclasses.dataclass(frozen=True, slots=True)
class Failed:
    """An attempt of one row failed by the row's own fault and it waits for its next."""

    event_id: uuid.UUID
    error: str
    retry_count: int


@dataclasses.dataclass(frozen=True, slots=True)
class DeadLettered:
    """A row has become a dead letter and waits for an operator."""

    event_id: uuid.UUID
    error: str
    retry_count: int


@dataclasses.dataclass(frozen=True, slots=True)
class Claimed:
    """A worker holds these rows. ``retries`` is how many of them have failed before."""

    event_ids: tuple[uuid.UUID, ...]
    retries: int = 0


@dataclasses.dataclass(frozen=True, slots=True)
class ClaimLost:
    """A settle or renewal found rows no longer its own: the claim had been taken away. ``count`` rows."""

    path: Path
    count: int


@dataclasses.dataclass(frozen=True, slots=True)
class Recovered:
    """Expired claims went back to PENDING, each costing an attempt (Z33). ``count`` rows."""

    count: int


@dataclasses.dataclass(frozen=True, slots=True)
class CleanedUp:
    """Old settled rows were deleted from ``table``. ``count`` rows."""

    table: str
    count: int


@dataclasses.dataclass(frozen=True, slots=True)
class CircuitChanged:
    """The circuit to Redis opened or closed."""

    open: bool
    reason: str


@dataclasses.dataclass(frozen=True, slots=True)
class ShardUnusable:
    """One shard cannot be written though Redis is up (its key has the wrong type, say); its rows wait."""

    stream_key: str
    error: str


@dataclasses.dataclass(frozen=True, slots=True)
class DataLossDetected:
    """A shard of Redis lost acknowledged entries, or came back older; a new epoch began."""

    stream_key: str
    reason: str


@dataclasses.dataclass(frozen=True, slots=True)
class DeadlockRetried:
    """MySQL chose one of the relay's own transactions as a deadlock's victim (1213) or let it wait too long (1205)."""

    operation: str


@dataclasses.dataclass(frozen=True, slots=True)
class DirectPublished:
    """Events went straight to their streams, past the database."""

    count: int


@dataclasses.dataclass(frozen=True, slots=True)
class LoopBeat:
    """A supervised loop finished a round. ``seconds`` is how long it took."""

    loop: str
    seconds: float


@dataclasses.dataclass(frozen=True, slots=True)
class LoopFailed:
    """A supervised loop's round raised; it goes on after ``retry_in`` seconds."""

    loop: str
    error: str
    retry_in: float


Fact = (
    Recorded
    | Published
    | DuplicatesSuppressed
    | Deferred
    | Settled
    | Failed
    | DeadLettered
    | Claimed
    | ClaimLost
    | Recovered
    | CleanedUp
    | CircuitChanged
    | ShardUnusable
    | DataLossDetected
    | DeadlockRetried
    | DirectPublished
    | LoopBeat
    | LoopFailed
)
Observer = Callable[[Fact], None]


class Observers:
    """Hands each fact to each observer; an observer that raises is logged, counted in ``errors``, and kept."""

    def __init__(self, observers: Iterable[Observer] = ()) -> None:
        self._observers = tuple(observers)
        self.errors = 0

    def add(self, observer: Observer) -> None:
        """Append an observer; it hears every later fact."""
        self._observers = (*self._observers, observer)

    def remove(self, observer: Observer) -> None:
        """Forget an observer; no error if it is not there."""
        self._observers = tuple(kept for kept in self._observers if kept != observer)

    def __call__(self, fact: Fact) -> None:
        for observer in self._observers:
            try:
                observer(fact)
            except Exception:
                self.errors += 1
                _log.exception("an observer raised", extra={"fact": type(fact).__name__})
