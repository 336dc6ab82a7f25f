"""JSON messages between a trainer and one live environment, over a socket pair whose packets stay whole.

    packet = 1 byte (MORE, LAST or END) + at most PACKET_BYTES of a message's JSON

The socket is SOCK_SEQPACKET, so a process that is killed in the middle of a reply leaves whole packets
behind: the packet END, in which its parent says how it ended, cannot be taken for the rest of that reply.
The blocking half is standard library only, because sandboxed processes load it.
"""

from __future__ import annotations

import json
import math
import os
import socket
import time
from collections.abc import Iterable, Iterator
from typing import Any

Message = dict[str, Any]

PACKET_BYTES = 1 << 16
MESSAGE_BYTES = 64 << 20
"""Longest message that is read from a process."""
MORE, LAST, END = b"\0", b"\1", b"\2"


def packets(message: Message) -> Iterator[bytes]:
    """Split a message into packets."""
    # As json.loads decodes: text of a model may hold half a surrogate pair.
    data = json.dumps(message, ensure_ascii=False).encode(errors="surrogatepass")
    for start in range(0, len(data), PACKET_BYTES):
        last = start + PACKET_BYTES >= len(data)
        yield (LAST if last else MORE) + data[start : start + PACKET_BYTES]


def receive(fd: int) -> Message | None:
    """Read the next message, however long it takes; None when there will be none."""
    data = bytearray()
    while packet := os.read(fd, PACKET_BYTES + 1):
        data += packet[1:]
        if packet[:1] == LAST:
            message: Message = json.loads(data)
            return message
    return None


def send(fd: int, message: Message) -> None:
    """Write a message."""
    for packet in packets(message):
        os.write(fd, packet)


async def receive_within(channel: socket.socket, deadline: float) -> Message | None:
    """Return the next message of a non-blocking socket; None when there will be none.

    Args:
        deadline: of time.monotonic().

    Raises:
        TimeoutError: it was not there by the deadline. One that was there is returned, even if this event
            loop was busy until after it.
        ValueError: it is too long, or no JSON.
    """
    data = bytearray()
    while True:
        try:
            packet = channel.recv(PACKET_BYTES + 1)
        except BlockingIOError:
            if time.monotonic() >= deadline:
                raise TimeoutError from None
            await _ready(channel, deadline, write=False)
            continue
        except ConnectionResetError:  # said once, when the other end closed with packets unread; then comes
            continue  # what was sent before that
        if not packet:
            return None
        if packet[:1] == END:
            data.clear()  # of a reply that was not finished
        data += packet[1:]
        if len(data) > MESSAGE_BYTES:
            raise ValueError(f"a message of more than {MESSAGE_BYTES} bytes")
        if packet[:1] != MORE:
            try:
                message = json.loads(data)
            except RecursionError:
                raise ValueError("a message that is nested too deeply") from None
            if not isinstance(message, dict):
                raise ValueError("a message that is no object")
            return message


async def send_within(channel: socket.socket, message: Iterable[bytes], deadline: float) -> None:
    """Write the packets of a message to a non-blocking socket. If nobody reads it any more, `receive_within`
    will tell.

    Raises:
        TimeoutError: the process did not take it by the deadline.
    """
    for packet in message:
        while True:
            try:
                channel.send(packet)
            except BlockingIOError:
                if time.monotonic() >= deadline:
                    raise TimeoutError from None
                await _ready(channel, deadline, write=True)
                continue
            except (BrokenPipeError, ConnectionResetError):
                return
            break


async def readable(fd: int) -> None:
    """Wait until there is something to read."""
    import asyncio

    loop = asyncio.get_running_loop()
    ready = asyncio.Event()
    loop.add_reader(fd, ready.set)
    try:
        await ready.wait()
    finally:
        loop.remove_reader(fd)


async def _ready(channel: socket.socket, deadline: float, *, write: bool) -> None:
    """Wait until the socket is ready or the deadline has passed.

    Only readiness is awaited: a read that a timeout cancels would lose the packet that it had taken.
    """
    import asyncio

    loop = asyncio.get_running_loop()
    ready = loop.create_future()
    watch, leave = (loop.add_writer, loop.remove_writer) if write else (loop.add_reader, loop.remove_reader)

    def wake() -> None:
        if not ready.done():
            ready.set_result(None)

    watch(channel.fileno(), wake)
    try:
        left = deadline - time.monotonic()
        await asyncio.wait([ready], timeout=None if left == math.inf else max(0.0, left))
    finally:
        leave(channel.fileno())
