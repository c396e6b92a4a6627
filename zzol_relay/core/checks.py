"""What is fit for the relay and what is not: verdicts on facts that were read from MySQL and Redis.

``zzol-relay check`` prints them.
"""

from __future__ import annotations

import dataclasses
import re
from typing import Literal

__all__ = ["DatabaseFacts", "Finding", "RedisFacts", "judge_database", "judge_redis"]

Verdict = Literal["ok", "warn", "fail"]

_MYSQL, _MARIADB, _REDIS, _VALKEY = (8, 0), (10, 6), (7, 0), (7, 2)
_CLOCK = 1.0
_PACKET_HEADROOM = 2
"""A payload travels escaped: in the worst case every byte becomes two."""


@dataclasses.dataclass(frozen=True, slots=True)
class Finding:
    """One line of the report. ``mend`` says what to do; '' where nothing is to be done."""

    name: str
    verdict: Verdict
    found: str
    mend: str = ""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class DatabaseFacts:
    """What the outbox's database is like. ``error``: it could not be asked, and the rest says nothing.

    ``clock_ahead`` is the server's clock less this host's, in seconds. ``denied`` names what the relay may not do,
    one statement each. Settings that could not be read are None.
    """

    error: str = ""
    sqlite: bool = False
    version: str = ""
    isolation: str | None = None
    log_bin: bool = False
    binlog_format: str | None = None
    read_only: bool = False
    flush_at_commit: str | None = None
    max_packet: int | None = None
    clock_ahead: float = 0.0
    revision: str | None = None
    head: str = ""
    schema_fits: bool = False
    schema_fault: str | None = None
    denied: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class RedisFacts:
    """What Redis is like. ``error``: it could not be asked, and the rest says nothing.

    ``rdb`` is None where the server does not say whether it saves. ``denied`` names commands that are not allowed,
    ``refused`` is why writes are refused, ``scripts`` why the scripts cannot be used.
    """

    error: str = ""
    version: str = ""
    valkey: bool = False
    role: str = ""
    policy: str = ""
    aof: bool = False
    rdb: bool | None = None
    persistence_failure: str = ""
    clock_ahead: float = 0.0
    denied: tuple[str, ...] = ()
    refused: str = ""
    scripts: str = ""


def judge_database(facts: DatabaseFacts, *, max_payload_bytes: int) -> list[Finding]:
    """The verdicts on the database."""
    if facts.error:
        return [Finding("database", "fail", facts.error, "see that it runs and that database_url fits")]
    if facts.sqlite:
        stand_in = "SQLite is a stand-in for first steps: one process, one machine"
        return [Finding("database version", "warn", f"SQLite {facts.version}", stand_in), *_schema(facts)]
    return [
        _database_version(facts),
        *_schema(facts),
        _privileges(facts),
        _isolation(facts),
        _binlog(facts),
        _writable(facts),
        _durable(facts),
        _packet(facts, max_payload_bytes),
        _clock("database clock", facts.clock_ahead),
    ]


def judge_redis(facts: RedisFacts) -> list[Finding]:
    """The verdicts on Redis."""
    if facts.error:
        return [Finding("redis", "fail", facts.error, "see that it runs and that redis_url fits")]
    return [
        _redis_version(facts),
        _role(facts),
        _policy(facts),
        _persistence(facts),
        _commands(facts),
        _scripts(facts),
        _clock("redis clock", facts.clock_ahead),
    ]


def _database_version(facts: DatabaseFacts) -> Finding:
    mariadb = "mariadb" in facts.version.lower()
    product, minimum = ("MariaDB", _MARIADB) if mariadb else ("MySQL", _MYSQL)
    return _version("database version", product, facts.version, minimum)


def _redis_version(facts: RedisFacts) -> Finding:
    product, minimum = ("Valkey", _VALKEY) if facts.valkey else ("Redis", _REDIS)
    return _version("redis version", product, facts.version, minimum)


def _version(name: str, product: str, version: str, minimum: tuple[int, int]) -> Finding:
    found = f"{product} {version}"
    # MariaDB may say 5.5.5-10.11.2-MariaDB, for clients that cannot read its real number.
    match = re.match(r"(?:5\.5\.5-)?(\d+)\.(\d+)", version)
    if match is None:
        return Finding(name, "warn", found, f"cannot be read; {product} {minimum[0]}.{minimum[1]} or later is needed")
    if (int(match[1]), int(match[2])) < minimum:
        return Finding(name, "fail", found, f"use {product} {minimum[0]}.{minimum[1]} or later")
    return Finding(name, "ok", found)


def _schema(facts: DatabaseFacts) -> list[Finding]:
    found = f"revision {facts.revision or 'none'}, newest known {facts.head}"
    migrate = "run 'zzol-relay migrate'"
    if facts.schema_fault is not None:
        return [Finding("schema", "fail", facts.schema_fault, migrate)]
    return [Finding("schema", "ok", found) if facts.schema_fits else Finding("schema", "fail", found, migrate)]


def _privileges(facts: DatabaseFacts) -> Finding:
    if facts.denied:
        mend = "grant SELECT, INSERT, UPDATE and DELETE on the relay's tables"
        return Finding("privileges", "fail", f"denied: {', '.join(facts.denied)}", mend)
    if facts.schema_fault is not None:
        return Finding("privileges", "warn", "not tried: tables are missing", "migrate, then check again")
    return Finding("privileges", "ok", "may read and write its tables")


def _isolation(facts: DatabaseFacts) -> Finding:
    found = facts.isolation or "unknown"
    if found.replace(" ", "-").upper() == "READ-COMMITTED":
        return Finding("isolation", "ok", "READ COMMITTED on the relay's own connections")
    mend = "the relay asks for READ COMMITTED; see what resets it (a proxy?): other levels block who records"
    return Finding("isolation", "fail", found, mend)


def _binlog(facts: DatabaseFacts) -> Finding:
    if not facts.log_bin:
        return Finding("binary log", "ok", "off")
    if (facts.binlog_format or "").upper() == "STATEMENT":
        mend = "SET GLOBAL binlog_format = 'ROW': InnoDB refuses writes at READ COMMITTED with STATEMENT (error 1665)"
        return Finding("binary log", "fail", "STATEMENT", mend)
    return Finding("binary log", "ok", facts.binlog_format or "on")


def _writable(facts: DatabaseFacts) -> Finding:
    if facts.read_only:
        return Finding("database role", "fail", "read-only: a replica?", "point database_url at the primary")
    return Finding("database role", "ok", "takes writes")


def _durable(facts: DatabaseFacts) -> Finding:
    value = facts.flush_at_commit
    if value in ("1", None):
        return Finding("durability", "ok", "commits are on disk" if value else "unknown")
    mend = "set innodb_flush_log_at_trx_commit = 1, or accept that a crash may lose the last second of commits"
    return Finding("durability", "warn", f"innodb_flush_log_at_trx_commit = {value}", mend)


def _packet(facts: DatabaseFacts, max_payload_bytes: int) -> Finding:
    if facts.max_packet is None:
        return Finding("packet size", "ok", "unknown")
    found = f"max_allowed_packet = {facts.max_packet}"
    if facts.max_packet < max_payload_bytes * _PACKET_HEADROOM:
        mend = f"raise it above {max_payload_bytes * _PACKET_HEADROOM}, or lower max_payload_bytes"
        return Finding("packet size", "fail", found, mend)
    return Finding("packet size", "ok", found)


def _clock(name: str, ahead: float) -> Finding:
    found = f"{abs(ahead):.3f} s {'ahead of' if ahead >= 0 else 'behind'} this host's"
    if abs(ahead) > _CLOCK:
        return Finding(name, "warn", found, "run NTP on all hosts: ages and latencies are wrong by as much")
    return Finding(name, "ok", found)


def _role(facts: RedisFacts) -> Finding:
    if facts.role != "master":
        return Finding(
            "redis role", "fail", facts.role or "unknown", "point redis_url at the primary, or use sentinel://"
        )
    return Finding("redis role", "ok", "primary")


def _policy(facts: RedisFacts) -> Finding:
    if facts.policy == "noeviction":
        return Finding("eviction", "ok", "noeviction")
    mend = "set maxmemory-policy noeviction: others evict what deduplicates and orders, and whole streams"
    return Finding("eviction", "fail", facts.policy or "unknown", mend)


def _persistence(facts: RedisFacts) -> Finding:
    if facts.persistence_failure:
        mend = "see the disk: Redis may refuse writes, and would come back older"
        return Finding("persistence", "warn", facts.persistence_failure, mend)
    if facts.aof:
        return Finding("persistence", "ok", "AOF")
    if facts.rdb is None:
        return Finding("persistence", "warn", "no AOF; whether RDB is on cannot be read", "see that one of them is on")
    if facts.rdb:
        return Finding("persistence", "ok", "RDB: what came after the last dump is lost with the process")
    mend = "set appendonly yes: else a restart loses every stream, and 'zzol-relay republish' has to mend it"
    return Finding("persistence", "warn", "neither AOF nor RDB", mend)


def _commands(facts: RedisFacts) -> Finding:
    if facts.denied:
        mend = "allow these on the keys of key_prefix: +@read +@write +@scripting +info"
        return Finding("redis commands", "fail", f"denied: {', '.join(facts.denied)}", mend)
    if facts.refused:
        return Finding(
            "redis commands", "fail", f"writes are refused: {facts.refused}", "see the server's memory and disk"
        )
    return Finding("redis commands", "ok", "may read and write its keys")


def _scripts(facts: RedisFacts) -> Finding:
    if facts.scripts:
        return Finding("publish script", "fail", facts.scripts, "allow EVAL, EVALSHA and SCRIPT LOAD")
    return Finding("publish script", "ok", "loads and runs")
