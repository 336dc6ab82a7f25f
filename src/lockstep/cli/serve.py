"""`lockstep serve`: the Tinker API on this machine.

lockstep serve --model Qwen/Qwen3-8B=./Qwen3-8B
lockstep serve --model small=bundled:smollm2-135m --dir served --port 8700 --user ada --user bob
lockstep serve --model small=bundled:smollm2-135m --host 10.0.0.5 --tokens tokens.json
"""

from __future__ import annotations

import importlib.util
import logging
from collections.abc import Sequence
from pathlib import Path

from lockstep.cli import arguments as values
from lockstep.cluster.ray import is_loopback
from lockstep.common_errors import missing_package
from lockstep.errors import ConfigError
from lockstep.observe.lock import RunLock
from lockstep.observe.text import echo
from lockstep.processes.http_server import LOOPBACK

_PORT = 8766


def main(argv: Sequence[str]) -> int:
    """Run `lockstep serve`. Exit status 0, also after Ctrl-C, with which a server ends."""
    parser = values.command_parser(
        "lockstep serve",
        "Serve the Tinker API on this machine: the `tinker` client trains adapters of the models "
        "and samples from them, with logprobs that equal the trainer's bit for bit. Ctrl-C stops the server; "
        "checkpoints stay in --dir.",
    )
    flags = values.Flags(parser)
    flags.many("--model", "NAME=MODEL", "a base model: its name for clients, and a folder or hub name")
    flags.value("--dir", values.path, "run directory: checkpoints and tokens", Path("runs/serve"))
    flags.many("--user", "NAME", "a user with a token of its own (default: one, named user)")
    flags.value("--port", values.positive, "port", _PORT)
    flags.value(
        "--host", "ADDRESS", "address to listen on; any address but a loopback one needs --tokens", LOOPBACK
    )
    flags.value(
        "--tokens", values.path, "JSON file that only you can read, from user to token (each tml-...)"
    )
    flags.value("--max-clients", values.positive, "training clients in memory", 64)
    flags.value("--sample-seconds", values.positive, "deadline of a sample request", 3600)
    arguments = parser.parse_args(argv)
    if arguments.tokens is not None and arguments.user:
        raise ConfigError("contradiction: --tokens names the users; leave --user out")
    if arguments.tokens is None and not is_loopback(arguments.host):
        raise ConfigError(
            f"missing-setting: --host {arguments.host} lets other machines in; give --tokens FILE, with a "
            "token for each user"
        )
    models = _models(arguments.model)
    if arguments.port >= 2**16:
        raise ConfigError(f"out-of-range: --port {arguments.port} is above 65535")
    for package in ("tinker", "peft"):
        if importlib.util.find_spec(package) is None:
            raise missing_package("lockstep serve", package, extra="serve")
    logging.basicConfig(level=logging.WARNING, format="%(asctime)s %(name)s: %(message)s")
    import torch

    from lockstep.invariant import configure_cuda
    from lockstep.serve.app import Server
    from lockstep.serve.models import BaseModel
    from lockstep.serve.service import Service
    from lockstep.serve.store import Store, read_tokens

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if device.type == "cuda":
        configure_cuda()
    store = Store(arguments.dir)
    lock = RunLock(store.directory / "lock", flag="--dir")
    if arguments.tokens is None:
        tokens_file = store.directory / "tokens.json"
        tokens = store.tokens(arguments.user or ["user"])
    else:
        tokens_file = arguments.tokens
        tokens = read_tokens(tokens_file)
    bases = [BaseModel(name, folder, device=device) for name, folder in models.items()]
    service = Service(
        bases, store, most_clients=arguments.max_clients, sample_seconds=float(arguments.sample_seconds)
    )
    server = Server(service, tokens, port=arguments.port, host=arguments.host)

    def ready() -> None:
        echo(f"serve: TINKER_BASE_URL={server.url}, tokens in {tokens_file}, models {', '.join(models)}")
        echo("serve: ready", flush=True)

    try:
        server.run(ready)
    except KeyboardInterrupt:
        echo()
    finally:
        lock.release()
    return 0


def _models(given: Sequence[str]) -> dict[str, str]:
    """Return the model of each name. Raises ConfigError."""
    models: dict[str, str] = {}
    for text in given:
        name, equals, model = text.partition("=")
        if not (name and equals and model):
            raise ConfigError(f"wrong-format: --model {text!r} must be NAME=MODEL, such as small=./my-model")
        if name in models:
            raise ConfigError(f"duplicate: --model {name} is given twice")
        models[name] = model
    if not models:
        raise ConfigError("missing-setting: there is no model; give --model NAME=MODEL")
    return models
