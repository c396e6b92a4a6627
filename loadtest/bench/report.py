"""What a benchmark found, as JSON and as a table."""

from __future__ import annotations

import dataclasses
from typing import Any, Literal

from rich.table import Table

__all__ = ["Aim", "Report", "table"]


@dataclasses.dataclass(frozen=True, slots=True)
class Aim:
    """A figure to reach: ``value`` is to be at most, or at least, ``bound``."""

    value: float
    kind: Literal["at most", "at least"]
    bound: float

    @property
    def met(self) -> bool:
        """Whether it was reached."""
        return self.value <= self.bound if self.kind == "at most" else self.value >= self.bound


@dataclasses.dataclass(frozen=True, slots=True)
class Report:
    """``variants`` maps each variant to its figures; ``aims`` and ``figures`` become top-level keys of the JSON."""

    bench: str
    quick: bool
    settings: dict[str, Any]
    versions: dict[str, str]
    variants: dict[str, dict[str, float]]
    descriptions: dict[str, str]
    aims: dict[str, Aim]
    figures: dict[str, float] = dataclasses.field(default_factory=dict)

    def as_json(self) -> dict[str, Any]:
        """One object: what ran, under which settings, the figures of each variant, and each ratio under its own key."""
        return {
            "bench": self.bench,
            "quick": self.quick,
            **{name: _short(value) for name, value in self.figures.items()},
            **{name: _short(aim.value) for name, aim in self.aims.items()},
            "aims": {name: {"bound": aim.bound, "kind": aim.kind, "met": aim.met} for name, aim in self.aims.items()},
            "variants": {
                name: {"what": self.descriptions[name], **{key: _short(value) for key, value in figures.items()}}
                for name, figures in self.variants.items()
            },
            "settings": self.settings,
            "versions": self.versions,
        }


def table(report: Report) -> Table:
    """The figures of each variant, and the aims below them."""
    columns = list(dict.fromkeys(key for figures in report.variants.values() for key in figures))
    shown = Table(title=f"{report.bench}, {report.versions.get('database', '')}")
    shown.add_column("variant")
    for column in columns:
        shown.add_column(column, justify="right")
    for name, figures in report.variants.items():
        shown.add_row(
            f"{name}: {report.descriptions[name]}",
            *(f"{figures[column]:,.2f}" if column in figures else "" for column in columns),
        )
    shown.caption = "\n".join(
        f"{name} = {aim.value:.2f}, aim: {aim.kind} {aim.bound:g}, {'met' if aim.met else 'missed'}"
        for name, aim in report.aims.items()
    )
    return shown


def _short(value: float) -> float:
    return round(value, 4 if abs(value) < 100 else 1)
