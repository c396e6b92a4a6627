"""The order proof over a claimed batch (Z9, G18); each test here guards a dagger rule of the design."""

from __future__ import annotations

import dataclasses

from hypothesis import given
from hypothesis import strategies as st

from zzol_relay.core.lifecycle import Status
from zzol_relay.core.sequence import Mode, Plan, plan_batch, predecessor_done

BIG = 1 << 30


@dataclasses.dataclass(frozen=True)
class Row:
    id: int
    aggregate_key: tuple[str, str, str] | None
    sequence: int | None = None
    prev_sequence: int | None = None
    retry_count: int = 0
    replays: int = 0
    size: int = 10


def row(id_: int, sequence: int, aggregate: str = "A", **changes: int) -> Row:
    return Row(id_, ("k", "room", aggregate), sequence, changes.pop("prev", sequence - 1), **changes)


def sent(plan: Plan[Row]) -> list[tuple[int, str]]:
    return [(planned.row.id, planned.mode.value) for planned in plan.send]


def test_the_first_of_an_aggregate_goes_as_head_and_those_behind_it_as_next_in_sequence_order() -> None:
    rows = [row(3, 3), row(1, 1), row(2, 2), row(9, 1, "B")]
    plan = plan_batch(rows, {3: Status.PENDING, 2: Status.PENDING}, "skip", max_bytes=BIG)
    assert sent(plan) == [(1, "head"), (2, "next"), (3, "next"), (9, "head")]


def test_a_row_whose_predecessor_is_neither_done_nor_in_the_batch_waits_with_all_behind_it() -> None:
    rows = [row(3, 3), row(4, 4), row(9, 1, "B")]
    plan = plan_batch(rows, {3: Status.IN_PROGRESS, 4: Status.PENDING}, "skip", max_bytes=BIG)
    assert sent(plan) == [(9, "head")]
    assert [r.id for r in plan.wait] == [3, 4]


def test_sequences_may_have_gaps_since_each_row_names_its_predecessor() -> None:
    """S13: the caller gives 10 and 11; prev_sequence is what counts, not n - 1."""
    rows = [row(1, 10, prev=0), row(2, 25, prev=10)]
    assert sent(plan_batch(rows, {2: Status.PENDING}, "skip", max_bytes=BIG)) == [(1, "head"), (2, "next")]


def test_a_dead_predecessor_lets_go_under_skip_and_blocks_under_block() -> None:
    rows = [row(2, 2)]
    assert sent(plan_batch(rows, {2: Status.DEAD_LETTER}, "skip", max_bytes=BIG)) == [(2, "head")]
    assert sent(plan_batch(rows, {2: Status.DEAD_LETTER}, "block", max_bytes=BIG)) == []


def test_a_settled_or_vanished_predecessor_lets_go() -> None:
    assert predecessor_done(None, "block")
    assert predecessor_done(Status.PUBLISHED, "block")
    assert predecessor_done(Status.DISCARDED, "block")
    assert not predecessor_done(Status.PENDING, "skip")
    assert not predecessor_done(Status.IN_PROGRESS, "skip")


def test_a_row_that_has_cost_an_attempt_goes_alone() -> None:
    """A row that kills its worker takes no neighbour with it."""
    rows = [row(1, 1, retry_count=1), row(2, 1, "B"), row(3, 1, "C")]
    plan = plan_batch(rows, {}, "skip", max_bytes=BIG)
    assert sent(plan) == [(1, "head")]
    assert {r.id for r in plan.leave} == {2, 3}


def test_fresh_rows_first_leave_the_one_that_has_cost_an_attempt_and_those_behind_it() -> None:
    rows = [row(2, 1, "B"), row(1, 1, retry_count=1), row(3, 2)]
    plan = plan_batch(rows, {3: Status.PENDING}, "skip", max_bytes=BIG)
    assert sent(plan) == [(2, "head")]
    assert {r.id for r in plan.leave} == {1, 3}


def test_a_replay_passes_the_order_proof_and_counts_as_unpublished_for_its_successor() -> None:
    rows = [row(5, 5, replays=1), row(6, 6)]
    plan = plan_batch(rows, {5: Status.IN_PROGRESS, 6: Status.PENDING}, "skip", max_bytes=BIG)
    assert sent(plan) == [(5, "replay")]
    assert [r.id for r in plan.wait] == [6]


def test_under_block_a_replay_is_a_plain_head() -> None:
    assert sent(plan_batch([row(5, 5, replays=1)], {5: Status.PUBLISHED}, "block", max_bytes=BIG)) == [(5, "head")]


def test_an_event_without_aggregate_is_unordered_and_never_waits() -> None:
    rows = [Row(1, None), Row(2, None)]
    assert sent(plan_batch(rows, {}, "block", max_bytes=BIG)) == [(1, "unordered"), (2, "unordered")]


def test_the_batch_ends_at_its_bytes_but_a_single_large_row_goes() -> None:
    rows = [row(1, 1, size=900), row(2, 1, "B", size=900), row(3, 2, "B", size=1)]
    plan = plan_batch(rows, {3: Status.PENDING}, "skip", max_bytes=1000)
    assert sent(plan) == [(1, "head")]
    assert {r.id for r in plan.leave} == {2, 3}
    assert sent(plan_batch([row(1, 1, size=5000)], {}, "skip", max_bytes=1000)) == [(1, "head")]


@st.composite
def batches(draw: st.DrawFn) -> tuple[list[Row], dict[int, Status]]:
    rows: list[Row] = []
    statuses: dict[int, Status] = {}
    next_id = 1
    for aggregate in draw(st.lists(st.sampled_from("ABC"), unique=True, min_size=1)):
        sequence = 0
        present_before = None
        for _ in range(draw(st.integers(1, 5))):
            prev, sequence = sequence, sequence + draw(st.integers(1, 3))
            if draw(st.booleans()):
                rows.append(
                    row(
                        next_id,
                        sequence,
                        aggregate,
                        prev=prev,
                        retry_count=draw(st.sampled_from([0, 0, 0, 1])),
                        replays=draw(st.sampled_from([0, 0, 0, 1])),
                        size=draw(st.integers(1, 60)),
                    )
                )
                if prev:
                    if present_before == prev:
                        statuses[next_id] = Status.PENDING
                    elif draw(st.booleans()):
                        statuses[next_id] = draw(st.sampled_from(list(Status)))
                present_before = sequence
                next_id += 1
    return draw(st.permutations(rows)), statuses


@given(batches(), st.sampled_from(["skip", "block"]))
def test_every_plan_keeps_the_order_and_loses_no_row(batch: tuple[list[Row], dict[int, Status]], policy: str) -> None:
    rows, statuses = batch
    plan = plan_batch(rows, statuses, policy, max_bytes=100)  # type: ignore[arg-type]
    parts = [p.row.id for p in plan.send] + [r.id for r in plan.wait] + [r.id for r in plan.leave]
    assert sorted(parts) == sorted(r.id for r in rows)
    last: dict[object, int] = {}
    for planned in plan.send:
        current = planned.row
        if planned.mode is Mode.NEXT:
            # Right behind its predecessor in the same batch, which is itself proven.
            assert last[current.aggregate_key] == current.prev_sequence
        if planned.mode is Mode.HEAD:
            assert predecessor_done(statuses.get(current.id), policy)  # type: ignore[arg-type]
        if planned.mode is not Mode.REPLAY:
            assert (current.sequence or 0) > last.get(current.aggregate_key, 0)
            last[current.aggregate_key] = current.sequence or 0
    if any(planned.row.retry_count for planned in plan.send):
        assert len(plan.send) == 1
    if rows and not plan.send:
        assert not plan.leave
