"""Benchmarks, by name. Each compares variants that take turns on the same private services."""

from __future__ import annotations

from loadtest.bench import commit, drain
from loadtest.bench.harness import Bench

__all__ = ["BENCHES"]

BENCHES: dict[str, Bench] = {bench.name: bench for bench in (commit.BENCH, drain.BENCH)}
