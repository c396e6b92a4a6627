"""What became of committed events, read from the database and the streams; the relay's own counters are not asked."""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Iterator, Sequence
from typing import cast

import redis
from sqlalchemy import Engine, text

__all__ = ["Verdict", "judge"]

_PAGE = 5_000


@dataclasses.dataclass(frozen=True, slots=True)
class Verdict:
    """``lost``: committed, yet in no stream. ``duplicates``: entries of an event beyond its first. ``inversions``:
    entries that stand behind a later one of their aggregate. ``phantoms``: entries that nobody committed.
    ``unsettled``: rows not marked published."""

    committed: int
    entries: int
    lost: int
    duplicates: int
    inversions: int
    phantoms: int
    unsettled: int


def judge(engine: Engine, outbox: str, committed: str, redis_url: str, streams: Sequence[str]) -> Verdict:
    """Compare the event ids in the table ``committed`` (``event_ids``: 16 bytes each, one after the other; written by
    the transactions that recorded the events) with every entry of ``streams``."""
    with engine.connect() as connection:
        ids = {
            data[start : start + 16].hex()
            for (data,) in connection.execute(text(f"SELECT event_ids FROM {committed}"))
            for start in range(0, len(data), 16)
        }
        unsettled = connection.execute(text(f"SELECT COUNT(*) FROM {outbox} WHERE status <> 'PUBLISHED'")).scalar_one()
        rows = {bytes(id_).hex() for (id_,) in connection.execute(text(f"SELECT event_id FROM {outbox}"))}
    if rows != ids:
        raise RuntimeError(f"{len(ids ^ rows)} events are in one of {outbox} and {committed} alone")
    found: collections.Counter[str] = collections.Counter()
    last: dict[tuple[str, str], int] = {}
    inversions = 0
    with redis.Redis.from_url(redis_url, decode_responses=True) as client:
        for stream in streams:
            for fields in _entries(client, stream):
                event_id, sequence = fields["id"].replace("-", ""), int(fields["sequence"])
                found[event_id] += 1
                aggregate = (stream, fields["subject"])
                # A second entry of an event is a duplicate, wherever it stands.
                if found[event_id] == 1:
                    inversions += sequence <= last.get(aggregate, 0)
                    last[aggregate] = max(sequence, last.get(aggregate, 0))
    return Verdict(
        committed=len(ids),
        entries=found.total(),
        lost=len(ids - found.keys()),
        duplicates=found.total() - len(found),
        inversions=inversions,
        phantoms=len(found.keys() - ids),
        unsettled=int(unsettled),
    )


def _entries(client: redis.Redis, stream: str) -> Iterator[dict[str, str]]:
    start = "-"
    while page := cast(list[tuple[str, dict[str, str]]], client.xrange(stream, start, "+", count=_PAGE)):
        for _, fields in page:
            yield fields
        start = f"({page[-1][0]}"
