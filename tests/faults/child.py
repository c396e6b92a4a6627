"""A process to be killed: records or works up to a named point, says so on stdout, and waits there for its end.

Usage: child.py ROLE POINT, with DATABASE_URL and REDIS_URL in the environment.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from typing import Any, NoReturn

from sqlalchemy import create_engine
from sqlalchemy.orm import Session

from zzol_relay import Event, Relay, Stream


def say(line: str) -> None:
    print(line, flush=True)


def reach(point: str) -> NoReturn:
    """Tell the test that the point is reached, and go no further."""
    say(f"POINT {point}")
    threading.Event().wait()
    raise AssertionError("unreachable")


def produce(relay: Relay, engine: Any, point: str) -> None:
    if point == "after_commit":
        relay._after_commit._delivery.send = lambda shipments, path: reach(point)  # type: ignore[method-assign]
    elif point == "after_xadd":
        relay._after_commit._settler._settle = lambda batch: reach(point)  # type: ignore[method-assign]
    with relay, Session(engine) as session:
        for n in range(2):
            relay.record(session, Event(type="t", stream="room", aggregate_type="room", aggregate_id="A", data=n))
        session.flush()
        if point == "before_commit":
            reach(point)
        session.commit()
        threading.Event().wait()


def work(relay: Relay, point: str) -> None:
    worker = relay._worker
    send = worker._delivery.send
    if point == "holding":
        worker._delivery.send = lambda shipments, path: reach(point)  # type: ignore[method-assign]
    elif point == "between":
        worker._settle = lambda token, sent: reach(point)  # type: ignore[method-assign]
    elif point == "paused":

        def pause(shipments: Any, path: Any) -> Any:
            say("POINT paused")
            os.kill(os.getpid(), signal.SIGSTOP)
            return send(shipments, path)

        worker._delivery.send = pause  # type: ignore[method-assign]
    say(f"SETTLED {relay.run_once()}")


def main() -> None:
    role, point = sys.argv[1:]
    engine = create_engine(os.environ["DATABASE_URL"])
    streams = [Stream(name="room", retention=0)] if role == "produce" else []
    relay = Relay(engine, streams, redis_url=os.environ["REDIS_URL"], worker=False, claim_lease=1.0)
    if role == "produce":
        produce(relay, engine, point)
    else:
        relay._publisher.learn(["zzol:{room:0}"])
        work(relay, point)


main()
