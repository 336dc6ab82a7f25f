"""The server process: `python -m lockstep.engine.served.server FILE`.

    GET  /health /info /load
    POST /generate    {"flow", "groups"} ──► an event for each sample as it ends, then [DONE]
    POST /abort {"flow"}    /sleep /wake
    POST /weights/begin|receive|finish|fail|read

It listens on loopback, and answers only who sends its token (LOCKSTEP_SERVER_TOKEN).
"""

from __future__ import annotations

import json
import os
import queue
import select
import socket
import sys
import threading
import traceback
from collections.abc import Callable, Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import torch

from lockstep import invariant
from lockstep.config.engine import EngineConfig
from lockstep.config.model import ModelConfig
from lockstep.engine.admission import admit_decoding
from lockstep.engine.members import load_engine_class
from lockstep.engine.remote.server import LOOPBACK
from lockstep.engine.served.handler import TokenHandler, bearer
from lockstep.engine.served.host import Host, Weights
from lockstep.errors import LockstepError
from lockstep.models.load import (
    LoadedModel,
    attention_implementation,
    load_model,
    load_tokenizer,
    prepared_config,
)
from lockstep.models.source import module_without_weights
from lockstep.processes.supervisor import name_process
from lockstep.protocols.engine import SharesWeights
from lockstep.version import __version__
from lockstep.wire.server_token import TOKEN

_LOOK_SECONDS = 0.5
"""How often a stream without news looks whether its client is still there."""


def main(argv: list[str]) -> None:
    """Serve what the file describes, see `lockstep.engine.served.engine.describe_server`, until killed."""
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
            stream = self.host.generate(asked["flow"], asked["groups"])
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
