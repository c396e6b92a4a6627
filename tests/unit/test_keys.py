"""Redis key names (Z26, S4)."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from zzol_relay.streams.keys import ShardKeys, logical_stream, shard_of, stream_key, stream_keys


def test_a_stored_stream_key_leads_back_to_its_logical_stream() -> None:
    """Z26."""
    assert [logical_stream(key) for key in stream_keys("app", "room.v2", 3)] == ["room.v2"] * 3


@pytest.mark.parametrize("key", ["room", "zzol:room:0", "zzol:{room}", "zzol:{room:0}:seen:x", ""])
def test_another_key_leads_nowhere(key: str) -> None:
    with pytest.raises(ValueError, match="not the key"):
        logical_stream(key)


def test_every_key_of_a_shard_has_its_prefix_and_hash_tag() -> None:
    keys = ShardKeys(stream_key("zzol", "room", 2))
    for key in (keys.shard, keys.probe, keys.seen("e"), keys.seen("e", 1), keys.tail("room:A")):
        assert key.startswith("zzol:{room:2}:")


@given(st.text(min_size=1), st.integers(1, 64))
def test_a_partition_has_one_shard(partition: str, shards: int) -> None:
    """S4: the key follows the aggregate id."""
    assert 0 <= shard_of(partition, shards) < shards
    assert shard_of(partition, shards) == shard_of(partition, shards)


def test_the_hash_is_stable_across_versions() -> None:
    assert [shard_of(name, 16) for name in ("A", "ABCD", "방")] == [11, 5, 7]
