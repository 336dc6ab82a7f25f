"""JSON behind a 4-byte length: jobs to a child process, and its replies, each with its job's id.

This is what the child needs, which waits without a limit. Standard library only: sandboxed processes load it.
"""

from __future__ import annotations

import json
import os
import struct
from typing import Any

Message = dict[str, Any]


def receive(fd: int) -> Message:
    """Read the next message; ends the process when there will be none."""
    size = struct.unpack("<I", _read(fd, 4))[0]
    message: Message = json.loads(_read(fd, size))
    return message


def _read(fd: int, size: int) -> bytes:
    data = bytearray()
    while len(data) < size:
        chunk = os.read(fd, min(size - len(data), 1 << 20))
        if not chunk:
            os._exit(0)
        data += chunk
    return bytes(data)


def send(fd: int, message: Message) -> None:
    """Write one message."""
    data = memoryview(packed(message))
    while data:
        data = data[os.write(fd, data) :]


def packed(message: Message) -> bytes:
    """Return the bytes of a message."""
    text = json.dumps(message, ensure_ascii=False).encode(errors="surrogatepass")  # as json.loads decodes
    return struct.pack("<I", len(text)) + text
