"""What an event is and what is refused, before anything is written (G4-G6, S3, S7)."""

from __future__ import annotations

import dataclasses
import uuid
from datetime import UTC, datetime, timedelta, timezone
from typing import Any

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from zzol_relay.core.errors import InvalidEventError, PayloadTooLargeError
from zzol_relay.core.events import (
    MAX_AGGREGATE_ID,
    MAX_NAME,
    MAX_SEQUENCE,
    Event,
    encode_data,
    entry_fields,
    lexical_sequence,
    validate,
)
from zzol_relay.core.ids import RANDOM_BITS, uuid7

GOOD = Event(type="room.created", stream="room", aggregate_type="room", aggregate_id="방-1", data={"n": 1})


def test_a_good_event_passes() -> None:
    validate(GOOD)
    validate(Event(type="x", stream="s"))


@pytest.mark.parametrize(
    ("field", "changes"),
    [
        ("type", {"type": ""}),
        ("type", {"type": "a b"}),
        ("type", {"type": "x" * 129}),
        ("type", {"type": 7}),
        ("stream", {"stream": "a:b"}),
        ("stream", {"stream": "s" * (MAX_NAME + 1)}),
        ("stream", {"stream": "room\n"}),
        ("aggregate_id", {"aggregate_id": None}),
        ("aggregate_id", {"aggregate_type": None}),
        ("aggregate_id", {"aggregate_id": ""}),
        ("aggregate_id", {"aggregate_id": "padded "}),
        ("aggregate_id", {"aggregate_id": "a\x00b"}),
        ("aggregate_id", {"aggregate_id": "x" * (MAX_AGGREGATE_ID + 1)}),
        ("aggregate_type", {"aggregate_type": "a:b"}),
        ("sequence", {"sequence": 0}),
        ("sequence", {"sequence": True}),
        ("sequence", {"sequence": MAX_SEQUENCE + 1}),
        ("sequence", {"sequence": 1, "aggregate_id": None, "aggregate_type": None}),
        ("schema_version", {"schema_version": 0}),
        ("schema_version", {"schema_version": "1"}),
        ("event_id", {"event_id": "6f9f"}),
        ("occurred_at", {"occurred_at": datetime(2026, 1, 1)}),
        ("occurred_at", {"occurred_at": "2026-01-01"}),
        ("correlation_id", {"correlation_id": "x" * 129}),
        ("causation_id", {"causation_id": ""}),
        ("traceparent", {"traceparent": "00-xyz"}),
    ],
)
def test_a_field_that_cannot_be_carried_is_refused_by_name(field: str, changes: dict[str, Any]) -> None:
    with pytest.raises(InvalidEventError) as caught:
        validate(dataclasses.replace(GOOD, **changes))
    assert caught.value.field == field


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("wrap", [lambda v: v, lambda v: {"a": [1, {"b": v}]}, lambda v: [None, (v,)]])
def test_nan_is_refused_although_orjson_would_write_null(value: float, wrap: Any) -> None:
    with pytest.raises(InvalidEventError, match="NaN"):
        encode_data(wrap(value), 1000)


def test_nan_in_a_dataclass_is_refused() -> None:
    @dataclasses.dataclass
    class Score:
        value: float

    with pytest.raises(InvalidEventError, match="NaN"):
        encode_data(Score(float("nan")), 1000)
    assert encode_data(Score(1.5), 1000) == b'{"value":1.5}'


@pytest.mark.parametrize("value", [object(), {1: 2}, {"a": {1, 2}}, b"bytes", 1 << 70, "\ud800", complex(1, 2)])
def test_what_is_not_json_is_refused(value: Any) -> None:
    with pytest.raises(InvalidEventError) as caught:
        encode_data({"v": value}, 1000)
    assert caught.value.field == "data"


def test_a_datetime_without_time_zone_is_refused_and_one_with_is_carried() -> None:
    with pytest.raises(InvalidEventError, match="no time zone"):
        encode_data({"at": datetime(2026, 1, 1)}, 1000)
    assert encode_data([datetime(2026, 1, 1, tzinfo=UTC)], 1000) == b'["2026-01-01T00:00:00+00:00"]'


def test_a_payload_over_the_limit_is_refused_and_one_at_the_limit_is_not() -> None:
    assert len(encode_data("x" * 98, 100)) == 100
    with pytest.raises(PayloadTooLargeError) as caught:
        encode_data("x" * 99, 100)
    assert (caught.value.size, caught.value.limit) == (101, 100)


json_values = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**63) | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(st.characters(exclude_categories=["Cs"])),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(st.text(st.characters(exclude_categories=["Cs"])), inner, max_size=4)
    ),
    max_leaves=20,
)  # fmt: skip


@given(json_values)
def test_every_json_value_survives_the_round_trip(value: Any) -> None:
    assert orjson.loads(encode_data(value, 1 << 20)) == value


def test_the_entry_is_cloudevents_with_its_attributes() -> None:
    """S7: id, type and sequence stand in the entry; G5: the id is the event's own."""
    event = dataclasses.replace(
        GOOD,
        event_id=uuid.UUID(int=7),
        occurred_at=datetime(2026, 1, 2, 12, tzinfo=timezone(timedelta(hours=9))),
        sequence=12,
        correlation_id="c",
        causation_id="d",
        traceparent=f"00-{'a' * 32}-{'b' * 16}-01",
    )
    validate(event)
    flat = entry_fields(event, b'{"n":1}', "test")
    fields = dict(zip(flat[::2], flat[1::2], strict=True))
    assert fields == {
        "specversion": "1.0",
        "id": str(event.event_id),
        "type": "room.created",
        "source": "test",
        "time": "2026-01-02T03:00:00.000000Z",
        "datacontenttype": "application/json",
        "schemaversion": "1",
        "subject": "room/방-1",
        "partitionkey": "방-1",
        "sequence": "00000000000000000012",
        "correlationid": "c",
        "causationid": "d",
        "traceparent": event.traceparent,
        "data": b'{"n":1}',
    }


def test_an_event_that_is_not_completed_has_no_entry() -> None:
    with pytest.raises(InvalidEventError, match="not completed"):
        entry_fields(GOOD, b"{}", "test")


@given(st.integers(1, MAX_SEQUENCE), st.integers(1, MAX_SEQUENCE))
def test_sequences_sort_as_text_like_their_numbers(a: int, b: int) -> None:
    assert (lexical_sequence(a) < lexical_sequence(b)) == (a < b)


@given(st.integers(0, 2**48 - 1), st.integers(0, 2**RANDOM_BITS - 1))
def test_uuid7_has_version_variant_and_time(ms: int, random: int) -> None:
    value = uuid7(ms, random)
    assert (value.version, value.variant) == (7, uuid.RFC_4122)
    assert value.int >> 80 == ms
    assert uuid7(ms, random) == value
