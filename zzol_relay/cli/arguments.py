"""What several commands take, and asking before something is done."""

from __future__ import annotations

import re
import sys
from datetime import UTC, datetime, timedelta
from typing import Annotated

import typer

__all__ = ["Json", "Yes", "agreed", "duration", "moment"]

_DURATION = re.compile(r"(\d+(?:\.\d+)?)\s*(s|min|m|h|d|)\Z")
_SECONDS = {"": 1.0, "s": 1.0, "m": 60.0, "min": 60.0, "h": 3600.0, "d": 86400.0}


def duration(text: str) -> float:
    """Seconds, given as ``90``, ``90s``, ``15m``, ``2h`` or ``1d``."""
    match = _DURATION.match(text.strip())
    if match is None:
        raise typer.BadParameter(f"{text!r} is not a duration; use 90s, 15m, 2h or 1d")
    return float(match[1]) * _SECONDS[match[2]]


def moment(text: str) -> datetime:
    """A time, given as ISO 8601 (UTC where it names no zone), or as a duration: so long ago."""
    if _DURATION.match(text.strip()):
        return datetime.now(UTC) - timedelta(seconds=duration(text))
    try:
        given = datetime.fromisoformat(text.strip())
    except ValueError:
        raise typer.BadParameter(f"{text!r} is neither an ISO 8601 time nor a duration such as 2h") from None
    return given if given.utcoffset() is not None else given.replace(tzinfo=UTC)


def agreed(question: str, yes: bool) -> None:
    """Go on only where ``--yes`` was given or a person says so; exits with 1 where they do not, 2 where none can."""
    if yes:
        return
    if not sys.stdin.isatty():
        raise typer.BadParameter("nobody can be asked here; give --yes")
    typer.confirm(question, abort=True)


Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]
Yes = Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")]
