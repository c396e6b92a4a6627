"""Cleanup, the duties' leases and the instances' heartbeats."""

from __future__ import annotations

import dataclasses
from datetime import datetime
from typing import Any

import orjson
from sqlalchemy import Connection, delete, literal, or_, select, update
from sqlalchemy.dialects import mysql, sqlite

from zzol_relay.core.lifecycle import SETTLED
from zzol_relay.settings import Settings
from zzol_relay.store.database import Database
from zzol_relay.store.dialect import seconds_since, utc_after, utc_now

__all__ = ["Instance", "UpkeepStore"]

_FORGET_INSTANCE = 24 * 3600.0


@dataclasses.dataclass(frozen=True, slots=True)
class Instance:
    """A process that runs the relay, as its last heartbeat told."""

    name: str
    version: str
    role: str
    circuit: str
    counters: dict[str, Any]
    started_at: datetime
    beat_age: float


class UpkeepStore:
    """Run-once pieces of upkeep; scheduling is elsewhere."""

    def __init__(self, database: Database, settings: Settings) -> None:
        self._db = database
        self._settings = settings

    def delete_settled(self) -> int:
        """Delete up to ``cleanup_batch`` settled rows older than the retention, in index order, in one transaction.

        Selects ids, then deletes by primary key with the predicate restated; never an unsent row. Returns the count.
        """
        t = self._db.tables.outbox
        old = utc_after(literal(-round(self._settings.retention * 1e6)))
        statuses = sorted(status.value for status in SETTLED)

        def work(connection: Connection) -> int:
            deleted = 0
            for status in statuses:
                batch = select(t.c.id).where(t.c.status == status, t.c.due_at <= old)
                batch = batch.limit(self._settings.cleanup_batch - deleted)
                ids = connection.execute(self._db.tables.by_due(batch)).scalars().all()
                if ids:
                    deleted += connection.execute(
                        delete(t).where(t.c.id.in_(ids), t.c.status == status, t.c.due_at <= old)
                    ).rowcount
                if deleted >= self._settings.cleanup_batch:
                    break
            return deleted

        return self._db.run("cleanup", work)

    def take_duty(self, name: str, holder: bytes, lease: float, not_within: float = 0.0) -> bool:
        """Take a duty for ``lease`` seconds, unless another holds it or it last ran less than ``not_within`` ago.

        One guarded UPDATE decides among any number of processes; no GET_LOCK.
        """
        duty = self._db.tables.duty

        def work(connection: Connection) -> bool:
            self._ensure_duty(connection, name)
            free = or_(duty.c.holder.is_(None), duty.c.holder == holder, duty.c.lease_until <= utc_now())
            due = or_(duty.c.last_run_at.is_(None), duty.c.last_run_at <= utc_after(literal(-round(not_within * 1e6))))
            result = connection.execute(
                update(duty)
                .where(duty.c.name == name, free, due)
                .values(holder=holder, lease_until=utc_after(literal(round(lease * 1e6))))
            )
            return result.rowcount == 1

        return self._db.run("take_duty", work)

    def renew_duty(self, name: str, holder: bytes, lease: float) -> bool:
        """Extend a duty that is still ours; False when another has taken it."""
        duty = self._db.tables.duty
        statement = (
            update(duty)
            .where(duty.c.name == name, duty.c.holder == holder)
            .values(lease_until=utc_after(literal(round(lease * 1e6))))
        )
        return self._db.run("renew_duty", lambda connection: connection.execute(statement).rowcount == 1)

    def finish_duty(self, name: str, holder: bytes) -> None:
        """Note that the duty ran to its end, and release it."""
        duty = self._db.tables.duty
        statement = (
            update(duty)
            .where(duty.c.name == name, duty.c.holder == holder)
            .values(holder=None, lease_until=None, last_run_at=utc_now())
        )
        self._db.run("finish_duty", lambda connection: connection.execute(statement))

    def _ensure_duty(self, connection: Connection, name: str) -> None:
        duty = self._db.tables.duty
        if connection.execute(select(duty.c.name).where(duty.c.name == name)).first() is None:
            if self._db.is_sqlite:
                connection.execute(sqlite.insert(duty).values(name=name).on_conflict_do_nothing())
            else:
                insert = mysql.insert(duty).values(name=name)
                connection.execute(insert.on_duplicate_key_update(name=insert.inserted.name))

    def beat(self, instance: bytes, name: str, version: str, role: str, circuit: str, counters: dict[str, Any]) -> None:
        """Write this process's heartbeat, and forget processes that have been silent for a day."""
        t = self._db.tables.instance
        values = {
            "instance_id": instance, "name": name[:64], "version": version, "role": role, "circuit": circuit,
            "counters": orjson.dumps(counters), "beat_at": utc_now(),
        }  # fmt: skip

        def work(connection: Connection) -> None:
            changed = connection.execute(update(t).where(t.c.instance_id == instance).values(values)).rowcount
            if not changed:
                connection.execute(t.insert().values(started_at=utc_now(), **values))
            silent = t.c.beat_at <= utc_after(literal(-round(_FORGET_INSTANCE * 1e6)))
            # By primary key: a delete that looks for them would lock the rows of all who beat at the same time.
            for gone in connection.execute(select(t.c.instance_id).where(silent)).scalars().all():
                connection.execute(delete(t).where(t.c.instance_id == gone, silent))

        self._db.run("beat", work)

    def leave(self, instance: bytes) -> None:
        """Take this process's row away at a graceful stop."""
        t = self._db.tables.instance
        self._db.run("leave", lambda connection: connection.execute(delete(t).where(t.c.instance_id == instance)))

    def instances(self) -> list[Instance]:
        """Every process that has a row, the freshest first."""
        t = self._db.tables.instance
        age = seconds_since(t.c.beat_at).label("beat_age")

        def read(connection: Connection) -> list[Instance]:
            rows = connection.execute(
                select(t.c.name, t.c.version, t.c.role, t.c.circuit, t.c.counters, t.c.started_at, age)
                .order_by(t.c.beat_at.desc()).limit(1000)
            )  # fmt: skip
            return [
                Instance(
                    r.name, r.version, r.role, r.circuit, orjson.loads(r.counters), r.started_at, float(r.beat_age)
                )
                for r in rows
            ]

        return self._db.run("instances", read)
