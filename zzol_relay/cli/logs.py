"""Log lines for people or for machines. Both print the fields given as ``extra=``, and mask passwords in URLs."""

from __future__ import annotations

import logging
import sys
from datetime import UTC, datetime
from typing import Any

import orjson

from zzol_relay.settings import mask_url

__all__ = ["JsonFormatter", "TextFormatter", "configure"]

_STANDARD = frozenset(logging.LogRecord("", 0, "", 0, "", (), None).__dict__) | {"message", "asctime", "taskName"}


def configure(level: str, *, json: bool) -> None:
    """Send the root logger's lines to stderr from ``level`` on."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonFormatter() if json else TextFormatter())
    logging.basicConfig(level=level.upper(), handlers=[handler], force=True)
    # Says at INFO, whenever a revision is looked up, which database it is about to ask.
    logging.getLogger("alembic.runtime.migration").setLevel(logging.WARNING)


class JsonFormatter(logging.Formatter):
    """One JSON object a line: ``time`` (UTC), ``level``, ``logger``, ``message``, the extra fields, ``exception``."""

    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, Any] = {
            "time": _time(record),
            "level": record.levelname,
            "logger": record.name,
            "message": record.getMessage(),
        }
        line |= {name: value for name, value in _extra(record).items() if name not in line}
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return mask_url(orjson.dumps(line, default=str, option=orjson.OPT_NON_STR_KEYS).decode())


class TextFormatter(logging.Formatter):
    """``time LEVEL logger: message name=value …``, and the traceback on the lines after it."""

    def format(self, record: logging.LogRecord) -> str:
        parts = [f"{_time(record)} {record.levelname} {record.name}: {record.getMessage()}"]
        parts += [f"{name}={_plain(value)}" for name, value in _extra(record).items()]
        line = " ".join(parts)
        if record.exc_info:
            line = f"{line}\n{self.formatException(record.exc_info)}"
        return mask_url(line)


def _time(record: logging.LogRecord) -> str:
    return datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds")


def _extra(record: logging.LogRecord) -> dict[str, Any]:
    return {name: value for name, value in record.__dict__.items() if name not in _STANDARD}


def _plain(value: object) -> str:
    text = str(value)
    return text if text.isprintable() and text and " " not in text else orjson.dumps(text).decode()
