"""The folder of a training client as a run directory, for `lockstep runs`, `status` and `view`.

config.toml         kind = "serve" and the model's name
metrics.jsonl       one line per optimizer step, counted on where the state of an earlier one is loaded
lock                while the client is there
summary.json        once its session has ended
"""

from __future__ import annotations

import json
import logging
import threading
from collections.abc import Mapping
from pathlib import Path

from lockstep.errors import LockstepError
from lockstep.observe.files import write_atomic, write_json
from lockstep.observe.lock import RunLock
from lockstep.observe.metrics import JsonlWriter
from lockstep.observe.run_history import recorded_steps

log = logging.getLogger(__name__)


class ServedRun:
    """See the module. A full disk costs lines of the log, never a step that was taken.

    Raises:
        LockstepError, OSError: the folder cannot be written, or another process has it.
    """

    def __init__(self, folder: Path, *, model: str) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._folder = folder
        self._lock = RunLock(folder / "lock")
        write_atomic(folder / "config.toml", f'kind = "serve"\n\n[model]\nname = {json.dumps(model)}\n')
        self._steps = recorded_steps(folder)[0]
        (folder / "summary.json").unlink(missing_ok=True)
        self._writer = JsonlWriter(folder / "metrics.jsonl")
        self._loss, self._tokens = 0.0, 0
        self._closing = threading.Lock()
        """The worker writes, and the server's thread closes."""
        self._closed = False

    def add(self, *, loss: float, tokens: int) -> None:
        """Count a forward_backward to the step that will be taken."""
        self._loss += loss
        self._tokens += tokens

    def step(self, metrics: Mapping[str, float], *, lr: float) -> None:
        """Write the line of an optimizer step."""
        row = {"loss": self._loss, "tokens": self._tokens, "lr": lr, **metrics}
        with self._closing:
            if self._closed:
                return
            try:
                self._writer.write(self._steps, row, evaluation=None)
            except OSError as error:
                log.warning("%s: step %d is not logged: %s", self._folder, self._steps, error)
            self._steps, self._loss, self._tokens = self._steps + 1, 0.0, 0

    def close(self) -> None:
        """The session has ended. Safe to call twice."""
        with self._closing:
            if self._closed:
                return
            self._closed = True
            self._writer.close()
        try:
            write_json(self._folder / "summary.json", {"outcome": "finished", "steps": self._steps})
            self._lock.release()
        except (OSError, LockstepError) as error:
            log.warning("%s: %s", self._folder, error)
