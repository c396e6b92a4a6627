"""What the rooms are: a fold over their entries in stream order. No I/O, no clock, no randomness.

Every instance folds the same entries and so holds the same rooms. A room exists here from its ``room.created`` entry
on, never earlier: built inside the transaction, it would survive a rollback as a ghost (Z2, Z3). Entries for unknown
rooms are no-ops.
"""

from __future__ import annotations

import dataclasses
import unicodedata
from typing import Literal

import msgspec

from zzol_relay import Entry

__all__ = [
    "ALPHABET",
    "CODE_LENGTH",
    "MAX_PLAYERS",
    "ROOM_LIFETIME",
    "Applied",
    "Room",
    "Rooms",
    "TokenBucket",
    "clean_name",
    "is_code",
]

ALPHABET = "ABCDFGHJKLMNPQRSTUVWXYZ346789"
CODE_LENGTH = 4
MAX_PLAYERS = 9
ROOM_LIFETIME = 3600.0
"""Seconds from creation to the end of a room, by the stream's clock."""

Reason = Literal["full", "name"]


class _CreatedData(msgspec.Struct, frozen=True):
    host: str


class _PlayerData(msgspec.Struct, frozen=True):
    player: str
    count: int = 0


@dataclasses.dataclass(slots=True)
class Room:
    """One room. ``players`` are in order of arrival; the first is the host. ``taps`` counts each player's.

    ``started``: READY until then, PLAYING from then on.
    """

    code: str
    created: Entry
    players: list[str]
    taps: dict[str, int]
    started: bool = False


@dataclasses.dataclass(frozen=True, slots=True)
class Applied:
    """What an entry did. ``refused`` tells why a join changed nothing; without it the entry is part of the room."""

    room: Room
    kind: Literal["created", "joined", "started", "left", "tap"]
    player: str
    refused: Reason | None = None


class Rooms:
    """All rooms that live now; at most ``limit``, the oldest making way."""

    def __init__(self, limit: int = 100_000) -> None:
        self._limit = limit
        self._rooms: dict[str, Room] = {}
        self.malformed = 0

    def __len__(self) -> int:
        return len(self._rooms)

    def get(self, code: str) -> Room | None:
        """The room of that code, if its entry has arrived and it has not ended."""
        return self._rooms.get(code)

    def apply(self, entry: Entry) -> Applied | None:
        """Fold one entry. None where it changes nothing: unknown room or type, repeated creation, a stranger's tap."""
        code = entry.aggregate_id
        if code is None:
            return None
        try:
            return self._created(code, entry) if entry.type == "room.created" else self._later(code, entry)
        except msgspec.DecodeError:
            # Somebody else's entry must not clog the stream.
            self.malformed += 1
            return None

    def expire(self, milliseconds: int) -> list[Room]:
        """End and return the rooms that are over at that moment of the stream's clock."""
        ended = []
        for room in tuple(self._rooms.values()):
            if room.created.milliseconds + ROOM_LIFETIME * 1000 > milliseconds and len(self._rooms) <= self._limit:
                break
            ended.append(self._rooms.pop(room.code))
        return ended

    def _created(self, code: str, entry: Entry) -> Applied | None:
        if code in self._rooms:
            return None
        host = msgspec.json.decode(entry.data, type=_CreatedData).host
        room = self._rooms[code] = Room(code, entry, [host], {host: 0})
        return Applied(room, "created", host)

    def _later(self, code: str, entry: Entry) -> Applied | None:
        room = self._rooms.get(code)
        if room is None or entry.type not in ("room.joined", "room.started", "room.left", "tap"):
            return None
        if entry.type == "room.started":
            room.started = True
            return Applied(room, "started", "")
        data = msgspec.json.decode(entry.data, type=_PlayerData)
        player = data.player
        if entry.type == "room.joined":
            taken = {name.casefold() for name in room.players}
            if player.casefold() in taken:
                return Applied(room, "joined", player, "name")
            if len(room.players) >= MAX_PLAYERS:
                return Applied(room, "joined", player, "full")
            room.players.append(player)
            room.taps.setdefault(player, 0)
            return Applied(room, "joined", player)
        if player not in room.players:
            return None
        if entry.type == "room.left":
            # Whoever is first now is the host.
            room.players.remove(player)
            return Applied(room, "left", player)
        room.taps[player] += data.count
        return Applied(room, "tap", player)


class TokenBucket:
    """``rate`` messages a second, as many at once. Times are seconds of any one clock."""

    __slots__ = ("_at", "_left", "_rate")

    def __init__(self, rate: float, now: float) -> None:
        self._rate = rate
        self._left = rate
        self._at = now

    def take(self, now: float) -> bool:
        """Whether one more message may come now."""
        self._left = min(self._rate, self._left + (now - self._at) * self._rate)
        self._at = now
        if self._left < 1:
            return False
        self._left -= 1
        return True


def clean_name(name: str) -> str | None:
    """A player's name as it is kept, or None where it cannot be one: 1 to 10 printable characters."""
    cleaned = unicodedata.normalize("NFC", name).strip()
    return cleaned if cleaned and len(cleaned) <= 10 and cleaned.isprintable() else None


def is_code(text: str) -> bool:
    """Whether ``text`` can be a join code: four distinct characters of ``ALPHABET``."""
    return len(text) == CODE_LENGTH == len(set(text)) and set(text) <= set(ALPHABET)
