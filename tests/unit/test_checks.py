"""The verdicts of ``zzol-relay check`` on facts (Z5, G9)."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from zzol_relay.core.checks import DatabaseFacts, Finding, RedisFacts, judge_database, judge_redis

DATABASE = DatabaseFacts(
    version="8.0.36", isolation="READ-COMMITTED", log_bin=True, binlog_format="ROW", flush_at_commit="1",
    max_packet=64 << 20, revision="0001", head="0001", schema_fits=True,
)  # fmt: skip
REDIS = RedisFacts(version="7.0.15", role="master", policy="noeviction", aof=True, rdb=True)


def on_database(**changes: Any) -> list[Finding]:
    return judge_database(dataclasses.replace(DATABASE, **changes), max_payload_bytes=256 * 1024)


def on_redis(**changes: Any) -> list[Finding]:
    return judge_redis(dataclasses.replace(REDIS, **changes))


def bad(findings: list[Finding]) -> dict[str, str]:
    """Name to verdict of what is not well; each of these says what to mend."""
    assert all(finding.mend for finding in findings if finding.verdict != "ok")
    assert len({finding.name for finding in findings}) == len(findings)
    return {finding.name: finding.verdict for finding in findings if finding.verdict != "ok"}


def test_what_is_fit_is_ok():
    assert bad(on_database()) == {}
    assert bad(on_redis()) == {}


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"version": "5.7.44"}, {"database version": "fail"}),
        ({"version": "9.7.4"}, {}),
        ({"version": "10.6.0-MariaDB"}, {}),
        ({"version": "10.5.27-MariaDB-log"}, {"database version": "fail"}),
        ({"version": "5.5.5-10.11.6-MariaDB"}, {}),
        ({"version": "5.5.5-10.3.1-MariaDB"}, {"database version": "fail"}),
        ({"version": "?"}, {"database version": "warn"}),
        ({"isolation": "READ COMMITTED"}, {}),
        ({"isolation": "REPEATABLE-READ"}, {"isolation": "fail"}),
        ({"isolation": None}, {"isolation": "fail"}),
        ({"binlog_format": "STATEMENT"}, {"binary log": "fail"}),
        ({"binlog_format": "STATEMENT", "log_bin": False}, {}),
        ({"binlog_format": "MIXED"}, {}),
        ({"binlog_format": None}, {}),
        ({"read_only": True}, {"database role": "fail"}),
        ({"flush_at_commit": "2"}, {"durability": "warn"}),
        ({"max_packet": 256 * 1024}, {"packet size": "fail"}),
        ({"max_packet": None}, {}),
        ({"clock_ahead": 1.5}, {"database clock": "warn"}),
        ({"clock_ahead": -1.5}, {"database clock": "warn"}),
        ({"clock_ahead": -0.5}, {}),
        ({"schema_fits": False, "revision": None}, {"schema": "fail"}),
        ({"schema_fault": "no table"}, {"schema": "fail", "privileges": "warn"}),
        ({"denied": ("DELETE on t",)}, {"privileges": "fail"}),
        ({"sqlite": True, "version": "3.40"}, {"database version": "warn"}),
        ({"error": "refused"}, {"database": "fail"}),
    ],
    ids=str,
)
def test_what_is_not_fit_of_the_database(changes: dict[str, Any], expected: dict[str, str]):
    assert bad(on_database(**changes)) == expected


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"version": "6.2.14"}, {"redis version": "fail"}),
        ({"version": "8.2.1"}, {}),
        ({"version": "7.2.0", "valkey": True}, {}),
        ({"version": "7.0.0", "valkey": True}, {"redis version": "fail"}),
        ({"role": "slave"}, {"redis role": "fail"}),
        ({"policy": "allkeys-lru"}, {"eviction": "fail"}),
        ({"policy": ""}, {"eviction": "fail"}),
        ({"aof": False}, {}),
        ({"aof": False, "rdb": False}, {"persistence": "warn"}),
        ({"aof": False, "rdb": None}, {"persistence": "warn"}),
        ({"persistence_failure": "the last dump failed"}, {"persistence": "warn"}),
        ({"denied": ("XADD",)}, {"redis commands": "fail"}),
        ({"refused": "OOM"}, {"redis commands": "fail"}),
        ({"scripts": "NOPERM"}, {"publish script": "fail"}),
        ({"clock_ahead": 2}, {"redis clock": "warn"}),
        ({"error": "refused"}, {"redis": "fail"}),
    ],
    ids=str,
)
def test_what_is_not_fit_of_redis(changes: dict[str, Any], expected: dict[str, str]):
    assert bad(on_redis(**changes)) == expected


def test_a_finding_says_what_was_found():
    by_name = {finding.name: finding for finding in [*on_database(version="11.4.2-MariaDB"), *on_redis(clock_ahead=-2)]}
    assert by_name["database version"].found == "MariaDB 11.4.2-MariaDB"
    assert by_name["redis version"].found == "Redis 7.0.15"
    assert by_name["redis clock"].found == "2.000 s behind this host's"
