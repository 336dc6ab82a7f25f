"""A process that has imported torch once and forks a child for every `lockstep ...` command it is sent.

Each child is a real process: it can be killed, and dies with its own exit status; it only starts 20 times as
fast. Jobs arrive as JSON lines: {argv, cwd, out, err, signals, files}. Answers: {"pid": N} when it has
started, {"code": N} when it has ended (-9: killed by SIGKILL). A job's "signals" say at which moment the
child sends itself a signal, see `arm`.

Never runs a backward pass itself: autograd does not survive a fork after one.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import json
import os
import resource
import signal
import sys
from collections.abc import Callable
from typing import Any

import psutil

PRELOADED = (
    "lockstep.loops",
    "lockstep.train.local",
    "lockstep.engine.hf.engine",
    "peft",
)

_step: int | None = None
"""The training step that the child is in or was in last."""


def main() -> None:
    """Serve jobs until standard input closes."""
    for name in PRELOADED:
        importlib.import_module(name)
    answer({"ready": True})
    for line in sys.stdin:
        job = json.loads(line)
        pid = os.fork()
        if pid == 0:
            run(job)
        answer({"pid": pid})
        _, status = os.waitpid(pid, 0)
        answer({"code": os.waitstatus_to_exitcode(status)})


def answer(value: dict[str, Any]) -> None:
    print(json.dumps(value), flush=True)


def run(job: dict[str, Any]) -> None:
    """In the child: what the console script does, then the exit status."""
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    for number, path in ((1, job["out"]), (2, job["err"])):
        os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), number)
    os.chdir(job["cwd"])
    if job["file_bytes"] is not None:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)  # then write() says EFBIG, as a full disk says ENOSPC
        resource.setrlimit(resource.RLIMIT_FSIZE, (job["file_bytes"], job["file_bytes"]))
    follow_steps()
    for order in job["signals"]:
        arm(**order)
    from lockstep.cli.main import main as command

    code = 1
    try:
        code = command(job["argv"])
    except SystemExit as stop:
        code = stop.code if isinstance(stop.code, int) else 1
    except BaseException:
        sys.excepthook(*sys.exc_info())
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def follow_steps() -> None:
    from lockstep.loop.run import Run

    begin = Run._begin_step

    def begin_step(self: Run, step: int) -> None:
        global _step
        _step = step
        begin(self, step)

    Run._begin_step = begin_step  # type: ignore[method-assign]


def arm(
    target: str,
    *,
    call: int,
    send: str | dict[str, str],
    step: int | None = None,
    of: str | None = None,
    when: str = "before",
) -> None:
    """Send the process a signal at one call of `module:Class.method` or `module:function`.

    Args:
        send: the signal; or a table of "signal", "note", a file to which the step is appended when it is
            sent, and "whom", words of the command line of the child process that gets it instead.
        call: which of its calls, from 1; counted in `step` only, if one is given, and only those of objects
            with an attribute that contains the text `of`, if one is given. A thread in the background belongs
            to no step for certain: name its object.
        when: before or after the call; backward: inside the backward pass of the tensor that it returns
            (calls that return one without a graph are not counted).
    """
    module_name, _, path = target.partition(":")
    owner: Any = importlib.import_module(module_name)
    *parents, name = path.split(".")
    for parent in parents:
        owner = getattr(owner, parent)
    original: Callable[..., Any] = getattr(owner, name)
    count = 0
    order = {"signal": send} if isinstance(send, str) else send
    number, note, whom = getattr(signal, order["signal"]), order.get("note"), order.get("whom")

    def fire(*_: Any) -> None:
        if note:
            with open(note, "a") as file:
                print(_step, file=file)
        if not whom:
            os.kill(os.getpid(), number)
            return
        for child in psutil.Process().children(recursive=True):
            with contextlib.suppress(psutil.NoSuchProcess):
                if whom in " ".join(child.cmdline()):
                    child.send_signal(number)

    @functools.wraps(original)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        if step is not None and _step != step:
            return original(*args, **kwargs)
        if of is not None and not any(of in str(value) for value in vars(args[0]).values()):
            return original(*args, **kwargs)
        nonlocal count
        if when == "before" and (count := count + 1) == call:
            fire()
        result = original(*args, **kwargs)
        if when == "after" and (count := count + 1) == call:
            fire()
        if when == "backward" and result.requires_grad and (count := count + 1) == call:
            result.register_hook(fire)
        return result

    setattr(owner, name, wrapper)


if __name__ == "__main__":
    main()
