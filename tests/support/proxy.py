"""A TCP proxy on loopback that breaks connections on purpose, at an exact byte."""

from __future__ import annotations

import contextlib
import queue
import selectors
import socket
import struct
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Literal, Self

__all__ = ["TcpProxy"]

HOST = "127.0.0.1"

Side = Literal["client", "server"]
"""Where bytes come from: ``client`` bytes travel to the server, ``server`` bytes to the client."""

_CHUNK = 65536
_MOST = 1024 * 1024


class _Flow:
    """One direction of one connection: bytes read and not yet forwarded."""

    def __init__(self, side: Side, source: socket.socket, sink: socket.socket) -> None:
        self.side: Side = side
        self.source = source
        self.sink = sink
        self.chunks: deque[tuple[float, bytes]] = deque()
        self.size = 0
        self.ended = False
        """The source has sent its last byte."""
        self.shut = False
        """The sink was told so."""
        self.discarding = False
        """What is read goes nowhere."""


class _Pair:
    """A client's connection and its twin to the server."""

    def __init__(self, client: socket.socket, server: socket.socket) -> None:
        self.client = client
        self.server = server
        self.flows = (_Flow("client", client, server), _Flow("server", server, client))


class TcpProxy:
    """Forwards what connects to ``port`` to ``target_host:target_port``, until told otherwise. A context manager.

    One thread does all the work, and each control is carried out on it before the call returns: after ``stall()`` has
    returned, not one more byte passes. Counts of bytes begin when a control is armed and run over all connections.
    """

    def __init__(self, target_host: str, target_port: int) -> None:
        self._target = (target_host, target_port)
        self._pairs: list[_Pair] = []
        self._stalled: set[Side] = set()
        self._delay = 0.0
        self._refusing = False
        self._cut_at: dict[Side, int] = {}
        self._drop_after: int | None = None
        self._drop_closes = True
        self._counts = {"accepted": 0, "refused": 0, "cut": 0, "client": 0, "server": 0, "dropped": 0}
        self._failure: BaseException | None = None
        self._closed = False
        self._news = threading.Condition()
        self._orders: queue.SimpleQueue[tuple[Callable[[], object], threading.Event]] = queue.SimpleQueue()
        self._bell, self._ear = socket.socketpair()
        self._listener = socket.create_server((HOST, 0), backlog=256)
        for waiting in (self._ear, self._listener):
            waiting.setblocking(False)
        self.port: int = self._listener.getsockname()[1]
        """Where it listens on 127.0.0.1."""
        self._thread = threading.Thread(target=self._run, name=f"proxy-{self.port}", daemon=True)
        self._thread.start()

    # -- what has happened

    @property
    def connections(self) -> int:
        """Connections accepted and forwarded so far."""
        return self._counts["accepted"]

    @property
    def refused(self) -> int:
        """Connections closed at once, because of ``refuse()`` or because the target did not answer."""
        return self._counts["refused"]

    @property
    def cuts(self) -> int:
        """Connections that a control has ended."""
        return self._counts["cut"]

    @property
    def client_bytes(self) -> int:
        """Bytes forwarded to the server."""
        return self._counts["client"]

    @property
    def server_bytes(self) -> int:
        """Bytes forwarded to the client."""
        return self._counts["server"]

    @property
    def dropped_bytes(self) -> int:
        """Reply bytes swallowed by ``drop_replies()``."""
        return self._counts["dropped"]

    @property
    def open(self) -> int:
        """Connections forwarded now."""
        return len(self._pairs)

    def wait_for(self, condition: Callable[[TcpProxy], object], timeout: float = 10.0) -> None:
        """Wait until ``condition(proxy)`` holds; looked at whenever something has happened. Fails the test else."""
        with self._news:
            if not self._news.wait_for(lambda: condition(self), timeout):
                raise AssertionError(f"not within {timeout:g} s; {self.open} open, counts {self._counts}")

    # -- controls

    def cut(self, *, reset: bool = False) -> None:
        """Close every connection, on both sides; new ones are forwarded. ``reset``: with RST instead of FIN."""

        def cut() -> None:
            for pair in list(self._pairs):
                self._cut(pair, reset)

        self._do(cut)

    def stall(self, side: Side | None = None) -> None:
        """Stop forwarding the bytes of one side or both, without closing anything; nothing is lost.

        New connections are accepted and just as silent.
        """
        self._do(lambda: self._stalled.update(("client", "server") if side is None else (side,)))

    def resume(self) -> None:
        """End ``stall()``: what was held is forwarded."""
        self._do(self._stalled.clear)

    def delay(self, seconds: float) -> None:
        """Forward every chunk read from now on this much later, in each direction; 0 ends it."""
        self._do(lambda: setattr(self, "_delay", seconds))

    def refuse(self, on: bool = True) -> None:
        """Accept new connections and close them at once; those that exist live on."""
        self._do(lambda: setattr(self, "_refusing", on))

    def cut_after(self, *, client_bytes: int | None = None, server_bytes: int | None = None) -> None:
        """Forward exactly so many more bytes of a side, then cut the connection that carried the last of them (0: the
        next that would carry one). Once: later connections are forwarded. Give one side or both, whichever is first.
        """

        def arm() -> None:
            given: dict[Side, int | None] = {"client": client_bytes, "server": server_bytes}
            self._cut_at = {side: count for side, count in given.items() if count is not None}

        self._do(arm)

    def drop_replies(self, after_bytes: int = 0, *, close: bool = True) -> None:
        """Let so many more bytes of replies pass, then swallow them while requests still reach the server.

        ``close``: the client's connection is closed as soon as a byte of a reply is swallowed; the server's is shut
        only for writing, so that it carries out all it was sent. Once: the next connection is forwarded. Otherwise
        every connection stays open and silent until ``heal()``; what was swallowed is gone.
        """

        def arm() -> None:
            self._drop_after, self._drop_closes = after_bytes, close

        self._do(arm)

    def heal(self) -> None:
        """End every control; connections that were cut stay cut."""

        def disarm() -> None:
            self._stalled.clear()
            self._cut_at = {}
            self._drop_after = None
            self._delay, self._refusing = 0.0, False

        self._do(disarm)

    def close(self) -> None:
        """Close everything and end the thread; safe to call twice."""
        if self._closed:
            return
        self._do(lambda: setattr(self, "_closed", True))
        self._thread.join()
        self._bell.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    # -- the thread

    def _do(self, order: Callable[[], object]) -> None:
        done = threading.Event()
        self._orders.put((order, done))
        with contextlib.suppress(OSError):
            self._bell.send(b"!")
        # The thread may end between two looks.
        while not done.wait(0.5 if self._thread.is_alive() else 0):
            if not self._thread.is_alive():
                raise AssertionError("the proxy is closed") from self._failure

    def _run(self) -> None:
        try:
            while not self._closed:
                self._round()
                with self._news:
                    self._news.notify_all()
        except BaseException as error:
            self._failure = error
            raise
        finally:
            for pair in list(self._pairs):
                self._forget(pair)
            self._listener.close()
            self._ear.close()
            with self._news:
                self._news.notify_all()

    def _round(self) -> None:
        with selectors.DefaultSelector() as selector:
            for waiting in (self._listener, self._ear):
                selector.register(waiting, selectors.EVENT_READ)
            ready = self._interests(selector)
            events = {key.fd: mask for key, mask in selector.select(ready)}
        # What arrived together with an order must not overtake it.
        self._carry_out()
        if self._closed:
            return
        if self._listener.fileno() in events:
            self._accept()
        for pair in list(self._pairs):
            for flow in pair.flows:
                if pair in self._pairs and events.get(flow.source.fileno(), 0) & selectors.EVENT_READ:
                    self._read(pair, flow)
            for flow in pair.flows:
                if pair in self._pairs:
                    self._forward(pair, flow)

    def _interests(self, selector: selectors.BaseSelector) -> float | None:
        """Register what is to be waited for; returns for how long, None for ever."""
        interests: dict[socket.socket, int] = {}
        timeout: float | None = None
        now = time.monotonic()
        for pair in self._pairs:
            for flow in pair.flows:
                if not flow.ended and flow.size < _MOST:
                    interests[flow.source] = interests.get(flow.source, 0) | selectors.EVENT_READ
                if flow.side in self._stalled or not flow.chunks:
                    continue
                due = flow.chunks[0][0]
                if due <= now:
                    interests[flow.sink] = interests.get(flow.sink, 0) | selectors.EVENT_WRITE
                else:
                    timeout = min(due - now, timeout if timeout is not None else due - now)
        for waiting, mask in interests.items():
            selector.register(waiting, mask)
        return timeout

    def _carry_out(self) -> None:
        with contextlib.suppress(BlockingIOError):
            self._ear.recv(4096)
        while True:
            try:
                order, done = self._orders.get_nowait()
            except queue.Empty:
                return
            order()
            done.set()

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except BlockingIOError:
                return
            if self._refusing:
                self._counts["refused"] += 1
                client.close()
                continue
            try:
                server = socket.create_connection(self._target, 5.0)
            except OSError:
                self._counts["refused"] += 1
                client.close()
                continue
            for end in (client, server):
                end.setblocking(False)
                end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self._counts["accepted"] += 1
            self._pairs.append(_Pair(client, server))

    def _read(self, pair: _Pair, flow: _Flow) -> None:
        try:
            data = flow.source.recv(_CHUNK)
        except BlockingIOError:
            return
        except OSError:
            self._forget(pair)
            return
        if not data:
            flow.ended = True
            if flow.discarding:
                self._forget(pair)
        elif flow.discarding:
            self._counts["dropped"] += len(data)
        else:
            flow.chunks.append((time.monotonic() + self._delay, data))
            flow.size += len(data)

    def _forward(self, pair: _Pair, flow: _Flow) -> None:
        if flow.side in self._stalled:
            return
        while flow.chunks and flow.chunks[0][0] <= time.monotonic():
            due, data = flow.chunks.popleft()
            flow.size -= len(data)
            allowed = self._allowed(flow, len(data))
            sent = self._send(pair, flow, data[:allowed])
            if sent is None:
                return
            self._counts[flow.side] += sent
            if flow.side in self._cut_at:
                self._cut_at[flow.side] -= sent
            if flow.side == "server" and self._drop_after is not None:
                self._drop_after -= sent
            rest = data[sent:]
            if self._cut_at.get(flow.side) == 0 and (sent or rest):
                self._cut_at = {}
                self._cut(pair, reset=False)
                return
            if rest and flow.side == "server" and self._drop_after == 0:
                self._drop(pair, flow, rest)
                if self._drop_closes:
                    return
                continue
            if rest:
                flow.chunks.appendleft((due, rest))
                flow.size += len(rest)
                return
        if flow.ended and not flow.chunks and not flow.shut:
            flow.shut = True
            with contextlib.suppress(OSError):
                flow.sink.shutdown(socket.SHUT_WR)
            if all(each.shut and not each.discarding for each in pair.flows):
                self._forget(pair)

    def _allowed(self, flow: _Flow, size: int) -> int:
        allowed = min(size, self._cut_at.get(flow.side, size))
        if flow.side == "server" and self._drop_after is not None:
            allowed = min(allowed, self._drop_after)
        return allowed

    def _send(self, pair: _Pair, flow: _Flow, data: bytes) -> int | None:
        """Bytes sent, or None when the connection has broken and is forgotten."""
        if not data:
            return 0
        try:
            return flow.sink.send(data)
        except BlockingIOError:
            return 0
        except OSError:
            self._forget(pair)
            return None

    def _drop(self, pair: _Pair, flow: _Flow, data: bytes) -> None:
        self._counts["dropped"] += len(data)
        if not self._drop_closes:
            return
        self._drop_after = None
        self._counts["cut"] += 1
        # Closed with replies unread, the server could lose requests: it is left to finish.
        self._counts["dropped"] += sum(len(chunk) for _, chunk in flow.chunks)
        flow.chunks.clear()
        flow.size = 0
        flow.discarding = True
        flow.shut = True
        pair.client.close()
        pair.flows[0].ended = True
        self._forward(pair, pair.flows[0])

    def _cut(self, pair: _Pair, reset: bool) -> None:
        self._counts["cut"] += 1
        self._forget(pair, reset)

    def _forget(self, pair: _Pair, reset: bool = False) -> None:
        if pair in self._pairs:
            self._pairs.remove(pair)
        for end in (pair.client, pair.server):
            if reset and end.fileno() != -1:
                end.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            end.close()
