"""The small duties beside the poller, each run once; scheduling is elsewhere (Z33, Z36)."""

from __future__ import annotations

import logging
import random
import threading
from collections.abc import Callable

from zzol_relay.core.observer import CleanedUp, DeadLettered, Fact, Recovered
from zzol_relay.core.policy import backoff
from zzol_relay.settings import Settings
from zzol_relay.store.claims import ClaimStore
from zzol_relay.store.upkeep import UpkeepStore

__all__ = ["Cleanup", "Recovery"]

_log = logging.getLogger("zzol_relay.upkeep")

_CLEANUP_LEASE = 60.0
_ONCE_A_DAY = 12 * 3600.0


class Recovery:
    """Expired claims back to PENDING, each costing an attempt."""

    def __init__(self, claims: ClaimStore, settings: Settings, observe: Callable[[Fact], None]) -> None:
        self._claims = claims
        self._settings = settings
        self._observe = observe
        self._random = random.Random()

    def run_once(self) -> int:
        """Recover until no claim is expired; returns how many rows moved."""
        moved = 0
        while True:
            result = self._claims.recover(self._delay)
            if result.recovered:
                _log.warning("expired claims recovered", extra={"rows": len(result.recovered)})
                self._observe(Recovered(len(result.recovered)))
            for event_id in result.dead:
                _log.error("event is a dead letter: its workers died or hung", extra={"event_id": str(event_id)})
                self._observe(DeadLettered(event_id, "the claim expired", self._settings.max_attempts))
            count = len(result.recovered) + len(result.dead)
            moved += count
            if count < self._settings.batch_rows:
                return moved

    def _delay(self, attempts: int) -> float:
        return backoff(
            attempts, self._random.random(), base=self._settings.backoff_base, cap=self._settings.backoff_cap
        )


class Cleanup:
    """Settled rows past their retention, in small transactions, by one process at a time."""

    def __init__(self, upkeep: UpkeepStore, settings: Settings, holder: bytes, observe: Callable[[Fact], None]) -> None:
        self._upkeep = upkeep
        self._settings = settings
        self._holder = holder
        self._observe = observe
        self._stopping = threading.Event()

    def stop(self) -> None:
        """End after the present batch."""
        self._stopping.set()

    def run_once(self, *, not_within: float = _ONCE_A_DAY) -> int | None:
        """Delete until nothing is old; returns the count, or None where another process has the duty or it ran less
        than ``not_within`` seconds ago."""
        if not self._upkeep.take_duty("cleanup", self._holder, _CLEANUP_LEASE, not_within):
            return None
        total = 0
        while not self._stopping.is_set():
            deleted = self._upkeep.delete_settled()
            total += deleted
            # Batch by batch: a cleanup of hours is seen to make progress.
            self._observe(CleanedUp("outbox_event", deleted))
            if deleted < self._settings.cleanup_batch:
                self._upkeep.finish_duty("cleanup", self._holder)
                break
            if not self._upkeep.renew_duty("cleanup", self._holder, _CLEANUP_LEASE):
                break
        _log.info("cleanup done", extra={"rows": total})
        return total
