"""``zzol-relay find`` and ``republish`` (G5, G9, S3)."""

from __future__ import annotations

import dataclasses
import uuid
from collections.abc import Callable

import pytest
import redis
from sqlalchemy import Engine, text

from tests.support.cli import Answer, run_cli, run_on_a_terminal
from tests.support.streams import entries
from zzol_relay import Event, Relay
from zzol_relay.cli.arguments import duration, moment
from zzol_relay.embedded import RedisServer


@dataclasses.dataclass(frozen=True)
class House:
    """Three published events of one room."""

    relay: Relay
    engine: Engine
    ids: list[str]
    env: dict[str, str]

    def run(self, *arguments: str) -> Answer:
        return run_cli(*arguments, **self.env)

    def change(self, statement: str) -> None:
        with self.engine.begin() as connection:
            connection.execute(text(statement))


@pytest.fixture
def house(sqlite_engine: Engine, sqlite_url: str, redis_server: RedisServer, make_relay: Callable[..., Relay]) -> House:
    relay = make_relay(sqlite_engine, start=False, mode="polling")
    relay._publisher.learn()
    events = [
        Event(type="room.joined", stream="room", aggregate_type="room", aggregate_id="AB", data={"n": "4nn"},
              correlation_id="req-1" if n else None)
        for n in range(3)
    ]  # fmt: skip
    with relay.begin(sqlite_engine) as connection:
        ids = [str(event.event_id) for event in relay.record_all(connection, events)]
    assert relay.run_once() == 3
    return House(relay, sqlite_engine, ids, {"ZZOL_DATABASE_URL": sqlite_url, "ZZOL_REDIS_URL": redis_server.url})


def test_find_tells_the_story_of_an_event(house: House):
    answer = house.run("find", house.ids[1])
    assert (answer.code, answer.err) == (0, "")
    assert ["status", "PUBLISHED"] in answer.rows
    assert ["entry", "present"] in answer.rows
    steps = [row[1] for row in answer.rows[answer.rows.index(["when", "what"]) + 1 :]]
    assert steps[:2] == ["occurred", "recorded"]
    assert steps[2].startswith("published, ")
    assert "4nn" not in answer.out
    assert ["payload", '{"n":"4nn"}'] in house.run("find", house.ids[1], "--payload").rows

    told = house.run("find", house.ids[1], "--json").json
    assert (told["entry"], told["waiting_behind"], told["audit"]) == ("present", 0, [])
    assert told["correlation_id"] == "req-1"
    assert "payload" not in told


def test_find_tells_what_operators_did_and_what_failed(house: House):
    house.change("UPDATE zzol_outbox_event SET status = 'DEAD_LETTER', published_at = NULL, retry_count = 10,"
                 f" last_error = 'ERR no' WHERE event_id = X'{uuid.UUID(house.ids[2]).hex}'")  # fmt: skip
    assert "DEAD_LETTER, 10 attempt(s) failed: ERR no" in house.run("find", house.ids[2]).out
    assert run_cli("dead-letters", "replay", house.ids[2], **house.env).code == 0
    assert "replay by " in house.run("find", house.ids[2]).out


def test_find_by_aggregate_and_by_correlation(house: House):
    by_aggregate = house.run("find", "--aggregate", "room:AB", "--json")
    assert [row["event_id"] for row in by_aggregate.json] == house.ids
    assert [row["sequence"] for row in by_aggregate.json] == [1, 2, 3]
    by_correlation = house.run("find", "--correlation", "req-1").rows
    assert [row[1] for row in by_correlation[1:]] == house.ids[1:]
    newest = house.run("find", "--aggregate", "room:AB", "--stream", "room", "--limit", "1").rows
    assert [row[1] for row in newest[1:]] == house.ids[2:]


@pytest.mark.parametrize(
    "arguments",
    [(str(uuid.uuid4()),), ("--aggregate", "room:ZZ"), ("--aggregate", "room:AB", "--stream", "hall"),
     ("--correlation", "req-2")],
    ids=["id", "aggregate", "stream", "correlation"],
)  # fmt: skip
def test_find_of_nothing_is_1(house: House, arguments: tuple[str, ...]):
    assert house.run("find", *arguments).code == 1


def test_republish_says_what_is_absent_and_sends_it_only_when_told_to(house: House, redis_client: redis.Redis):
    intact = house.run("republish", "--since", "1h")
    assert (intact.code, intact.out) == (0, "examined\t3\nabsent\t0\ntrimmed\t0\nunknown\t0\n")
    redis_client.flushall()
    looked = house.run("republish", "--since", "1h", "--dry-run")
    assert (looked.code, looked.rows[1]) == (0, ["absent", "3"])
    refused = house.run("republish", "--since", "1h")
    assert refused.code == 2
    assert "--yes" in refused.err
    assert entries(redis_client) == []
    done = house.run("republish", "--since", "2020-01-01", "--stream", "room", "--yes", "--json")
    assert done.code == 0
    assert done.json == {
        "dry_run": False, "examined": 3, "absent": 3, "trimmed": 0, "unknown": 0, "restored": 3, "remembered": 0,
        "failed": 0,
    }  # fmt: skip
    assert [entry.event_id for entry in entries(redis_client)] == house.ids
    assert house.run("republish", "--since", "1h", "--yes").rows[1] == ["absent", "0"]
    assert len(entries(redis_client)) == 3


def test_republish_asks_a_person(house: House, redis_client: redis.Redis):
    redis_client.flushall()
    code, said = run_on_a_terminal("republish", "--since", "1h", answer="n", **house.env)
    assert code == 1
    assert "Send 3 event(s) again? [y/N]" in said
    assert entries(redis_client) == []
    code, said = run_on_a_terminal("republish", "--since", "1h", answer="y", **house.env)
    assert code == 0
    assert len(entries(redis_client)) == 3


def test_republish_without_redis_is_3(house: House):
    answer = house.run("republish", "--since", "1h", "--yes")
    assert answer.code == 0
    env = {**house.env, "ZZOL_REDIS_URL": "redis://127.0.0.1:1/0"}
    assert run_cli("republish", "--since", "1h", "--yes", **env).code == 3


def test_durations_and_moments():
    assert [duration(given) for given in ("90", "90s", "1.5m", "15min", "2h", "1d")] == [90, 90, 90, 900, 7200, 86400]
    assert moment("2026-01-31T12:00").isoformat() == "2026-01-31T12:00:00+00:00"
    assert moment("2026-01-31T12:00+09:00").isoformat() == "2026-01-31T12:00:00+09:00"
    assert moment("2h") < moment("1h")
