"""Reading what stands in the streams and in the outbox, past the code under test."""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from typing import Any

import orjson
import redis
from sqlalchemy import Engine, text

__all__ = ["Entry", "check_order", "entries", "outbox_rows", "statuses"]


@dataclasses.dataclass(frozen=True)
class Entry:
    """One stream entry, decoded."""

    entry_id: str
    event_id: str
    type: str
    subject: str | None
    sequence: int | None
    data: Any
    replay: str | None


def entries(client: redis.Redis, stream: str = "room", shards: int = 1, prefix: str = "zzol") -> list[Entry]:
    """All entries of a stream, shard by shard, in stream order. ``client`` decodes replies."""
    found = []
    for shard in range(shards):
        read: Any = client.xrange(f"{prefix}:{{{stream}:{shard}}}")
        for entry_id, fields in read:
            found.append(
                Entry(
                    entry_id,
                    fields["id"],
                    fields["type"],
                    fields.get("subject"),
                    int(fields["sequence"]) if "sequence" in fields else None,
                    orjson.loads(fields["data"]),
                    fields.get("replay"),
                )
            )
    return found


def check_order(found: list[Entry]) -> None:
    """Assert that no event stands twice and that each aggregate is in sequence order (replays apart)."""
    first = [entry for entry in found if entry.replay is None]
    ids = [entry.event_id for entry in first]
    assert len(ids) == len(set(ids)), "an event stands twice"
    by_subject: dict[str, list[int]] = defaultdict(list)
    for entry in first:
        if entry.subject is not None and entry.sequence is not None:
            by_subject[entry.subject].append(entry.sequence)
    for subject, sequences in by_subject.items():
        assert sequences == sorted(sequences), f"{subject} is out of order: {sequences}"


def outbox_rows(engine: Engine, columns: str = "*") -> list[Any]:
    """The outbox's rows by id."""
    with engine.connect() as connection:
        return list(connection.execute(text(f"SELECT {columns} FROM zzol_outbox_event ORDER BY id")))


def statuses(engine: Engine) -> dict[str, int]:
    """How many rows stand in each status."""
    with engine.connect() as connection:
        rows = connection.execute(text("SELECT status, COUNT(*) FROM zzol_outbox_event GROUP BY status"))
        return {row[0]: row[1] for row in rows}
