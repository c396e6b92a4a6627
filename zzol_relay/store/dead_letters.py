"""The operator's transitions of dead letters, each audited in its own transaction."""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from typing import Any

import orjson
from sqlalchemy import Connection, update

from zzol_relay.core.lifecycle import Status
from zzol_relay.store.database import Database
from zzol_relay.store.dialect import utc_now

__all__ = ["DeadLetterStore"]


class DeadLetterStore:
    """DEAD_LETTER → PENDING (replay) or DISCARDED; nothing else leaves that state."""

    def __init__(self, database: Database) -> None:
        self._db = database
        self._t = database.tables.outbox

    def replay(self, event_ids: Sequence[uuid.UUID], actor: str) -> int:
        """Make dead letters PENDING again, due now, with all their attempts and a new replay number; returns how many
        were dead letters."""
        t = self._t
        values = {
            "status": Status.PENDING.value,
            "retry_count": 0,
            # Kept until PUBLISHED: it makes the poller send the row outside the order, deduplicated by this number†.
            "replays": t.c.replays + 1,
            "claim_token": None,
            "due_at": utc_now(),
            "updated_at": utc_now(),
        }
        return self._move("replay", event_ids, actor, values)

    def discard(self, event_ids: Sequence[uuid.UUID], actor: str) -> int:
        """Give dead letters up for good; returns how many were dead letters."""
        values = {"status": Status.DISCARDED.value, "due_at": utc_now(), "updated_at": utc_now()}
        return self._move("discard", event_ids, actor, values)

    def _move(self, action: str, event_ids: Sequence[uuid.UUID], actor: str, values: dict[str, Any]) -> int:
        t, audit = self._t, self._db.tables.audit

        def work(connection: Connection) -> int:
            moved: int = connection.execute(
                update(t)
                .where(t.c.event_id.in_([id_.bytes for id_ in event_ids]), t.c.status == Status.DEAD_LETTER.value)
                .values(values)
            ).rowcount
            connection.execute(
                audit.insert().values(
                    at=utc_now(),
                    actor=actor[:128],
                    action=action,
                    affected=moved,
                    detail=orjson.dumps({"event_ids": [str(id_) for id_ in event_ids[:1000]]}),
                )
            )
            return moved

        return self._db.run(action, work) if event_ids else 0
