"""Dead letters as operators handle them: list, show, replay, discard (Z13, G9)."""

from __future__ import annotations

import getpass
import uuid
from collections.abc import Callable, Sequence

from zzol_relay.core.errors import DeadLetterError
from zzol_relay.core.lifecycle import Status
from zzol_relay.store.dead_letters import DeadLetterStore
from zzol_relay.store.outbox import OutboxRecord, OutboxStore

__all__ = ["DeadLetters"]


class DeadLetters:
    """``relay.dead_letters``. Each action is audited in ``relay_audit`` in its own transaction."""

    def __init__(self, store: OutboxStore, actions: DeadLetterStore, wake: Callable[[], None]) -> None:
        self._store = store
        self._actions = actions
        self._wake = wake

    def list(self, *, limit: int = 100, after: int = 0) -> list[OutboxRecord]:
        """Dead letters in id order, ``limit`` of them with an id above ``after``."""
        return self._store.list_by_status(Status.DEAD_LETTER, limit=limit, after=after)

    def show(self, event_id: uuid.UUID) -> OutboxRecord:
        """One dead letter. Raises ``DeadLetterError`` where the event is none."""
        record = self._store.find(event_id)
        if record is None:
            raise DeadLetterError(
                f"event {event_id} is not in the outbox; settled rows are deleted after the retention"
            )
        if record.status is not Status.DEAD_LETTER:
            raise DeadLetterError(f"event {event_id} is {record.status.value}, not a dead letter")
        return record

    def replay(self, event_ids: Sequence[uuid.UUID], *, actor: str | None = None) -> int:
        """Send dead letters again, outside their aggregate's order and visibly so; returns how many were.

        They are sent by the poller, at once where one runs in this process. ``actor`` is audited (default: the user
        of this process).
        """
        moved = self._actions.replay(event_ids, actor or _user())
        if moved:
            self._wake()
        return moved

    def discard(self, event_ids: Sequence[uuid.UUID], *, actor: str | None = None) -> int:
        """Give dead letters up for good; returns how many were."""
        moved = self._actions.discard(event_ids, actor or _user())
        if moved:
            # Under "block" the next of their aggregates may go now.
            self._wake()
        return moved


def _user() -> str:
    try:
        return getpass.getuser()
    except (KeyError, OSError, ImportError):
        return "unknown"
