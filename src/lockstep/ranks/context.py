"""The context of a rank: its process groups, device and deadline, small collectives with the other ranks, and
the report of the error that ends it.

    with init_ranks(device="cpu") as ranks:
        first_losses = ranks.gather(loss, what="the first loss")

`lockstep.ranks.launch`, torchrun or the deepspeed launcher start the ranks, and pass RANK, WORLD_SIZE and the
address of a store in the environment. A single process uses `RankContext.alone()`.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import queue
import re
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from types import TracebackType
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist
from pydantic import JsonValue
from torch._C._distributed_c10d import HashStore, PrefixStore, Store

from lockstep import errors
from lockstep.common_errors import wrong_variable
from lockstep.errors import ConfigError, LockstepError
from lockstep.observe import flight
from lockstep.observe.files import file_errors
from lockstep.observe.memory_plans import OutOfMemory
from lockstep.observe.text import echo
from lockstep.processes.supervisor import name_process
from lockstep.ranks import process_group
from lockstep.ranks.collectives import record_collectives
from lockstep.ranks.environment import FLIGHT_DIR, LAUNCHER_PID
from lockstep.ranks.launch import ERROR_KEY, POSITION_KEY, leave
from lockstep.ranks.process_group import RankError as RankError
from lockstep.ranks.process_group import (
    broadcast_object,
    decode_object,
    encode_object,
    gather_bytes,
    gather_objects,
)

T = TypeVar("T")

CONTROL_SECONDS = 60.0
"""Default deadline of a wait for another rank."""
_LISTEN_SECONDS = 0.5
_LOST_PEER = re.compile(
    r"closed by peer|pair closure|Broken pipe|Connection reset|Connection refused|remote process exited"
)


class PeerFailed(RankError):
    """This rank ends because another one failed."""


@dataclass(frozen=True, kw_only=True, slots=True)
class _Failure:
    """An error of one rank, to be sent to the others."""

    kind: str
    text: str
    data: dict[str, Any]
    """Code and fields of a LockstepError."""

    @classmethod
    def of(cls, error: Exception) -> _Failure:
        # another's text may be no Unicode
        text = str(error).encode("utf-8", errors="backslashreplace").decode("utf-8")
        data = error.data if isinstance(error, LockstepError) else {}
        return cls(kind=type(error).__name__, text=text, data=data)

    def as_error(self, rank: int, what: str) -> LockstepError:
        """Return the error for every rank, with its own class if that is in lockstep.errors."""
        known = errors.from_another_process(self.kind, f"rank {rank}: {self.text}", self.data)
        text = f"{what}: rank {rank} failed with {self.kind}: {self.text}"
        return known or PeerFailed(text, code="peer-failed")


@dataclass(frozen=True, kw_only=True)
class RankContext:
    """A rank's number, device, groups and deadline. As a context manager it posts an error that leaves it to
    the store, so that the launcher can name the rank that failed first."""

    rank: int
    world_size: int
    local_rank: int
    device: torch.device
    backend: str
    """Backend of the default process group: "gloo" or "cpu:gloo,cuda:nccl"."""
    control: dist.ProcessGroup | None
    """A gloo group on the host for small messages under a deadline, whatever the device. None: a single
    process."""
    store: Store
    """Shared by all ranks. A store hosted by the launcher outlives every rank."""
    seconds: float
    """Deadline of every wait for another rank."""
    description: str
    """One line: ranks, backend, devices."""
    calls: Iterator[int] = field(default_factory=itertools.count, repr=False, compare=False)
    """Numbers for what all ranks do in the same order, such as making a queue."""

    @classmethod
    def alone(cls, device: str | torch.device = "cpu") -> RankContext:
        """Return the context of a single process, without a process group."""
        return cls(
            rank=0,
            world_size=1,
            local_rank=0,
            device=torch.device(device),
            backend="none",
            control=None,
            store=HashStore(),
            seconds=CONTROL_SECONDS,
            description="1 process",
        )

    @property
    def is_first(self) -> bool:
        """Whether this is rank 0, the only one that writes files and to the terminal."""
        return self.rank == 0

    @property
    def on_one_machine(self) -> bool:
        """Whether all ranks are on this machine, according to the launcher."""
        return local_ranks(os.environ) == self.world_size

    # --- small collectives: every method is collective ------------------------------------------------------

    def gather(self, value: T, kind: Any = JsonValue, *, what: str) -> list[T]:
        """Return every rank's value, by rank.

        Args:
            kind: type of the values (see `ranks.process_group`); other types are refused.
            what: the purpose, for the error of a rank that waits in vain, and for the launcher.

        Raises:
            RankError: a rank did not arrive within `seconds`, or is gone, or a value has another type.
        """
        if self.control is None:
            return [value]
        return self.wait_for(lambda: gather_objects(value, kind, group=self.control), what)

    def broadcast(self, value: T, kind: Any = JsonValue, *, what: str) -> T:
        """Return rank 0's value on every rank. Raises as `gather`."""
        if self.control is None:
            return value
        return self.wait_for(lambda: broadcast_object(value, kind, group=self.control), what)

    def any(self, flag: bool, *, what: str) -> bool:
        """Return whether the flag is True on any rank. Raises RankError."""
        return any(self.gather(flag, bool, what=what))

    def gather_results(self, make: Callable[[], T], kind: Any = JsonValue, *, what: str) -> list[T]:
        """Call `make`, which must not use collectives, on every rank, and return the results by rank.

        Args:
            kind: type of the results, as in `gather`.

        Raises:
            LockstepError: the same on every rank if it fails on one: a RewardError of rank 1 becomes a
            RewardError
                of all. Other exceptions are raised unchanged on their own rank, and as PeerFailed on the
                others.
        """
        if self.control is None:
            return [make()]
        error: Exception | None = None
        outcome = tuple[kind | None, _Failure | None]
        try:
            mine = encode_object((make(), None), outcome)
        except Exception as raised:  # not swallowed: raised below, here and on every other rank
            error, mine = raised, encode_object((None, _Failure.of(raised)), outcome)
        parts = self.wait_for(lambda: gather_bytes(mine, group=self.control), what)
        everyone = [decode_object(part, outcome, sender=rank) for rank, part in enumerate(parts)]
        for rank, (_, failure) in enumerate(everyone):
            if failure is not None:
                if rank == self.rank and not isinstance(error, LockstepError):
                    assert error is not None
                    raise error
                raise failure.as_error(rank, what) from error
        return [cast(T, value) for value, _ in everyone]

    def on_rank_zero(self, make: Callable[[], T], kind: Any = JsonValue, *, what: str) -> T:
        """Call `make`, which must not use collectives, on rank 0, and return its result on every rank. Raises
        as `gather_results`."""
        return cast(
            T, self.gather_results(lambda: make() if self.is_first else None, kind | None, what=what)[0]
        )

    @contextlib.contextmanager
    def fail_together(self, what: str) -> Iterator[None]:
        """Make the body, which must not use collectives, fail on every rank if it fails on one. Raises as
        `gather_results`."""
        if self.control is None:
            yield
            return
        error: Exception | None = None
        try:
            yield
        except Exception as raised:  # raised again by `fail`
            error = raised

        def fail() -> None:
            if error is not None:
                raise error

        self.gather_results(fail, what=what)

    def require_same(self, values: Mapping[str, Any], *, what: str) -> None:
        """Raise on every rank unless each value is equal on all of them.

        Raises:
            ConfigError: names the first values that differ, with the ranks of each.
        """
        own = {name: repr(value) for name, value in values.items()}
        everyone = self.gather(own, dict[str, str], what=f"comparing {what}")
        names = dict.fromkeys(name for values_of_rank in everyone for name in values_of_rank)
        differ = [n for n in names if any(f.get(n) != everyone[0].get(n) for f in everyone)]
        if differ:
            lines = [f"  {name}: {_by_rank([f.get(name) for f in everyone])}" for name in differ[:10]]
            more = f"\n  and {len(differ) - 10} more" if len(differ) > 10 else ""
            raise ConfigError(
                f"ranks-differ: the ranks differ in {what}; start all of them with the same command, files "
                "and installed versions:\n" + "\n".join(lines) + more
            )

    def at(self, what: str, *, step: int = -1) -> None:
        """Post what this rank is about to do; the launcher prints it if a rank dies. step -1: before the
        first step."""
        where = f"step {step}" if step >= 0 else "the start"
        position = {"rank": self.rank, "step": step, "what": what, "time": time.time()}
        self.store.set(
            POSITION_KEY.format(rank=self.rank), json.dumps(position | {"text": f"{where}: {what}"})
        )

    def wait_for(self, collective: Callable[[], T], what: str) -> T:
        """Run a collective of `control` in a thread: gloo waits outside Python, and this thread must still
        receive Ctrl-C. Raises RankError, as `gather`."""
        ended: queue.SimpleQueue[tuple[T | None, BaseException | None]] = queue.SimpleQueue()

        def run() -> None:
            try:
                ended.put((collective(), None))
            except BaseException as raised:  # raised again below, in the thread that waits
                ended.put((None, raised))

        with flight.purpose(what):
            threading.Thread(target=run, name=what, daemon=True).start()
            while True:  # in steps: a signal that comes right before a wait is only seen at its end
                with contextlib.suppress(queue.Empty):
                    result, error = ended.get(timeout=_LISTEN_SECONDS)
                    break
        if error is None:
            return cast(T, result)
        if isinstance(error, RankError):
            where = f"rank {self.rank} of {self.world_size}, at {what}"
            raise error.with_message(f"{where}: {error}", kind=RankError) from error
        if isinstance(error, RuntimeError):  # gloo's errors are RuntimeErrors
            line = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
            late = f"a rank did not arrive within {self.seconds:g} s"
            reason = "another rank is gone" if is_peer_failure(error) else late
            raise RankError(
                f"rank {self.rank} of {self.world_size}, at {what}: {reason} (torch says: {line})",
                code="peer-failed" if is_peer_failure(error) else "deadline",
            ) from error
        raise error

    # --- the end --------------------------------------------------------------------------------------------

    def __enter__(self) -> RankContext:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None and not isinstance(error, (SystemExit, KeyboardInterrupt)):
            self.post_error(error)
            self._note_out_of_memory(error)
        self.close(failed=error is not None)

    def post_error(self, error: BaseException) -> None:
        """Post the error that ends this rank to the store."""
        text, noted = "".join(traceback.format_exception(error)), OutOfMemory.of(error)
        value = {
            "time": time.time(),
            "type": type(error).__name__,
            "code": getattr(error, "code", None),
            "text": text[-20_000:],
            "peer": is_peer_failure(error),
            "outside": getattr(error, "from_outside", False),
            "out_of_memory": None if noted is None else noted.step,
            "printed": isinstance(error, LockstepError) and not reported_by_launcher(error),
        }
        try:
            self.store.set(ERROR_KEY.format(rank=self.rank), json.dumps(value))
        except RuntimeError as gone:  # the store's host has died; the log still has it
            echo(f"rank {self.rank}: the store is gone ({gone}); the error was:\n{text}", file=sys.stderr)

    def _note_out_of_memory(self, error: BaseException) -> None:
        """Note on an error of this rank that it follows from another's, after which the run goes on."""
        with contextlib.suppress(RuntimeError):  # the store is gone
            for key in (ERROR_KEY.format(rank=rank) for rank in range(self.world_size)):
                step = (
                    json.loads(self.store.get(key)).get("out_of_memory") if self.store.check([key]) else None
                )
                if step is not None and OutOfMemory.of(error) is None:
                    OutOfMemory(step=step, run_dir="").note(error)

    def close(self, *, failed: bool = False) -> None:
        """Leave the process groups. After a failure this waits for no rank: the process is about to end (see
        `leave`), and tearing down a group whose collectives are out of step can block."""
        if self.control is None or not dist.is_initialized():
            return
        if failed:
            sys.excepthook = _leave_after(sys.excepthook)
        else:
            dist.destroy_process_group()
            flight.stop()


def _leave_after(hook: Callable[..., object]) -> Callable[..., object]:
    """Return a sys.excepthook that shows an uncaught error with `hook` and ends the process."""
    if getattr(hook, "leaves", False):  # another context of this process has failed before
        return hook

    def show_and_leave(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        if not _run_goes_on(error):
            hook(kind, error, trace)
        leave(128 + signal.SIGINT if issubclass(kind, KeyboardInterrupt) else 1)

    vars(show_and_leave)["leaves"] = True
    return show_and_leave


def is_peer_failure(error: BaseException) -> bool:
    """Return whether the error only says that another rank is gone."""
    if isinstance(error, PeerFailed):
        return True
    return isinstance(error, RuntimeError) and _LOST_PEER.search(str(error)) is not None


def reported_by_launcher(error: BaseException) -> bool:
    """Return whether the launcher reports this error instead of the command: another rank has gone, and
    `lockstep.ranks.launch`, which saw how, names it; or the run goes on with a smaller memory plan."""
    return _run_goes_on(error) or (LAUNCHER_PID in os.environ and is_peer_failure(error))


def _run_goes_on(error: BaseException) -> bool:
    """Return whether the launcher goes on with a smaller memory plan after this error."""
    several = os.environ.get("WORLD_SIZE", "1") != "1"  # one process does that itself
    return LAUNCHER_PID in os.environ and several and OutOfMemory.of(error) is not None


def _by_rank(values: list[str | None]) -> str:
    """Format values by rank, such as "'adamw' on rank 0, 'sgd' on ranks 1, 2"."""
    ranks: dict[str, list[int]] = {}
    for rank, value in enumerate(values):
        ranks.setdefault(str(value), []).append(rank)
    listed = {
        value: f"rank{'s' if len(on) > 1 else ''} {', '.join(map(str, on))}" for value, on in ranks.items()
    }
    return ", ".join(f"{value} on {on}" for value, on in listed.items())


def init_ranks(
    *,
    device: str = "cpu",
    seconds: float = CONTROL_SECONDS,
) -> RankContext:
    """Connect to the other ranks.

    Args:
        device: "cpu" or "cuda"; with "cuda" local rank r takes GPU r. More ranks than GPUs share them, over
            gloo, because NCCL refuses two ranks on one GPU.
        seconds: deadline of every wait, from here on.

    Raises:
        ConfigError: the environment is not that of a launcher.
        RankError: the others did not connect in time, or a process that is no rank of this run did.
    """
    environ = os.environ
    rank, world_size, local_rank = (_number(environ, key) for key in ("RANK", "WORLD_SIZE", "LOCAL_RANK"))
    if not 0 <= rank < world_size:
        raise ConfigError(f"wrong-environment: RANK = {rank} is out of range for WORLD_SIZE = {world_size}")
    if FLIGHT_DIR in environ:
        record(Path(environ[FLIGHT_DIR]), rank=rank, world_size=world_size)
    where, backend, description = _placement(device, local_rank, world_size, environ)
    if where.type == "cuda":
        torch.cuda.set_device(where)
    deadline = timedelta(seconds=seconds)
    try:
        if not dist.is_initialized():
            process_group.join(backend, timeout=deadline)
        control = dist.new_group(backend="gloo", timeout=deadline)
        assert isinstance(control, dist.ProcessGroup)
        dist.monitored_barrier(control, timeout=deadline)
        process_group.prove(control)
    except RankError:
        raise
    except RuntimeError as error:  # DistStoreError and DistNetworkError are RuntimeErrors
        raise RankError(
            f"deadline: rank {rank} of {world_size}: the other ranks did not join within {seconds:g} s. "
            "Start each of them with the same WORLD_SIZE, MASTER_ADDR and MASTER_PORT; check their logs. "
            f"torch says: {error}"
        ) from error
    store = _store()
    # Ranks that connect again over the same store need other names for their calls.
    turn = int(store.add(f"contexts/{rank}", 1))
    return RankContext(
        rank=rank,
        world_size=world_size,
        local_rank=local_rank,
        device=where,
        backend=backend,
        control=control,
        store=store,
        calls=itertools.count(turn << 32),
        seconds=seconds,
        description=description,
    )


def record(folder: Path, *, rank: int, world_size: int) -> None:
    """Have this process keep a flight record (lockstep.observe.flight), unless it does already.

    Raises:
        ConfigError: its file cannot be made, such as on a full disk.
    """
    with file_errors(folder, ConfigError, "write"):
        flight.start(folder, rank=rank, world_size=world_size)
    if world_size > 1:  # a launcher started it; a program of the user's keeps its name
        name_process(f"rank{rank}" if rank < 100 else f"r{rank}")  # six characters fit
    record_collectives()


def local_ranks(environ: Mapping[str, str]) -> int | None:
    """Return how many of the ranks are on this machine; None: the launcher does not say."""
    # deepspeed's launcher says LOCAL_SIZE
    count = environ.get("LOCAL_WORLD_SIZE") or environ.get("LOCAL_SIZE")
    return None if count is None else int(count)


def _number(environ: Mapping[str, str], key: str) -> int:
    value = environ.get(key)
    if value is None and key == "LOCAL_RANK":
        value = environ.get("RANK")
    if value is None or not value.isdecimal():
        fix = (
            "start the ranks with --ranks N, torchrun or deepspeed, which set RANK, WORLD_SIZE and LOCAL_RANK"
        )
        raise wrong_variable(key, value, f"is not a number; {fix}")
    return int(value)


def _placement(
    device: str, local_rank: int, world_size: int, environ: Mapping[str, str]
) -> tuple[torch.device, str, str]:
    """Device, backend and a line that describes both."""
    if device != "cuda":
        return torch.device(device), "gloo", f"{world_size} ranks on {device}, gloo"
    gpus = torch.cuda.device_count()
    if gpus == 0:
        raise ConfigError(
            "missing-device: device = 'cuda' on several ranks, but this machine has no visible GPU; set the "
            "device to cpu"
        )
    local = local_ranks(environ) or world_size
    if local > gpus:
        return (
            torch.device("cuda", local_rank % gpus),
            "gloo",
            f"{world_size} ranks on {gpus} GPU{'s' if gpus > 1 else ''}: several ranks share a GPU, so "
            "collectives go through gloo and the host (NCCL refuses that); times are not those of a real job",
        )
    return (
        torch.device("cuda", local_rank),
        "cpu:gloo,cuda:nccl",
        f"{world_size} ranks, one GPU each, nccl",
    )


def _store() -> Store:
    """The launcher's store, without torch's prefixes, so that the launcher can read it; else the default
    one."""
    if process_group.of_launcher():
        return process_group.launcher_store(timedelta(seconds=10))
    # Private, in torch 2.11 to 2.13: nothing public gives the store that torch has made.
    store: Any = dist.distributed_c10d._get_default_store()
    return PrefixStore("lockstep", store)
