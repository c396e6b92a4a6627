"""What went wrong, as one line on stderr and an exit code."""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from enum import IntEnum

from sqlalchemy.exc import ArgumentError, DBAPIError, InterfaceError, OperationalError, SQLAlchemyError
from sqlalchemy.exc import TimeoutError as PoolTimeoutError

from zzol_relay.core.errors import BrokerUnavailableError, ConfigurationError, RelayError, SchemaError
from zzol_relay.settings import mask_url
from zzol_relay.store.database import error_code

__all__ = ["Exit", "explain", "reported"]

_log = logging.getLogger("zzol_relay.cli")

_NO_COLUMN = 1054


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
        case DBAPIError() if error_code(error) == _NO_COLUMN or "no such column" in str(error.orig):
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
    """Exit with one line on stderr and a code; a traceback of what nobody foresaw is logged at ``debug``."""
    try:
        yield
    except (RelayError, SQLAlchemyError) as error:
        code, line = explain(error)
    except Exception as error:
        # PyMySQL, say, raises a RuntimeError where MySQL 8's logins need the cryptography package.
        code, line = Exit.FAILED, mask_url(" ".join(f"{type(error).__name__}: {error}".split()))
        _log.debug("unexpected error", exc_info=True)
    else:
        return
    print(f"zzol-relay: {line}", file=sys.stderr)
    raise SystemExit(code)


def _driver_text(error: DBAPIError) -> str:
    # Without the statement and its parameters, which SQLAlchemy appends.
    args: tuple[object, ...] = getattr(error.orig, "args", ())
    if len(args) == 2 and isinstance(args[0], int):
        return f"{args[1]} ({args[0]})"
    return str(error.orig)
