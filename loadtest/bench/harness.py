"""How every benchmark measures: variants take turns in rounds, and ratios are medians over the rounds.

A machine drifts: its disk, its neighbours, its clock rate. Within a round all variants meet about the same machine,
so the ratio of two of them is steady where their absolute figures are not.
"""

from __future__ import annotations

import dataclasses
import gc
import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import TypeVar

from loadtest.bench.report import Report
from loadtest.bench.services import Services

__all__ = ["Bench", "interleave", "median_ratio", "percentile"]

T = TypeVar("T")


@dataclasses.dataclass(frozen=True, slots=True)
class Bench:
    """A benchmark. ``run`` takes the services, whether to be quick, and the number of rounds (0: its own)."""

    name: str
    summary: str
    run: Callable[[Services, bool, int], Report]


def interleave(variants: Mapping[str, Callable[[], T]], *, rounds: int, warmup: int = 1) -> dict[str, list[T]]:
    """Run A B C, A B C, …; returns what each variant gave in each of ``rounds``, after ``warmup`` that do not count."""
    samples: dict[str, list[T]] = {name: [] for name in variants}
    for number in range(warmup + rounds):
        for name, run in variants.items():
            # Nobody pays for the garbage of the one before.
            gc.collect()
            sample = run()
            if number >= warmup:
                samples[name].append(sample)
    return samples


def median_ratio(over: Sequence[float], under: Sequence[float]) -> float:
    """The median of the per-round ratios of two variants."""
    return statistics.median(a / b for a, b in zip(over, under, strict=True))


def percentile(values: Sequence[float], share: float) -> float:
    """The value that ``share`` (0 … 1) of ``values`` do not exceed."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(len(ordered) * share))]
