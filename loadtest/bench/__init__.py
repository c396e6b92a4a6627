"""Benchmarks, by name, each on private services of its own."""

from __future__ import annotations

from loadtest.bench import cleanup, commit, contention, drain, idle, memory
from loadtest.bench.harness import Bench

__all__ = ["BENCHES"]

BENCHES: dict[str, Bench] = {
    bench.name: bench
    for bench in (commit.BENCH, drain.BENCH, contention.BENCH, idle.BENCH, cleanup.BENCH, memory.BENCH)
}
