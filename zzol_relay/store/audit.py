"""Who did what by hand, and when: ``relay_audit``."""

from __future__ import annotations

import dataclasses
import uuid
from collections.abc import Mapping
from datetime import datetime
from typing import Any

import orjson
from sqlalchemy import Connection, select

from zzol_relay.store.database import Database
from zzol_relay.store.dialect import utc_now
from zzol_relay.store.tables import Tables

__all__ = ["AuditEntry", "AuditStore", "write_audit"]


@dataclasses.dataclass(frozen=True, slots=True)
class AuditEntry:
    """One action of an operator. ``affected`` rows changed; ``detail`` holds the filter and the event ids."""

    id: int
    at: datetime
    actor: str
    action: str
    affected: int
    detail: dict[str, Any]


def write_audit(
    connection: Connection, tables: Tables, *, actor: str, action: str, affected: int, detail: Mapping[str, Any]
) -> None:
    """Write an entry in the transaction of ``connection``: what it tells and what it tells of commit together."""
    connection.execute(
        tables.audit.insert().values(
            at=utc_now(), actor=actor[:128], action=action, affected=affected, detail=orjson.dumps(detail, default=str)
        )
    )


class AuditStore:
    """Reads of the audit, and entries that belong to no change of a row."""

    def __init__(self, database: Database) -> None:
        self._db = database
        self._t = database.tables.audit

    def newest(self, limit: int = 100) -> list[AuditEntry]:
        """The ``limit`` newest entries, newest first."""
        t = self._t

        def read(connection: Connection) -> list[AuditEntry]:
            return [
                AuditEntry(row.id, row.at, row.actor, row.action, row.affected, orjson.loads(row.detail))
                for row in connection.execute(select(t).order_by(t.c.id.desc()).limit(limit))
            ]

        return self._db.run("audit", read)

    def about(self, event_id: uuid.UUID, among: int = 10_000) -> list[AuditEntry]:
        """The entries, oldest first, that name this event, among the ``among`` newest."""
        return [entry for entry in reversed(self.newest(among)) if str(event_id) in entry.detail.get("event_ids", ())]

    def write(self, *, actor: str, action: str, affected: int, detail: Mapping[str, Any]) -> None:
        """Write an entry in a transaction of its own."""
        self._db.run(
            "audit",
            lambda connection: write_audit(
                connection, self._db.tables, actor=actor, action=action, affected=affected, detail=detail
            ),
        )
