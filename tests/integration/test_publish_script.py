"""publish.lua and epoch.lua on a real Redis: modes, dedup, order, epoch; most tests here guard a dagger rule."""

from __future__ import annotations

import dataclasses
import uuid
from collections.abc import Iterator
from typing import Any

import pytest
import redis

from tests.support.streams import entries
from zzol_relay.core.observer import DataLossDetected
from zzol_relay.core.sequence import Mode
from zzol_relay.streams.publisher import Command, Outcome, OutcomeKind, ScriptPublisher

KEY = "zzol:{room:0}"


@pytest.fixture
def heard() -> list[Any]:
    return []


@pytest.fixture
def publisher(redis_server: Any, redis_client: redis.Redis, heard: list[Any]) -> Iterator[ScriptPublisher]:
    made = ScriptPublisher(
        redis_server.url, timeout=1, dedup_window=600, tail_ttl=86400, retentions={KEY: 0}, observe=heard.append
    )
    made.learn()
    yield made
    made.close()


class Sender:
    """Sends one command for sequence numbers of one aggregate, remembering each event's id."""

    def __init__(self, publisher: ScriptPublisher) -> None:
        self.publisher = publisher
        self.ids: dict[int, str] = {}

    def command(self, sequence: int, mode: Mode, **changes: Any) -> Command:
        event_id = self.ids.setdefault(sequence, str(uuid.uuid4()))
        fields = ["id", event_id, "type", "t", "data", str(sequence)]
        options: dict[str, Any] = {
            "epoch": self.publisher.epoch(KEY), "aggregate": "room:A", "sequence": sequence,
            "prev_sequence": sequence - 1,
        }  # fmt: skip
        return Command(KEY, event_id, mode, fields, **options | changes)

    def __call__(self, sequence: int, mode: Mode, **changes: Any) -> Outcome:
        return self.publisher.publish([self.command(sequence, mode, **changes)])[0]


@pytest.fixture
def send(publisher: ScriptPublisher) -> Sender:
    return Sender(publisher)


def kinds(outcomes: list[Outcome]) -> list[str]:
    return [outcome.kind.value for outcome in outcomes]


def test_next_publishes_only_behind_its_predecessor(send: Sender, redis_client: redis.Redis) -> None:
    assert send(2, Mode.NEXT).kind is OutcomeKind.DEFERRED
    assert send(1, Mode.NEXT).kind is OutcomeKind.PUBLISHED
    assert send(3, Mode.NEXT) == Outcome(OutcomeKind.DEFERRED, "1")
    assert send(2, Mode.NEXT).kind is OutcomeKind.PUBLISHED
    assert [e.data for e in entries(redis_client)] == [1, 2]


def test_next_compares_with_the_named_predecessor_not_with_the_number_before(send: Sender) -> None:
    assert send(10, Mode.NEXT, prev_sequence=0).kind is OutcomeKind.PUBLISHED
    assert send(25, Mode.NEXT, prev_sequence=10).kind is OutcomeKind.PUBLISHED


def test_a_resend_is_a_duplicate_with_the_first_entrys_id(send: Sender, redis_client: redis.Redis) -> None:
    """G11, G12, Z34."""
    first = send(1, Mode.NEXT)
    for mode in (Mode.NEXT, Mode.HEAD, Mode.RESTORE):
        assert send(1, mode) == Outcome(OutcomeKind.DUPLICATE, first.detail)
    assert len(entries(redis_client)) == 1


def test_head_publishes_above_the_tail_and_answers_past_below(send: Sender, redis_client: redis.Redis) -> None:
    assert send(5, Mode.HEAD).kind is OutcomeKind.PUBLISHED
    assert send(4, Mode.HEAD) == Outcome(OutcomeKind.PAST, "5")
    assert send(4, Mode.NEXT) == Outcome(OutcomeKind.PAST, "5")
    assert send(9, Mode.HEAD).kind is OutcomeKind.PUBLISHED
    assert [e.data for e in entries(redis_client)] == [5, 9]


def test_past_answers_when_the_memory_of_the_id_ran_out(send: Sender, redis_client: redis.Redis) -> None:
    send(1, Mode.NEXT)
    redis_client.delete(f"{KEY}:seen:{send.ids[1]}")
    assert send(1, Mode.HEAD) == Outcome(OutcomeKind.PAST, "1")


def test_a_failing_xadd_leaves_nothing_behind(send: Sender, redis_client: redis.Redis) -> None:
    """Reads, then XADD, then the keys: written before it, ``seen`` would make the lost event a duplicate."""
    redis_client.set(KEY, "not a stream")
    assert send(1, Mode.NEXT).kind is OutcomeKind.SHARD
    assert redis_client.keys(f"{KEY}:seen:*") + redis_client.keys(f"{KEY}:tail:*") == []
    redis_client.delete(KEY)
    assert send(1, Mode.NEXT).kind is OutcomeKind.PUBLISHED


def test_a_command_proven_under_another_epoch_is_refused(send: Sender, redis_client: redis.Redis) -> None:
    stale = send.command(1, Mode.HEAD)
    redis_client.flushall()
    assert kinds(send.publisher.publish([stale])) == ["EPOCH"]
    assert entries(redis_client) == []
    send.publisher.learn()
    assert send(1, Mode.HEAD).kind is OutcomeKind.PUBLISHED
    assert kinds(send.publisher.publish([stale])) == ["EPOCH"]


def test_replay_goes_past_order_and_memory_once_per_number_and_leaves_the_tail_alone(
    send: Sender, redis_client: redis.Redis
) -> None:
    for n in (1, 2, 3):
        send(n, Mode.NEXT)
    replayed = send(1, Mode.REPLAY, replay=1)
    assert replayed.kind is OutcomeKind.PUBLISHED
    assert send(1, Mode.REPLAY, replay=1) == Outcome(OutcomeKind.DUPLICATE, replayed.detail)
    assert send(1, Mode.REPLAY, replay=2).kind is OutcomeKind.PUBLISHED
    assert redis_client.get(f"{KEY}:tail:room:A") == "3"
    assert send(4, Mode.NEXT).kind is OutcomeKind.PUBLISHED


def test_replay_of_what_was_never_published_is_remembered_as_published(send: Sender) -> None:
    """``seen`` is written too: a late resend of the first publication must not add another entry."""
    replayed = send(1, Mode.REPLAY, replay=1)
    assert send(1, Mode.HEAD) == Outcome(OutcomeKind.DUPLICATE, replayed.detail)


def test_restore_respects_the_memory_and_leaves_the_tail_alone(send: Sender, redis_client: redis.Redis) -> None:
    send(5, Mode.HEAD)
    assert send(3, Mode.RESTORE).kind is OutcomeKind.PUBLISHED
    assert send(3, Mode.RESTORE).kind is OutcomeKind.DUPLICATE
    assert redis_client.get(f"{KEY}:tail:room:A") == "5"


def test_an_event_without_aggregate_is_only_deduplicated(send: Sender, redis_client: redis.Redis) -> None:
    for _ in range(2):
        command = dataclasses.replace(send.command(7, Mode.UNORDERED), aggregate=None, sequence=0, prev_sequence=0)
        send.publisher.publish([command])
    assert len(entries(redis_client)) == 1
    assert redis_client.keys(f"{KEY}:tail:*") == []


def test_every_key_but_the_stream_and_the_epoch_has_a_ttl(send: Sender, redis_client: redis.Redis) -> None:
    send(1, Mode.NEXT)
    send(1, Mode.REPLAY, replay=1)
    ttls = {key: redis_client.pttl(key) for key in redis_client.keys("*")}
    assert {key for key, ttl in ttls.items() if ttl == -1} == {KEY, f"{KEY}:shard"}
    assert 590_000 < ttls[f"{KEY}:seen:{send.ids[1]}"] <= 600_000
    assert 86_000_000 < ttls[f"{KEY}:tail:room:A"] <= 86_400_000


def test_large_sequences_stay_exact(send: Sender) -> None:
    top = (1 << 53) - 1
    assert send(top - 1, Mode.HEAD).kind is OutcomeKind.PUBLISHED
    assert send(top, Mode.NEXT).kind is OutcomeKind.PUBLISHED
    assert send(top - 2, Mode.HEAD) == Outcome(OutcomeKind.PAST, str(top))


def test_the_stream_is_trimmed_by_time(redis_server: Any, redis_client: redis.Redis) -> None:
    publisher = ScriptPublisher(redis_server.url, timeout=1, dedup_window=600, tail_ttl=86400, retentions={KEY: 60_000})
    publisher.learn()
    for n in range(300):
        redis_client.xadd(KEY, {"old": n}, id=f"{1000 + n}-0")
    send = Sender(publisher)
    assert send(1, Mode.NEXT).kind is OutcomeKind.PUBLISHED
    # "~" keeps whole nodes of 100 entries, so a rest may stand.
    assert redis_client.xlen(KEY) <= 101
    publisher.close()


def test_scripts_flushed_in_mid_flight_are_loaded_again(send: Sender, redis_client: redis.Redis) -> None:
    send(1, Mode.NEXT)
    redis_client.script_flush()
    outcomes = send.publisher.publish([send.command(n, Mode.NEXT) for n in (2, 3, 4)])
    assert kinds(outcomes) == ["PUBLISHED"] * 3
    assert [e.data for e in entries(redis_client)] == [1, 2, 3, 4]


def test_wrongtype_on_one_events_own_key_is_the_events_fault_and_the_others_go_on(
    send: Sender, redis_client: redis.Redis
) -> None:
    """Z31: one failing row does not stop the batch."""
    commands = [send.command(1, Mode.HEAD), send.command(2, Mode.HEAD, aggregate="room:B")]
    redis_client.lpush(f"{KEY}:seen:{send.ids[1]}", "x")
    outcomes = send.publisher.publish(commands)
    assert kinds(outcomes) == ["EVENT", "PUBLISHED"]
    assert "WRONGTYPE" in outcomes[0].detail


def test_a_successor_is_not_sent_past_a_failed_mate(send: Sender, redis_client: redis.Redis) -> None:
    """Followers in a batch go as next; as head, the second would publish although the first failed."""
    commands = [send.command(1, Mode.HEAD), send.command(2, Mode.NEXT)]
    redis_client.lpush(f"{KEY}:seen:{send.ids[1]}", "x")
    assert kinds(send.publisher.publish(commands)) == ["EVENT", "DEFERRED"]


@pytest.mark.parametrize(
    ("setting", "value", "restored"),
    [("maxmemory", "1", "0"), ("min-replicas-to-write", "3", "0"), ("requirepass", "secret", "")],
)
def test_a_server_that_refuses_everybody_is_unavailable(
    redis_server: Any, redis_client: redis.Redis, setting: str, value: str, restored: str
) -> None:
    """OOM, NOREPLICAS and NOAUTH are no event's own fault."""
    redis_client.ping()
    redis_client.config_set(setting, value)
    try:
        publisher = ScriptPublisher(redis_server.url, timeout=1, dedup_window=600, tail_ttl=86400)
        command = Command(KEY, "e", Mode.UNORDERED, ["id", "e", "data", "1"], epoch="")
        publisher._shards.clear()
        assert kinds(publisher.publish([command])) in (["UNAVAILABLE"], ["EPOCH"])
        command = Command(KEY, "e", Mode.RESTORE, ["id", "e", "data", "1"])
        assert kinds(publisher.publish([command])) == ["UNAVAILABLE"]
        publisher.close()
    finally:
        redis_client.config_set(setting, restored)


def test_a_replica_refuses_writes_and_is_unavailable(send: Sender, redis_client: redis.Redis) -> None:
    """READONLY: after a failover the old primary is a replica."""
    redis_client.replicaof("127.0.0.1", 1)
    try:
        assert send(1, Mode.NEXT).kind is OutcomeKind.UNAVAILABLE
    finally:
        redis_client.replicaof("NO", "ONE")


def test_an_emptied_redis_begins_a_new_epoch_and_says_so(
    send: Sender, redis_client: redis.Redis, heard: list[Any]
) -> None:
    send(1, Mode.NEXT)
    before = send.publisher.epoch(KEY)
    redis_client.flushall()
    send.publisher.learn()
    assert send.publisher.epoch(KEY) != before
    assert [type(fact) for fact in heard] == [DataLossDetected]


def test_a_stream_behind_an_acknowledged_entry_begins_a_new_epoch(
    send: Sender, redis_client: redis.Redis, heard: list[Any]
) -> None:
    """An older RDB brings its epoch key along; the last id tells."""
    send(1, Mode.NEXT)
    send.publisher.learn()
    assert heard == []
    send.publisher.learn((), {KEY: "99999999999999-0"})
    assert [fact.reason for fact in heard] == ["the stream is older than an acknowledged entry"]
    send.publisher.learn()
    assert len(heard) == 1


def test_each_new_connection_is_verified_before_anything_is_sent_on_it(
    send: Sender, redis_client: redis.Redis, heard: list[Any]
) -> None:
    send(1, Mode.NEXT)
    proven_before = send.command(2, Mode.HEAD)
    redis_client.flushall()
    # Somebody else has begun the shard anew, so that a key is there; only the epoch differs.
    redis_client.client_kill_filter(_type="normal", skipme=True)
    assert kinds(send.publisher.publish([proven_before]))[0] in ("EPOCH", "UNAVAILABLE")
    assert kinds(send.publisher.publish([proven_before])) == ["EPOCH"]
    assert entries(redis_client) == []
    assert len(heard) == 1
