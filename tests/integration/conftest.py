"""A producer and a worker that a test drives by hand."""

from __future__ import annotations

from typing import Any

import pytest
from sqlalchemy import Engine

from tests.support.outbox import STREAMS
from zzol_relay import Relay


@pytest.fixture
def producer(engine: Engine, make_relay: Any) -> Relay:
    """Records rows that are due at once and publishes nothing by itself (polling mode)."""
    relay: Relay = make_relay(engine, STREAMS, worker=False, mode="polling", start=False)
    return relay


@pytest.fixture
def worker(engine: Engine, make_relay: Any) -> Relay:
    """A bare worker: it declares no stream, and is driven by ``run_once``."""
    relay: Relay = make_relay(engine, [], worker=False, start=False)
    return relay
