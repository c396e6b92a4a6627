"""Recording and changing outbox rows from a test."""

from __future__ import annotations

from typing import Any

from sqlalchemy import Engine, text
from sqlalchemy.orm import Session

from zzol_relay import Event, Relay, Stream

__all__ = ["KEY", "STREAMS", "execute", "record"]

STREAMS = [Stream(name="room", retention=0)]
KEY = "zzol:{room:0}"


def record(relay: Relay, engine: Engine, aggregate: str | None = "A", count: int = 1, **fields: Any) -> list[Event]:
    """Record ``count`` events of one aggregate, or of none, in one transaction."""
    kind = None if aggregate is None else "room"
    with Session(engine) as session, session.begin():
        return relay.record_all(
            session,
            [
                Event(type="t", stream="room", aggregate_type=kind, aggregate_id=aggregate, data=n, **fields)
                for n in range(count)
            ],
        )


def execute(engine: Engine, statement: str, **parameters: Any) -> int:
    """Run one statement in a transaction of its own; returns how many rows it touched."""
    with engine.begin() as connection:
        return connection.execute(text(statement), parameters).rowcount
