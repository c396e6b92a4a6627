"""What became of every event, from what three witnesses hold: the database's rows, the streams' entries, and the
clients' own logs. Nothing here asks the relay."""

from __future__ import annotations

import dataclasses
import uuid
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

import msgspec
import redis
from sqlalchemy import Engine, text

from game_server.players import Player, Received

__all__ = ["PathVerdict", "Row", "StreamEntry", "Verdict", "judge", "percentile", "read_rows", "read_streams"]


@dataclasses.dataclass(frozen=True, slots=True)
class Row:
    """An outbox row."""

    event_id: str
    room: str
    sequence: int
    status: str


@dataclasses.dataclass(frozen=True, slots=True)
class StreamEntry:
    """An entry of one of the stream's shards."""

    id: str
    event_id: str
    type: str
    room: str
    sequence: int | None
    player: str
    sent: float | None


@dataclasses.dataclass(slots=True)
class PathVerdict:
    """One path. ``expected``: committed rows, or direct events that were not refused."""

    expected: int = 0
    in_stream: int = 0
    delivered: int = 0
    lost: int = 0
    duplicated: int = 0
    out_of_order: int = 0

    @property
    def ok(self) -> bool:
        """Whether nothing went wrong."""
        return not (self.lost or self.duplicated or self.out_of_order)


@dataclasses.dataclass(slots=True)
class Verdict:
    """Both paths, and what belongs to neither: rooms without their event, events without a committed row, rows that
    are not settled as published. ``problems`` names the first few."""

    outbox: PathVerdict
    direct: PathVerdict
    refused: int
    torn: int
    ghosts: int
    unsettled: int
    problems: list[str]

    @property
    def ok(self) -> bool:
        """Whether every promise was kept."""
        return self.outbox.ok and self.direct.ok and not (self.torn or self.ghosts or self.unsettled)


def read_rows(engine: Engine) -> tuple[list[Row], list[str]]:
    """The outbox rows in the order of their ids, and the codes of the game's rooms."""
    with engine.connect() as connection:
        rows = connection.execute(
            text("SELECT event_id, aggregate_id, sequence, status FROM zzol_outbox_event ORDER BY id")
        ).all()
        codes = connection.execute(text("SELECT code FROM game_room")).scalars().all()
    found = [Row(str(uuid.UUID(bytes=bytes(row[0]))), row[1], int(row[2]), row[3]) for row in rows]
    return found, list(codes)


def read_streams(redis_url: str, shards: int) -> list[StreamEntry]:
    """Every entry of the stream ``room``, shard by shard, in order."""
    found = []
    with redis.Redis.from_url(redis_url) as client:
        for shard in range(shards):
            for entry_id, fields in client.xrange(f"zzol:{{room:{shard}}}"):
                data = msgspec.json.decode(fields[b"data"])
                sequence = fields.get(b"sequence")
                found.append(
                    StreamEntry(
                        entry_id.decode(),
                        fields[b"id"].decode(),
                        fields[b"type"].decode(),
                        fields[b"partitionkey"].decode(),
                        None if sequence is None else int(sequence),
                        data.get("player", ""),
                        data.get("sent"),
                    )
                )
    return found


def judge(
    rows: Sequence[Row], codes: Iterable[str], entries: Sequence[StreamEntry], players: Sequence[Player]
) -> Verdict:
    """Compare the witnesses."""
    codes = set(codes)
    problems: list[str] = []
    outbox, direct = PathVerdict(), PathVerdict()
    committed = {row.event_id: row for row in rows}
    story: dict[str, list[StreamEntry]] = {}
    for entry in entries:
        story.setdefault(entry.room, []).append(entry)

    _judge_outbox(outbox, committed, story, entries, players, problems)
    refused = _judge_direct(direct, entries, players, problems)
    for player in players:
        if player.room:
            _judge_client(player, story.get(player.room, []), outbox, direct, problems)

    event_rooms = {row.room for row in rows}
    torn = codes ^ event_rooms
    ghosts = [entry for entry in entries if entry.sequence is not None and entry.event_id not in committed]
    unsettled = [row for row in rows if row.status != "PUBLISHED"]
    problems += [f"room {code}: row and event were not written together" for code in sorted(torn)]
    problems += [f"ghost: {entry.type} of {entry.room} was never committed" for entry in ghosts]
    problems += [f"row of {row.room} is {row.status}" for row in unsettled]
    return Verdict(outbox, direct, refused, len(torn), len(ghosts), len(unsettled), problems[:20])


def _judge_outbox(
    outbox: PathVerdict,
    committed: Mapping[str, Row],
    story: Mapping[str, Sequence[StreamEntry]],
    entries: Sequence[StreamEntry],
    players: Sequence[Player],
    problems: list[str],
) -> None:
    times = Counter(entry.event_id for entry in entries if entry.event_id in committed)
    creators = {player.room: player for player in players if player.host and player.room}
    outbox.expected = len(committed)
    outbox.in_stream = len(times)
    for event_id, row in committed.items():
        creator = creators.get(row.room)
        got = creator is not None and any(received.event_id == event_id for received in creator.log)
        outbox.delivered += got
        if not times[event_id] or not got:
            outbox.lost += 1
            where = "the stream" if not times[event_id] else "its creator"
            problems.append(f"lost: {row.room}'s event {row.sequence} never reached {where}")
    outbox.duplicated += sum(times.values()) - len(times)
    for room, told in story.items():
        sequences = [entry.sequence for entry in told if entry.sequence is not None]
        if sequences != sorted(sequences) or told[0].type != "room.created":
            outbox.out_of_order += 1
            problems.append(f"out of order in the stream: {room} {[entry.type for entry in told][:5]} {sequences}")


def _judge_direct(
    direct: PathVerdict, entries: Sequence[StreamEntry], players: Sequence[Player], problems: list[str]
) -> int:
    """Taps, which their senders can tell apart; returns how many were refused."""
    found = Counter((entry.player, entry.sent) for entry in entries if entry.type == "tap")
    refused = 0
    for player in players:
        refused += len(player.refused)
        own = {received.data["sent"] for received in player.log if received.type == "tap"}
        for ref, sent in player.taps.items():
            if ref in player.refused:
                continue
            direct.expected += 1
            direct.in_stream += found[player.name, sent] > 0
            direct.delivered += sent in own
            if not found[player.name, sent] or sent not in own:
                direct.lost += 1
                problems.append(f"lost: a tap of {player.name} in {player.room}")
    direct.duplicated += sum(found.values()) - len(found)
    return refused


def _judge_client(
    player: Player, told: Sequence[StreamEntry], outbox: PathVerdict, direct: PathVerdict, problems: list[str]
) -> None:
    """A client must hold its room's creation, then every entry from its own arrival on, once, in stream order."""
    start = next((i for i, entry in enumerate(told) if entry.type == "room.joined" and entry.player == player.name), 1)
    wanted = [*told[:1], *told[1 if player.host else start :]]
    by_id = {entry.id: entry for entry in wanted}
    times = Counter(received.id for received in player.log)

    def path(of: StreamEntry | Received) -> PathVerdict:
        return outbox if of.sequence is not None else direct

    for entry in wanted:
        if not times[entry.id] and not (entry.sequence is not None and player.host):
            # A creation that its creator never got is counted with its row.
            path(entry).lost += 1
            problems.append(f"lost: {player.name} in {player.room} never got {entry.type} {entry.id}")
    for received in player.log:
        if received.id not in by_id:
            path(received).duplicated += 1
            problems.append(f"{player.name} in {player.room} got {received.type} {received.id}, not in its room")
    for id_, count in times.items():
        if count > 1 and id_ in by_id:
            path(by_id[id_]).duplicated += count - 1
            problems.append(f"{player.name} in {player.room} got {id_} {count} times")
    got = [received.id for received in player.log if received.id in by_id]
    order = [entry.id for entry in wanted if times[entry.id]]
    if list(dict.fromkeys(got)) != order:
        direct.out_of_order += 1
        problems.append(f"out of order at {player.name} in {player.room}")


def percentile(values: Sequence[float], fraction: float) -> float | None:
    """The value below which that fraction lies; None of nothing."""
    if not values:
        return None
    return sorted(values)[min(len(values) - 1, int(len(values) * fraction))]
