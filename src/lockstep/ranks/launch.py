"""Launch several ranks of one command on this machine, watch them, and end all of them when one dies.

    launch_ranks(["replay", "--ranks", "2"], ranks=2, timeout=None, log_dir=Path("out/logs"))

runs `python -m lockstep replay --ranks 2` twice, with the environment that torchrun gives its workers, so
that the same command works unchanged under torchrun and under the deepspeed launcher: `in_launcher` tells
whether the ranks are started already. Each rank is a Child (lockstep.processes). Their store is hosted here,
so the positions of the ranks are known even after rank 0 has died. It listens on loopback only and asks for a
secret of the run (lockstep.ranks.process_group). Torch is loaded only when something starts.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import secrets
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from lockstep.common_errors import cannot_write
from lockstep.errors import ConfigError, DataError
from lockstep.observe.files import write_atomic
from lockstep.observe.text import echo
from lockstep.processes.child import AT_ONCE, Child, describe_status, end
from lockstep.processes.programs import COMMAND, python
from lockstep.ranks.environment import FLIGHT_DIR, LAUNCHER_PID, SECRET, in_launcher, threads_per_rank
from lockstep.ranks.hang import OUT_OF_STEP, HangReport, examine
from lockstep.ranks.shown import Shown
from lockstep.ranks.warm_spares import WarmSpares
from lockstep.ranks.watchdog import Counts, Signs, Watchdog, name_recording, signs

ENDED_KEY = "lockstep/ended/{rank}"
"""Store: how a rank ended, text, written by the launcher, as a killed rank cannot write it."""
POSITION_KEY = "lockstep/position/{rank}"
"""Store: what a rank is about to do, JSON (lockstep.ranks.guard.Position)."""
ERROR_KEY = "lockstep/error/{rank}"
"""Store: {"time": unix seconds, "type", "text", "peer": bool, "printed": bool, "out_of_memory": int | None}
of the error that ends a rank. peer: it has only lost another rank. printed: the command prints it itself.
out_of_memory: the step in which memory ran out, if the run has a smaller memory plan."""

INTERRUPTED, TIMED_OUT = 130, 124
_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)
_POLL_SECONDS = 0.05
_WAIT_SECONDS = 1.0
"""Between two looks at the clock and at the watchdog."""
_SHOW_SECONDS = 0.1
"""Between two looks at what rank 0 has written."""
_GRACE_SECONDS = 12.0
"""After the first rank died: time for the others to notice, report and end by themselves."""
_CLOSE_SECONDS = 8.0
"""Then the time between SIGTERM and SIGKILL."""
_TRACEBACK_LINES = 40
SPARE_LOGS = "spares"
"""Folder beside the ranks' logs: the logs of warm spares."""
HANG_FILE = "hang.json"
"""In the folder of the ranks' logs: the report of a hang (lockstep.ranks.hang.HangReport)."""
_WAITED = ("RankError", "Desync")
"""Errors of a rank that has waited in vain."""


@dataclass(frozen=True, kw_only=True)
class RankEnd:
    """How one rank ended."""

    rank: int
    status: int
    """Exit status; negative: the number of the signal that ended it."""
    stopped: bool = False
    """The launcher ended it, because another rank had died or for Ctrl-C."""
    error: Mapping[str, Any] | None = None
    """The error that it posted to the store, see ERROR_KEY."""
    position: Mapping[str, Any] | None = None
    """What it was about to do, see POSITION_KEY."""

    @property
    def shell_status(self) -> int:
        """The status as a shell has it: 128 + N for signal N."""
        return self.status if self.status > 0 else 128 - self.status

    def how(self) -> str:
        """Return `was killed by SIGKILL`, `exited with status 1`, ..."""
        return "was stopped" if self.stopped else describe_status(self.status)

    def where(self) -> str:
        """Return `; last seen at step 3, before gradients (all_reduce)`, or nothing."""
        return f"; last seen at {self.position['text']}" if self.position else ""


def leave(status: int) -> None:
    """End this rank at once if a failure left process groups behind; otherwise do nothing.

    A thread of gloo that frees a tensor while Python shuts down is ended by Python, and C++ aborts:
    "terminate called without an active exception", status 134 instead of the failure's.
    """
    distributed = sys.modules.get("torch.distributed") if in_launcher() else None
    if distributed is not None and distributed.is_available() and distributed.is_initialized():
        end_process(status)


def end_process(status: int) -> NoReturn:
    """End with this exit status and without Python's shutdown, which threads in gloo can abort."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


def launch_ranks(
    argv: Sequence[str],
    *,
    ranks: int,
    timeout: float | None,
    log_dir: Path,
    graceful: bool = False,
    watch: float | None = None,
) -> int:
    """Run `python -m lockstep ARGV` on every rank and wait for all.

    Rank 0's output is shown as it comes; everything a rank prints is in log_dir/rank-N.log and, for stderr,
    rank-N.err.log. When a rank dies all others end within 30 seconds, and the cause is printed: the rank that
    died first, its traceback, the position of every rank. Ctrl-C and SIGTERM are passed on. No process is
    left behind, not even when this one is killed (see lockstep.processes).

    Args:
        argv: without the program's name.
        timeout: seconds for the whole; None: as long as the ranks take (their collectives have deadlines of
            their own).
        graceful: the ranks end by themselves after Ctrl-C or SIGTERM, which may take a while (they save):
            wait for them until a second signal comes.
        watch: the ranks keep flight records in log_dir, and when none of them makes progress for so many
            seconds, they are ended with a report of who waits for whom (lockstep.ranks.watchdog), which is
            also in log_dir/hang.json; None: not watched.

    Returns:
        0; or the status of the rank that failed first (128 + N for signal N); 1 after a hang; 124 after the
        timeout; 130 after Ctrl-C, 143 after SIGTERM.

    Raises:
        ConfigError: fewer than 1 rank, or this process is a rank itself.
    """
    return launch_command(
        [*python(COMMAND, unbuffered=True), *argv],
        ranks=ranks,
        timeout=timeout,
        log_dir=log_dir,
        graceful=graceful,
        watch=watch,
    )


def launch_command(
    command: Sequence[str],
    *,
    ranks: int,
    timeout: float | None,
    log_dir: Path,
    graceful: bool = False,
    watch: float | None = None,
) -> int:
    """`launch_ranks` for any program; `command[0]` is an executable."""
    check_launch(ranks, log_dir)
    with signals_raised():
        launch = Launch(command, ranks=ranks, log_dir=log_dir, graceful=graceful, watch=watch)
        return launch.run(timeout)


def check_launch(ranks: int, log_dir: Path) -> None:
    """Make the folder of the ranks' logs. Raises ConfigError, as `launch_ranks`."""
    if ranks < 1:
        raise ConfigError(f"out-of-range: --ranks {ranks}: at least 1 rank is needed")
    if in_launcher():
        raise ConfigError(
            f"contradiction: this process is already rank {os.environ['RANK']} of {os.environ['WORLD_SIZE']} "
            "(RANK and WORLD_SIZE are set); leave --ranks out under torchrun or deepspeed, or unset them"
        )
    try:
        log_dir.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise cannot_write(
            ConfigError, log_dir, error, "ranks write their logs there", done="created"
        ) from error


class Launch:
    """One set of processes on this machine; lockstep.cluster.launch has them started elsewhere."""

    address = "127.0.0.1"
    """Where the ranks' store listens."""

    def __init__(
        self,
        command: Sequence[str],
        *,
        ranks: int,
        log_dir: Path,
        graceful: bool = False,
        watch: float | None = None,
    ) -> None:
        from lockstep.ranks.process_group import hidden_store, host_store

        self.command, self.ranks, self.log_dir = list(command), ranks, log_dir
        self.graceful = graceful
        self.passed_on: signal.Signals | None = None
        """The signal that ranks were sent, so that they stop gracefully."""
        self._secret = secrets.token_hex(32)
        tcp = host_store(self.address)
        self._port = tcp.port
        self.store = hidden_store(tcp, self._secret)
        self._children: list[Child] = []
        """By rank."""
        self.shown: list[Shown] = []
        self.ended: dict[int, int] = {}
        self.stopped: set[int] = set()
        self._closed = False
        self.restarts = False
        """Whether a death from outside is reported by `death`, so that the caller restarts the ranks."""
        self.smaller_plan: Callable[[int], str | None] | None = None
        """Called with the step in which the ranks ran out of memory: prepares the run for a smaller memory
        plan, and returns a line that says so, for `death`; None: there is none."""
        self.replanned = False
        """Whether `death` is such a line."""
        self.death: str | None = None
        """A line about such a death; None: the ranks ended otherwise."""
        self.died = 0.0
        """When it was noticed, in Unix seconds."""
        self.extra: dict[str, str] = {}
        """More environment variables of all ranks."""
        self.spares: WarmSpares | None = None
        """Spares from the previous launch."""
        self.refills = False
        """Whether to start spares for the next launch."""
        self.flights = log_dir.absolute()
        """The folder of the ranks' flight records, on each machine."""
        self._watchdog = None if watch is None else Watchdog(self.look, seconds=watch)
        self._hang: HangReport | None = None

    def run(self, timeout: float | None) -> int:
        deadline = None if timeout is None else time.monotonic() + timeout
        try:
            self.start()
            try:
                return self._watch(deadline)
            except LaunchInterrupted as interrupted:
                if not self.graceful or interrupted.number not in (signal.SIGINT, signal.SIGTERM):
                    raise
                self._pass_on(interrupted.number)
                return self._watch(deadline)
        except LaunchInterrupted as interrupted:
            self._stop()
            echo(f"lockstep: {interrupted.number.name}: all {self.ranks} ranks ended", file=sys.stderr)
            return 128 + interrupted.number
        finally:
            self._stop()

    def start(self) -> None:
        """Start every rank."""
        environments = [self.environment(rank) for rank in range(self.ranks)]
        promoted = {} if self.spares is None else self.spares.promote(environments)
        apart = self.log_dir.with_name(SPARE_LOGS)
        for rank, environment in enumerate(environments):
            if rank in promoted:
                for path in _logs(apart, rank):
                    path.replace(self.log_dir / path.name)
                self._children.append(promoted[rank])
            else:
                for path in filter(Path.exists, _logs(apart, rank)):  # the log of a spare that has failed
                    path.replace(self.log_dir / f"spare-{path.name}")
                self._children.append(self._spawn(self.log_dir, rank, environment))
            if rank == 0:
                self.show(*_logs(self.log_dir, rank))
        if self.spares is not None and self.refills:
            apart.mkdir(exist_ok=True)
            self.spares.refill(functools.partial(self._spawn, apart), environments)

    def _spawn(self, logs: Path, rank: int, environment: Mapping[str, str]) -> Child:
        out, err = _logs(logs, rank)
        with out.open("wb") as first, err.open("wb") as second:
            whole = {**os.environ, **environment}
            return Child(self.command, output=(first, second), env=whole, grace=_CLOSE_SECONDS)

    @property
    def started(self) -> int:
        """How many ranks were started."""
        return len(self._children)

    def show(self, out: Path, err: Path, *, every: float | None = _SHOW_SECONDS) -> None:
        """Show what is written to these files from now on, looking `every` so many seconds, or when woken."""
        self.shown = [Shown(out, sys.stdout, every), Shown(err, sys.stderr, every)]

    def ended_now(self) -> dict[int, int]:
        """The status of each rank that has ended, those already in `ended` left out or not."""
        found = {rank: child.poll() for rank, child in enumerate(self._children) if rank not in self.ended}
        return {rank: status for rank, status in found.items() if status is not None}

    def send_signal(self, number: signal.Signals) -> None:
        """Send a signal to every rank."""
        for child in self._children:
            child.send_signal(number)

    def end(self) -> None:
        """End every rank with what it started."""
        end(self._children)

    def wait(self, seconds: float) -> None:
        """Wait until a rank may have ended, at most so long."""
        time.sleep(min(seconds, _POLL_SECONDS))

    def look(self, known: Mapping[int, Counts]) -> list[Signs]:
        """Signs of progress of the ranks; known: those of the last look."""
        return signs(self.flights, known=known)

    def report(self) -> HangReport:
        """Say what the ranks wait for. Raises DataError if none keeps a record."""
        return examine(self.flights)

    def _watch(self, deadline: float | None) -> int:
        """Wait until all have ended, or one of them failed."""
        while len(self.ended) < self.ranks:
            self._poll()
            if any(status and not self._ended_as_requested(status) for status in self.ended.values()):
                return self._end_after_failure()
            if self._watchdog is not None and self._watchdog.stalled():
                self._examine()
                if self.restarts and self.passed_on is None:
                    self.died = time.time()
                    self.death = f"no rank has made progress for {self._watchdog.seconds:g} s"
                    self.send_signal(AT_ONCE)  # a stopped one hears nothing else
                self._stop()
                return self._explain_hang(self._watchdog.seconds)
            if deadline is not None and time.monotonic() > deadline:
                self._stop()
                return self._explain_timeout()
            self.wait(_WAIT_SECONDS if self._watchdog is None else min(_WAIT_SECONDS, self._watchdog.pause))
        return max(self.ended.values())

    def _end_after_failure(self) -> int:
        """End the others; the status of the rank that failed first."""
        self.died, restarts = time.time(), self.restarts and self.passed_on is None
        failed = None if self.passed_on is not None else self._out_of_memory()
        if failed is not None or (restarts and min(self.ended.values()) < 0):
            self.send_signal(AT_ONCE)  # the cause is known, and they would wait for the dead one
        else:
            self._examine()  # while the others are where they are
            self._grace(_GRACE_SECONDS)
        self._stop()
        if failed is not None and self.smaller_plan is not None:
            self.death = self.smaller_plan(failed)
            self.replanned = self.death is not None
        elif restarts:
            self.death = self._death()
        return self.explain_failure() if self.death is None else self.ends()[0].shell_status

    def _out_of_memory(self) -> int | None:
        """Return the step in which a rank ran out of memory, if one has posted that. It may not have ended
        yet: others end as soon as it leaves them."""
        steps = [(end.error or {}).get("out_of_memory") for end in self.ends()]
        return next((step for step in steps if isinstance(step, int)), None)

    def _death(self) -> str | None:
        """Return what ended the ranks; None: an error of their own, which would happen again."""
        first = self.ends()[0]
        error = first.error or {}
        own = first.status > 0 if first.error is None else not (error.get("peer") or error.get("outside"))
        if own:
            return None
        lost = "lost a process of its own" if error.get("outside") else "lost another one"
        how = first.how() if first.status < 0 else lost
        return f"rank {first.rank} of {self.ranks} {how}{first.where()}"

    def _examine(self) -> None:
        """Look where the ranks are, before any of them is ended."""
        if self._watchdog is None:
            return
        with contextlib.suppress(DataError):  # none has come so far as to keep a record
            self._hang = name_recording(self.report())
            text = json.dumps(self._hang.as_dict(), indent=2)
            write_atomic(self.log_dir / HANG_FILE, text + "\n")

    def _pass_on(self, number: signal.Signals) -> None:
        """Ask every rank to end."""
        self.passed_on = number
        self.send_signal(number)

    def _ended_as_requested(self, status: int) -> bool:
        """Whether a rank with this status has stopped gracefully because of a signal."""
        signals = [self.passed_on] if self.passed_on else [signal.SIGINT, signal.SIGTERM]
        return self.graceful and status in [128 + number for number in signals]

    def _poll(self) -> None:
        """Note which ranks have ended."""
        for rank, status in self.ended_now().items():
            if rank not in self.ended:
                self.ended[rank] = status
                self.store.set(ENDED_KEY.format(rank=rank), RankEnd(rank=rank, status=status).how())

    def _grace(self, seconds: float) -> None:
        until = time.monotonic() + seconds
        while len(self.ended) < self.ranks and time.monotonic() < until:
            self.wait(_WAIT_SECONDS)
            self._poll()

    def _stop(self) -> None:
        """End the ranks that still run, with their children, and show rank 0's output to its end."""
        if self._closed:
            return
        self._closed = True
        self._poll()
        self.stopped |= set(range(self.started)) - set(self.ended)
        try:
            self.end()  # at once, should a second Ctrl-C come
        finally:
            self.ended |= dict.fromkeys(self.stopped, -signal.SIGTERM)
            for shown in self.shown:
                shown.finish()

    def environment(self, rank: int) -> dict[str, str]:
        """What a rank needs to find the others."""
        environment = {
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "WORLD_SIZE": str(self.ranks),
            "LOCAL_WORLD_SIZE": str(self.ranks),
            "GROUP_RANK": "0",
            "MASTER_ADDR": self.address,
            "MASTER_PORT": str(self._port),
            # every rank connects to the store above instead of rank 0 opening one
            "TORCHELASTIC_USE_AGENT_STORE": "True",
            LAUNCHER_PID: str(os.getpid()),
            SECRET: self._secret,
            **self.extra,
        }
        if self._watchdog is not None:
            environment[FLIGHT_DIR] = str(self.flights)
        if "OMP_NUM_THREADS" not in os.environ:
            environment["OMP_NUM_THREADS"] = str(threads_per_rank(self.ranks))
        if "GLOO_SOCKET_IFNAME" not in os.environ and Path("/sys/class/net/lo").exists():
            environment["GLOO_SOCKET_IFNAME"] = "lo"  # one machine: the host's name need not resolve
        return environment

    # --- reports --------------------------------------------------------------------------------------------

    def ends(self) -> list[RankEnd]:
        """Return how all ranks ended, the one to blame first: one that a signal killed (it could post no
        error), then by the time of their errors, those that only lost a peer last."""
        ends = [
            RankEnd(
                rank=rank,
                status=self.ended.get(rank, 0),
                stopped=rank in self.stopped,
                error=self._read(ERROR_KEY, rank),
                position=self._read(POSITION_KEY, rank),
            )
            for rank in range(self.ranks)
        ]

        seen = list(self.ended)

        def blame(end: RankEnd) -> tuple[bool, bool, bool, bool, float, int]:
            error = end.error or {}
            killed = end.status < 0
            when = float(error.get("time", 0.0))
            order = seen.index(end.rank) if killed and end.rank in seen else end.rank
            return (end.stopped, end.status == 0, not killed, bool(error.get("peer")), when, order)

        return sorted(ends, key=blame)

    def _read(self, key: str, rank: int) -> Mapping[str, Any] | None:
        name = key.format(rank=rank)
        try:
            if not self.store.check([name]):
                return None
            value = json.loads(self.store.get(name))
        except (RuntimeError, ValueError):
            return None
        return value if isinstance(value, dict) else None

    def explain_failure(self) -> int:
        """Print which rank failed first, and how; its status."""
        first, *others = self.ends()
        zero = next(end for end in (first, *others) if end.rank == 0)
        same = first is zero or (first.status > 0 and _message(first) is not None)
        if zero.status > 0 and _printed(zero) and same and _message(zero) == _message(first):
            # It ended in order and its message has been shown already: a wrong flag, a verdict that failed.
            if (zero.error or {}).get("type") == "RankError":  # it waited in vain: where are the others?
                where = [f"rank {end.rank} {end.how()}{end.where()}" for end in (first, *others)]
                self._print(where + self._hang_lines())
            return zero.status
        lines = [f"lockstep: rank {first.rank} of {self.ranks} {first.how()}{first.where()}"]
        lines += [f"  | {line}" for line in self._exit_report(first)]
        lines += [f"rank {end.rank} {end.how()}{end.where()}" for end in others]
        waited = (first.error or {}).get("type") in _WAITED
        out_of_step = self._hang is not None and self._hang.cause in OUT_OF_STEP
        self._print(lines + self._hang_lines() if waited or out_of_step else lines)
        return first.shell_status

    def _explain_hang(self, seconds: float) -> int:
        lines = [f"lockstep: no rank has made progress for {seconds:g} s; the run was ended"]
        if self._hang is None:
            lines.append(f"none has come so far as to keep a record; what they said is in {self.log_dir}")
        self._print(lines + self._hang_lines())
        return 1

    def _hang_lines(self) -> list[str]:
        return [] if self._hang is None else self._hang.text().splitlines()

    def _explain_timeout(self) -> int:
        lines = [f"lockstep: the {self.ranks} ranks were stopped at the deadline"]
        lines += [f"rank {end.rank} {end.how()}{end.where()}" for end in sorted(self.ends(), key=_rank)]
        self._print(lines)
        return TIMED_OUT

    def _print(self, lines: Sequence[str]) -> None:
        echo("\n".join([*lines, f"logs: {self.log_dir}/rank-*.log"]), file=sys.stderr)

    def _exit_report(self, end: RankEnd) -> list[str]:
        """Its traceback, else the end of what it wrote to stderr."""
        if end.error is not None and end.error.get("text"):
            text = str(end.error["text"])
        else:
            path = self.log_dir / f"rank-{end.rank}.err.log"
            text = path.read_text(encoding="utf-8", errors="replace") if path.exists() else ""
        lines = ["".join(c if c.isprintable() or c == "\t" else "?" for c in x) for x in text.splitlines()]
        return lines[-_TRACEBACK_LINES:]


def _logs(folder: Path, rank: int) -> tuple[Path, Path]:
    """Where a rank's stdout and stderr go."""
    return folder / f"rank-{rank}.log", folder / f"rank-{rank}.err.log"


def _rank(end: RankEnd) -> int:
    return end.rank


def _printed(end: RankEnd) -> bool:
    """Whether the command has printed its error itself."""
    return end.error is None or bool(end.error.get("printed"))


def _message(end: RankEnd) -> str | None:
    """The last line of its error, which is the same on all ranks where all fail for the same reason, such as
    a bad setting; None: it posted none."""
    lines = str((end.error or {}).get("text", "")).splitlines()
    return lines[-1] if lines else None


class LaunchInterrupted(KeyboardInterrupt):
    """A signal that ends the launcher came."""

    def __init__(self, number: signal.Signals) -> None:
        super().__init__(number.name)
        self.number = number


@contextlib.contextmanager
def signals_raised() -> Iterator[None]:
    """Inside, a signal that ends the launcher raises LaunchInterrupted, unless it is ignored (nohup)."""

    def interrupt(number: int, _: object) -> NoReturn:
        raise LaunchInterrupted(signal.Signals(number))

    previous = {n: signal.getsignal(n) for n in _SIGNALS}
    previous = {n: handler for n, handler in previous.items() if handler not in (signal.SIG_IGN, None)}
    if threading.current_thread() is not threading.main_thread():
        previous = {}  # where Python runs handlers, and which alone may set them
    for number in previous:
        signal.signal(number, interrupt)
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
