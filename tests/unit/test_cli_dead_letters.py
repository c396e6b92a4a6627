"""``zzol-relay dead-letters`` (Z13, G9)."""

from __future__ import annotations

import dataclasses
import uuid
from collections.abc import Callable

import pytest
from sqlalchemy import Engine, select, update

from tests.support.cli import Answer, run_cli, run_on_a_terminal
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


def test_list_takes_filters_and_counts(ward: Ward):
    with ward.engine.begin() as connection:
        connection.execute(update(OUTBOX).where(OUTBOX.c.id == 2).values(last_error="ERR timed out"))
    assert [row["event_id"] for row in ward.run("list", "--json", "--error", "TIMED").json] == [ward.ids[1]]
    assert [row["event_id"] for row in ward.run("list", "--json", "--aggregate", "room:r2").json] == [ward.ids[2]]
    assert ward.run("list", "--count").out == "3\n"
    assert ward.run("list", "--count", "--stream", "room", "--type", "room.created", "--newer-than", "1h").out == "3\n"
    assert ward.run("list", "--count", "--stream", "hall").out == "0\n"
    assert ward.run("list", "--count", "--older-than", "2m").out == "0\n"


def test_show_says_what_waits_behind(ward: Ward):
    assert ["waiting_behind", "0"] in ward.run("show", ward.ids[0]).rows
    assert ward.run("show", ward.ids[0], "--json").json["waiting_behind"] == 0


@pytest.mark.parametrize(("command", "status"), [("replay", "PENDING"), ("discard", "DISCARDED")])
def test_all_that_match_need_a_yes(ward: Ward, command: str, status: str):
    """Without anybody to ask, nothing is done."""
    refused = ward.run(command, "--all", "--type", "room.created")
    assert (refused.code, refused.out) == (2, "")
    assert "--yes" in refused.err
    assert ward.status(ward.ids[0]) == "DEAD_LETTER"
    done = ward.run(command, "--all", "--aggregate", "room:r1", "--yes")
    assert (done.code, done.out) == (0, f"{command}ed 1\n")
    assert [ward.status(each) for each in ward.ids[:3]] == ["DEAD_LETTER", status, "DEAD_LETTER"]
    assert ward.run(command, "--all", "--yes").out == f"{command}ed 2\n"
    nothing = ward.run(command, "--all")
    assert (nothing.code, nothing.out) == (1, f"{command}ed 0\n")


def test_a_person_is_asked_with_the_count_and_may_say_no(ward: Ward):
    code, said = run_on_a_terminal("dead-letters", "discard", "--all", "--stream", "room", answer="n", **ward.env)
    assert code == 1
    assert "Discard for good: 3 dead letter(s) (stream room)? [y/N]" in said
    assert ward.status(ward.ids[0]) == "DEAD_LETTER"
    code, said = run_on_a_terminal("dead-letters", "discard", "--all", "--stream", "room", answer="y", **ward.env)
    assert code == 0
    assert "discarded 3" in said
    assert "3/3" in said, "a progress bar"


def test_audit_tells_who_did_what(ward: Ward):
    ward.run("replay", ward.ids[0])
    ward.run("discard", "--all", "--error", "red", "--yes")
    found = ward.run("audit", "--json").json
    assert [(entry["action"], entry["affected"]) for entry in found] == [("discard", 2), ("replay", 1)]
    assert found[0]["detail"] == {"filter": {"error": "red"}, "event_ids": ward.ids[1:3]}
    rows = ward.run("audit", "--limit", "1").rows
    assert len(rows) == 2
    assert rows[1][2:] == ["discard", "2", f'{{"filter":{{"error":"red"}}}} {ward.ids[1]} and 1 more']
