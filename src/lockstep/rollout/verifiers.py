"""Verifiers in a process of their own, where a job that never ends can be killed: from any thread, at any
time.

math-verify's own timeout works by SIGALRM and only in a main thread; some reasoning_gym verifiers evaluate
what the model wrote. One process per VerifierProcess, started on first use, started again after a kill.
"""

from __future__ import annotations

import contextlib
import json
import os
import pickle
import select
import struct
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lockstep.errors import ConfigError

_CHILD = Path(__file__).with_name("verifier_child.py")
_START_SECONDS = 180.0
"""For importing a library, which the job's own limit does not count."""
PACKAGES = {"reasoning_gym": "reasoning-gym", "math_verify": "math-verify"}


class VerifierFailure(RuntimeError):
    """A verifier raised, in its own process; the text is its exception."""


class VerifierProcess:
    """Runs verifier jobs one at a time with a time limit; safe to call from several threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._loaded: set[str] = set()
        self._stop: weakref.finalize[Any, Any] | None = None

    def reasoning_gym(
        self, row: Mapping[str, Any], answer: str, *, timeout: float
    ) -> tuple[float, str | None]:
        """(score, why the answer counts as junk or None) by the score_answer of the task that
        `row["verifier"]` names.

        An exception over the answer is junk, score 0, if the verifier takes the row's own answer without
        raising.

        Raises:
            VerifierFailure: the verifier raises on the row's own answer too.
            TimeoutError: the verifier ran for longer than `timeout` seconds.
        """
        entry = {k: v for k, v in row.items() if k not in ("verifier", "verifier_settings", "problem")}
        job = {
            "kind": "reasoning_gym",
            "task": str(row["verifier"]).partition(":")[2],
            "settings": dict(row.get("verifier_settings") or {}),
            "entry": entry,
            "answer": answer,
        }
        reply = self._run("reasoning_gym", job, timeout)
        return float(reply["score"]), reply.get("junk")

    def math(self, gold: str, answer: str, *, timeout: float) -> tuple[float, str | None]:
        """(1.0 or 0.0, why the answer counts as junk or None): math-verify of `answer` against `gold`.

        Raises:
            VerifierFailure: `gold` holds no expression, or math-verify raised.
            TimeoutError: it ran for longer than `timeout` seconds.
        """
        reply = self._run("math_verify", {"kind": "math", "gold": gold, "answer": answer}, timeout)
        return float(reply["score"]), reply.get("junk")

    def close(self) -> None:
        """End the process; a later job starts another one."""
        if self._stop is not None:
            self._stop()
        self._process, self._stop = None, None
        self._loaded = set()

    def _run(self, module: str, job: dict[str, Any], timeout: float) -> dict[str, Any]:
        with self._lock:
            if module not in self._loaded:
                self._exchange({"kind": "import", "module": module}, _START_SECONDS)
                self._loaded.add(module)
            return self._exchange(job, timeout)

    def _exchange(self, job: dict[str, Any], timeout: float) -> dict[str, Any]:
        process = self._process or self._start()
        assert process.stdin is not None and process.stdout is not None
        # Written by us, read by our own child: nothing from outside is ever unpickled (replies are JSON).
        # JSON would make lists of tuples and strings of integer keys, which some tasks' verifiers look at.
        data = pickle.dumps({**job, "timeout": timeout})
        line = b""
        try:
            process.stdin.write(struct.pack("<I", len(data)) + data)
            process.stdin.flush()
            line = _read_line(process.stdout.fileno(), timeout)
        except BrokenPipeError:
            pass  # the process is gone: the same as an empty reply
        except BaseException:
            # Timed out, or the user pressed Ctrl-C in between: a late reply must not answer the next job.
            self.close()
            raise
        if not line:
            code = process.wait()
            self.close()
            raise VerifierFailure(f"the verifier process ended with exit code {code} during the job")
        reply: dict[str, Any] = json.loads(line)
        if "error" in reply:
            raise VerifierFailure(reply["error"])
        return reply

    def _start(self) -> subprocess.Popen[bytes]:
        process = subprocess.Popen(
            [sys.executable, "-P", "-W", "ignore", str(_CHILD)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**os.environ, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"},
        )
        self._process = process
        self._stop = weakref.finalize(self, _end, process)
        return process


def _read_line(fd: int, timeout: float) -> bytes:
    """One line, without its end; empty when the writer is gone."""
    deadline = time.monotonic() + timeout
    data = b""
    while not data.endswith(b"\n"):
        ready, _, _ = select.select([fd], [], [], max(0.0, deadline - time.monotonic()))
        if not ready:
            raise TimeoutError(f"the verifier took longer than {timeout:g} s")
        chunk = os.read(fd, 1 << 16)
        if not chunk:
            return b""
        data += chunk
    return data


def _end(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    process.wait()
    for pipe in (process.stdin, process.stdout):
        if pipe is not None:
            with contextlib.suppress(BrokenPipeError):  # a job was still in the pipe's buffer
                pipe.close()


def require_package(module: str, *, needed_by: str) -> None:
    """ConfigError with the pip line when a package is not installed; imports nothing."""
    from importlib.util import find_spec

    if find_spec(module) is None:
        raise ConfigError(
            f"{needed_by} needs {PACKAGES[module]}, which is not installed; pip install {PACKAGES[module]}"
        )
