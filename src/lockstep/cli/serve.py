"""`lockstep serve`: the Tinker API on this machine.

lockstep serve --model Qwen/Qwen3-8B=./Qwen3-8B
lockstep serve --model small=bundled:smollm2-135m --dir served --port 8700 --user ada --user bob
"""

from __future__ import annotations

import importlib.util
import logging
from collections.abc import Sequence
from pathlib import Path

from lockstep.cli import arguments as values
from lockstep.common_errors import missing_package
from lockstep.errors import ConfigError
from lockstep.observe.text import echo

_PORT = 8766


def main(argv: Sequence[str]) -> int:
    """Run `lockstep serve`. Exit status 0, also after Ctrl-C, with which a server ends."""
    parser = values.command_parser(
        "lockstep serve",
        "Serve the Tinker API on this machine (127.0.0.1): the `tinker` client trains adapters of the models "
        "and samples from them, with logprobs that are the trainer's to the bit. Ctrl-C ends it; checkpoints "
        "stay in --dir.",
    )
    flags = values.Flags(parser)
    flags.many("--model", "NAME=MODEL", "a base model: its name for clients, and a folder or hub name")
    flags.value("--dir", values.path, "run directory: checkpoints and tokens", Path("runs/serve"))
    flags.many("--user", "NAME", "a user with a token of its own (default: one, named user)")
    flags.value("--port", values.positive, "port", _PORT)
    arguments = parser.parse_args(argv)
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
    from lockstep.serve.store import Store

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if device.type == "cuda":
        configure_cuda()
    store = Store(arguments.dir)
    tokens = store.tokens(arguments.user or ["user"])
    bases = [BaseModel(name, folder, device=device) for name, folder in models.items()]
    server = Server(Service(bases, store), tokens, port=arguments.port)
    tokens_file = store.directory / "tokens.json"

    def ready() -> None:
        echo(f"serve: TINKER_BASE_URL={server.url}, tokens in {tokens_file}, models {', '.join(models)}")
        echo("serve: ready", flush=True)

    try:
        server.run(ready)
    except KeyboardInterrupt:
        echo()
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
