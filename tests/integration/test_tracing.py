"""The trace context travels commit → stream → consumer."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from typing import Any

import pytest
import redis
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanKind, Tracer, get_current_span
from sqlalchemy import Engine
from sqlalchemy.ext.asyncio import AsyncSession, create_async_engine
from sqlalchemy.orm import Session

from zzol_relay import Event, Relay
from zzol_relay.tracing import context_of

pytestmark = pytest.mark.usefixtures("relay_tables")

KEY = "zzol:{room:0}"
GIVEN = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


@pytest.fixture
def exporter() -> InMemorySpanExporter:
    return InMemorySpanExporter()


@pytest.fixture
def tracer(exporter: InMemorySpanExporter) -> Tracer:
    # A provider of the test's own: the global one can be set once a process only.
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    return provider.get_tracer("test")


def happened(**fields: Any) -> Event:
    return Event(type="t", stream="room", aggregate_type="room", aggregate_id="A", **fields)


def last_fields(client: redis.Redis) -> dict[str, str]:
    found: Any = client.xrevrange(KEY, count=1)
    fields: dict[str, str] = found[0][1]
    return fields


def consume(tracer: Tracer, client: redis.Redis) -> None:
    with tracer.start_as_current_span("handle", context=context_of(last_fields(client)), kind=SpanKind.CONSUMER):
        pass


@pytest.mark.parametrize("mode", ["hybrid", "polling"])
def test_a_consumers_span_is_the_child_of_the_request_that_recorded(
    engine: Engine, make_relay: Any, redis_client: redis.Redis, tracer: Tracer, exporter: Any, mode: str
) -> None:
    relay: Relay = make_relay(engine, tracing=True, mode=mode, worker=False)
    with tracer.start_as_current_span("request"), Session(engine) as session, session.begin():
        event = relay.record(session, happened())
    # Long after the request's span, on another thread or in another process.
    relay.run_once()
    consume(tracer, redis_client)
    request, handle = exporter.get_finished_spans()
    assert (request.name, handle.name) == ("request", "handle")
    assert handle.context.trace_id == request.context.trace_id
    assert handle.parent.span_id == request.context.span_id
    assert event.traceparent == last_fields(redis_client)["traceparent"]


async def _publish(relay: Relay, event: Event) -> None:
    async with relay:
        await relay.publish(event)


def test_the_direct_path_carries_it_too(
    engine: Engine, make_relay: Any, redis_client: redis.Redis, tracer: Tracer, exporter: Any
) -> None:
    relay: Relay = make_relay(engine, tracing=True, worker=False, start=False)
    with tracer.start_as_current_span("request"):
        asyncio.run(_publish(relay, happened()))
    consume(tracer, redis_client)
    request, handle = exporter.get_finished_spans()
    assert handle.parent.span_id == request.context.span_id


def test_an_async_session_sees_the_span_of_its_task(
    engine: Engine, database_url: str, make_relay: Any, tracer: Tracer
) -> None:
    async def record() -> Event:
        async_engine = create_async_engine(database_url.replace("+pymysql", "+aiomysql"))
        relay: Relay = make_relay(engine, tracing=True, worker=False)
        with tracer.start_as_current_span("request") as span:
            async with AsyncSession(async_engine) as session, session.begin():
                event = await session.run_sync(relay.record, happened())
        await async_engine.dispose()
        assert event.traceparent is not None
        assert f"{span.get_span_context().span_id:016x}" in event.traceparent
        return event

    asyncio.run(record())


def test_what_an_event_says_itself_wins_and_without_a_span_there_is_none(
    engine: Engine, make_relay: Any, redis_client: redis.Redis, tracer: Tracer
) -> None:
    relay: Relay = make_relay(engine, tracing=True, worker=False)
    with tracer.start_as_current_span("request"), Session(engine) as session, session.begin():
        assert relay.record(session, happened(traceparent=GIVEN)).traceparent == GIVEN
    assert last_fields(redis_client)["traceparent"] == GIVEN
    with Session(engine) as session, session.begin():
        assert relay.record(session, happened()).traceparent is None
    assert "traceparent" not in last_fields(redis_client)


def test_it_is_off_unless_asked_for(engine: Engine, make_relay: Any, tracer: Tracer) -> None:
    relay: Relay = make_relay(engine, worker=False)
    with tracer.start_as_current_span("request"), Session(engine) as session, session.begin():
        assert relay.record(session, happened()).traceparent is None


@pytest.mark.parametrize("fields", [{}, {"traceparent": ""}, {"traceparent": "nonsense"}, {b"traceparent": b"\xff"}])
def test_an_entry_without_a_valid_parent_starts_a_trace_of_its_own(fields: Any) -> None:
    assert not get_current_span(context_of(fields)).get_span_context().is_valid


def test_fields_as_bytes_are_read_as_well() -> None:
    context = get_current_span(context_of({b"traceparent": GIVEN.encode()})).get_span_context()
    assert f"{context.trace_id:032x}" in GIVEN


def test_without_the_package_the_setting_is_refused_and_all_else_works() -> None:
    script = """
        import sys
        sys.modules["opentelemetry"] = None
        from zzol_relay import ConfigurationError, Relay, Stream
        Relay("mysql+pymysql://u@127.0.0.1:1/x", [Stream(name="room")])
        try:
            Relay("mysql+pymysql://u@127.0.0.1:1/x", [Stream(name="room")], tracing=True)
        except ConfigurationError as error:
            print(error)
    """
    import textwrap

    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script)], capture_output=True, text=True, check=True, timeout=30
    )
    assert "zzol-relay[otel]" in done.stdout
