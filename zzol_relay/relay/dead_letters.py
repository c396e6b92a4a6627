"""Dead letters as operators handle them: list, show, replay, discard (Z13, G9)."""

from __future__ import annotations

import getpass
import uuid
from builtins import list as list_of
from collections.abc import Callable, Iterator, Sequence

from zzol_relay.core.errors import DeadLetterError
from zzol_relay.core.lifecycle import Status
from zzol_relay.store.audit import AuditEntry, AuditStore
from zzol_relay.store.dead_letters import DeadLetterFilter, DeadLetterStore
from zzol_relay.store.outbox import OutboxRecord, OutboxStore

__all__ = ["DeadLetters", "Moved", "process_user"]

Moved = Callable[[int], None]
"""Told after each batch how many rows have moved so far."""


class DeadLetters:
    """``relay.dead_letters``.

    Rows move in batches of 500, each a transaction of its own with its entry in ``relay_audit``. Replayed rows are
    sent by the poller, at once where one runs in this process: outside their aggregate's order and visibly so, or,
    where ``on_dead_letter`` is ``block``, in it. Under ``block`` what waited behind a row may go at once when it is
    replayed or discarded. ``actor`` is audited (default: the user of this process).
    """

    def __init__(self, store: OutboxStore, rows: DeadLetterStore, audit: AuditStore, wake: Callable[[], None]) -> None:
        self._store = store
        self._rows = rows
        self._audit = audit
        self._wake = wake

    def list(
        self, filter: DeadLetterFilter | None = None, *, limit: int = 100, after: int = 0
    ) -> list_of[OutboxRecord]:
        """Dead letters that match (None: all) in id order, ``limit`` of them with an id above ``after``."""
        return self._rows.matching(filter or DeadLetterFilter(), limit=limit, after=after)

    def count(self, filter: DeadLetterFilter | None = None) -> int:
        """How many dead letters match."""
        return self._rows.count(filter or DeadLetterFilter())

    def show(self, event_id: uuid.UUID) -> OutboxRecord:
        """One dead letter. Raises ``DeadLetterError`` where the event is none."""
        record = self._find(event_id)
        if record.status is not Status.DEAD_LETTER:
            raise DeadLetterError(f"event {event_id} is {record.status.value}, not a dead letter")
        return record

    def waiting_behind(self, event_id: uuid.UUID) -> int:
        """How many unpublished rows of the event's aggregate stand behind it (counted up to 100,000): what
        ``on_dead_letter="block"`` holds up. Raises ``DeadLetterError`` where the event is not in the outbox."""
        return self._rows.waiting_behind(self._find(event_id))

    def replay(self, event_ids: Sequence[uuid.UUID], *, actor: str | None = None, progress: Moved | None = None) -> int:
        """Send those of these events that are dead letters again, all attempts anew; returns how many were."""
        return self._run(self._rows.move("replay", event_ids, actor or process_user()), progress)

    def discard(
        self, event_ids: Sequence[uuid.UUID], *, actor: str | None = None, progress: Moved | None = None
    ) -> int:
        """Give those of these events that are dead letters up for good; returns how many were."""
        return self._run(self._rows.move("discard", event_ids, actor or process_user()), progress)

    def replay_matching(
        self,
        filter: DeadLetterFilter,
        *,
        limit: int | None = None,
        actor: str | None = None,
        progress: Moved | None = None,
    ) -> int:
        """Send every dead letter that matches and is one now again, at most ``limit``; returns how many."""
        return self._run(self._rows.move_matching("replay", filter, actor or process_user(), limit), progress)

    def discard_matching(
        self,
        filter: DeadLetterFilter,
        *,
        limit: int | None = None,
        actor: str | None = None,
        progress: Moved | None = None,
    ) -> int:
        """Give every dead letter that matches and is one now up, at most ``limit``; returns how many."""
        return self._run(self._rows.move_matching("discard", filter, actor or process_user(), limit), progress)

    def audit(self, limit: int = 100) -> list_of[AuditEntry]:
        """The ``limit`` newest entries of ``relay_audit``, newest first: who did what by hand, and when."""
        return self._audit.newest(limit)

    def _run(self, batches: Iterator[int], progress: Moved | None) -> int:
        total = 0
        try:
            for moved in batches:
                total += moved
                if progress is not None:
                    progress(total)
        finally:
            if total:
                # Even a discard may let the next of an aggregate go.
                self._wake()
        return total

    def _find(self, event_id: uuid.UUID) -> OutboxRecord:
        record = self._store.find(event_id)
        if record is None:
            raise DeadLetterError(
                f"event {event_id} is not in the outbox; settled rows are deleted after the retention"
            )
        return record


def process_user() -> str:
    """The name of the user that this process runs as."""
    try:
        return getpass.getuser()
    except (KeyError, OSError, ImportError):
        return "unknown"
