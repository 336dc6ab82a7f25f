"""The text log of one rank of a run, logs/rank-0.log: its notes, its warnings, and the error that ends it.

    log = RunLog(run_dir.logs / "rank-0.log")
    with log.records():            # warnings and log records of libraries too, as they come
        log.line("step 1/10 ...")

Each line is written at once, with its time, and with control characters escaped. A resumed run appends. The
log does not change what the terminal shows.
"""

from __future__ import annotations

import contextlib
import datetime
import io
import logging
import os
import stat
import sys
import threading
import traceback
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from lockstep.errors import ConfigError, LockstepError, redacted
from lockstep.observe.files import file_errors
from lockstep.observe.text import echo, printable

_MAX_CHARS = 20_000
"""Longest text: of a longer one only the end is written."""


class RunLog:
    """Lines of one file. Safe from several threads.

    Raises:
        ConfigError: the file cannot be written, or is no plain file.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        # O_NONBLOCK: opening a fifo without a reader would wait for ever; it is refused below.
        flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
        with file_errors(path, ConfigError, "write"):
            handle = os.open(path, flags, 0o644)
        self._file: io.FileIO | None = io.FileIO(handle, "a")
        self._lock = threading.Lock()
        if not stat.S_ISREG(os.fstat(handle).st_mode):
            self._file.close()
            raise ConfigError(f"not-a-file: {path}: is not a regular file; remove it", path=path)

    def line(self, text: str) -> None:
        """Write a text of one line or several.

        A full disk does not end the run here: it is reported once on stderr, and later lines are dropped.
        """
        time = datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d %H:%M:%S")
        lines = [f"{time} {printable(line)}\n" for line in redacted(text)[-_MAX_CHARS:].splitlines() or [""]]
        with self._lock:
            if self._file is None:
                return
            try:
                self._file.write("".join(lines).encode("utf-8", errors="backslashreplace"))
            except OSError as error:
                echo(f"{self.path}: cannot be written ({error.strerror}); it ends here", file=sys.stderr)
                self._file.close()
                self._file = None

    def error(self, error: BaseException) -> None:
        """Write the traceback of an error, and the code of one of Lockstep's."""
        code = f"error code: {error.code}\n" if isinstance(error, LockstepError) else ""
        self.line("".join(traceback.format_exception(error)) + code)

    def close(self) -> None:
        """Close the file; later lines are dropped."""
        with self._lock:
            if self._file is not None:
                self._file.close()
                self._file = None

    @contextlib.contextmanager
    def records(self) -> Iterator[None]:
        """Write Python's warnings and log records from WARNING on too; both are still shown as before."""
        handler = _Records(self)
        root, show = logging.getLogger(), warnings.showwarning

        def log_and_show(
            message: Any, category: Any, filename: str, lineno: int, *rest: Any, **more: Any
        ) -> None:
            self.line(f"{filename}:{lineno}: {category.__name__}: {message}")
            show(message, category, filename, lineno, *rest, **more)

        root.addHandler(handler)
        warnings.showwarning = log_and_show
        try:
            yield
        finally:
            root.removeHandler(handler)
            if warnings.showwarning is log_and_show:  # nobody has replaced it since
                warnings.showwarning = show


class _Records(logging.Handler):
    def __init__(self, log: RunLog) -> None:
        super().__init__(logging.WARNING)
        self._log = log

    def emit(self, record: logging.LogRecord) -> None:
        self._log.line(f"{record.levelname} {record.name}: {self.format(record)}")
        if logging.lastResort is not None and not self._others(logging.getLogger(record.name)):
            logging.lastResort.handle(record)  # as without this handler

    def _others(self, logger: logging.Logger | None) -> bool:
        """Whether another handler gets the logger's records."""
        while logger is not None:
            if any(handler is not self for handler in logger.handlers):
                return True
            logger = logger.parent if logger.propagate else None
        return False
