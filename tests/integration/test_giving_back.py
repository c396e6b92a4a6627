"""A claim that is given back keeps its place: nothing is put off behind rows that only lacked their shard's epoch."""

from __future__ import annotations

import pytest
import redis
from sqlalchemy import Engine

from tests.support.facts import Facts
from tests.support.outbox import record
from tests.support.streams import check_order, entries
from zzol_relay import Relay
from zzol_relay.core.observer import Deferred

pytestmark = pytest.mark.usefixtures("relay_tables")


def test_a_first_claim_that_has_to_learn_its_shard_puts_off_nothing(
    producer: Relay, worker: Relay, engine: Engine, redis_client: redis.Redis, facts: Facts
) -> None:
    """A bare worker meets a backlog of one aggregate that is longer than a batch: as it starts after an outage."""
    record(producer, engine, "A", worker.settings.batch_rows + 20)
    assert worker.run_once() == worker.settings.batch_rows + 20
    check_order(entries(redis_client))
    assert [fact.reason for fact in facts.of(Deferred)] == ["epoch"]
