"""The game's own table, and the one transaction that matters here: room and event together (Z6, Z22)."""

from __future__ import annotations

import dataclasses
import secrets
import time
import uuid
from datetime import UTC, datetime
from typing import Any, cast

from sqlalchemy import CursorResult, DateTime, Engine, String, create_engine, event, update
from sqlalchemy.dialects import mysql
from sqlalchemy.exc import IntegrityError
from sqlalchemy.orm import DeclarativeBase, Mapped, Session, mapped_column

from game_server.rooms import ALPHABET, CODE_LENGTH
from zzol_relay import Event, Relay

__all__ = ["Base", "GameRoom", "NewRoom", "create_room", "create_tables", "make_code", "make_engine", "start_room"]


class Base(DeclarativeBase):
    """The game's tables."""


class GameRoom(Base):
    """A room that was created; its life is in its stream."""

    __tablename__ = "game_room"
    __table_args__ = {"mysql_engine": "InnoDB", "mysql_charset": "utf8mb4"}  # noqa: RUF012 - SQLAlchemy's form

    code: Mapped[str] = mapped_column(String(CODE_LENGTH), primary_key=True)
    host: Mapped[str] = mapped_column(String(10))
    state: Mapped[str] = mapped_column(String(12))
    created_at: Mapped[datetime] = mapped_column(DateTime().with_variant(mysql.DATETIME(fsp=6), "mysql", "mariadb"))


@dataclasses.dataclass(frozen=True, slots=True)
class NewRoom:
    """A committed room. ``committed_at`` is when the driver's commit returned, Unix time in milliseconds."""

    code: str
    event_id: uuid.UUID
    committed_at: float


def make_engine(url: str) -> Engine:
    """The game's engine."""
    if url.startswith("sqlite"):
        return create_engine(url, connect_args={"timeout": 15})
    return create_engine(url, pool_size=8, max_overflow=8, pool_pre_ping=True, pool_recycle=1800)


def create_tables(engine: Engine) -> None:
    """Create what is missing."""
    Base.metadata.create_all(engine)


def make_code() -> str:
    """A random join code: distinct characters, none of which is taken for another."""
    return "".join(secrets.SystemRandom().sample(ALPHABET, CODE_LENGTH))


def create_room(engine: Engine, relay: Relay, host: str, code: str) -> NewRoom | None:
    """Save a room and record its event in one transaction; None where the code is taken.

    Blocks; when it returns and Redis is healthy, the event stands in its stream. Raises what the database raises.
    """
    moment: list[float] = []
    with Session(engine) as session:
        # Fires when the driver's commit has returned, before the relay publishes.
        event.listen(session, "after_commit", lambda _: moment.append(time.time() * 1000))
        try:
            with session.begin():
                session.add(
                    GameRoom(code=code, host=host, state="READY", created_at=datetime.now(UTC).replace(tzinfo=None))
                )
                session.flush()
                recorded = relay.record(session, _event("room.created", code, {"host": host}))
        except IntegrityError:
            return None
    assert recorded.event_id is not None
    return NewRoom(code, recorded.event_id, moment[0])


def start_room(engine: Engine, relay: Relay, code: str) -> float | None:
    """READY → PLAYING, in the row and as an event; returns when it was committed, None where the state forbids it.

    Blocks and raises as ``create_room`` does.
    """
    moment: list[float] = []
    with Session(engine) as session:
        event.listen(session, "after_commit", lambda _: moment.append(time.time() * 1000))
        with session.begin():
            ready = update(GameRoom).where(GameRoom.code == code, GameRoom.state == "READY")
            changed = session.execute(ready.values(state="PLAYING"), execution_options={"synchronize_session": False})
            if cast("CursorResult[Any]", changed).rowcount != 1:
                return None
            relay.record(session, _event("room.started", code, {}))
    return moment[0]


def _event(kind: str, code: str, data: dict[str, object]) -> Event:
    return Event(type=kind, stream="room", aggregate_type="room", aggregate_id=code, data=data)
