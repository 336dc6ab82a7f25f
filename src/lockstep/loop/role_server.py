"""The process of remote roles: `python -m lockstep.loop.role_server FILE`.

    GET  /health
    POST /call    {"call", "key", "seconds", "arguments"} ──► {"value"} or {"kind", "text", "data", "lost"}

The bodies are those of lockstep.loop.role_worker. The server listens on loopback and requires its token
(LOCKSTEP_SERVER_TOKEN). Roles compute in the main thread only, one call after the other. The reply to a key
is kept until calls with other keys arrive: a client that lost a reply and asks again gets the same one, so
nothing is trained twice.
"""

from __future__ import annotations

import contextlib
import dataclasses
import faulthandler
import json
import os
import queue
import sys
import threading
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, TypeVar, cast

import torch
from torch import Tensor

from lockstep.config.load import parse_toml, saved_values
from lockstep.config.run import GRPORun
from lockstep.engine.remote.server import LOOPBACK
from lockstep.errors import LockstepError, TrainError
from lockstep.loop.build import build_backend, make_planner, seed_generators
from lockstep.loop.determinism import deterministic, make_invariant, prepare_kernels
from lockstep.loop.distributed import mesh_coordinates
from lockstep.loop.memory_plan import start_offloading
from lockstep.loop.resolve import Resolved
from lockstep.loop.role_worker import MOST_BYTES, packed, unpacked
from lockstep.loop.roles import Critic, build_reward_models, build_value
from lockstep.models.load import LoadedModel, load_model
from lockstep.observe.metrics import Spans
from lockstep.processes.supervisor import name_process
from lockstep.protocols import TrainBackend
from lockstep.protocols.reward import RewardInput
from lockstep.protocols.train import FinishSave, OffloadableBackend
from lockstep.ranks.context import RankContext, init_ranks, is_peer_failure
from lockstep.rollout.reward_models import RewardModels
from lockstep.schema.batch import PackedBatch, RolloutSample
from lockstep.train import BACKENDS
from lockstep.wire.server_token import TOKEN, TokenHandler, bearer

_KEPT = 4
"""Replies that are kept: one client calls from a few threads at most."""
_BESIDE = {"finish"}
"""Calls that run beside others: they only write files."""


def main(argv: list[str]) -> None:
    """Serve until killed."""
    faulthandler.enable()
    name_process("roles")
    about = json.loads(Path(argv[0]).read_text(encoding="utf-8"))
    calls = Calls(RoleHost())
    with serving(calls, token=os.environ.pop(TOKEN), port=about["port"]):
        calls.work()


@contextlib.contextmanager
def serving(calls: Calls, *, token: str, port: int = 0) -> Iterator[ThreadingHTTPServer]:
    """Serve HTTP in threads; port 0: any free one."""
    own = {"calls": calls, "authorization": bearer(token)}
    handler: type[BaseHTTPRequestHandler] = type("Handler", (_Handler,), own)
    with ThreadingHTTPServer((LOOPBACK, port), handler) as server:
        server.daemon_threads = True
        threading.Thread(target=server.serve_forever, name="http", daemon=True).start()
        yield server
        server.shutdown()


@dataclass(eq=False)
class _Call:
    make: Callable[[], Any] | None
    done: threading.Event = field(default_factory=threading.Event)
    answer: bytes | None = b""
    """None: no longer kept."""

    def run(self) -> None:
        make, self.make = self.make, None  # with the tensors that it was given
        assert make is not None, "a call is run once"
        self.answer = _answered(make)
        self.done.set()


class Calls:
    """The calls of one client, each executed once."""

    def __init__(self, host: RoleHost) -> None:
        self._host = host
        self._todo: queue.SimpleQueue[_Call] = queue.SimpleQueue()
        self._known: dict[str, _Call] = {}
        self._lock = threading.Lock()

    def work(self) -> None:
        """Execute calls in this thread, forever."""
        while True:
            self._todo.get().run()

    def answer(self, body: bytes) -> bytes:
        """Return the reply to a message, executing the call unless its key is known."""
        try:
            request = unpacked(body)
            key, seconds, name = str(request["key"]), float(request["seconds"]), str(request["call"])
            method = self._host.call(name)
            arguments = dict(request["arguments"])
        except (LockstepError, KeyError, TypeError, ValueError) as error:
            return packed(_failure(error))
        with self._lock:
            call = self._known.get(key)
            if call is None:
                call = self._known[key] = _Call(lambda: method(**arguments))
                done = [old for old in self._known.values() if old.done.is_set() and old.answer is not None]
                for old in done[:-_KEPT]:
                    old.answer = None
                if name in _BESIDE:
                    threading.Thread(target=call.run, name=name, daemon=True).start()
                else:
                    self._todo.put(call)
        if not call.done.wait(seconds):
            late = TrainError(f"deadline: the process stayed busy for {seconds:g} s")
            return packed(_failure(late))
        if (answer := call.answer) is None:
            gone = TrainError("wrong-state: this call has finished, and its result is no longer kept")
            return packed(_failure(gone))
        return answer


def _answered(make: Callable[[], Any]) -> bytes:
    try:
        return packed({"value": make()})
    except Exception as error:  # the client shall read it, whatever it is
        if not isinstance(error, LockstepError):
            traceback.print_exc()  # to the log, which the client's error quotes
        return packed(_failure(error))


def _failure(error: Exception) -> dict[str, Any]:
    known = isinstance(error, LockstepError)
    return {
        "kind": type(error).__name__,
        "text": str(error).encode("utf-8", errors="backslashreplace").decode("utf-8"),
        "data": error.data if isinstance(error, LockstepError) else {},
        "lost": not known and is_peer_failure(error),
    }


class _Handler(TokenHandler):
    calls: Calls
    most_bytes = MOST_BYTES

    def do_GET(self) -> None:
        if self.body() is not None:
            self.reply(200 if self.path == "/health" else 404, b"{}")

    def do_POST(self) -> None:
        body = self.body()
        if body is None:
            return
        if self.path != "/call":
            self.refuse(404, f"no such path: {self.path}")
        else:
            self.reply(200, self.calls.answer(body), kind="application/octet-stream")


# The roles inside the process: loaded as the trainer would load them, and called by name.


Role = TypeVar("Role")


class RoleHost:
    """The roles of one process, empty until `build`. Collective where the backends are: the process of every
    rank gets the same calls."""

    def __init__(self) -> None:
        self._ref: TrainBackend | None = None
        self._value: Critic | None = None
        self._rewards: RewardModels | None = None
        self._saving: dict[str, FinishSave] = {}
        self._open = contextlib.ExitStack()

    def call(self, name: str) -> Callable[..., Any]:
        """Return the function behind a call. Raises KeyError."""
        calls: dict[str, Callable[..., Any]] = {
            "build": self.build,
            "logprobs": self.logprobs,
            "rewards": self.rewards,
            "score": self.score,
            "update": self.update,
            "save": self.save,
            "finish": self.finish,
            "load": self.load,
            "export": self.export,
        }
        return calls[name]

    def build(
        self,
        run: str,
        axes: Mapping[str, Any],
        roles: Sequence[str],
        threads: int,
        meeting: Mapping[str, str] | None,
    ) -> dict[str, Any]:
        """Load the roles.

        Args:
            run: the run file. axes: what its "auto" values became in the trainer's process.
            threads: torch's, which affect the bits.
            meeting: the environment of a rank; None: this process is alone.

        Raises:
            ConfigError, ModelError: what the trainer's process would raise.
        """
        torch.set_num_threads(threads)
        values, origin = parse_toml(run.encode(), origin="the trainer's run"), "the trainer's run"
        made = cast(GRPORun, saved_values(values, origin=origin))  # no other kind has remote roles
        assert made.cluster is not None
        self._open.enter_context(deterministic(made.train.deterministic))
        resolved, ranks = Resolved.from_axes(made, axes), RankContext.alone(axes["device"])
        if meeting is not None:
            os.environ.update(meeting)
            kind = resolved.device.partition(":")[0]
            ranks = init_ranks(device=kind, seconds=made.cluster.remote_seconds)
            resolved = Resolved.from_axes(made, {**axes, "device": str(ranks.device)})
        device = torch.device(resolved.device)
        if device.type == "cuda" and device.index is not None:
            torch.cuda.set_device(device)
        coordinates = mesh_coordinates(ranks, tp=made.train.tp, ring=made.train.ring)
        seed_generators(made.seed, stream=coordinates.stream)
        prepare_kernels(
            resolved.device,
            deterministic=made.train.deterministic,
            batch_invariant=resolved.batch_invariant,
        )
        policy = _policy(resolved, weights="ref" in roles)
        if "ref" in roles:
            temperature = made.rollout.sampling.temperature
            self._ref = build_backend(resolved, policy, total_steps=0, temperature=temperature, ref=False)
            if "ref" in made.offloaded:
                _offload_weights(self._ref)
        if "reward_model" in roles:
            self._rewards = build_reward_models(resolved, policy, ranks=RankContext.alone(resolved.device))
        if "value" in roles:
            assert made.critic is not None
            plan = make_planner(resolved, ranks)
            self._value = build_value(resolved, made.critic, policy, plan=plan, ranks=ranks, spans=Spans())
            start_offloading(made, "value", backend=self._value.backend)
        notes = [] if self._rewards is None else self._rewards.notes(policy.tokenizer)
        return {"pid": os.getpid(), "notes": notes}

    # --- scores ---------------------------------------------------------------------------------------------

    def logprobs(self, batches: Sequence[PackedBatch]) -> list[Tensor]:
        """The reference's, see protocols.Scorer; on the host."""
        return [each.cpu() for each in _require(self._ref, "ref").logprobs(batches)]

    def rewards(self, inputs: Sequence[RewardInput]) -> dict[str, Any]:
        """Return the reward models' scores by name, and how many documents were truncated."""
        models = _require(self._rewards, "reward_model")
        scores = models.score(inputs)
        truncated, models.truncated = models.truncated, 0
        return {"scores": scores, "truncated": truncated}

    def score(self, samples: Sequence[RolloutSample]) -> list[Tensor]:
        """See Critic."""
        return _require(self._value, "value").score(samples)

    # --- the value model's training -------------------------------------------------------------------------

    def update(
        self, samples: Sequence[RolloutSample], values: Sequence[Tensor], returns: Sequence[Tensor]
    ) -> dict[str, float]:
        """See Critic."""
        value = _require(self._value, "value")
        return value.update(samples, values=values, returns=returns)

    def save(self, directory: str, background: bool) -> None:
        """Start saving the value model's backend; `finish` completes it."""
        backend = _require(self._value, "value").backend
        self._saving[directory] = backend.save(Path(directory), background=background)

    def finish(self, directory: str) -> dict[str, str]:
        """Complete a save; in any thread."""
        return self._saving.pop(directory)()

    def load(self, directory: str, verified: bool) -> None:
        """Load a checkpoint of `save` or of a trainer."""
        _require(self._value, "value").backend.load(Path(directory), verified=verified)

    def export(self, directory: str) -> None:
        """Write a Hugging Face folder."""
        _require(self._value, "value").backend.export(Path(directory))


def _require(role: Role | None, name: str) -> Role:
    if role is None:
        raise TrainError(f"wrong-state: this process does not have the role {name}")
    return role


def _policy(resolved: Resolved[GRPORun], *, weights: bool) -> LoadedModel:
    """Load the initial policy as the reference. Without weights, load only its config and tokenizer, which
    the other roles are checked against."""
    run, device = resolved.run, torch.device(resolved.device)
    whole = weights and not BACKENDS.load(run.train.backend).shards_weights
    model = load_model(run.model, attention=resolved.attention, device=device, materialize=whole)
    if weights and resolved.batch_invariant:
        make_invariant(model, device=device, required=True)
    return dataclasses.replace(model, execution=resolved.execution)


def _offload_weights(backend: TrainBackend) -> None:
    offloadable: OffloadableBackend = backend  # type: ignore[assignment]
    offloadable.offload("weights")


if __name__ == "__main__":
    main(sys.argv[1:])
