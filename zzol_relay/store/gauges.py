"""What the database tells to metrics and probes, at a price that does not grow with the tables.

Counting all rows, or taking ``MIN(created_at)`` of those that wait, reads the table: 0.2 s and 1.3 s beside a million
published and 300,000 waiting rows, from every process at every scrape. Here each status costs at most ``CAP`` entries
of the one index, and one row: 50 ms a full status, 0.3 ms an empty one.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from datetime import datetime
from typing import Any

from sqlalchemy import Connection, func, select
from sqlalchemy.exc import DBAPIError

from zzol_relay.core.errors import SchemaError
from zzol_relay.core.lifecycle import UNPUBLISHED, Status
from zzol_relay.store.database import Database, error_code
from zzol_relay.store.dialect import seconds_since
from zzol_relay.store.tables import Tables

__all__ = ["CAP", "Backlog", "GaugeStore", "read_backlog"]

CAP = 100_000
"""A status is counted up to here; ``CAP + 1`` means: at least so many."""

_NO_COLUMN = 1054


@dataclasses.dataclass(frozen=True, slots=True)
class Backlog:
    """What waits. Ages are seconds, by the database's clock.

    Counts end at 100,001, which says: more than 100,000. The oldest age is exact up to there too: where more rows wait
    in a status, it is that of the oldest among the 100,000 that are due first, and so a lower bound.
    """

    by_status: dict[str, int]
    oldest_unpublished_age: float | None
    last_published_at: datetime | None


class GaugeStore:
    """Reads for gauges and probes."""

    def __init__(self, database: Database) -> None:
        self._db = database

    def waiting(self) -> Backlog:
        """The backlog without the settled rows, which nobody is alarmed by."""
        statuses = (*UNPUBLISHED, Status.DEAD_LETTER)
        return self._db.run("gauges", lambda connection: read_backlog(connection, self._db.tables, statuses))

    def schema_fault(self) -> str | None:
        """What this release misses in the schema: a table or a column; None where it can work.

        Asks the tables themselves, not their revision: a newer release's schema fits too, and no migration tool is
        loaded. Raises what the database raises where it cannot be asked.
        """

        def look(connection: Connection) -> None:
            for table in self._db.tables.metadata.sorted_tables:
                connection.execute(select(table).limit(0))

        try:
            self._db.run("schema", look)
        except SchemaError as error:
            return str(error)
        except DBAPIError as error:
            if error_code(error) == _NO_COLUMN or "no such column" in str(error.orig):
                return "the relay's tables are of an older release; run 'zzol-relay migrate'"
            raise
        return None


def read_backlog(connection: Connection, tables: Tables, statuses: Iterable[Status]) -> Backlog:
    """The backlog of these statuses; the newest publish whichever they are."""
    t = tables.outbox
    counts: dict[str, int] = {}
    oldest: list[int] = []
    for status in statuses:
        number, first = connection.execute(_counted(tables, status)).one()
        counts[status.value] = number
        if first is not None and status in UNPUBLISHED:
            oldest.append(first)
    age = None
    if oldest:
        # Ids are given in the order of creation: the lowest is the oldest, and there is no index on created_at. A row
        # that was cleaned away in between has no age.
        age = connection.execute(select(func.max(seconds_since(t.c.created_at))).where(t.c.id.in_(oldest))).scalar()
    last = connection.execute(
        select(t.c.published_at).where(t.c.status == Status.PUBLISHED.value)
        .order_by(t.c.status.desc(), t.c.due_at.desc(), t.c.id.desc()).limit(1)
    ).scalar()  # fmt: skip
    return Backlog(counts, None if age is None else max(0.0, float(age)), last)


def _counted(tables: Tables, status: Status) -> Any:
    t = tables.outbox
    # Limited inside, and of columns that the index holds: no row is read.
    some = tables.by_due(select(t.c.id).where(t.c.status == status.value).limit(CAP + 1)).subquery()
    return select(func.count(), func.min(some.c.id)).select_from(some)
