"""Sending again what Redis acknowledged and then lost, from the rows that the outbox still holds.

What is absent is asked of Redis entry by entry, since a Redis that came back from an older dump still holds the rest;
a window sent again wholesale would double it.
"""

from __future__ import annotations

import dataclasses
import itertools
import logging
from array import array
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import UTC, datetime

from zzol_relay.core.errors import BrokerUnavailableError, ConfigurationError
from zzol_relay.core.events import entry_fields
from zzol_relay.core.sequence import Mode
from zzol_relay.relay.dead_letters import process_user
from zzol_relay.settings import Settings
from zzol_relay.store.audit import AuditStore
from zzol_relay.store.outbox import newest_per_key
from zzol_relay.store.republish import PublishedRow, RepublishStore, RestorableRow
from zzol_relay.streams.presence import Presence
from zzol_relay.streams.publisher import Command, OutcomeKind, ScriptPublisher

__all__ = ["Republished", "Republisher", "slices"]

_log = logging.getLogger("zzol_relay.republish")

_BATCH = 500


@dataclasses.dataclass(frozen=True, slots=True)
class Republished:
    """What a republish found and did, in rows; ``dry_run`` leaves the last three at 0.

    ``examined`` were published in the window. Of these, ``absent`` are no longer in their streams, nor old enough to
    have been trimmed; ``trimmed`` are gone and are that old (counted in ``absent`` instead where they are wanted);
    ``unknown`` cannot be looked for, since their entry id was never learned. Of the absent ones, ``restored`` were
    sent; ``remembered`` were published within the last dedup window, as far as Redis knows: by a run that was
    interrupted, or their entries were deleted by hand (then run it again after the window); ``failed`` were refused.
    """

    examined: int = 0
    absent: int = 0
    trimmed: int = 0
    unknown: int = 0
    restored: int = 0
    remembered: int = 0
    failed: int = 0


@dataclasses.dataclass(slots=True)
class _Search:
    """What one pass over the window has found; 8 bytes per absent row."""

    counts: Republished
    absent: array[int]
    newest: dict[str, str]


class Republisher:
    """``relay.republish``: finds what is absent, then sends it in the order of the rows' ids, which is that of each
    aggregate."""

    def __init__(
        self, store: RepublishStore, audit: AuditStore, publisher: ScriptPublisher, settings: Settings
    ) -> None:
        self._store = store
        self._audit = audit
        self._publisher = publisher
        self._settings = settings

    def __call__(
        self,
        since: datetime,
        until: datetime | None = None,
        *,
        stream: str | None = None,
        include_trimmed: bool = False,
        dry_run: bool = False,
        actor: str | None = None,
        progress: Callable[[Republished], None] | None = None,
    ) -> Republished:
        """Send again, in order, the published events whose entries Redis no longer holds.

        ``since`` and ``until`` (default: now) bound when they were published; both have a time zone. ``stream`` limits
        it to one logical stream. Entries that are absent for their age, by the shard's retention, are left alone
        unless ``include_trimmed``. ``dry_run`` only looks. ``progress`` is told after each batch what was done so far.

        The rows keep their status and their aggregates' tails stay; restored entries carry the field ``restored`` and
        stand behind younger ones. Running it again sends nothing twice, as long as an interrupted run is repeated
        within the dedup window. Audited in ``relay_audit`` under ``actor`` (default: the user of this process).

        Raises ``BrokerUnavailableError`` where Redis cannot be reached, or goes away in between: run it again.
        """
        window = _utc("since", since), self._store.now() if until is None else _utc("until", until)
        report = progress or (lambda so_far: None)
        search = self._search(window, stream, include_trimmed, report)
        if dry_run or not search.absent:
            return search.counts
        # Whether Redis lost data must be found out before our own entries make its streams look newer.
        self._publisher.learn(search.newest, search.newest)
        done = search.counts
        try:
            for done in self._restore(search):
                report(done)
        finally:
            detail = {
                "since": window[0].isoformat(),
                "until": window[1].isoformat(),
                "stream": stream,
                "include_trimmed": include_trimmed,
                **dataclasses.asdict(done),
            }
            self._audit.write(actor=actor or process_user(), action="republish", affected=done.restored, detail=detail)
            _log.warning("republished what Redis had lost", extra=dataclasses.asdict(done))
        return done

    def _search(
        self,
        window: tuple[datetime, datetime],
        stream: str | None,
        include_trimmed: bool,
        report: Callable[[Republished], None],
    ) -> _Search:
        search = _Search(Republished(), array("Q"), {})
        for page in self._store.published(*window, stream):
            known = [row for row in page if row.entry_id]
            search.newest = newest_per_key(
                itertools.chain(search.newest.items(), ((row.stream_key, row.entry_id) for row in known))
            )
            places = self._look_for(known)
            absent = [row.id for row in known if places[row.id] is Presence.ABSENT]
            trimmed = [row.id for row in known if places[row.id] is Presence.TRIMMED]
            wanted = absent + trimmed if include_trimmed else absent
            search.absent.extend(wanted)
            counts = search.counts
            search.counts = dataclasses.replace(
                counts,
                examined=counts.examined + len(page),
                absent=counts.absent + len(wanted),
                trimmed=counts.trimmed + (0 if include_trimmed else len(trimmed)),
                unknown=counts.unknown + len(page) - len(known),
            )
            report(search.counts)
        return search

    def _look_for(self, rows: Sequence[PublishedRow]) -> dict[int, Presence]:
        by_shard: dict[str, list[PublishedRow]] = {}
        for row in rows:
            by_shard.setdefault(row.stream_key, []).append(row)
        places: dict[int, Presence] = {}
        for key, members in by_shard.items():
            found = self._publisher.look_for(key, [(row.entry_id, str(row.event_id)) for row in members])
            places.update(zip((row.id for row in members), found, strict=True))
        return places

    def _restore(self, search: _Search) -> Iterator[Republished]:
        done = search.counts
        # By id: rows of an aggregate were inserted under its lock, so their ids are in sequence order, while they may
        # have been settled in another.
        ids = sorted(search.absent)
        for start in range(0, len(ids), _BATCH):
            sizes = self._store.sizes(ids[start : start + _BATCH])
            for part in slices(sizes, self._settings.batch_bytes):
                done, unavailable = self._send(self._store.rows(part), done)
                yield done
                if unavailable:
                    raise BrokerUnavailableError(f"Redis went away after {done.restored} events: {unavailable}")

    def _send(self, rows: Sequence[RestorableRow], done: Republished) -> tuple[Republished, str]:
        outcomes = self._publisher.publish(map(self._command, rows))
        moved: list[tuple[int, str, str]] = []
        restored = remembered = failed = 0
        unavailable = ""
        for row, outcome in zip(rows, outcomes, strict=True):
            if outcome.kind is OutcomeKind.PUBLISHED:
                restored += 1
                moved.append((row.id, row.entry_id, outcome.detail))
            elif outcome.kind is OutcomeKind.DUPLICATE:
                remembered += 1
                # By a run that ended before it could note so, say.
                moved.append((row.id, row.entry_id, outcome.detail))
            elif outcome.kind is OutcomeKind.UNAVAILABLE:
                unavailable = outcome.detail
            else:
                failed += 1
                _log.error(
                    "an event could not be restored",
                    extra={"event_id": str(row.event.event_id), "error": outcome.detail},
                )
        self._store.moved(moved)
        so_far = dataclasses.replace(
            done,
            restored=done.restored + restored,
            remembered=done.remembered + remembered,
            failed=done.failed + failed,
        )
        return so_far, unavailable

    def _command(self, row: RestorableRow) -> Command:
        fields = entry_fields(row.event, row.data, self._settings.source)
        marks = ["restored", "true"]
        if row.replays and self._settings.on_dead_letter == "skip":
            marks += ["replay", str(row.replays)]
        fields[-2:-2] = marks
        return Command(
            stream_key=row.stream_key,
            event_id=str(row.event.event_id),
            mode=Mode.RESTORE,
            fields=fields,
            aggregate=row.event.aggregate,
            sequence=row.event.sequence or 0,
        )


def slices(sizes: Mapping[int, int], max_bytes: int) -> Iterator[list[int]]:
    """Cut rows, given as id → bytes, into parts of at most ``max_bytes``, in their order; a larger row goes alone."""
    part: list[int] = []
    total = 0
    for id_, size in sizes.items():
        if part and total + size > max_bytes:
            yield part
            part, total = [], 0
        part.append(id_)
        total += size
    if part:
        yield part


def _utc(name: str, moment: datetime) -> datetime:
    if moment.utcoffset() is None:
        raise ConfigurationError(f"{name}: a datetime without time zone is ambiguous; use datetime.now(UTC)")
    return moment.astimezone(UTC).replace(tzinfo=None)
