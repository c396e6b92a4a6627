"""Random interleavings over the real store and the real script keep the invariants (G7-G12, G18, G25, Z34, Z35).

No threads: every step of the protocol that may be interleaved with another is a rule of a state machine, driven by
hypothesis. A crash is a step that never comes; a lost reply is a step whose result is thrown away.
"""

from __future__ import annotations

import time
import uuid
from typing import Any

import pytest
import redis
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule, run_state_machine_as_test
from sqlalchemy import Engine, text
from sqlalchemy.orm import Session

from tests.support.streams import check_order, entries, outbox_rows
from zzol_relay import Event, Status, Stream
from zzol_relay.core.lifecycle import UNPUBLISHED
from zzol_relay.relay.after_commit import Ticket, _Job
from zzol_relay.relay.delivery import Shipment

pytestmark = pytest.mark.usefixtures("relay_tables")

KEY = "zzol:{room:0}"
indexes = st.integers(0, 100)


class Interleavings(RuleBasedStateMachine):
    engine: Engine
    client: redis.Redis
    make_relay: Any

    def __init__(self) -> None:
        super().__init__()
        with self.engine.begin() as connection:
            connection.execute(text("DELETE FROM zzol_outbox_event"))
            connection.execute(text("DELETE FROM zzol_outbox_aggregate"))
        self.client.flushall()
        options = {"batch_rows": 4, "max_attempts": 4, "backoff_base": 0.01, "backoff_cap": 0.02}
        streams = [Stream(name="room", retention=0)]
        self.relay: Any = self.make_relay(self.engine, streams, worker=False, **options, start=False)
        self.relay._publisher.learn()
        self.relay._recorder.hand_over = self.inflight_of
        self.relay._after_commit._settler.put = lambda marks: self.marks.extend(marks)
        self.session: Session | None = None
        self.savepoints: list[Any] = []
        self.uncommitted: list[list[str]] = [[]]
        self.committed: set[str] = set()
        self.rolled_back: set[str] = set()
        self.poisoned: set[str] = set()
        self.inflight: list[Shipment] = []
        self.marks: list[Any] = []
        self.claims: list[tuple[Any, dict[str, str]]] = []
        self.sent: list[tuple[bytes, Any]] = []

    def inflight_of(self, shipments: list[Shipment]) -> None:
        self.inflight += shipments

    @initialize()
    def open_session(self) -> None:
        self.session = Session(self.engine)

    @rule(aggregate=st.sampled_from("AB"), count=st.integers(1, 2))
    def record(self, aggregate: str, count: int) -> None:
        assert self.session is not None
        events = [Event(type="t", stream="room", aggregate_type="room", aggregate_id=aggregate)] * count
        for event in self.relay.record_all(self.session, events):
            self.uncommitted[-1].append(str(event.event_id))

    @rule()
    def savepoint(self) -> None:
        assert self.session is not None
        if len(self.savepoints) < 2:
            self.savepoints.append(self.session.begin_nested())
            self.uncommitted.append([])

    @rule(release=st.booleans())
    def end_savepoint(self, release: bool) -> None:
        if self.savepoints:
            ids = self.uncommitted.pop()
            if release:
                self.savepoints.pop().commit()
                self.uncommitted[-1] += ids
            else:
                self.savepoints.pop().rollback()
                self.rolled_back |= set(ids)

    @rule(commit=st.sampled_from([True, True, True, False]))
    def end_transaction(self, commit: bool) -> None:
        assert self.session is not None
        while self.savepoints:
            self.end_savepoint(commit)
        if commit:
            self.session.commit()
            self.committed |= set(self.uncommitted[0])
        else:
            self.session.rollback()
            self.rolled_back |= set(self.uncommitted[0])
        self.uncommitted = [[]]

    @rule(count=st.integers(1, 3), answer=st.sampled_from(["read", "read", "lost"]))
    def dispatch(self, count: int, answer: str) -> None:
        batch, self.inflight = self.inflight[:count], self.inflight[count:]
        if batch:
            marks = list(self.marks)
            now = time.monotonic()
            ticket = Ticket(len(batch))
            self.relay._after_commit._pending += len(batch)
            self.relay._after_commit._dispatch([_Job(shipment, ticket, now, now) for shipment in batch])
            if answer == "lost":
                self.marks = marks

    @rule()
    def settle_marks(self) -> None:
        if self.marks:
            self.relay._after_commit._settler._settle(self.marks)
            self.marks = []

    @rule()
    def crash_the_embedding_process(self) -> None:
        self.inflight, self.marks = [], []

    @rule()
    def leases_end(self) -> None:
        if not self.savepoints and self.session is not None and not self.session.in_transaction():
            with self.engine.begin() as connection:
                connection.execute(text("UPDATE zzol_outbox_event SET due_at = UTC_TIMESTAMP(6)"
                                        " WHERE status IN ('PENDING', 'IN_PROGRESS')"))  # fmt: skip

    @rule()
    def claim(self) -> None:
        epochs = self.relay._publisher.epochs()
        claim = self.relay._claims.claim()
        if claim.rows:
            self.claims.append((claim, epochs))

    @rule(index=indexes)
    def send_claim(self, index: int) -> None:
        if self.claims:
            claim, epochs = self.claims.pop(index % len(self.claims))
            shipments = [
                Shipment(planned.row, planned.row.data or b"", planned.mode, epochs[planned.row.stream_key])
                for planned in claim.rows
            ]
            self.sent.append((claim.token, self.relay._worker._delivery.send(shipments, "poller")))

    @rule(index=indexes)
    def settle_claim(self, index: int) -> None:
        if self.sent:
            token, sent = self.sent.pop(index % len(self.sent))
            self.relay._worker._return_waiting(token, sent)
            self.relay._worker._fail(token, sent)
            self.relay._worker._settle(token, sent)

    @rule(index=indexes)
    def crash_a_worker(self, index: int) -> None:
        if self.claims:
            self.claims.pop(index % len(self.claims))
        elif self.sent:
            self.sent.pop(index % len(self.sent))

    @rule()
    def recover(self) -> None:
        if self.session is not None and not self.session.in_transaction():
            self.relay.recover()

    @rule()
    def scripts_are_flushed(self) -> None:
        self.client.script_flush()

    @rule(index=indexes)
    def poison(self, index: int) -> None:
        if self.inflight:
            event_id = str(self.inflight[index % len(self.inflight)].row.event_id)
            if not self.client.exists(f"{KEY}:seen:{event_id}"):
                self.client.lpush(f"{KEY}:seen:{event_id}", "x")
                self.poisoned.add(event_id)

    def teardown(self) -> None:
        try:
            self.end_transaction(False)
            for _ in range(60):
                self.leases_end()
                self.relay.recover()
                self.relay.run_once()
                if not {Status(row.status) for row in outbox_rows(self.engine)} & UNPUBLISHED:
                    break
            self.check()
        finally:
            assert self.session is not None
            self.session.close()
            self.relay.stop()

    def check(self) -> None:
        found = entries(self.client)
        check_order(found)
        in_stream = {entry.event_id for entry in found}
        rows = outbox_rows(self.engine)
        dead = {str(_uuid(row.event_id)) for row in rows if row.status == "DEAD_LETTER"}
        assert {str(_uuid(row.event_id)) for row in rows} == self.committed
        assert not in_stream & self.rolled_back
        assert in_stream | dead == self.committed
        assert {row.status for row in rows} <= {"PUBLISHED", "DEAD_LETTER"}
        # An attempt is counted for the crash of a worker too, so the innocent may die after four of them.
        for row in rows:
            if row.status == "DEAD_LETTER" and str(_uuid(row.event_id)) not in self.poisoned:
                assert "claim expired" in row.last_error


def _uuid(raw: bytes) -> Any:
    return uuid.UUID(bytes=bytes(raw))


@pytest.mark.timeout(180)
def test_random_interleavings_keep_every_promise(engine: Engine, redis_client: redis.Redis, make_relay: Any) -> None:
    machine = type(
        "Machine", (Interleavings,), {"engine": engine, "client": redis_client, "make_relay": staticmethod(make_relay)}
    )
    run_state_machine_as_test(
        machine,
        settings=settings(
            max_examples=60,
            stateful_step_count=30,
            deadline=None,
            derandomize=True,
            suppress_health_check=list(HealthCheck),
        ),
    )
