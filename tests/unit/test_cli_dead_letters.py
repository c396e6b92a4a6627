"""``zzol-relay dead-letters`` (Z13, G9)."""

from __future__ import annotations

import dataclasses
import uuid
from collections.abc import Callable

import pytest
from sqlalchemy import Engine, select, update

from tests.support.cli import Answer, run_cli
from zzol_relay import Event, Relay
from zzol_relay.embedded import RedisServer
from zzol_relay.store.tables import Tables

TABLES = Tables("zzol_", None)
OUTBOX = TABLES.outbox


@dataclasses.dataclass(frozen=True)
class Ward:
    """Three dead letters, then a pending event; ``ids`` are theirs."""

    engine: Engine
    ids: list[str]
    env: dict[str, str]

    def run(self, *arguments: str) -> Answer:
        return run_cli("dead-letters", *arguments, **self.env)

    def status(self, event_id: str) -> str:
        with self.engine.connect() as connection:
            found = connection.execute(
                select(OUTBOX.c.status).where(OUTBOX.c.event_id == uuid.UUID(event_id).bytes)
            ).scalar_one()
            return str(found)

    def audit(self) -> list[tuple[str, int]]:
        with self.engine.connect() as connection:
            t = TABLES.audit
            return [(r.action, r.affected) for r in connection.execute(select(t).order_by(t.c.id))]


@pytest.fixture
def ward(sqlite_engine: Engine, sqlite_url: str, redis_server: RedisServer, make_relay: Callable[..., Relay]) -> Ward:
    relay = make_relay(sqlite_engine, start=False, mode="polling")
    events = [
        Event(type="room.created", stream="room", aggregate_type="room", aggregate_id=f"r{n}", data={"host": "4nn"})
        for n in range(4)
    ]
    with relay.begin(sqlite_engine) as connection:
        ids = [str(event.event_id) for event in relay.record_all(connection, events)]
    with sqlite_engine.begin() as connection:
        connection.execute(
            update(OUTBOX)
            .where(OUTBOX.c.id <= 3)
            .values(status="DEAD_LETTER", retry_count=10, last_error="ERR\tno\n\x1b[31mred")
        )
    return Ward(sqlite_engine, ids, {"ZZOL_DATABASE_URL": sqlite_url, "ZZOL_REDIS_URL": redis_server.url})


def test_list_shows_dead_letters_only_and_no_payload(ward: Ward):
    answer = ward.run("list", "--json")
    assert answer.code == 0
    assert [row["event_id"] for row in answer.json] == ward.ids[:3]
    assert answer.json[0]["retry_count"] == 10
    assert answer.json[0]["status"] == "DEAD_LETTER"
    assert "4nn" not in answer.out


def test_list_is_limited_and_goes_on_after_a_number(ward: Ward):
    first = ward.run("list", "--json", "--limit", "2").json
    rest = ward.run("list", "--json", "--after", str(first[-1]["id"])).json
    assert [row["event_id"] for row in (*first, *rest)] == ward.ids[:3]


def test_list_piped_is_one_line_each_and_cannot_steer_a_terminal(ward: Ward):
    rows = ward.run("list").rows
    assert [len(row) for row in rows] == [9] * 4
    assert [row[1] for row in rows[1:]] == ward.ids[:3]
    assert rows[1][-1] == r"ERR\tno\n\x1b[31mred"


def test_show_keeps_the_payload_to_itself_unless_asked(ward: Ward):
    event_id = ward.ids[0]
    plain = ward.run("show", event_id)
    assert ["event_id", event_id] in plain.rows
    assert "4nn" not in plain.out
    assert ["payload", '{"host":"4nn"}'] in ward.run("show", event_id, "--payload").rows
    assert "payload" not in ward.run("show", event_id, "--json").json
    assert ward.run("show", event_id, "--json", "--payload").json["payload"] == {"host": "4nn"}


def test_show_of_what_is_no_dead_letter_fails(ward: Ward):
    pending = ward.run("show", ward.ids[3])
    assert (pending.code, pending.out) == (1, "")
    assert "is PENDING, not a dead letter" in pending.err
    unknown = ward.run("show", str(uuid.uuid4()))
    assert unknown.code == 1
    assert "is not in the outbox" in unknown.err


def test_replay_makes_them_pending_and_is_audited(ward: Ward):
    answer = ward.run("replay", ward.ids[0], ward.ids[1], ward.ids[0])
    assert (answer.code, answer.out, answer.err) == (0, "replayed 2\n", "")
    assert [ward.status(event_id) for event_id in ward.ids[:3]] == ["PENDING", "PENDING", "DEAD_LETTER"]
    assert ward.audit() == [("replay", 2)]


def test_replay_leaves_alone_what_is_no_dead_letter(ward: Ward):
    some = ward.run("replay", ward.ids[0], ward.ids[3])
    assert (some.code, some.out) == (0, "replayed 1\n")
    assert "1 of 2 are no dead letters" in some.err
    none = ward.run("replay", ward.ids[3])
    assert (none.code, none.out) == (1, "replayed 0\n")


def test_discard_needs_a_yes(ward: Ward):
    refused = ward.run("discard", ward.ids[0])
    assert refused.code == 2
    assert "--yes" in refused.err
    assert ward.status(ward.ids[0]) == "DEAD_LETTER"
    done = ward.run("discard", "--yes", ward.ids[0])
    assert (done.code, done.out) == (0, "discarded 1\n")
    assert ward.status(ward.ids[0]) == "DISCARDED"
    assert ward.run("discard", "--yes", ward.ids[0]).code == 1
