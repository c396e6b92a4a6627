"""The hub: encode once, write once, wait for nobody, drop whoever does not keep up."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from websockets.asyncio.client import connect
from websockets.asyncio.server import ServerConnection, serve

from zzol_relay.hub import CLOSE_SLOW, Frames, Hub, WebSocketConnection, text_frame


class FakeConnection:
    """Writes down what it is asked to do."""

    def __init__(self, buffered: int = 0, fails: bool = False) -> None:
        self.buffered = buffered
        self.fails = fails
        self.written: list[Frames] = []
        self.closed: list[int] = []

    def write(self, frames: Frames) -> None:
        if self.fails:
            raise OSError("gone")
        self.written.append(frames)

    def close(self, code: int, reason: str) -> None:
        self.closed.append(code)
        if self.fails:
            raise OSError("gone")


def test_a_room_gets_its_messages_in_one_write_and_one_encoding() -> None:
    hub = Hub()
    one, two, other = FakeConnection(), FakeConnection(), FakeConnection()
    hub.join("A", one)
    hub.join("A", two)
    hub.join("A", two)
    hub.join("B", other)
    assert hub.publish("A", [b"1", b"2"]) == 2
    assert [frames.messages for frames in one.written] == [(b"1", b"2")]
    assert one.written[0] is two.written[0]
    assert one.written[0].wire is two.written[0].wire
    assert other.written == []
    assert hub.publish("nowhere", [b"1"]) == 0


@pytest.mark.parametrize("bad", [FakeConnection(buffered=101), FakeConnection(fails=True)])
def test_one_that_cannot_follow_is_closed_and_the_others_are_served(bad: FakeConnection) -> None:
    """Never skipped: a gap would break an ordered stream."""
    hub = Hub(max_buffered=100)
    first, last = FakeConnection(buffered=100), FakeConnection()
    for connection in (first, bad, last):
        hub.join("A", connection)
        hub.join("B", connection)
    assert hub.publish("A", [b"1"]) == 2
    assert bad.closed == [CLOSE_SLOW]
    assert (len(first.written), len(last.written), len(bad.written)) == (1, 1, 0)
    assert hub.rooms(bad) == frozenset()
    assert hub.members("B") == (first, last)
    assert hub.dropped == 1


def test_leaving_forgets_everything() -> None:
    hub = Hub()
    connection = FakeConnection()
    hub.join("A", connection)
    hub.join("B", connection)
    hub.leave("A", connection)
    hub.leave("A", connection)
    assert hub.rooms(connection) == {"B"}
    hub.forget(connection)
    hub.join("C", connection)
    hub.drop("C")
    assert hub.rooms(connection) == frozenset()
    assert hub.publish("B", [b"1"]) == 0
    assert not hub._rooms
    assert not hub._joined


@pytest.mark.parametrize(
    ("size", "header"),
    [
        (0, "8100"),
        (125, "817d"),
        (126, "817e007e"),
        (65535, "817effff"),
        (65536, "817f0000000000010000"),
    ],
)
def test_frames_are_those_of_rfc_6455(size: int, header: str) -> None:
    frame = text_frame(b"x" * size)
    assert frame[: -size or None].hex() == header
    assert len(frame) == len(header) // 2 + size


@pytest.mark.parametrize("compression", [None, "deflate"])
def test_real_clients_get_the_joined_frames_in_order(compression: str | None) -> None:
    """Raw frames where there are no extensions, else through the protocol; beside the server's own ``send``."""

    async def scenario() -> list[str]:
        hub = Hub()
        joined = asyncio.Event()

        async def handle(websocket: ServerConnection) -> None:
            hub.join("A", WebSocketConnection(websocket))
            joined.set()
            await websocket.wait_closed()

        async with serve(handle, "127.0.0.1", 0, compression=compression) as server:
            port = server.sockets[0].getsockname()[1]
            async with connect(f"ws://127.0.0.1:{port}/", compression=compression, proxy=None) as client:
                await joined.wait()
                messages = ["a" * size for size in (1, 125, 126, 70000)] + ["ü"]
                hub.publish("A", [message.encode() for message in messages])
                (member,) = hub.members("A")
                assert isinstance(member, WebSocketConnection)
                await member.websocket.send("after")
                got = [await client.recv() for _ in range(len(messages) + 1)]
                assert got == [*messages, "after"]
                return [str(message) for message in got]

    assert len(asyncio.run(scenario())) == 6


def test_a_client_that_never_reads_is_aborted_and_the_server_does_not_grow() -> None:
    """``websockets.broadcast`` would let the buffer grow until the pings time out."""

    async def scenario() -> int:
        hub = Hub()
        joined = asyncio.Event()
        gone = asyncio.Event()

        async def handle(websocket: ServerConnection) -> None:
            hub.join("A", WebSocketConnection(websocket))
            joined.set()
            await websocket.wait_closed()
            gone.set()

        async with serve(handle, "127.0.0.1", 0, compression=None) as server:
            port = server.sockets[0].getsockname()[1]
            _reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=1024)
            request: Any = (
                "GET / HTTP/1.1\r\nHost: x\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
                "Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\nSec-WebSocket-Version: 13\r\n\r\n"
            )
            writer.write(request.encode())
            await joined.wait()
            (member,) = hub.members("A")
            largest = 0
            for _ in range(2000):
                if not hub.publish("A", [b"x" * 65536]):
                    break
                largest = max(largest, member.buffered)
                await asyncio.sleep(0)
            await gone.wait()
            writer.close()
        assert hub.dropped == 1
        return largest

    assert asyncio.run(scenario()) <= 1024 * 1024 + 65536 + 10
