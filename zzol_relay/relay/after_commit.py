"""Right after commit: one dispatcher thread publishes what has queued up as one pipeline, one settler marks it.

Promise 3. The committing thread waits for its ticket at most ``commit_wait``, when its connection is back in the pool;
with an open circuit it does not wait at all. Whatever goes wrong here is left to the poller: the row is PENDING and
its born lease runs out (Z24).
"""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import threading
import time
import uuid
from collections import deque
from collections.abc import Callable, Sequence

from zzol_relay.core.lifecycle import Status
from zzol_relay.core.observer import ClaimLost, Deferred, Fact, LoopBeat, LoopFailed, Recorded, Settled
from zzol_relay.core.policy import backoff
from zzol_relay.core.sequence import Mode, aggregate_order, predecessor_done
from zzol_relay.relay.circuit import Circuit
from zzol_relay.relay.delivery import Delivery, Shipment
from zzol_relay.settings import Settings
from zzol_relay.store.claims import ClaimStore
from zzol_relay.store.outbox import OutboxStore
from zzol_relay.streams.publisher import ScriptPublisher

__all__ = ["AfterCommit", "Settler", "Ticket"]

_log = logging.getLogger("zzol_relay.after_commit")

_FIRST_REPEAT = 0.002
_LAST_REPEAT = 0.032


class Ticket:
    """Done when each of a commit's rows is published or left to the poller."""

    __slots__ = ("_callback", "_left", "_lock", "_mutex")

    def __init__(self, rows: int) -> None:
        self._left = rows
        self._lock = threading.Lock()
        self._lock.acquire()
        self._mutex = threading.Lock()
        self._callback: Callable[[], None] | None = None

    def resolve(self) -> None:
        """One more row has its answer."""
        with self._mutex:
            self._left -= 1
            if self._left:
                return
            self._lock.release()
            callback = self._callback
        if callback is not None:
            callback()

    def wait(self, timeout: float) -> bool:
        """Block until done; False after ``timeout`` seconds."""
        return self._lock.acquire(timeout=timeout)

    async def wait_async(self, timeout: float) -> bool:
        """As ``wait``, without blocking the event loop."""
        loop = asyncio.get_running_loop()
        done = asyncio.Event()

        def callback() -> None:
            try:
                loop.call_soon_threadsafe(done.set)
            except RuntimeError:
                # The loop was closed while we published; nobody waits any more.
                _log.debug("the event loop closed before its commit's answer came")

        with self._mutex:
            if self._left == 0:
                return True
            self._callback = callback
        try:
            async with asyncio.timeout(timeout):
                await done.wait()
        except TimeoutError:
            return False
        return True


@dataclasses.dataclass(slots=True)
class _Job:
    shipment: Shipment
    ticket: Ticket
    born: float
    deadline: float
    repeat: float = _FIRST_REPEAT
    not_before: float = 0.0


class Settler:
    """Marks rows that this process published itself, many in one UPDATE (Z25).

    The queue holds ``settle_queue`` marks; one more is dropped and counted as deferred: the poller takes the row when
    its born lease ends, and the script answers DUPLICATE.
    """

    def __init__(self, claims: ClaimStore, token: bytes, settings: Settings, observe: Callable[[Fact], None]) -> None:
        self._claims = claims
        self._token = token
        self._settings = settings
        self._observe = observe
        self._queue: deque[tuple[int, str, uuid.UUID]] = deque()
        self._wake = threading.Condition()
        self._idle = False
        self._stopping = False
        self._thread = threading.Thread(target=self._run, name="zzol-relay-settler", daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def put(self, marks: Sequence[tuple[int, str, uuid.UUID]]) -> None:
        """Queue marks: row id, entry id, event id."""
        with self._wake:
            room = self._settings.settle_queue - len(self._queue)
            self._queue.extend(marks[:room])
            # While marks gather, only a full batch is worth waking the thread for: each waking takes the interpreter
            # from the threads that commit.
            if self._idle or len(self._queue) >= self._settings.dispatch_batch:
                self._wake.notify()
        if len(marks) > room:
            self._observe(Deferred("after_commit", tuple(mark[2] for mark in marks[room:]), "overflow"))

    def stop(self, deadline: float) -> None:
        """Settle what is queued, until ``deadline`` (monotonic) at the latest."""
        with self._wake:
            self._stopping = True
            self._wake.notify()
        if self._thread.ident is not None:
            self._thread.join(max(0.0, deadline - time.monotonic()))

    def _run(self) -> None:
        failures = 0
        while True:
            batch = self._take()
            if batch is None:
                return
            started = time.monotonic()
            while batch:
                try:
                    self._settle(batch)
                    failures = 0
                    break
                except Exception as error:
                    failures += 1
                    pause = backoff(failures, 0.5, base=0.1, cap=5.0)
                    self._observe(LoopFailed("settler", repr(error), pause))
                    _log.warning("marking published rows failed", exc_info=True, extra={"rows": len(batch)})
                    with self._wake:
                        if self._stopping:
                            return
                        self._wake.wait(pause)
            self._observe(LoopBeat("settler", time.monotonic() - started))

    def _take(self) -> list[tuple[int, str, uuid.UUID]] | None:
        """The next batch; empty after a while without work, so that idling is seen to be life; None at the end."""
        with self._wake:
            if not self._queue and not self._stopping:
                self._idle = True
                self._wake.wait(self._settings.heartbeat_interval)
                self._idle = False
            if not self._queue:
                return None if self._stopping else []
            if len(self._queue) < self._settings.dispatch_batch and not self._stopping:
                linger = time.monotonic() + self._settings.settle_linger
                while len(self._queue) < self._settings.dispatch_batch and not self._stopping:
                    left = linger - time.monotonic()
                    if left <= 0:
                        break
                    self._wake.wait(left)
            return [self._queue.popleft() for _ in range(min(len(self._queue), self._settings.dispatch_batch))]

    def _settle(self, batch: list[tuple[int, str, uuid.UUID]]) -> None:
        # In id order, like every other writer of these rows.
        batch.sort()
        kept = self._claims.settle(self._token, Status.PENDING, [(id_, entry) for id_, entry, _ in batch])
        self._observe(Settled("after_commit", tuple(mark[2] for mark in batch)))
        if kept < len(batch):
            self._observe(ClaimLost("after_commit", len(batch) - kept))


class AfterCommit:
    """The dispatcher. ``submit`` hands over a commit's rows; the queue holds ``dispatch_queue`` of them."""

    def __init__(
        self,
        delivery: Delivery,
        settler: Settler,
        store: OutboxStore,
        publisher: ScriptPublisher,
        circuit: Circuit,
        settings: Settings,
        observe: Callable[[Fact], None],
    ) -> None:
        self._delivery = delivery
        self._settler = settler
        self._store = store
        self._publisher = publisher
        self._circuit = circuit
        self._settings = settings
        self._observe = observe
        self._queue: deque[_Job] = deque()
        self._repeats: list[_Job] = []
        self._pending = 0
        self._wake = threading.Condition()
        self._stopping = False
        self._thread = threading.Thread(target=self._run, name="zzol-relay-dispatcher", daemon=True)

    def start(self) -> None:
        """Start dispatcher and settler."""
        self._settler.start()
        self._thread.start()

    def stop(self, deadline: float) -> None:
        """Publish what is queued and settle it, until ``deadline`` (monotonic) at the latest."""
        with self._wake:
            self._stopping = True
            self._wake.notify()
        if self._thread.ident is not None:
            self._thread.join(max(0.0, deadline - time.monotonic()))
        self._settler.stop(deadline)

    @property
    def accepts(self) -> bool:
        """Whether a commit's rows would be taken now; the answer may be another when it comes to it."""
        return not self._circuit.is_open and not self._stopping and self._thread.is_alive()

    def submit(self, shipments: Sequence[Shipment]) -> Ticket | None:
        """Queue a commit's rows for publishing; None where they are left to the poller, and nobody need wait."""
        if self._circuit.is_open:
            self._leave(shipments, "circuit")
            return None
        now = time.monotonic()
        ticket = Ticket(len(shipments))
        deadline = now + self._settings.commit_wait
        with self._wake:
            # Not alive: never started, or the child of a fork.
            stopping = self._stopping or not self._thread.is_alive()
            if stopping or self._pending + len(shipments) > self._settings.dispatch_queue:
                reason = "stopping" if stopping else "overflow"
            else:
                reason = ""
                self._pending += len(shipments)
                self._queue.extend(_Job(shipment, ticket, now, deadline) for shipment in shipments)
                self._wake.notify()
        if reason:
            self._observe(Deferred("after_commit", _ids(shipments), "stopping" if reason == "stopping" else "overflow"))
            return None
        return ticket

    def recorded(self, shipments: Sequence[Shipment], waited: float) -> None:
        """Announce rows that were committed."""
        self._observe(Recorded(_ids(shipments), waited))

    def _leave(self, shipments: Sequence[Shipment], reason: str) -> None:
        self._observe(Deferred("after_commit", _ids(shipments), reason))  # type: ignore[arg-type]

    def _run(self) -> None:
        while True:
            jobs = self._take()
            if jobs is None:
                return
            started = time.monotonic()
            try:
                self._dispatch(jobs)
            except Exception as error:
                # The rows stay PENDING under their born lease; the loop must live.
                _log.exception("the dispatcher failed", extra={"rows": len(jobs)})
                self._observe(LoopFailed("dispatcher", repr(error), 0.0))
                self._finish(jobs, "error")
            self._observe(LoopBeat("dispatcher", time.monotonic() - started))

    def _take(self) -> list[_Job] | None:
        limit = self._settings.dispatch_batch
        with self._wake:
            while True:
                now = time.monotonic()
                if self._repeats:
                    ready = [job for job in self._repeats if job.not_before <= now]
                    if ready:
                        self._repeats = [job for job in self._repeats if job.not_before > now]
                        ready += [self._queue.popleft() for _ in range(min(len(self._queue), limit))]
                        return ready
                if self._queue:
                    return [self._queue.popleft() for _ in range(min(len(self._queue), limit))]
                if self._repeats:
                    self._wake.wait(min(job.not_before for job in self._repeats) - now)
                elif self._stopping:
                    return None
                elif not self._wake.wait(self._settings.heartbeat_interval):
                    # Nothing to do for a while: seen to be life.
                    return []

    def _dispatch(self, jobs: list[_Job]) -> None:
        if not jobs:
            return
        if self._circuit.is_open:
            self._finish(jobs, "circuit")
            return
        deferred = self._send(jobs)
        if not deferred:
            return
        # A missing tail, or a predecessor still on its way: ask the database at once, under the epoch of now.
        epochs = self._publisher.epochs()
        statuses = self._store.predecessors([job.shipment.row.id for job in deferred])
        proven, unproven = [], []
        for job in deferred:
            shipment = job.shipment
            if predecessor_done(statuses.get(shipment.row.id), self._settings.on_dead_letter):
                epoch = epochs.get(shipment.row.stream_key, "")
                job.shipment = dataclasses.replace(shipment, mode=Mode.HEAD, epoch=epoch)
                proven.append(job)
            else:
                unproven.append(job)
        if proven:
            unproven += self._send(proven)
        self._repeat(unproven)

    def _send(self, jobs: list[_Job]) -> list[_Job]:
        """Publish; settle what is done, leave what failed, and return what the order deferred."""
        # In sequence order per aggregate: threads commit in that order but may queue up in another.
        jobs = sorted(jobs, key=lambda job: aggregate_order(job.shipment.row))
        now = time.monotonic()
        by_id = {job.shipment.row.id: job for job in jobs}
        shipments = []
        for job in jobs:
            row = dataclasses.replace(job.shipment.row, age=now - job.born)
            shipments.append(dataclasses.replace(job.shipment, row=row))
        sent = self._delivery.send(shipments, "after_commit")
        if sent.done:
            # Whoever waits goes on first; the marks have time.
            self._finish([by_id[row.id] for row, _ in sent.done])
            self._settler.put([(row.id, entry, row.event_id) for row, entry in sent.done])
        deferred = []
        left: dict[str, list[_Job]] = {}
        for shipment, reason in sent.waiting:
            job = by_id[shipment.row.id]
            if reason == "order":
                deferred.append(job)
            else:
                left.setdefault(reason, []).append(job)
        for row, _ in (*sent.failed, *sent.impossible):
            # Whether it is the event's own fault is for the poller to count; the immediate path costs no attempt†.
            left.setdefault("error", []).append(by_id[row.id])
        for cause, kept in left.items():
            self._finish(kept, cause)
        return deferred

    def _repeat(self, jobs: list[_Job]) -> None:
        now = time.monotonic()
        again = []
        late = []
        for job in jobs:
            if now + job.repeat >= job.deadline or self._stopping:
                late.append(job)
            else:
                # From the tail again: the head proof was for that moment.
                job.shipment = dataclasses.replace(job.shipment, mode=Mode.NEXT)
                job.not_before = now + job.repeat
                job.repeat = min(job.repeat * 2, _LAST_REPEAT)
                again.append(job)
        if again:
            with self._wake:
                self._repeats += again
        self._finish(late, "order")

    def _finish(self, jobs: Sequence[_Job], reason: str = "") -> None:
        if not jobs:
            return
        with self._wake:
            self._pending -= len(jobs)
        if reason:
            self._leave([job.shipment for job in jobs], reason)
        for job in jobs:
            job.ticket.resolve()


def _ids(shipments: Sequence[Shipment]) -> tuple[uuid.UUID, ...]:
    return tuple(shipment.row.event_id for shipment in shipments)
