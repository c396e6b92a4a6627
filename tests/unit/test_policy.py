"""Whose fault, when again, when no more (Z4, Z13, Z27, S9)."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from zzol_relay.core.lifecycle import TRANSITIONS, Status, can_move
from zzol_relay.core.policy import Blame, backoff, blame, exhausted, past_is_safe


@pytest.mark.parametrize(
    "message",
    [
        "LOADING Redis is loading the dataset in memory",
        "READONLY You can't write against a read only replica.",
        "OOM command not allowed when used memory > 'maxmemory'. script: 8a, on @user_script:40.",
        "NOAUTH Authentication required.",
        "WRONGPASS invalid username-password pair",
        "NOPERM User app has no permissions to run the 'xadd' command",
        "NOREPLICAS Not enough good replicas to write.",
        "MISCONF Redis is configured to save RDB snapshots",
        "BUSY Redis is busy running a script.",
        "MASTERDOWN Link with MASTER is down",
        "CLUSTERDOWN The cluster is down",
        "MOVED 3999 127.0.0.1:6381",
        "TRYAGAIN Multiple keys request during rehashing of slot",
    ],
)
def test_a_server_wide_code_blames_the_broker(message: str) -> None:
    assert blame(message) is Blame.BROKER


@pytest.mark.parametrize("message", ["WRONGTYPE Operation against a key", "ERR unknown", "user_script:1: boom", ""])
def test_any_other_error_is_only_a_suspect(message: str) -> None:
    assert blame(message) is Blame.SUSPECT


@given(st.integers(1, 5000), st.floats(0, 1, exclude_max=True))
def test_backoff_grows_within_its_bounds(failures: int, jitter: float) -> None:
    delay = backoff(failures, jitter, base=0.5, cap=60)
    step = min(60.0, 0.5 * 2.0 ** min(failures - 1, 64))
    assert step / 2 <= delay <= step
    assert backoff(failures + 1, jitter, base=0.5, cap=60) >= delay


def test_the_tenth_failure_of_ten_is_the_dead_one() -> None:
    """Z13: "more than 10" against "10" is settled as the 10th."""
    assert [n for n in range(1, 12) if exhausted(n, 10)] == [10, 11]


def test_past_settles_only_what_is_older_than_the_memory() -> None:
    """The dagger rule: PAST of a young row can only be a restored database or a deleted counter."""
    assert past_is_safe(600.0, 600.0)
    assert not past_is_safe(599.9, 600.0)


def test_nothing_leaves_a_settled_state_and_only_an_operator_leaves_the_dead() -> None:
    """Z11, Z13."""
    assert TRANSITIONS[Status.PUBLISHED] == TRANSITIONS[Status.DISCARDED] == frozenset()
    assert TRANSITIONS[Status.DEAD_LETTER] == {Status.PENDING, Status.DISCARDED}
    assert can_move(Status.PENDING, Status.PUBLISHED)
    assert can_move(Status.IN_PROGRESS, Status.PENDING)
    assert not can_move(Status.DEAD_LETTER, Status.PUBLISHED)
