"""Facts into figures, and the page that explains them."""

from __future__ import annotations

import re
import subprocess
import sys
import textwrap
import uuid
from pathlib import Path
from typing import Any, get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry, Histogram, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from zzol_relay.core.observer import Fact, Published, Recorded
from zzol_relay.metrics import _HANDLERS, BUCKETS, METRICS, Metrics

ROOT = Path(__file__).resolve().parents[2]


def exposed(name: str, kind: str) -> str:
    return f"{name}_total" if kind == "counter" else name


def test_the_page_and_the_code_name_the_same_metrics():
    page = (ROOT / "docs" / "metrics.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| `(zzol_\w+)` \| (\w+) \| ([\w, ]*) ?\|", page, re.MULTILINE)
    on_page = {name: (kind, tuple(filter(None, labels.strip().split(", ")))) for name, kind, labels in rows}
    in_code = {exposed(metric.name, metric.kind): (metric.kind, metric.labels) for metric in METRICS}
    assert on_page == in_code
    # Those of the examples exist too.
    suffix = r"_(bucket|sum|count)$"
    assert {re.sub(suffix, "", name) for name in re.findall(r"\bzzol_(?!relay)\w+", page)} <= set(in_code)


def test_every_source_has_its_metric():
    """G23, G24, S15, by the words of the sources."""
    page = (ROOT / "docs" / "metrics.md").read_text(encoding="utf-8")
    column = " ".join(
        line.rstrip("| \n").rpartition("| ")[2] for line in page.splitlines() if line.startswith("| `zzol")
    )
    for wanted in (
        "outbox_backlog_count", "oldest_unpublished_age", "commit-to-publish p50/p95/p99", "publish errors", "retries",
        "lease expiry and recovery", "duplicates suppressed", "processing failures", "dead letters",
        "PENDING count", "oldest age", "last publish time",
    ):  # fmt: skip
        assert wanted in column, wanted


def test_each_metric_is_moved_by_a_test_of_the_real_thing():
    moved = (ROOT / "tests" / "integration" / "test_metrics.py").read_text(encoding="utf-8")
    for metric in METRICS:
        assert f'"{metric.name.removeprefix("zzol_")}"' in moved, metric.name


def test_every_fact_is_counted():
    assert set(_HANDLERS) == set(get_args(Fact))


def test_what_is_exposed_is_what_is_listed():
    registry = CollectorRegistry()
    metrics = Metrics(registry)
    families = {family.name: family for family in text_string_to_metric_families(generate_latest(registry).decode())}
    assert set(families) == {metric.name for metric in METRICS}
    for metric in METRICS:
        assert families[metric.name].type == metric.kind
        assert families[metric.name].documentation == metric.help
    metrics.close()
    Metrics(registry)


@given(batches=st.lists(st.lists(st.floats(0, 1000), min_size=1, max_size=50), max_size=5))
def test_the_histogram_counts_as_prometheus_clients_own(batches: list[list[float]]):
    registry = CollectorRegistry()
    metrics = Metrics(registry)
    other = CollectorRegistry()
    reference = Histogram("reference", "r", buckets=BUCKETS, registry=other)
    for batch in batches:
        metrics(Published("poller", (uuid.UUID(int=0),) * len(batch), tuple(batch)))
        for value in batch:
            reference.observe(value)
    name = "zzol_outbox_commit_to_publish_seconds"
    for bound in (*BUCKETS, "+Inf"):
        assert registry.get_sample_value(f"{name}_bucket", {"path": "poller", "le": str(bound)}) == (
            other.get_sample_value("reference_bucket", {"le": str(bound)})
        )
    assert registry.get_sample_value(f"{name}_sum", {"path": "poller"}) == pytest.approx(
        other.get_sample_value("reference_sum")
    )


def test_threads_lose_no_count():
    import threading

    registry = CollectorRegistry()
    metrics = Metrics(registry)
    fact = Recorded((uuid.UUID(int=0),), 0.001)

    def count() -> None:
        for _ in range(2000):
            metrics(fact)

    threads = [threading.Thread(target=count) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert registry.get_sample_value("zzol_outbox_recorded_total") == 8000
    assert registry.get_sample_value("zzol_outbox_commit_wait_seconds_count") == 8000


def test_unknown_facts_are_let_pass():
    other: Any = object()
    Metrics(CollectorRegistry())(other)


def test_without_the_package_the_error_says_what_to_install():
    script = """
        import sys
        sys.modules["prometheus_client"] = None
        from zzol_relay import ConfigurationError
        from zzol_relay.metrics import Metrics
        try:
            Metrics()
        except ConfigurationError as error:
            print(error)
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script)],
        capture_output=True, text=True, check=True, timeout=30, cwd=ROOT,
    )  # fmt: skip
    assert "zzol-relay[metrics]" in done.stdout
