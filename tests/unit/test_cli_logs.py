"""Log lines: every extra field, one line each, no passwords."""

from __future__ import annotations

import json
import logging
import sys
import uuid
from typing import Any

import pytest

from zzol_relay.cli.logs import JsonFormatter, TextFormatter


def record(message: str, *, failed: bool = False, **extra: Any) -> logging.LogRecord:
    exc_info = None
    if failed:
        try:
            raise ValueError("cannot reach redis://:s3cret@host")
        except ValueError:
            exc_info = sys.exc_info()
    return logging.getLogger("zzol_relay.x").makeRecord(
        "zzol_relay.x", logging.WARNING, "f.py", 1, message, (), exc_info, extra=extra
    )


def test_json_lines_carry_the_extra_fields():
    event_id = uuid.uuid4()
    line = json.loads(JsonFormatter().format(record("publishing failed", event_id=event_id, retry_count=3)))
    assert line.pop("time").endswith("+00:00")
    assert line == {
        "level": "WARNING",
        "logger": "zzol_relay.x",
        "message": "publishing failed",
        "event_id": str(event_id),
        "retry_count": 3,
    }


def test_text_lines_carry_the_extra_fields():
    line = TextFormatter().format(record("publishing failed", error="two words\nand a line", retry_count=3))
    assert line.endswith(r'WARNING zzol_relay.x: publishing failed error="two words\nand a line" retry_count=3')


@pytest.mark.parametrize("formatter", [JsonFormatter(), TextFormatter()], ids=["json", "text"])
def test_passwords_in_urls_are_masked_even_in_tracebacks(formatter: logging.Formatter):
    text = formatter.format(record("x", failed=True, url="mysql://u:s3cret@h/d"))
    assert "s3cret" not in text
    assert "redis://:***@host" in text
    assert "Traceback" in text


def test_a_json_line_is_one_line():
    assert "\n" not in JsonFormatter().format(record("a\nb", failed=True))
