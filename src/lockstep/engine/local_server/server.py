"""The server process: `python -m lockstep.engine.local_server.server FILE`.

    GET  /health /info /load
    POST /generate    {"flow", "groups", "border"} ──► an event for each sample as it ends, then [DONE]
    POST /abort {"flow"}    /sleep /wake
    POST /weights/begin|receive|finish|fail|read

It listens on loopback, and answers only who sends its token (LOCKSTEP_SERVER_TOKEN).
"""

from __future__ import annotations

import json
import math
import os
import queue
import select
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor

from lockstep import invariant
from lockstep.common_errors import other_tensors
from lockstep.config.engine import EngineConfig
from lockstep.config.model import ModelConfig
from lockstep.engine.local_server.clock import LogicalClock
from lockstep.engine.local_server.requests import request_of
from lockstep.engine.remote.server import LOOPBACK
from lockstep.engine.spec import admit_decoding, load_engine_class
from lockstep.errors import EngineError, LockstepError
from lockstep.models.load import (
    LoadedModel,
    attention_implementation,
    load_model,
    load_tokenizer,
    prepared_config,
)
from lockstep.models.source import module_without_weights
from lockstep.processes.supervisor import name_process
from lockstep.protocols.engine import Finished, Handle, SharesWeights
from lockstep.schema.weights import WeightUpdate
from lockstep.version import __version__
from lockstep.wire.buckets import HEAD_VALUES, WireError, dtype_name
from lockstep.wire.receive import Receiver
from lockstep.wire.server_token import TOKEN, TokenHandler, bearer

# The engine inside of the server: its samples, and its weights as they come in buckets.
#
#     HTTP threads ──► generate ─► engine.submit ─┐
#                  ──► begin, call ─► tasks ──────┴─► work(), the main thread ──► events of each stream
#
# The engine computes in the main thread alone, task after task: weights never change under a running sample.


Result = TypeVar("Result")
Event = dict[str, Any] | None
"""What a stream says: a sample, an error; None: that was all."""

_STOP_SECONDS = 60.0
"""Deadline of the step in which samples that nobody waits for are running."""


class Stream:
    """The samples of one POST, and what is to be said of them."""

    def __init__(self, ids: Sequence[str]) -> None:
        self.events: queue.SimpleQueue[Event] = queue.SimpleQueue()
        self._left = set(ids)

    def say(self, id: str, event: dict[str, Any]) -> None:
        """Add a sample; the last one ends the stream."""
        self._left.discard(id)
        self.events.put(event)
        if not self._left:
            self.events.put(None)


class Host:
    """Runs one engine for one client, which calls from any thread.

    A *flow* is all that the client asks for until it gives up, over one or more streams. With the first
    request of another flow, and with an update, the samples of the flow before are dropped: nobody waits for
    them.
    """

    def __init__(self, engine: SharesWeights, weights: Weights, *, dirty: bool) -> None:
        self.engine, self.weights = engine, weights
        self.tokens = 0
        """Sampled since the start."""
        self._dirty = dirty
        self._tasks: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._idle = threading.Condition()
        """Guards what follows; notified when a run of the engine has ended."""
        self._flow = ""
        self._runs = 0
        self._streams: dict[Handle, tuple[Stream, dict[int, str]]] = {}
        """Of each request with samples that have not ended: its stream, and their ids."""
        self._clock: LogicalClock | None = None
        """Of samples that are cut off at a border of logical time."""
        self._ids: dict[tuple[int, int], str] = {}
        """(number of a request, sample) -> the sample's id, under a clock."""
        self._later: list[tuple[Stream, str, dict[str, Any]]] = []
        """What is said once the border is reached: it may have to be shortened."""
        engine.on_token = self._count  # type: ignore[attr-defined]

    def work(self) -> None:
        """Do what comes, in this thread, for ever."""
        while True:
            self._tasks.get()()

    def call(self, task: Callable[[], Result], *, seconds: float) -> Result:
        """Run `task` in the working thread, between samples.

        Raises:
            EngineError: not done in time, or an error of the task.
        """
        done: queue.SimpleQueue[Result | Exception] = queue.SimpleQueue()

        def run() -> None:
            try:
                done.put(task())
            except Exception as error:
                done.put(error)

        self._tasks.put(run)
        try:
            result = done.get(timeout=seconds)
        except queue.Empty:
            raise EngineError(f"deadline: the engine's process was busy for {seconds:g} s") from None
        if isinstance(result, Exception):
            raise result
        return result

    # samples

    def generate(
        self, flow: str, groups: Sequence[Mapping[str, Any]], border: dict[str, Any] | None = None
    ) -> Stream:
        """Submit requests, see lockstep.engine.local_server.requests.

        Args:
            border: at which the samples are cut off, see `LogicalClock`, which then is of these samples
                alone: a flow has one such request. None: only by `abort`.

        Raises:
            EngineError: one of them is impossible, or there are no weights yet.
        """
        stream = Stream([id for group in groups for id in group["ids"]])
        with self._idle:
            if self._dirty:
                raise EngineError("wrong-state: the engine has no complete version of the weights")
            if flow != self._flow:
                self._drop()
                self._flow = flow
            self._clock = None if border is None else LogicalClock.of_json(border)
            self._ids, self._later = {}, []
            impossible: EngineError | None = None
            try:
                for group in groups:
                    handle = self.engine.submit(request_of(group))
                    self._streams[handle] = (stream, dict(enumerate(group["ids"])))
                    self._ids |= {(handle.index, i): id for i, id in enumerate(group["ids"])}
            except EngineError as error:
                impossible = error
            # Counted here and not when the task begins: `_drop` must wait for one that is still in the queue.
            self._runs += 1
            self._tasks.put(self._run)
            if impossible is not None:
                self._drop()
                raise impossible
        return stream

    def abort(self, flow: str) -> None:
        """End the samples of a flow; they still come."""
        with self._idle:
            if flow == self._flow and self._streams:
                self.engine.abort()

    def leave(self, flow: str) -> None:
        """The client of a flow is gone."""
        with self._idle:
            if flow == self._flow:
                self._drop()

    def _drop(self) -> None:
        """End every sample, for nobody; `_idle` is held."""
        self._flow = ""
        if self._streams:
            self._streams.clear()
            self.engine.abort()
        if not self._idle.wait_for(lambda: not self._runs, _STOP_SECONDS):
            raise EngineError(
                f"deadline: the samples of an earlier request did not end within {_STOP_SECONDS:g} s"
            )

    def _run(self) -> None:
        """Sample until nothing is left."""
        error: Exception | None = None
        try:
            for done in self.engine.finished():
                self._deliver(done)
        except Exception as raised:  # the client shall read it, whatever it is
            error = raised
            traceback.print_exc()  # to the server's log
        with self._idle:
            if error is None and self._clock is not None:
                for stream, name, event in self._later:
                    stream.say(name, self._clock.shortened(name, event))
            later, self._later = self._later, []
            if error is not None:
                text = str(error) if isinstance(error, EngineError) else f"{type(error).__name__}: {error}"
                waiting = [stream for stream, _ in self._streams.values()] + [stream for stream, *_ in later]
                for stream in {id(s): s for s in waiting}.values():
                    stream.events.put({"error": text})
                self._streams.clear()
            self._runs -= 1
            self._idle.notify_all()

    def _deliver(self, done: Finished) -> None:
        with self._idle:
            if done.handle not in self._streams:
                return
            stream, ids = self._streams[done.handle]
            id = ids.pop(done.sample)
            if not ids:
                del self._streams[done.handle]
        completion = done.completion
        event = {
            "id": id,
            "token_ids": completion.token_ids,
            # JSON has no infinity and no NaN.
            "logprobs": [x if math.isfinite(x) else None for x in completion.logprobs],
            "finish_reason": completion.finish_reason,
            "stop_reason": completion.stop_reason,
            "cached_tokens": completion.cached_tokens,
            # Not that of its last token, which an earlier request may have sampled.
            "policy_version": self.engine.stats().policy_version,
        }
        if self._clock is not None:
            if completion.finish_reason != "abort":
                self._clock.ended(id)
                self._stop_at_border(self._clock)
            if not self._clock.entry(id).first:
                self._later.append((stream, id, event))
                return
        stream.say(id, event)

    def _count(self, request: int, sample: int, token_ids: Sequence[int]) -> None:
        self.tokens += 1
        if self._clock is not None and (id := self._ids.get((request, sample))) is not None:
            self._clock.drew(id, len(token_ids))
            self._stop_at_border(self._clock)

    def _stop_at_border(self, clock: LogicalClock) -> None:
        if clock.reached:
            self.engine.abort()

    def sleep(self, *, seconds: float) -> None:
        """Free the engine's memory; the weights stay."""
        with self._idle:
            self._drop()
        self.call(self.engine.sleep, seconds=seconds)

    # weights

    def begin(self, about: Mapping[str, Any]) -> None:
        """Open a session; one that is open is given up, and so are samples that run."""
        with self._idle:
            self._drop()
            self._dirty = True
        self.call(lambda: self.weights.begin(about), seconds=_STOP_SECONDS)

    def finish(self, about: Mapping[str, Any], *, seconds: float) -> None:
        """Adopt the version of a session that has brought all weights."""

        def adopt() -> None:
            module = self.weights.finish(about)
            version = about["policy_version"]
            self.engine.update_weights(
                WeightUpdate(policy_version=version, tensors=lambda: iter(()), shared_module=module)
            )

        self.call(adopt, seconds=seconds)
        with self._idle:
            self._dirty = False


class Weights:
    """The Parameters of a module, written to in place by sessions.

    Args:
        module: of the engine.
    """

    def __init__(self, module: torch.nn.Module, *, device: torch.device) -> None:
        self._module, self._device = module, device
        self._own = dict(module.named_parameters(remove_duplicate=False))
        self._receiver = Receiver(device)
        self._session: Mapping[str, Any] | None = None
        self._received: set[str] = set()
        self._first: dict[int, str] = {}
        """id of a Parameter, which may have several names -> the one that came first."""
        self._next = 0

    def begin(self, about: Mapping[str, Any]) -> None:
        """Open a session: {"policy_version", "run_id"}."""
        self._session, self._received, self._first, self._next = about, set(), {}, 0

    def receive(self, about: Mapping[str, Any], bucket: Mapping[str, Any], *, seconds: float) -> None:
        """Copy one bucket; afterwards its memory may be reused.

        Raises:
            EngineError: it is not the session's next bucket, or its tensors are not the model's.
        """
        self._check(about)
        if bucket["index"] != self._next:
            raise EngineError(
                f"out-of-order: bucket {bucket['index']} arrived instead of bucket {self._next}"
            )
        try:
            with torch.no_grad():
                for name, tensor in self._receiver.tensors(bucket, deadline=time.monotonic() + seconds):
                    self._take(name, tensor)
        except WireError as error:
            raise EngineError(str(error), code="transfer-failed") from error
        # Before the answer: with it the sender fills the bucket's memory again.
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        self._next += 1

    def _take(self, name: str, tensor: Tensor) -> None:
        parameter = self._own.get(name)
        if parameter is None or parameter.shape != tensor.shape or name in self._received:
            has = "no such weight" if parameter is None else f"shape {list(parameter.shape)}"
            again = ", and takes it only once in a session" if name in self._received else ""
            raise EngineError(
                f"{name} arrived with shape {list(tensor.shape)}, but the model has {has}{again}",
                code="wrong-weights" if parameter is None else "wrong-shape",
            )
        first = self._first.setdefault(id(parameter), name)
        if first != name and not torch.equal(parameter, tensor.to(parameter)):
            raise EngineError(f"values-differ: {first} and {name} are tied, but arrived with two values")
        # In place: CUDA graphs and compiled layers have captured the Parameter's address.
        parameter.copy_(tensor)
        self._received.add(name)

    def finish(self, about: Mapping[str, Any]) -> torch.nn.Module:
        """Close the session. Raises EngineError, and leaves it open, when weights are missing."""
        self._check(about)
        missing = sorted(self._own.keys() - self._received)
        if missing:
            raise other_tensors(EngineError, "the session ended", missing)
        self._session = None
        return self._module

    def fail(self) -> None:
        """Give the session up, and release what was shared for it."""
        self._session = None
        self._receiver.close()

    def read(self, names: Sequence[str]) -> dict[str, dict[str, str]]:
        """The first values of each weight, as {"dtype", "hex": bytes}."""
        heads = {}
        for name in names:
            if name in self._own:
                first = self._own[name].detach().flatten()[:HEAD_VALUES].cpu()
                data = bytes(first.view(torch.uint8).tolist())
                heads[name] = {"dtype": dtype_name(first.dtype), "hex": data.hex()}
        return heads

    @property
    def num_bytes(self) -> int:
        """Of all Parameters."""
        return sum(p.numel() * p.element_size() for p in self._module.parameters())

    def _check(self, about: Mapping[str, Any]) -> None:
        if self._session is None or dict(self._session) != dict(about):
            raise EngineError(f"wrong-state: no weight session {dict(about)} is open here")


_LOOK_SECONDS = 0.5
"""How often a stream without news looks whether its client is still there."""


def main(argv: list[str]) -> None:
    """Serve what the file describes (`local_server.engine.describe_server`), until killed."""
    name_process("engine")
    about = json.loads(Path(argv[0]).read_text(encoding="utf-8"))
    host = make_host(about)
    # The token leaves the environment, so that no process started from here inherits it.
    server = ThreadingHTTPServer((LOOPBACK, about["port"]), handler_of(host, token=os.environ.pop(TOKEN)))
    server.daemon_threads = True
    threading.Thread(target=server.serve_forever, name="http", daemon=True).start()
    host.work()


def make_host(about: Mapping[str, Any]) -> Host:
    """Load the model and build the engine as the trainer's process would.

    Raises:
        ModelError, ConfigError, EngineError: the engine cannot serve this model here.
    """
    if about["threads"]:
        torch.set_num_threads(about["threads"])
    device = torch.device(about["device"])
    if device.type == "cuda":
        torch.cuda.set_device(device)
    if about["batch_invariant"] and device.type == "cuda":
        invariant.configure_cuda()
    model = _model(about, device)
    if about["batch_invariant"]:
        invariant.convert(model.module, device=device, dtype=model.dtype)
    config = EngineConfig(**about["config"])
    admit_decoding(config.name, model)
    engine: SharesWeights = load_engine_class(config.name)(config, model=model)
    return Host(engine, Weights(model.module, device=device), dirty=about["weights"] == "pushed")


def _model(about: Mapping[str, Any], device: torch.device) -> LoadedModel:
    config = ModelConfig(name=about["folder"], dtype=about["dtype"])
    attention = "varlen" if about["config"]["name"] == "native" else "sdpa"
    if about["weights"] == "folder":
        model = load_model(config, attention=attention, device=device)
        module, tokenizer = model.module, model.tokenizer
    else:
        module = module_without_weights(
            prepared_config(config),
            dtype=getattr(torch, about["dtype"]),
            device=device,
            attention=attention_implementation(attention),
        )
        _allocate(module, device)
        tokenizer = load_tokenizer(config, local_only=True)
    return LoadedModel(
        module=module,
        tokenizer=tokenizer,
        eos_token_ids=tuple(about["eos_token_ids"]),
        pad_token_id=0,
        dtype=getattr(torch, about["dtype"]),
        name=about["model_name"],
        max_positions=about["max_model_len"],
        execution=about["execution"],
    )


def _allocate(module: torch.nn.Module, device: torch.device) -> None:
    """Give Parameters of the meta device memory; tied ones stay tied."""
    made: dict[int, torch.nn.Parameter] = {}
    for part in module.modules():
        for name, old in part._parameters.items():
            if old is not None and old.is_meta:
                empty = torch.zeros_like(old, device=device)
                part._parameters[name] = made.setdefault(id(old), torch.nn.Parameter(empty))


def handler_of(host: Host, *, token: str) -> type[BaseHTTPRequestHandler]:
    """The handler of one server's requests."""
    return type("Handler", (_Handler,), {"host": host, "authorization": bearer(token)})


class _Handler(TokenHandler):
    host: Host

    def do_GET(self) -> None:
        if self.body() is not None:
            self._answer({"/health": dict, "/info": self._info, "/load": self._load}, b"")

    def do_POST(self) -> None:
        body = self.body()
        if body is None:
            return
        if self.path == "/generate":
            self._generate(body)
            return
        host, weights = self.host, self.host.weights
        self._answer(
            {
                "/abort": lambda flow: host.abort(flow),
                "/sleep": lambda seconds: host.sleep(seconds=seconds),
                "/wake": lambda seconds: host.call(host.engine.wake, seconds=seconds),
                "/weights/begin": lambda session, seconds: host.begin(session),
                "/weights/receive": lambda session, bucket, seconds: host.call(
                    lambda: weights.receive(session, bucket, seconds=seconds), seconds=seconds
                ),
                "/weights/finish": lambda session, seconds: host.finish(session, seconds=seconds),
                "/weights/fail": lambda seconds: host.call(weights.fail, seconds=seconds),
                "/weights/read": lambda names, seconds: host.call(
                    lambda: weights.read(names), seconds=seconds
                ),
            },
            body,
        )

    def _answer(self, routes: Mapping[str, Callable[..., Any]], body: bytes) -> None:
        """Call the route with the arguments of the body, JSON, and send what it returns."""
        if self.path not in routes:
            self._send(404, {"error": f"no such path: {self.path}"})
        else:
            try:
                self._send(200, routes[self.path](**json.loads(body or b"{}")) or {})
            except LockstepError as error:
                self._send(409, {"error": str(error), "data": error.data})
            except Exception as error:  # a reply that says what it was, not a broken connection
                traceback.print_exc()  # to the server's log, which the trainer's error names
                self._send(500, {"error": f"{type(error).__name__}: {error}"})

    def _send(self, status: int, value: Any) -> None:
        self.reply(status, json.dumps(value).encode())

    def _generate(self, body: bytes) -> None:
        """Stream the samples of a POST. A client that goes takes its flow with it."""
        try:
            asked = json.loads(body)
            stream = self.host.generate(asked["flow"], asked["groups"], asked.get("border"))
        except LockstepError as error:
            self._send(409, {"error": str(error), "data": error.data})
            return
        except (KeyError, TypeError, ValueError) as error:
            self._send(400, {"error": f"no valid request: {type(error).__name__}: {error}"})
            return
        self.close_connection = True
        self.connection.settimeout(None)  # a client may take its time with each sample
        try:
            self.send_response(200)
            self.send_header("Content-Type", "text/event-stream")
            self.send_header("Connection", "close")
            self.end_headers()
            while True:
                try:
                    event = stream.events.get(timeout=_LOOK_SECONDS)
                except queue.Empty:
                    if self._is_alone():
                        raise ConnectionResetError from None
                    continue
                self.wfile.write(
                    b"data: %s\n\n" % (b"[DONE]" if event is None else json.dumps(event).encode())
                )
                if event is None:
                    return
        except OSError:
            self.host.leave(asked["flow"])

    def _is_alone(self) -> bool:
        """Whether the client has closed the connection: it has nothing more to send, so anything is that."""
        return bool(select.select([self.connection], [], [], 0)[0]) and not self.connection.recv(
            1, socket.MSG_PEEK
        )

    def _info(self) -> dict[str, Any]:
        contract = self.host.engine.contract
        return {
            "version": __version__,
            "pid": os.getpid(),
            "contract": None if contract is None else contract.as_json(),
        }

    def _load(self) -> dict[str, Any]:
        stats = self.host.engine.stats()
        return {
            "tokens": self.host.tokens,
            "kv_cache_use": stats.kv_cache_use,
            "kv_cache_bytes": stats.kv_cache_bytes,
            "weights_bytes": self.host.weights.num_bytes,
        }


if __name__ == "__main__":
    main(sys.argv[1:])
