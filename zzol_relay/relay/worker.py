"""The fallback poller: claim, publish without a transaction or connection, settle (Z13, Z30, G17)."""

from __future__ import annotations

import logging
import random
import threading
import time
import uuid
from collections.abc import Callable, Sequence

from zzol_relay.core.errors import BrokerUnavailableError
from zzol_relay.core.lifecycle import Status
from zzol_relay.core.observer import Claimed, ClaimLost, DeadLettered, Deferred, Fact, Failed, Settled
from zzol_relay.core.policy import backoff, exhausted
from zzol_relay.core.sequence import Planned
from zzol_relay.relay.circuit import Circuit
from zzol_relay.relay.delivery import Delivery, Sent, Shipment, WaitReason
from zzol_relay.settings import Settings
from zzol_relay.store.claims import Claim, ClaimedRow, ClaimStore, Failure
from zzol_relay.store.outbox import OutboxStore
from zzol_relay.streams.publisher import ScriptPublisher

__all__ = ["Worker"]

_log = logging.getLogger("zzol_relay.worker")

_PIPELINE = 500


class Worker:
    """Publishes due rows. Any number of workers may run on one database."""

    def __init__(
        self,
        claims: ClaimStore,
        store: OutboxStore,
        delivery: Delivery,
        publisher: ScriptPublisher,
        circuit: Circuit,
        settings: Settings,
        observe: Callable[[Fact], None],
    ) -> None:
        self._claims = claims
        self._store = store
        self._delivery = delivery
        self._publisher = publisher
        self._circuit = circuit
        self._settings = settings
        self._observe = observe
        self._random = random.Random()
        self._stopping = threading.Event()
        self._turn = threading.Lock()

    def stop(self) -> None:
        """Claim no more; what is claimed is finished, or given back at no cost."""
        self._stopping.set()

    def run_once(self) -> int:
        """Poll until nothing more is due, Redis is away, or ``stop()``; returns how many rows were settled.

        One poll at a time per worker. Raises what the database raises; rows then claimed come back by recovery.
        """
        settled = 0
        with self._turn:
            while not self._stopping.is_set() and self._circuit.check():
                # Known before the claim: the order is proven under these epochs.
                epochs = self._publisher.epochs()
                started = time.monotonic()
                claim = self._claims.claim()
                if claim.waiting:
                    self._observe(Deferred("poller", claim.waiting, "order"))
                learned = False
                if claim.rows:
                    retries = sum(1 for planned in claim.rows if planned.row.retry_count)
                    self._observe(Claimed(tuple(planned.row.event_id for planned in claim.rows), retries))
                    learned = self._learn_shards(claim, epochs)
                    settled += self._deliver(claim, epochs, started)
                if not claim.more and not learned:
                    break
        return settled

    def _learn_shards(self, claim: Claim, epochs: dict[str, str]) -> bool:
        unknown = {planned.row.stream_key for planned in claim.rows} - epochs.keys()
        if not unknown:
            return False
        try:
            self._publisher.learn(unknown, self._store.newest_entries())
        except BrokerUnavailableError as error:
            self._circuit.open(str(error))
        return True

    def _deliver(self, claim: Claim, epochs: dict[str, str], claimed_at: float) -> int:
        rows = claim.rows
        payloads = self._claims.payloads([planned.row.id for planned in rows if planned.row.data is None])
        settled = 0
        held_since = claimed_at
        for start in range(0, len(rows), _PIPELINE):
            chunk: Sequence[Planned[ClaimedRow]] = rows[start : start + _PIPELINE]
            if self._stopping.is_set() or self._circuit.is_open:
                reason = "stopping" if self._stopping.is_set() else "circuit"
                self._give_back(claim.token, [planned.row for planned in rows[start:]], 0.0, reason)
                break
            if time.monotonic() - held_since > self._settings.claim_lease / 3:
                # Just before sending: rows that recovery has taken meanwhile are not ours to send.
                held_since = time.monotonic()
                ours = self._claims.renew(claim.token, [planned.row.id for planned in rows[start:]])
                lost = [planned for planned in chunk if planned.row.id not in ours]
                if lost:
                    self._observe(ClaimLost("poller", len(lost)))
                    chunk = [planned for planned in chunk if planned.row.id in ours]
            settled += self._send(claim.token, chunk, payloads, epochs)
        return settled

    def _send(
        self, token: bytes, chunk: Sequence[Planned[ClaimedRow]], payloads: dict[int, bytes], epochs: dict[str, str]
    ) -> int:
        shipments, unproven = [], []
        for planned in chunk:
            row = planned.row
            epoch = epochs.get(row.stream_key)
            data = row.data if row.data is not None else payloads.get(row.id)
            if epoch is None:
                unproven.append(row)
            elif data is not None:
                shipments.append(Shipment(row, data, planned.mode, epoch))
        self._give_back(token, unproven, 0.0, "epoch")
        if not shipments:
            return 0
        sent = self._delivery.send(shipments, "poller")
        self._return_waiting(token, sent)
        self._fail(token, sent)
        return self._settle(token, sent)

    def _settle(self, token: bytes, sent: Sent) -> int:
        if not sent.done:
            return 0
        # In id order, so that two settles of overlapping rows cannot deadlock.
        entries = sorted((row.id, entry) for row, entry in sent.done)
        kept = self._claims.settle(token, Status.IN_PROGRESS, entries)
        if kept < len(entries):
            self._observe(ClaimLost("poller", len(entries) - kept))
        if kept:
            self._observe(Settled("poller", tuple(row.event_id for row, _ in sent.done)))
        return kept

    def _return_waiting(self, token: bytes, sent: Sent) -> None:
        by_reason: dict[WaitReason, list[ClaimedRow]] = {}
        for shipment, reason in sent.waiting:
            by_reason.setdefault(reason, []).append(shipment.row)
        delays: dict[WaitReason, float] = {"order": self._settings.blocked_delay, "shard": self._settings.shard_retry}
        for reason, rows in by_reason.items():
            self._give_back(token, rows, delays.get(reason, 0.0), reason)

    def _give_back(self, token: bytes, rows: Sequence[ClaimedRow], delay: float, reason: str) -> None:
        if not rows:
            return
        # With the epoch known now the next claim sends them. After an outage they go to the end: rows of a shard that
        # cannot be asked for its epoch must not stand in the way of all others.
        in_front = reason == "epoch"
        kept = self._claims.give_back(token, sorted(row.id for row in rows), delay, in_front=in_front)
        if kept < len(rows):
            self._observe(ClaimLost("poller", len(rows) - kept))
        self._observe(Deferred("poller", tuple(row.event_id for row in rows), reason))  # type: ignore[arg-type]

    def _fail(self, token: bytes, sent: Sent) -> None:
        failures: dict[int, Failure] = {}
        ids: dict[int, uuid.UUID] = {}
        for row, error in (*sent.failed, *sent.impossible):
            attempts = row.retry_count + 1
            delay = backoff(
                attempts, self._random.random(), base=self._settings.backoff_base, cap=self._settings.backoff_cap
            )
            failures[row.id] = Failure(row.id, error, attempts, delay, exhausted(attempts, self._settings.max_attempts))
            ids[row.id] = row.event_id
        for row, error in sent.impossible:
            failures[row.id] = Failure(row.id, error, row.retry_count + 1, 0.0, True)
        if not failures:
            return
        kept = self._claims.fail(token, [failures[id_] for id_ in sorted(failures)])
        if len(kept) < len(failures):
            self._observe(ClaimLost("poller", len(failures) - len(kept)))
        for id_ in sorted(kept):
            failure = failures[id_]
            extra = {"event_id": str(ids[id_]), "error": failure.error, "retry_count": failure.retry_count}
            if failure.dead:
                _log.error("event is a dead letter; an operator must replay or discard it", extra=extra)
                self._observe(DeadLettered(ids[id_], failure.error, failure.retry_count))
            else:
                _log.warning("publishing failed; the event waits for its next attempt", extra=extra)
                self._observe(Failed(ids[id_], failure.error, failure.retry_count))
