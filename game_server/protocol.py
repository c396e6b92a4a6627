"""What clients and server say to each other: one JSON object a frame, told apart by ``op``.

Client: ``create``, ``join``, ``start``, ``tap``. Server: ``created``, ``joined`` and ``started`` answer the first
three, ``error`` refuses any of them, and ``event`` carries one entry of the room's stream. A ``ref`` given by the
client comes back in the answer.
"""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta

from zzol_relay import Entry

__all__ = [
    "ClientMessage",
    "Create",
    "Created",
    "EventFrame",
    "Join",
    "Joined",
    "ProtocolError",
    "Refused",
    "ServerMessage",
    "Start",
    "Started",
    "Tap",
    "decode",
    "encode",
    "event_frame",
]

Name = Annotated[str, Meta(min_length=1, max_length=10)]
Code = Annotated[str, Meta(min_length=4, max_length=4)]
Ref = Annotated[int, Meta(ge=0, lt=1 << 53)]


class ProtocolError(Exception):
    """A client's message that is not one of the protocol's; the message says what is wrong with it."""


class Create(msgspec.Struct, frozen=True, tag_field="op", tag="create", forbid_unknown_fields=True):
    """Make a room and be its host."""

    name: Name
    ref: Ref | None = None


class Join(msgspec.Struct, frozen=True, tag_field="op", tag="join", forbid_unknown_fields=True):
    """Enter a room by its code."""

    room: Code
    name: Name
    ref: Ref | None = None


class Start(msgspec.Struct, frozen=True, tag_field="op", tag="start", forbid_unknown_fields=True):
    """The host begins the game: READY → PLAYING."""

    ref: Ref | None = None


class Tap(msgspec.Struct, frozen=True, tag_field="op", tag="tap", forbid_unknown_fields=True):
    """``count`` taps; ``sent`` is the client's own clock and comes back in the event."""

    count: Annotated[int, Meta(ge=1, le=60)] = 1
    sent: float | None = None
    ref: Ref | None = None


class Created(msgspec.Struct, frozen=True, tag_field="op", tag="created"):
    """The room is committed. ``waiting``: its event is not here yet, Redis is away; it comes by itself.

    ``committed_at``: when the database's commit returned, Unix time in milliseconds by the server's clock.
    """

    room: str
    waiting: bool
    committed_at: float
    ref: int | None = None


class Joined(msgspec.Struct, frozen=True, tag_field="op", tag="joined"):
    """The room has let the player in. Its ``room.created``, and all from the own ``room.joined`` on, come as events."""

    room: str
    players: list[str]
    ref: int | None = None


class Started(msgspec.Struct, frozen=True, tag_field="op", tag="started"):
    """The change is committed; its event comes like all others. ``committed_at`` as in ``Created``."""

    room: str
    committed_at: float
    ref: int | None = None


class Refused(msgspec.Struct, frozen=True, tag_field="op", tag="error"):
    """``code`` is for programs: invalid, rate, room, name, full, unavailable, uncertain, internal."""

    code: str
    message: str
    ref: int | None = None


class EventFrame(msgspec.Struct, frozen=True, tag_field="op", tag="event"):
    """One entry of the room's stream; ``id`` is its entry id."""

    id: str
    event_id: str
    room: str
    type: str
    data: msgspec.Raw
    sequence: int | None = None


ClientMessage = Create | Join | Start | Tap
ServerMessage = Created | Joined | Started | Refused | EventFrame

_decoder = msgspec.json.Decoder(ClientMessage)
_encoder = msgspec.json.Encoder()


def decode(message: str | bytes) -> ClientMessage:
    """Parse and validate a client's frame. Raises ``ProtocolError``."""
    if isinstance(message, bytes):
        raise ProtocolError("send text frames")
    try:
        return _decoder.decode(message)
    except (msgspec.DecodeError, UnicodeEncodeError) as error:
        raise ProtocolError(str(error)) from None


def encode(message: ServerMessage) -> bytes:
    """A server's message as UTF-8 JSON."""
    return _encoder.encode(message)


def event_frame(entry: Entry) -> bytes:
    """An entry as the frame that every client of its room gets."""
    return _encoder.encode(
        EventFrame(
            entry.id,
            entry.event_id,
            entry.aggregate_id or "",
            entry.type,
            msgspec.Raw(entry.data),
            entry.sequence,
        )
    )
