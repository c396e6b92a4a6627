from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator

import pytest

from tests.support.proxy import TcpProxy


class Echo:
    """A server that sends back what it gets, and remembers it."""

    def __init__(self) -> None:
        self.got = b""
        self.ends = 0
        self.news = threading.Condition()
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.port = self.listener.getsockname()[1]
        self.threads: list[threading.Thread] = []
        self.closing = False
        self.thread = threading.Thread(target=self.accept)
        self.thread.start()

    def accept(self) -> None:
        while True:
            connection, _ = self.listener.accept()
            if self.closing:
                connection.close()
                return
            thread = threading.Thread(target=self.serve, args=(connection,))
            self.threads.append(thread)
            thread.start()

    def serve(self, connection: socket.socket) -> None:
        with connection:
            try:
                while data := connection.recv(65536):
                    with self.news:
                        self.got += data
                        self.news.notify_all()
                    connection.sendall(data)
            except OSError:
                pass
        with self.news:
            self.ends += 1
            self.news.notify_all()

    def wait_for(self, *, got: int | None = None, ends: int | None = None) -> None:
        with self.news:
            assert self.news.wait_for(
                lambda: (got is None or len(self.got) >= got) and (ends is None or self.ends >= ends), 10
            )

    def close(self) -> None:
        self.closing = True
        socket.create_connection(("127.0.0.1", self.port)).close()
        self.thread.join()
        self.listener.close()
        for thread in self.threads:
            thread.join(10)
            assert not thread.is_alive()


@pytest.fixture
def echo() -> Iterator[Echo]:
    server = Echo()
    yield server
    server.close()


@pytest.fixture
def proxy(echo: Echo) -> Iterator[TcpProxy]:
    with TcpProxy("127.0.0.1", echo.port) as proxy:
        yield proxy


@pytest.fixture
def client(proxy: TcpProxy) -> Iterator[socket.socket]:
    with connect(proxy) as connection:
        yield connection


def connect(proxy: TcpProxy) -> socket.socket:
    return socket.create_connection(("127.0.0.1", proxy.port), 10)


def read(connection: socket.socket, size: int) -> bytes:
    data = b""
    while len(data) < size and (chunk := connection.recv(size - len(data))):
        data += chunk
    return data


def is_closed(connection: socket.socket) -> bool:
    try:
        return connection.recv(1) == b""
    except ConnectionResetError:
        return True


def test_bytes_pass_both_ways_and_are_counted(proxy: TcpProxy, client: socket.socket) -> None:
    payload = bytes(range(256)) * 8192
    sender = threading.Thread(target=client.sendall, args=(payload,))
    sender.start()
    assert read(client, len(payload)) == payload
    sender.join()
    proxy.wait_for(lambda proxy: proxy.server_bytes == len(payload))
    assert (proxy.connections, proxy.open, proxy.client_bytes) == (1, 1, len(payload))


def test_the_end_of_a_client_reaches_the_server_and_comes_back(proxy: TcpProxy, client: socket.socket) -> None:
    client.sendall(b"last")
    client.shutdown(socket.SHUT_WR)
    assert read(client, 100) == b"last"
    proxy.wait_for(lambda proxy: proxy.open == 0)


@pytest.mark.parametrize("reset", [False, True])
def test_cut_closes_what_is_open_and_nothing_later(
    proxy: TcpProxy, echo: Echo, client: socket.socket, reset: bool
) -> None:
    client.sendall(b"a")
    assert read(client, 1) == b"a"
    proxy.cut(reset=reset)
    assert is_closed(client)
    echo.wait_for(ends=1)
    with connect(proxy) as again:
        again.sendall(b"b")
        assert read(again, 1) == b"b"
    assert proxy.cuts == 1


def test_stall_holds_both_sides_until_resume(proxy: TcpProxy, echo: Echo, client: socket.socket) -> None:
    proxy.stall()
    client.sendall(b"held")
    client.settimeout(0.1)
    with pytest.raises(TimeoutError):
        client.recv(1)
    assert (proxy.client_bytes, echo.got) == (0, b"")
    client.settimeout(10)
    proxy.resume()
    assert read(client, 4) == b"held"


def test_stall_of_replies_lets_requests_through(proxy: TcpProxy, echo: Echo, client: socket.socket) -> None:
    proxy.stall("server")
    client.sendall(b"request")
    echo.wait_for(got=7)
    client.settimeout(0.1)
    with pytest.raises(TimeoutError):
        client.recv(1)
    proxy.wait_for(lambda proxy: proxy.client_bytes == 7)
    assert proxy.server_bytes == 0
    client.settimeout(10)
    proxy.heal()
    assert read(client, 7) == b"request"


def test_a_client_that_leaves_during_a_stall_is_forgotten_after_it(
    proxy: TcpProxy, echo: Echo, client: socket.socket
) -> None:
    proxy.stall("client")
    client.sendall(b"bye")
    client.close()
    proxy.resume()
    echo.wait_for(got=3, ends=1)
    proxy.wait_for(lambda proxy: proxy.open == 0)


def test_cut_after_client_bytes_is_exact(proxy: TcpProxy, echo: Echo, client: socket.socket) -> None:
    client.sendall(b"before")
    assert read(client, 6) == b"before"
    proxy.cut_after(client_bytes=5)
    client.sendall(b"0123456789")
    read_until_closed(client)
    echo.wait_for(ends=1)
    assert echo.got == b"before01234"
    assert (proxy.client_bytes, proxy.cuts) == (11, 1)
    with connect(proxy) as again:
        again.sendall(b"0123456789")
        assert read(again, 10) == b"0123456789"


def test_cut_after_server_bytes_is_exact(proxy: TcpProxy, echo: Echo, client: socket.socket) -> None:
    proxy.cut_after(server_bytes=3)
    client.sendall(b"0123456789")
    assert read_until_closed(client) == b"012"
    assert echo.got == b"0123456789"


def test_cut_after_no_bytes_cuts_before_the_next(proxy: TcpProxy, echo: Echo, client: socket.socket) -> None:
    proxy.cut_after(client_bytes=0)
    client.sendall(b"never")
    assert read_until_closed(client) == b""
    echo.wait_for(ends=1)
    assert echo.got == b""


def test_dropped_replies_are_of_requests_that_were_carried_out(
    proxy: TcpProxy, echo: Echo, client: socket.socket
) -> None:
    proxy.drop_replies(after_bytes=4)
    client.sendall(b"once")
    assert read(client, 4) == b"once"
    client.sendall(b"more")
    assert is_closed(client)
    echo.wait_for(ends=1)
    assert echo.got == b"oncemore"
    proxy.wait_for(lambda proxy: proxy.open == 0)
    assert (proxy.server_bytes, proxy.dropped_bytes, proxy.cuts) == (4, 4, 1)
    with connect(proxy) as again:
        again.sendall(b"back")
        assert read(again, 4) == b"back"


def test_dropped_replies_may_leave_the_client_waiting(proxy: TcpProxy, echo: Echo, client: socket.socket) -> None:
    proxy.drop_replies(close=False)
    client.sendall(b"gone")
    proxy.wait_for(lambda proxy: proxy.dropped_bytes == 4)
    assert (echo.got, proxy.open) == (b"gone", 1)
    proxy.heal()
    client.sendall(b"back")
    assert read(client, 4) == b"back"


def test_delay_is_paid_in_each_direction(proxy: TcpProxy, client: socket.socket) -> None:
    proxy.delay(0.1)
    start = time.monotonic()
    client.sendall(b"slow")
    assert read(client, 4) == b"slow"
    assert time.monotonic() - start >= 0.2
    proxy.delay(0)
    client.sendall(b"fast")
    assert read(client, 4) == b"fast"


def test_refused_connections_are_closed_and_old_ones_live(proxy: TcpProxy, client: socket.socket) -> None:
    client.sendall(b"a")
    assert read(client, 1) == b"a"
    proxy.refuse()
    with connect(proxy) as refused:
        assert is_closed(refused)
    client.sendall(b"b")
    assert read(client, 1) == b"b"
    assert (proxy.refused, proxy.connections) == (1, 1)
    proxy.refuse(False)
    with connect(proxy) as again:
        again.sendall(b"c")
        assert read(again, 1) == b"c"


def test_a_missing_target_is_a_closed_connection() -> None:
    with socket.create_server(("127.0.0.1", 0)) as gone:
        port = gone.getsockname()[1]
    with TcpProxy("127.0.0.1", port) as proxy, connect(proxy) as client:
        assert is_closed(client)
        assert proxy.refused == 1


def test_a_closed_proxy_refuses_orders(echo: Echo) -> None:
    proxy = TcpProxy("127.0.0.1", echo.port)
    with connect(proxy) as client:
        client.sendall(b"a")
        assert read(client, 1) == b"a"
        proxy.close()
        assert is_closed(client)
    proxy.close()
    with pytest.raises(AssertionError, match="closed"):
        proxy.cut()


def read_until_closed(connection: socket.socket) -> bytes:
    data = b""
    try:
        while chunk := connection.recv(65536):
            data += chunk
    except ConnectionResetError:
        pass
    return data
