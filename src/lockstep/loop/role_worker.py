"""The trainer's side of remote roles, which run in a separate process beside each rank.

    rank 0 ── call(name, arguments) ──► process of rank 0 ─┐ one SPMD group,
    rank 1 ── call(name, arguments) ──► process of rank 1 ─┘ called by all ranks alike

A call has a deadline and an idempotency key: after a broken connection it is repeated under the same key, and
a process that has done it already repeats its reply. Errors come back as their own class, with the names of
the roles. The processes are Children (lockstep.processes) and never outlive their ranks. A process that dies
is restarted and called again, unless trained weights died with it. A process with a dedicated GPU can be
called early (`begin`), so that it computes while its rank does.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import logging
import os
import secrets
import socket
import threading
import time
import uuid
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lockstep.config.cluster import ClusterConfig
from lockstep.config.load import dump_toml
from lockstep.config.run import GRPORun
from lockstep.engine.remote import http
from lockstep.engine.remote.http import HttpClient, HttpError, Timeout, Unreachable
from lockstep.engine.remote.server import (
    LOOPBACK,
    ServerProcess,
    ServerSpec,
    free_port,
    masked,
    new_token,
    own_program,
    server_environment,
    server_gpus,
)
from lockstep.errors import EngineError, TrainError, from_another_process
from lockstep.loop.distributed import resume_command
from lockstep.loop.machine import layout_here
from lockstep.loop.resolve import Resolved
from lockstep.observe.files import write_atomic
from lockstep.observe.text import printable_lines
from lockstep.processes.programs import ROLE_SERVER, python
from lockstep.protocols.reward import RewardInput
from lockstep.ranks.context import RankContext, local_ranks
from lockstep.ranks.environment import LAUNCHER_PID, SECRET
from lockstep.ranks.process_group import host_store
from lockstep.schema.batch import PackedBatch, PlannedRows, PolicyBatch, RolloutSample, SharedRows
from lockstep.wire import buckets
from lockstep.wire.server_token import TOKEN

log = logging.getLogger(__name__)

_TRIES = 3
"""Attempts at a call while the process lives but breaks the connection."""
_LOOK_SECONDS = 1.0
"""Interval at which a waiting rank checks whether the process of another rank is dead."""
_DEATH_SECONDS = 2.0
"""After a broken connection: how long to wait for the death of the process to show."""
_CARRIED = ("LOCKSTEP_CACHE", "CUBLAS_WORKSPACE_CONFIG", "PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
"""Variables that are passed on from the trainer, besides those that every server gets."""
_LOST = "(it lost another process of its group)"
_SPREAD = {"ref", "value"}
"""Roles whose processes form one group across the ranks."""


class RoleWorkerDied(TrainError):
    """A remote process has ended, or has lost another one of its group."""


class RolesLost(TrainError):
    """Trained weights are lost, or the process cannot be restarted here."""

    from_outside = False
    """Whether a signal killed the process: with cluster.peer_copy the ranks are then restarted."""


class _LostElsewhere(Exception):
    """The process of another rank is dead, so this rank's process may never reply."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Reply:
    """The outcome of a call: a value or a death."""

    value: Any = None
    death: RoleWorkerDied | None = None


class RoleWorker:
    """A group of remote roles, which share a process outside the trainer's.

    Args:
        roles: one of run.remote_groups.
        resolved: the trainer's run.
        work_dir: parent of this group's folder, which holds the log and the description of the process.
        folder: the run's, for the command that resumes it; None: unknown.
    """

    def __init__(
        self,
        roles: Sequence[str],
        resolved: Resolved[GRPORun],
        *,
        ranks: RankContext,
        work_dir: Path,
        folder: Path | None = None,
    ) -> None:
        run, axes = resolved.run, resolved.axes
        assert run.cluster is not None
        self.roles = tuple(roles)
        self.restarts = 0
        """Restarts after a death."""
        self._config: ClusterConfig = run.cluster
        self._ranks, self._folder = ranks, folder
        self._grouped = ranks.world_size > 1 and bool(_SPREAD & set(self.roles))
        self._about = {"run": dump_toml(resolved.given), "axes": axes, "roles": self.roles}
        own = work_dir / "+".join(self.roles) / (f"rank-{ranks.rank}" if ranks.world_size > 1 else "")
        gpus: dict[str, str] = {}
        if resolved.device.startswith("cuda"):
            gpus = gpus_of_group(run, run.remote_groups.index(self.roles), ranks=ranks)
        self._server = _server(self.name, run.cluster, own, gpus=gpus)
        spec = self._server.spec
        headers = {"Authorization": f"Bearer {spec.token}"}
        self._client = HttpClient(spec.url, name=self.name, headers=headers)
        self._store: Any = None
        """The store where the processes of all ranks meet; only rank 0 has it."""
        self._begun: dict[str, Future[Reply]] = {}
        """Calls that have begun, by name."""
        self._closed = False

    @property
    def name(self) -> str:
        """The group in messages."""
        return f"remote process of {' + '.join(self.roles)}"

    def start(self) -> Mapping[str, Any]:
        """Start the processes and load the roles. Collective. Returns their description.

        Raises:
            LockstepError: on every rank, if a process does not start or a role cannot be loaded.
        """
        with self._ranks.fail_together(f"starting the {self.name}"):
            self._spawn()
        meeting = self._meeting()
        with self._ranks.fail_together(f"loading the {self.name}"):
            return self._load(meeting)

    def begin(self, name: str, **arguments: Any) -> None:
        """Send a request whose result the next `call` of this name, with the same arguments, waits for. Every
        rank must do so. Send nothing else to these roles until then: each rank sends on its own, and the
        order of calls must be the same on all ranks."""
        begun: Future[Reply] = Future()
        self._begun[name] = begun

        def ask() -> None:
            try:
                begun.set_result(self._ask(name, arguments, seconds=self._config.remote_seconds))
            except BaseException as error:  # raised by the `call` that waits for it
                begun.set_exception(error)

        # A daemon thread: a run that fails does not wait for it.
        threading.Thread(target=ask, name=f"asks the {self.name}", daemon=True).start()

    def call(self, name: str, *, alone: bool = False, **arguments: Any) -> Any:
        """Send a request, unless `begin` has sent it, and return the result. Collective unless `alone`.

        Args:
            alone: call only this rank's process; for roles that are complete in each process.

        Raises:
            LockstepError: the role's own error, with its class and code; or TrainError: no reply within
                cluster.remote_seconds, or the process died and cannot be restarted.
        """
        while True:
            begun = self._begun.pop(name, None)
            if begun is None:
                reply = self._ask(name, arguments, seconds=self._config.remote_seconds)
            else:
                reply = begun.result()
            deaths = [None if reply.death is None else str(reply.death)]
            if not alone:
                deaths = self._ranks.gather(deaths[0], str | None, what=f"the {self.name}: {name}")
            died = [death for death in deaths if death is not None]
            if not died:
                return reply.value
            # A process that only lost another one says so: the death of the other one is the cause.
            self._start_again(min(died, key=lambda text: _LOST in text), doing=name, alone=alone)

    def describe(self) -> dict[str, Any]:
        """Describe the process of this rank, for the manifest."""
        spec = self._server.spec
        return {
            "roles": list(self.roles),
            "url": spec.url,
            "pid": self._server.pid,
            "command": list(spec.command),
            "environment": masked(spec.environment),
            "log": str(spec.log),
        }

    def close(self) -> None:
        """End the process of this rank. Idempotent."""
        self._closed = True
        self._server.stop()
        self._store = None

    # --- a call ---------------------------------------------------------------------------------------------

    def _ask(self, name: str, arguments: Mapping[str, Any], *, seconds: float) -> Reply:
        about = {"call": name, "key": uuid.uuid4().hex, "seconds": seconds, "arguments": dict(arguments)}
        body, deadline = packed(about), time.monotonic() + seconds
        for tried in range(1, _TRIES + 1):
            try:
                reply = self._post(body, deadline=deadline)
            except _LostElsewhere:
                return Reply(death=RoleWorkerDied(f"peer-failed: the {self.name}, at {name} {_LOST}"))
            except Unreachable as sign:
                ended = self._server.wait_ended(_DEATH_SECONDS)
                if ended is not None:
                    if not self._closed:  # else nobody waits for this call any more
                        self._announce_death()
                    text = f"the {self.name} {ended}, at {name}. {self._server.log_text()}"
                    return Reply(death=RoleWorkerDied(text, code="process-died", roles=self.roles))
                if tried < _TRIES:
                    log.warning("the %s broke the connection at %s; asking again: %s", self.name, name, sign)
                    continue
                raise TrainError(
                    f"unreachable: the {self.name} is running but broke the connection {_TRIES} times, at "
                    f"{name}: {sign}. {self._server.log_text()}",
                    roles=self.roles,
                ) from sign
            except Timeout as sign:
                self._server.ask_for_traceback()
                setting = "remote_start_seconds" if name == "build" else "remote_seconds"
                raise TrainError(
                    f"deadline: the {self.name} did not answer within cluster.{setting} = {seconds:g} s, at "
                    f"{name}; raise the setting if the work is merely slow. {self._server.log_text()}",
                    setting=f"cluster.{setting}",
                    roles=self.roles,
                ) from sign
            except HttpError as error:
                raise error.with_message(str(error), kind=TrainError) from error
            if reply.status != 200:
                raise TrainError(
                    f"bad-reply: the {self.name} answered {name} with status {reply.status}: "
                    f"{reply.error_text()}"
                )
            return self._answer(unpacked(reply.body), name)
        raise AssertionError("the last try returns or raises")

    def _post(self, body: bytes, *, deadline: float) -> http.Reply:
        """Send a request. Raises HttpError; _LostElsewhere: another rank announced the death of its
        process."""
        with self._client.batch(limit=1) as batch:
            batch.submit(None, "/call", body)
            while (left := deadline - time.monotonic()) > 0:
                for _, reply in batch.poll(min(left, _LOOK_SECONDS)):
                    if isinstance(reply, HttpError):
                        raise reply
                    return reply
                # Not every collective notices a dead process: NCCL keeps waiting.
                if self._grouped and self._ranks.store.check([self._death]):
                    raise _LostElsewhere
        raise Timeout(f"deadline: {self.name} did not answer in time")

    @property
    def _death(self) -> str:
        """Key of the store under which ranks announce the death of a process of this start."""
        return f"dead/{self.name}/{self._server.starts}"

    def _announce_death(self) -> None:
        if self._grouped:
            self._ranks.store.set(self._death, "dead")

    def _answer(self, reply: Mapping[str, Any], name: str) -> Reply:
        """Return the result of a reply, or raise its error."""
        if "value" in reply:
            return Reply(value=reply["value"])
        kind, data = str(reply["kind"]), dict(reply["data"])
        text = f"{self.name}, at {name}: {printable_lines(str(reply['text']))}"
        if reply["lost"]:
            return Reply(death=RoleWorkerDied(f"peer-failed: {text} {_LOST}"))
        if (error := from_another_process(kind, text, data)) is not None:
            raise error.with_message(text, roles=self.roles)
        raise TrainError(f"bad-reply: {text} ({kind}). {self._server.log_text()}", roles=self.roles)

    def _waiting_for(self) -> str | None:
        try:
            self._client.get("/health", seconds=2.0).json()
        except HttpError as error:
            return str(error)
        return None

    # --- start and end --------------------------------------------------------------------------------------

    def _start_again(self, died: str, *, doing: str, alone: bool) -> None:
        """Restart the process. Raises TrainError: trained weights died with it, or too many restarts."""
        lost = None
        if "value" in self.roles:
            lost = "the value model's weights and optimizer since the last checkpoint are lost with it"
        elif alone and self._grouped:
            lost = "it works in a group with the processes of other ranks, so it cannot restart alone"
        elif self.restarts >= self._config.remote_restarts:
            lost = f"it was already restarted {self.restarts} times (cluster.remote_restarts)"
        if lost is not None:
            folder = self._folder
            on = "" if folder is None else f": {resume_command(folder, self._ranks)}"
            first, _, rest = died.partition("\n")
            error = RolesLost(
                f"process-died: {first}\n{lost}. Resume the run{on}" + (f"\n{rest}" if rest else ""),
                roles=self.roles,
                call=doing,
            )
            error.from_outside = " was killed by " in first
            raise error
        self.restarts += 1
        log.warning("%s: restarting it (%d)", died.splitlines()[0], self.restarts)
        if alone:
            self._spawn()
            self._load(None)
        else:
            self.start()

    def _spawn(self) -> None:
        try:
            self._server.start(self._waiting_for)
        except EngineError as error:
            raise error.with_message(str(error), kind=TrainError) from error

    def _load(self, meeting: Mapping[str, str] | None) -> Mapping[str, Any]:
        """Load the roles and return the process's description. Raises RoleWorkerDied, and errors of loading a
        role."""
        about = {**self._about, "threads": torch.get_num_threads(), "meeting": meeting}
        reply = self._ask("build", about, seconds=self._config.remote_start_seconds)
        if reply.death is not None:
            raise reply.death
        loaded: Mapping[str, Any] = reply.value
        return loaded

    def _meeting(self) -> Mapping[str, str] | None:
        """Return the environment in which the processes of all ranks find each other; None: each works alone.
        Collective."""
        if not self._grouped:
            return None

        def host() -> dict[str, str]:
            address = LOOPBACK if self._ranks.on_one_machine else _own_address()
            self._store = host_store(address)
            return {
                "MASTER_ADDR": address,
                "MASTER_PORT": str(self._store.port),
                SECRET: secrets.token_hex(32),
                LAUNCHER_PID: str(os.getpid()),
                "TORCHELASTIC_USE_AGENT_STORE": "True",
            }

        shared = self._ranks.on_rank_zero(host, dict[str, str] | None, what=f"a store for the {self.name}")
        assert shared is not None, "rank 0 has made one"
        local = local_ranks(os.environ) or self._ranks.world_size
        return shared | {
            "RANK": str(self._ranks.rank),
            "WORLD_SIZE": str(self._ranks.world_size),
            "LOCAL_RANK": str(self._ranks.local_rank),
            "LOCAL_WORLD_SIZE": str(local),
        }


def _own_address() -> str:
    """Return the address of this machine on the network of the launcher's store."""
    with contextlib.closing(socket.socket(socket.AF_INET, socket.SOCK_DGRAM)) as probe:
        probe.connect((os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])))  # sends nothing
        return str(probe.getsockname()[0])


def _server(name: str, config: ClusterConfig, work_dir: Path, *, gpus: dict[str, str]) -> ServerProcess:
    """Make the process beside this rank, without starting it.

    Args:
        gpus: environment variables that show it dedicated GPUs.
    """
    port, token = free_port(), new_token()
    carried = {name: os.environ[name] for name in _CARRIED if name in os.environ}
    work_dir.mkdir(parents=True, exist_ok=True)
    path = work_dir.resolve() / "worker.json"
    write_atomic(path, json.dumps({"port": port}))
    return ServerProcess(
        ServerSpec(
            name=name,
            command=(*python(ROLE_SERVER), str(path)),
            environment=server_environment(needed=own_program() | carried | gpus, extra={TOKEN: token}),
            port=port,
            log=work_dir.resolve() / "worker.log",
            start_seconds=config.remote_start_seconds,
            start_setting="cluster.remote_start_seconds",
            token=token,
        )
    )


# Messages between the trainer and remote roles: records, numbers and tensors as bytes, never pickles.
#
#     bytes   content
#     4       n, little endian
#     n       JSON, with name, dtype, shape and offset of each tensor
#     ...     the tensors, one after the other (lockstep.wire.buckets)
#
#     {"value": ..., "tensors": [TensorSpec, ...]}
#
# In `value` a tensor is {"tensor": index}, a record {"record": class, "fields": {...}}, a dict {"dict":
# {...}}; lists come back as tuples. Records are those of RECORDS and no others.


MOST_BYTES = 2**30
"""Limit of one message."""
RECORDS: Mapping[str, type[Any]] = {
    kind.__name__: kind for kind in (PackedBatch, PolicyBatch, RolloutSample, SharedRows, RewardInput)
}
_HEAD = 4
_PLAIN = (str, int, float, bool, type(None))


def packed(value: Any) -> bytes:
    """Return the bytes of plain values, tensors and records, nested in dicts and sequences.

    Raises:
        TrainError: there are more than MOST_BYTES of them.
    """
    tensors: list[Tensor] = []
    encoded = _encode(value, tensors)
    layout = buckets.Layout(MOST_BYTES)
    for index, tensor in enumerate(tensors):
        if layout.place(str(index), tensor) is None or layout.num_bytes > MOST_BYTES:
            raise _too_large()
    data = torch.zeros(layout.num_bytes, dtype=torch.uint8)
    if tensors:
        buckets.pack(data, layout.specs, tensors)
    head = json.dumps({"value": encoded, "tensors": buckets.specs_to_json(layout.specs)}).encode()
    if _HEAD + len(head) + len(data) > MOST_BYTES:
        raise _too_large()
    return len(head).to_bytes(_HEAD, "little") + head + data.numpy().tobytes()


def unpacked(message: bytes) -> Any:
    """The inverse of `packed`. Raises TrainError: the bytes are not a message."""
    try:
        size = int.from_bytes(message[:_HEAD], "little")
        head = json.loads(message[_HEAD : _HEAD + size])
        rest = bytearray(message[_HEAD + size :])
        data = torch.frombuffer(rest, dtype=torch.uint8) if rest else torch.empty(0, dtype=torch.uint8)
        specs = buckets.specs_from_json(head["tensors"])
        # Copies: a kernel may ask for an alignment that a place in a message has not.
        return _decode(head["value"], [tensor.clone() for _, tensor in buckets.unpack(data, specs)])
    except (KeyError, IndexError, TypeError, ValueError, RuntimeError, RecursionError) as error:
        raise TrainError(
            f"bad-reply: a message of remote roles is malformed: {type(error).__name__}: {error}"
        ) from error


def _too_large() -> TrainError:
    return TrainError(
        f"too-large: a message to or from remote roles has more than {MOST_BYTES} bytes; lower "
        "rollout.prompts_per_step or rollout.group_size",
        setting="rollout.prompts_per_step",
    )


def _encode(value: Any, tensors: list[Tensor]) -> Any:
    if isinstance(value, _PLAIN):
        return value
    if isinstance(value, PlannedRows):  # how to make them is code, which no message carries
        value = value.make()
    if isinstance(value, Tensor):
        tensors.append(value.detach().cpu())
        return {"tensor": len(tensors) - 1}
    if isinstance(value, Mapping):
        return {"dict": {str(key): _encode(each, tensors) for key, each in value.items()}}
    if isinstance(value, Sequence):
        return [_encode(each, tensors) for each in value]
    if RECORDS.get(type(value).__name__) is type(value):
        fields = {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
        encoded = {name: _encode(each, tensors) for name, each in fields.items()}
        return {"record": type(value).__name__, "fields": encoded}
    raise TypeError(f"a value of type {type(value).__name__} cannot be sent to remote roles")


def _decode(encoded: Any, tensors: Sequence[Tensor]) -> Any:
    if isinstance(encoded, list):
        return tuple(_decode(each, tensors) for each in encoded)
    if not isinstance(encoded, dict):
        return encoded
    if "tensor" in encoded:
        return tensors[encoded["tensor"]]
    if "dict" in encoded:
        return {key: _decode(each, tensors) for key, each in encoded["dict"].items()}
    fields = {name: _decode(each, tensors) for name, each in encoded["fields"].items()}
    return RECORDS[encoded["record"]](**fields)


# Dedicated GPUs of remote roles and engines, as this rank assigns them to the processes beside it.


def gpus_of_group(run: GRPORun, number: int, *, ranks: RankContext) -> dict[str, str]:
    """Return the environment that shows a process of remote group `number` (from 0) its dedicated GPU. It
    shows all GPUs of the group on this node, so that NCCL works, and the process takes that of its local
    rank. Empty: the process sees what its rank sees."""
    layout = layout_here(run.cluster, ranks)
    if not layout.remote_groups:
        return {}
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    return {"CUDA_VISIBLE_DEVICES": server_gpus(layout.of_group(number), device="cuda", visible=visible)}
