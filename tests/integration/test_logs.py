"""What is never written down: payloads and credentials, whatever fails (G6; structured logs)."""

from __future__ import annotations

import ast
import asyncio
import logging
import traceback
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest
import redis
from sqlalchemy import Engine, create_engine, make_url, text
from sqlalchemy.exc import DBAPIError
from sqlalchemy.orm import Session

import zzol_relay
from tests.support.facts import Facts
from zzol_relay import (
    ConfigurationError,
    Event,
    InvalidEventError,
    RecordingError,
    Relay,
    SchemaError,
    Settings,
    Stream,
)
from zzol_relay.core.observer import CircuitChanged, DataLossDetected, DeadLettered, Failed, LoopFailed, Settled

KEY = "zzol:{room:0}"
PAYLOAD = "card-4111-1111"
DATABASE_PASSWORD = "db/p@ss#Word%1"
REDIS_PASSWORD = "rd/p@ss#Word%2"
SECRETS = (
    PAYLOAD, DATABASE_PASSWORD, REDIS_PASSWORD, quote(DATABASE_PASSWORD, safe=""), quote(REDIS_PASSWORD, safe=""),
    # As SQLAlchemy and repr() spell them.
    quote(DATABASE_PASSWORD, safe=" +"), repr(DATABASE_PASSWORD)[1:-1],
)  # fmt: skip
STREAMS = [Stream(name="room", retention=0)]


class Heard(logging.Handler):
    """Every record of every logger."""

    def __init__(self) -> None:
        super().__init__(logging.DEBUG)
        self.records: list[logging.LogRecord] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.records.append(record)

    def text(self) -> str:
        parts = []
        for record in self.records:
            parts += [record.getMessage(), repr(record.__dict__), str(record.__dict__)]
            if record.exc_info and record.exc_info[1]:
                parts += [text_of(record.exc_info[1])]
        return "\n".join(parts)


def text_of(error: BaseException) -> str:
    """All that a log or a page would show of an exception, and of those behind it."""
    parts = ["".join(traceback.format_exception(error))]
    known: list[BaseException] = []
    behind: list[BaseException | None] = [error]
    while behind:
        one = behind.pop()
        # An error may stand behind itself.
        if one is not None and one not in known:
            known.append(one)
            parts += [str(one), repr(one)]
            behind += [one.__cause__, one.__context__]
    return "\n".join(parts)


def check(shown: str) -> None:
    for secret in SECRETS:
        at = shown.find(secret)
        assert at < 0, f"{secret!r} is shown: …{shown[max(0, at - 300) : at + 60]}…"


@pytest.fixture
def heard() -> Iterator[Heard]:
    handler = Heard()
    root, library = logging.getLogger(), logging.getLogger("zzol_relay")
    level = library.level
    # SQLAlchemy's own logger, asked for at DEBUG, prints parameters: that is the application's choice.
    library.setLevel(logging.DEBUG)
    root.addHandler(handler)
    yield handler
    root.removeHandler(handler)
    library.setLevel(level)


@pytest.fixture
def secret_engine(engine: Engine) -> Iterator[Engine]:
    """The test's database, under a user whose password is hard to mask."""
    with engine.begin() as connection:
        connection.execute(text("CREATE USER leaky@'%' IDENTIFIED BY :password"), {"password": DATABASE_PASSWORD})
        connection.execute(text("GRANT ALL ON *.* TO leaky@'%'"))
    url = engine.url.set(username="leaky", password=DATABASE_PASSWORD)
    leaky = create_engine(url, pool_pre_ping=False)
    yield leaky
    leaky.dispose()
    with engine.begin() as connection:
        connection.execute(text("DROP USER leaky@'%'"))


def redis_url_of(server: Any) -> str:
    url: str = server.url
    return url.replace("redis://", f"redis://:{quote(REDIS_PASSWORD, safe='')}@")


def lock(server: Any) -> redis.Redis:
    """A client of the server, which from now on asks for the password."""
    client = redis.Redis.from_url(server.url, decode_responses=True)
    client.config_set("requirepass", REDIS_PASSWORD)
    client.execute_command("AUTH", REDIS_PASSWORD)
    return client


def secret(n: int = 0, **fields: Any) -> Event:
    values = {"aggregate_type": "room", "aggregate_id": "A", "data": {"card": PAYLOAD, "n": n}, **fields}
    return Event(type="t", stream="room", **values)


def commit(relay: Relay, engine: Engine, event: Event) -> Event:
    with Session(engine) as session, session.begin():
        return relay.record(session, event)


@pytest.mark.usefixtures("relay_tables")
def test_redis_failing_in_every_way(
    secret_engine: Engine, make_relay: Any, own_redis: Any, facts: Facts, heard: Heard
) -> None:
    def broken(fact: Any) -> None:
        raise ValueError("the observer's own text")

    client = lock(own_redis)
    relay: Relay = make_relay(
        secret_engine, STREAMS, redis_url=redis_url_of(own_redis), born_lease=0.4, commit_wait=0.2, max_attempts=2,
        observers=[broken],
    )  # fmt: skip
    first = commit(relay, secret_engine, secret(1))
    facts.wait_for(Settled)
    # Poison, an attempt, a dead letter.
    event = secret(2, event_id=uuid.uuid4())
    client.lpush(f"{KEY}:seen:{event.event_id}", PAYLOAD)
    commit(relay, secret_engine, event)
    facts.wait_for(Failed)
    facts.wait_for(DeadLettered)
    # The event recorded twice.
    with pytest.raises(InvalidEventError) as twice:
        commit(relay, secret_engine, secret(3, event_id=first.event_id))
    check(text_of(twice.value))
    # NOAUTH, NOPERM, and a command that is gone: Redis quotes the arguments of those.
    client.execute_command("ACL", "SETUSER", "default", "-evalsha", "-eval")
    commit(relay, secret_engine, secret(4))
    facts.wait_for(lambda fact: isinstance(fact, CircuitChanged) and fact.open)
    client.execute_command("ACL", "SETUSER", "default", "+@all")
    facts.wait_for(lambda fact: isinstance(fact, CircuitChanged) and not fact.open)
    # Dead, and back without data and password: the handshake is refused now.
    own_redis.kill()
    commit(relay, secret_engine, secret(5))
    facts.wait_for(lambda fact: isinstance(fact, CircuitChanged) and fact.open, count=2)
    own_redis.start()
    facts.clear()
    facts.wait_for_beats("poller", 3)
    lock(own_redis).close()
    facts.wait_for(DataLossDetected)
    facts.wait_until(lambda: relay.status().backlog.by_status["PENDING"] == 0)
    shown = heard.text()
    assert "event is a dead letter" in shown
    assert "Redis is unavailable" in shown
    assert "Redis lost data" in shown
    assert "an observer raised" in shown
    check(shown)
    check(repr(facts.all()))
    check(f"{relay!r} {relay.settings!r} {relay.settings} {relay.status()!r} {relay.health()!r}")
    client.close()


@pytest.mark.usefixtures("relay_tables")
def test_the_direct_path_and_the_tail(secret_engine: Engine, make_relay: Any, own_redis: Any, heard: Heard) -> None:
    client = lock(own_redis)
    relay: Relay = make_relay(secret_engine, STREAMS, redis_url=redis_url_of(own_redis), worker=False, start=False)
    errors: list[BaseException] = []

    def listener(stream: str, entries: Any) -> None:
        raise ValueError("the listener's own text")

    async def fail() -> None:
        try:
            await relay.publish(secret())
        except Exception as error:
            errors.append(error)

    async def play() -> None:
        async with relay, relay.tail("room", listener):
            await relay.publish(secret())
            client.execute_command("ACL", "SETUSER", "default", "-xadd")
            await fail()
            client.execute_command("ACL", "SETUSER", "default", "+@all")
            client.set("zzol:{room:0}", PAYLOAD)
            await fail()
            own_redis.kill()
            await fail()
            relay.publish_soon(secret())
            await asyncio.sleep(0.1)

    asyncio.run(play())
    assert len(errors) == 3
    for error in errors:
        check(text_of(error))
    shown = heard.text()
    assert "was not acknowledged" in shown
    check(shown)


@pytest.mark.usefixtures("relay_tables")
def test_mysql_failing(
    secret_engine: Engine, make_relay: Any, database_server: Any, facts: Facts, heard: Heard
) -> None:
    relay: Relay = make_relay(secret_engine, STREAMS, born_lease=0.4)
    commit(relay, secret_engine, secret(1))
    facts.wait_for(Settled)
    send = relay._after_commit._delivery.send

    def die_after_publishing(shipments: Any, path: Any) -> Any:
        sent = send(shipments, path)
        database_server.kill()
        return sent

    relay._after_commit._delivery.send = die_after_publishing  # type: ignore[method-assign]
    commit(relay, secret_engine, secret(2))
    for loop in ("settler", "poller"):
        facts.wait_for(lambda fact, loop=loop: isinstance(fact, LoopFailed) and fact.loop == loop)  # type: ignore[misc]
    relay._after_commit._delivery.send = send  # type: ignore[method-assign]
    with pytest.raises(DBAPIError) as gone:
        commit(relay, secret_engine, secret(3))
    check(text_of(gone.value))
    database_server.start()
    facts.clear()
    facts.wait_for_beats("poller", 1)
    # The connection breaks under the INSERT itself, whose parameters hold the payload.
    with Session(secret_engine) as session:
        relay.record(session, secret(4))
        session.execute(text("SET @me = CONNECTION_ID()"))
        me = session.execute(text("SELECT CONNECTION_ID()")).scalar_one()
        with secret_engine.connect() as other:
            other.execute(text(f"KILL {int(me)}"))
        with pytest.raises(DBAPIError) as broken:
            relay.record(session, secret(5, aggregate_type=None, aggregate_id=None))
    check(text_of(broken.value))
    assert "INSERT" in str(broken.value), "the statement itself may be shown"
    shown = heard.text()
    assert "marking published rows failed" in shown
    assert "a loop's round failed" in shown
    check(shown)
    check(repr(facts.all()))


def test_missing_tables_wrong_passwords_and_wrong_places(
    secret_engine: Engine, make_relay: Any, facts: Facts, heard: Heard, sqlite_engine: Engine
) -> None:
    url = secret_engine.url
    relay: Relay = make_relay(secret_engine, STREAMS)
    with pytest.raises(SchemaError) as missing:
        relay.run_once()
    check(text_of(missing.value))
    facts.wait_for(lambda fact: isinstance(fact, LoopFailed) and fact.loop == "poller")
    with Session(sqlite_engine) as session, pytest.raises(RecordingError) as elsewhere:
        relay.record(session, secret())
    check(text_of(elsewhere.value))
    # A password may stand in the query too.
    asked = url.set(username="leaky", password=None, database="x").update_query_dict({"password": "wrong-in-query"})
    other: Relay = make_relay(asked.render_as_string(hide_password=False), STREAMS, name="other")
    facts.clear()
    facts.wait_for(lambda fact: isinstance(fact, LoopFailed) and fact.loop == "poller", count=2)
    with Session(secret_engine) as session, pytest.raises(RecordingError) as there:
        other.record(session, secret())
    assert "wrong-in-query" not in text_of(there.value)
    wrong = url.set(password=f"{DATABASE_PASSWORD}-no").render_as_string(hide_password=False)
    facts.clear()
    make_relay(wrong, STREAMS, name="refused")
    facts.wait_for(lambda fact: isinstance(fact, LoopFailed) and "denied" in fact.error)
    check(heard.text())
    assert "wrong-in-query" not in heard.text()


@pytest.mark.parametrize("data", [{"card": PAYLOAD, "x": object()}, {"card": PAYLOAD, "x": float("nan")}, PAYLOAD * 9])
@pytest.mark.usefixtures("relay_tables")
def test_a_refused_event_does_not_quote_its_data(engine: Engine, make_relay: Any, data: Any) -> None:
    relay: Relay = make_relay(engine, STREAMS, worker=False, start=False, max_payload_bytes=100)
    with Session(engine) as session, pytest.raises(InvalidEventError) as refused:
        relay.record(session, secret(data=data))
    check(text_of(refused.value))


def test_settings_mask_what_they_show() -> None:
    settings = Settings.load(
        {},
        database_url=f"mysql+pymysql://u:{quote(DATABASE_PASSWORD, safe='')}@h/db",
        redis_url=f"rediss://:{quote(REDIS_PASSWORD, safe='')}@h/0",
    )
    check(f"{settings!r} {settings}")
    relay = Relay(settings.database_url, STREAMS, settings=settings)
    check(f"{relay!r} {relay} {relay._database.url}")
    relay.stop()
    with pytest.raises(ConfigurationError) as refused:
        Relay(str(make_url("sqlite:///x.db")), redis_url=f"http://:{quote(REDIS_PASSWORD, safe='')}@h")
    check(text_of(refused.value))


def test_log_messages_are_constant_and_what_varies_is_extra() -> None:
    """Structured: no formatting into the message, and only names in ``extra`` that logging does not use itself."""
    root = Path(zzol_relay.__file__).parent
    standard = set(logging.LogRecord("", 0, "", 0, "", (), None).__dict__) | {"message", "asctime"}
    wrong = []
    for path in sorted(root.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if not (
                isinstance(node, ast.Call)
                and isinstance(node.func, ast.Attribute)
                and isinstance(node.func.value, ast.Name)
                and node.func.value.id == "_log"
                and node.func.attr in ("debug", "info", "warning", "error", "exception", "critical")
            ):
                continue
            constant = len(node.args) == 1 and isinstance(node.args[0], ast.Constant)
            extras = [keyword.value for keyword in node.keywords if keyword.arg == "extra"]
            names = {
                key.value for extra in extras if isinstance(extra, ast.Dict) for key in extra.keys
                if isinstance(key, ast.Constant)
            }  # fmt: skip
            if not constant or names & standard or {k.arg for k in node.keywords} - {"extra", "exc_info"}:
                wrong.append(f"{path.name}:{node.lineno}")
    assert wrong == []
