"""Show what another process writes to a file, as it comes."""

from __future__ import annotations

import codecs
import contextlib
import threading
from pathlib import Path
from typing import TextIO

_END_SECONDS = 8.0
"""For the rest of a file to be written to a stream that is read slowly."""


class Shown:
    """A thread that copies what is written to a file to a stream of ours, until `finish`. It looks every so
    many seconds, or if that is None, when it is woken."""

    def __init__(self, path: Path, stream: TextIO, every: float | None) -> None:
        self._path, self._stream, self._every = path, stream, every
        self._finished, self._woken = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._copy, name=f"shows {path.name}", daemon=True)
        self._thread.start()

    def wake(self) -> None:
        """Show what has been written."""
        self._woken.set()

    def finish(self) -> None:
        """Show the rest of the file, as far as somebody reads the stream."""
        self._finished.set()
        self._woken.set()
        self._thread.join(_END_SECONDS)

    def _copy(self) -> None:
        decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        # Ours may be closed or have few characters; the file has everything.
        with contextlib.suppress(OSError, ValueError), self._path.open("rb") as file:
            while True:
                last = self._finished.is_set()
                while chunk := file.read(1 << 16):
                    self._stream.write(decoder.decode(chunk))
                    self._stream.flush()
                if last:
                    return
                self._woken.wait(self._every)
                self._woken.clear()
