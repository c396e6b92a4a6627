"""The demo from end to end: an outage in the middle, and a verdict from rows, entries and clients' logs."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any

import pytest

from game_server.players import Player, Received
from game_server.protocol import Created
from game_server.verdict import Row, StreamEntry, judge
from tests.support.processes import ROOT
from zzol_relay import EmbeddedServiceError
from zzol_relay.embedded import DatabaseServer, RedisServer


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    short = ("--rooms", "2", "--players", "3", "--before", "1.5", "--outage", "1.5", "--after", "1")
    environment = {name: value for name, value in os.environ.items() if not name.startswith("ZZOL_") and name != "DB"}
    return subprocess.run(
        [sys.executable, "-m", "game_server.demo", *short, *arguments],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=50,
        check=False,
    )


@pytest.mark.parametrize("db", ["sqlite", "mysql"])
def test_nothing_is_lost_doubled_or_out_of_order(db: str, redis_server: RedisServer) -> None:
    """Z4, Z7, Z20 and the promises, with real processes, clients and a Redis that is killed."""
    if db == "mysql":
        try:
            DatabaseServer()
        except EmbeddedServiceError as error:
            pytest.fail(str(error)) if os.environ.get("CI") == "true" else pytest.skip(str(error))
    done = run("--db", db, "--json")
    assert done.returncode == 0, done.stderr + done.stdout
    verdict = json.loads(done.stdout)
    assert verdict["ok"], verdict
    for path in ("outbox", "direct"):
        found = verdict[path]
        assert found["expected"] == found["in_stream"] == found["delivered"] > 0
        assert (found["lost"], found["duplicated"], found["out_of_order"]) == (0, 0, 0)
    assert (verdict["torn"], verdict["ghosts"], verdict["unsettled"]) == (0, 0, 0)
    assert verdict["rooms_in_outage"] == verdict["told_waiting"] > 2
    # Two events a room.
    assert verdict["outbox"]["expected"] >= 2 * (2 + verdict["rooms_in_outage"])
    assert verdict["refused"] > 0
    assert verdict["instances"] == (1 if db == "sqlite" else 2)


def test_it_is_readable_in_a_pipe_and_says_where_sqlite_stands_in(redis_server: RedisServer) -> None:
    done = run("--db", "sqlite")
    assert done.returncode == 0, done.stderr + done.stdout
    assert "make demo DB=mysql" in done.stdout
    assert "0 lost, 0 duplicated, 0 out of order, 0 ghosts" in done.stdout
    assert "\x1b" not in done.stdout
    assert max(map(len, done.stdout.splitlines())) <= 80


def host(*log: tuple[str, str, str, int | None]) -> Player:
    player = Player("", "ann")
    player.host, player.room = True, "ABCD"
    player.created = Created("ABCD", False, 0.0)
    player.log = [Received(1.0, id_, event, kind, seq, {"player": "ann", "sent": 5.0}) for id_, event, kind, seq in log]
    player.taps = {1: 5.0}
    return player


def entry(id_: str, event: str, kind: str, sequence: int | None = None) -> StreamEntry:
    return StreamEntry(id_, event, kind, "ABCD", sequence, "ann", 5.0 if kind == "tap" else None)


ROWS = [Row("a", "ABCD", 1, "PUBLISHED"), Row("b", "ABCD", 2, "PUBLISHED")]
ENTRIES = [entry("1-0", "a", "room.created", 1), entry("2-0", "b", "room.started", 2), entry("3-0", "c", "tap")]
LOG = [("1-0", "a", "room.created", 1), ("2-0", "b", "room.started", 2), ("3-0", "c", "tap", None)]


@pytest.mark.parametrize(
    ("changes", "fault"),
    [
        ({}, None),
        ({"entries": ENTRIES[1:], "log": LOG[1:]}, "outbox.lost"),
        ({"log": LOG[1:]}, "outbox.lost"),
        ({"log": LOG[:2]}, "direct.lost"),
        ({"entries": ENTRIES[:2], "log": LOG[:2]}, "direct.lost"),
        ({"log": [*LOG, LOG[2]]}, "direct.duplicated"),
        ({"log": [LOG[0], *LOG]}, "outbox.duplicated"),
        ({"entries": [*ENTRIES, entry("4-0", "a", "room.created", 1)]}, "outbox.duplicated"),
        ({"entries": [*ENTRIES, entry("4-0", "d", "tap")]}, "direct.duplicated"),
        ({"entries": [ENTRIES[1], ENTRIES[0], ENTRIES[2]]}, "outbox.out_of_order"),
        ({"log": [LOG[0], LOG[2], LOG[1]]}, "direct.out_of_order"),
        ({"entries": [*ENTRIES, entry("4-0", "g", "room.started", 3)]}, "ghosts"),
        ({"codes": ["ABCD", "FGHJ"]}, "torn"),
        ({"rows": [ROWS[0], Row("b", "ABCD", 2, "PENDING")]}, "unsettled"),
    ],
)
def test_the_verdict_sees_every_fault(changes: dict[str, Any], fault: str | None) -> None:
    """A judge that always says «0 lost» would be worth nothing."""
    given: dict[str, Any] = {"rows": ROWS, "codes": ["ABCD"], "entries": ENTRIES, "log": LOG} | changes
    verdict = judge(given["rows"], given["codes"], given["entries"], [host(*given["log"])])
    assert verdict.ok == (fault is None), verdict
    if fault is not None:
        found: Any = verdict
        for name in fault.split("."):
            found = getattr(found, name)
        assert found > 0, verdict
