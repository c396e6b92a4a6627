"""The benchmarks of commit and drain run, and say what they found in the promised shape; never how fast."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from loadtest.bench import BENCHES
from zzol_relay.core.errors import EmbeddedServiceError
from zzol_relay.embedded.mysql import find_database
from zzol_relay.embedded.redis import find_redis

_ROOT = Path(__file__).resolve().parents[2]

RATIOS = {
    "commit": {"ratio_to_outbox_row", "ratio_to_zzol", "throughput_ratio_to_zzol"},
    "drain": {"ratio_to_bare"},
    "contention": {"per_s"},
    "idle": {"median_ms", "growth"},
    "cleanup": {"p99_ratio", "in_process_p99_ratio"},
    "memory": set[str](),
}
FIGURES = {
    "commit": set[str](),
    "drain": {"per_s", "bare_per_s"},
    "contention": {"flapping_per_s"},
    "idle": set[str](),
    "cleanup": {"deleted_per_s"},
    "memory": {"per_s"},
}
# What no run may find, however quick, and what may be nothing in a quick one.
NONE = {"contention": {"lost", "duplicates", "inversions", "deadlocks_escaped", "phantoms", "unsettled"}}
ANY = {"memory": {"rss_growth_mib"}}
VARIANTS = {
    "commit": {"business_row", "outbox_row", "relay", "zzol"},
    "drain": {"bare", "relay"},
    "contention": {"steady", "flapping", "record_only", "drain_1", "drain_4", "drain_many_1", "drain_many_4"},
    "idle": {"large", "small"},
    "cleanup": {"alone", "beside_cleanup", "in_process"},
    "memory": {"worker"},
}


@pytest.fixture(scope="module")
def services() -> None:
    """Both servers can be started here."""
    try:
        find_database("mariadb")
        find_redis()
    except EmbeddedServiceError as error:
        if os.environ.get("CI") == "true":
            pytest.fail(str(error), pytrace=False)
        pytest.skip(str(error))


def loadtest(*arguments: str) -> str:
    done = subprocess.run(
        [sys.executable, "-m", "loadtest", *arguments], cwd=_ROOT, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_list_names_every_benchmark() -> None:
    listed = [line.split()[0] for line in loadtest("bench", "--list").splitlines()]
    assert listed == list(BENCHES)


@pytest.mark.timeout(150)
@pytest.mark.parametrize("name", sorted(RATIOS))
def test_benchmark_reports_in_json(name: str, services: None) -> None:
    lines = loadtest("bench", name, "--quick", "--json").splitlines()
    report: dict[str, Any] = json.loads(lines[-1])
    assert len(lines) == 1
    assert report["bench"] == name
    assert report["quick"] is True
    none, some = NONE.get(name, set()), ANY.get(name, set())
    assert set(report["aims"]) == RATIOS[name] | none | some
    for key in RATIOS[name] | FIGURES[name]:
        assert isinstance(report[key], float)
        assert report[key] > 0
    assert {key: report[key] for key in none} == dict.fromkeys(none, 0)
    for key in some:
        assert report[key] >= 0
    for aim in report["aims"].values():
        assert aim.keys() == {"bound", "kind", "met"}
    assert set(report["variants"]) == VARIANTS[name]
    for figures in report["variants"].values():
        assert figures.pop("what")
        assert all(isinstance(value, float) for value in figures.values())
    assert report["settings"]["innodb_flush_log_at_trx_commit"] == 1
    assert report["settings"]["rounds"] >= 1
    assert report["versions"].keys() >= {"zzol_relay", "python", "database", "redis-server", "SQLAlchemy", "PyMySQL"}
