"""What went wrong, as one line on stderr and an exit code."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from enum import IntEnum

from sqlalchemy.exc import ArgumentError, DBAPIError, InterfaceError, OperationalError, SQLAlchemyError
from sqlalchemy.exc import TimeoutError as PoolTimeoutError

from zzol_relay.core.errors import BrokerUnavailableError, ConfigurationError, RelayError, SchemaError
from zzol_relay.settings import mask_url

__all__ = ["Exit", "explain", "reported"]


class Exit(IntEnum):
    """Exit codes, as ``--help`` and docs/cli.md list them."""

    OK = 0
    FAILED = 1
    USAGE = 2
    UNREACHABLE = 3
    SCHEMA = 4


def explain(error: RelayError | SQLAlchemyError) -> tuple[Exit, str]:
    """The exit code and the line for an error; passwords in URLs are masked."""
    match error:
        case SchemaError():
            code = Exit.SCHEMA
        case ConfigurationError() | ArgumentError():
            code = Exit.USAGE
        case BrokerUnavailableError() | OperationalError() | InterfaceError() | PoolTimeoutError():
            code = Exit.UNREACHABLE
        case _:
            code = Exit.FAILED
    text = f"database: {_driver_text(error)}" if isinstance(error, DBAPIError) else str(error)
    return code, mask_url(" ".join(text.split()))


@contextmanager
def reported() -> Iterator[None]:
    """Exit with a line on stderr, and without a traceback, for every error that is raised on purpose."""
    try:
        yield
    except (RelayError, SQLAlchemyError) as error:
        code, line = explain(error)
        print(f"zzol-relay: {line}", file=sys.stderr)
        raise SystemExit(code) from None


def _driver_text(error: DBAPIError) -> str:
    # Without the statement and its parameters, which SQLAlchemy appends.
    args = getattr(error.orig, "args", ())
    if len(args) == 2 and isinstance(args[0], int):
        return f"{args[1]} ({args[0]})"
    return str(error.orig)
