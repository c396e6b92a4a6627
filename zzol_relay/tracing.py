"""W3C trace context along an event: commit → stream → consumer. Needs opentelemetry-api (the extra ``otel``).

With the setting ``tracing`` on, ``record()`` and ``publish()`` give an event that carries no ``traceparent`` that of
the current span; the entry carries it on, and ``context_of`` hands it to the consumer's span:

::

    with tracer.start_as_current_span("handle", context=context_of(entry.fields), kind=SpanKind.CONSUMER):
        ...

The relay makes no spans of its own: whether a row went right after its commit or hours later, its trace is that of the
request that recorded it.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from zzol_relay.core.errors import ConfigurationError
from zzol_relay.core.events import Event

if TYPE_CHECKING:
    from opentelemetry.context import Context

__all__ = ["context_of", "traced", "with_traceparent"]

_PARENT = re.compile(r"[0-9a-f]{2}-[0-9a-f]{32}-[0-9a-f]{16}-[0-9a-f]{2}\Z")


def traced(complete: Callable[[Event], Event]) -> Callable[[Event], Event]:
    """``complete`` and then ``with_traceparent``. Raises ``ConfigurationError`` without opentelemetry-api."""
    _api()
    return lambda event: with_traceparent(complete(event))


def with_traceparent(event: Event) -> Event:
    """``event`` with the current span's ``traceparent``, where there is a span and the event has none of its own."""
    if event.traceparent is not None:
        return event
    context = _api().get_current_span().get_span_context()
    if not context.is_valid:
        return event
    parent = f"00-{context.trace_id:032x}-{context.span_id:016x}-{int(context.trace_flags) & 0xFF:02x}"
    return dataclasses.replace(event, traceparent=parent)


def context_of(entry_fields: Mapping[Any, Any]) -> Context:
    """The context to start a consumer's span in, from a stream entry's fields (names and values str or bytes).

    The current context where the entry carries no valid ``traceparent``.
    """
    _api()
    from opentelemetry.context import get_current
    from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

    value = entry_fields.get("traceparent", entry_fields.get(b"traceparent", ""))
    parent = value.decode(errors="replace") if isinstance(value, bytes) else str(value or "")
    if not _PARENT.match(parent):
        return get_current()
    return TraceContextTextMapPropagator().extract({"traceparent": parent}, get_current())


def _api() -> Any:
    try:
        from opentelemetry import trace
    except ImportError:
        raise ConfigurationError("tracing needs opentelemetry-api: pip install 'zzol-relay[otel]'") from None
    return trace
