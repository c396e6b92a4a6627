"""Counts and heartbeats gathered from facts, for status and health."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from zzol_relay.core.observer import (
    Claimed,
    ClaimLost,
    CleanedUp,
    DataLossDetected,
    DeadLettered,
    DeadlockRetried,
    Deferred,
    DirectPublished,
    DuplicatesSuppressed,
    Fact,
    Failed,
    LoopBeat,
    LoopFailed,
    Published,
    Recorded,
    Recovered,
    Settled,
)

__all__ = ["Counters"]


class Counters:
    """An observer that counts since the process began. ``clock`` is monotonic, in seconds."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._counts: dict[str, int] = {}
        self._beats: dict[str, float] = {}

    def __call__(self, fact: Fact) -> None:
        match fact:
            case LoopBeat(loop):
                self._beats[loop] = self._clock()
            case Recorded(event_ids):
                self._add("recorded", len(event_ids))
            case Published(path, event_ids):
                self._add(f"published_{path}", len(event_ids))
            case DuplicatesSuppressed(_, event_ids):
                self._add("duplicates_suppressed", len(event_ids))
            case Deferred(path, event_ids):
                self._add(f"deferred_{path}", len(event_ids))
            case Settled(_, event_ids):
                self._add("settled", len(event_ids))
            case Claimed(event_ids, retries):
                self._add("claimed", len(event_ids))
                self._add("retried", retries)
            case Failed():
                self._add("failed", 1)
            case DeadLettered():
                self._add("dead_lettered", 1)
            case ClaimLost(_, count):
                self._add("claims_lost", count)
            case Recovered(count):
                self._add("recovered", count)
            case CleanedUp(_, count):
                self._add("cleaned_up", count)
            case DirectPublished(count):
                self._add("direct_published", count)
            case DataLossDetected():
                self._add("data_losses", 1)
            case DeadlockRetried():
                self._add("deadlock_retries", 1)
            case LoopFailed():
                self._add("loop_failures", 1)
            case _:
                pass

    def counts(self) -> dict[str, int]:
        """A copy of the counts."""
        with self._lock:
            return dict(self._counts)

    def beat_ages(self) -> dict[str, float]:
        """Seconds since each loop last finished a round."""
        now = self._clock()
        return {loop: now - beat for loop, beat in list(self._beats.items())}

    def _add(self, name: str, number: int) -> None:
        with self._lock:
            self._counts[name] = self._counts.get(name, 0) + number
