"""Which settings an inference engine has: those without an effect are refused when a config is made.

What depends on the model or the device is refused by `lockstep.engine` when those are known.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from lockstep.errors import ConfigError

if TYPE_CHECKING:
    from lockstep.config.engine import EngineConfig

_OWN_WEIGHTS = ("vllm, in process", "vllm, started", "vllm, at a url", "sglang, started", "sglang, at a url")
_MADE_HERE = ("vllm, in process", "vllm, started", "sglang, started")
_EMBEDDED = ("native", "hf")
"""What "auto" may come to."""
_STARTED = ("vllm, started", "sglang, started")

HAS_EFFECT: dict[str, tuple[tuple[str, ...], str]] = {
    "replicas": (("hf", *_STARTED), "a process can hold one of vLLM's engines, and a url names one server"),
    "cuda_devices": (_STARTED, "only a server that Lockstep starts can be given GPUs"),
    "tp": (_STARTED, "only a server that Lockstep starts is split over GPUs"),
    "max_model_len": (_OWN_WEIGHTS, "the trainer's own modules take what the model takes"),
    "kv_cache_tokens": (("native",), "it has a size of its own for its KV cache"),
    "prefill_chunk": (("native",), "how prompts are cut up is its own affair"),
    "memory_fraction": (("native", *_MADE_HERE), "nothing is set aside for this engine here"),
    "prefix_caching": (_MADE_HERE, "there is no cache here that could be turned off"),
    "eager": (("native", *_MADE_HERE), "there are no CUDA graphs here that could be turned off"),
    "batch_invariant": (
        (*_MADE_HERE, "sglang, at a url"),
        "an embedded engine runs the trainer's modules, which train.batch_invariant = true makes invariant "
        "(with engine.name = 'native'), and of a running vLLM it cannot be seen whether the mode is on",
    ),
    "unseeded": (("sglang, started", "sglang, at a url"), "every sample has its seed there"),
    "sleep": (("native", "hf", *_MADE_HERE), "a server that Lockstep did not start keeps its memory"),
    "bucket_mb": (_OWN_WEIGHTS, "weights are not sent"),
    "start_seconds": (_OWN_WEIGHTS, "nothing is started or waited for"),
    "request_seconds": (_OWN_WEIGHTS, "it runs in the trainer's own thread"),
    "update_seconds": (_OWN_WEIGHTS, "weights are not sent"),
    "max_restarts": (_STARTED, "only a server that Lockstep started is started again"),
    "options": (_MADE_HERE, "there is no constructor that would take them"),
    "env": (_STARTED, "only a server that Lockstep starts has an environment of its own"),
    "python": (_STARTED, "it starts a server with another interpreter"),
    "token_env": (
        ("vllm, at a url", "sglang, at a url"),
        "a server that Lockstep starts gets a token by itself",
    ),
    "url": (("vllm, at a url", "sglang, at a url"), "it names a vLLM or SGLang server"),
}
"""Setting -> where it has an effect, and why it has none elsewhere. The others always have one."""


def kind(config: EngineConfig) -> str:
    """Which engine, and where: "native", "hf", "vllm, in process", "sglang, at a url", ..."""
    if config.name not in ("vllm", "sglang"):
        return config.name
    if config.url is not None:
        return f"{config.name}, at a url"
    if config.python is None and config.name == "vllm":
        return "vllm, in process"
    return f"{config.name}, started"


def check_engine(config: EngineConfig) -> None:
    """Raise unless `config.name` has what the other settings ask of it. A `module:Class` may have them all.

    A name that is not known here is refused where engines are looked up.

    Raises:
        ConfigError: what, why, and what to set.
    """
    if config.name not in (*_EMBEDDED, "auto", "vllm", "sglang"):
        return
    if config.python is not None and config.url is not None:
        raise ConfigError(
            f"engine.python = {_shown(config.python)} starts a server and engine.url = {config.url!r} is one "
            "that runs already; leave one of them out"
        )
    here = _EMBEDDED if config.name == "auto" else (kind(config),)
    fields = type(config).model_fields
    for name, (places, why) in HAS_EFFECT.items():
        value, default = getattr(config, name), fields[name].get_default(call_default_factory=True)
        if value != default and not set(here) & set(places):
            raise ConfigError(
                f"engine.{name} = {_shown(value)} has no effect with engine.name = {config.name!r}"
                f"{_where(config)}: {why}; it has one with {_listed(places)}"
            )
    if config.name in (*_EMBEDDED, "auto"):
        _check_embedded(config)
    else:
        _check_own_weights(config)


def _check_embedded(config: EngineConfig) -> None:
    if config.transfer not in ("auto", "memory"):
        raise ConfigError(
            f"engine.transfer = {config.transfer!r}: engine.name = {config.name!r} is in the trainer's "
            "process and shares or copies its weights; leave it at 'auto'"
        )


def _check_own_weights(config: EngineConfig) -> None:
    here = kind(config)
    if here != "vllm, in process" and config.transfer == "memory":
        raise ConfigError(
            "engine.transfer = 'memory' needs the engine in the trainer's process, and this one is a server; "
            "set 'auto', 'ipc', 'collective' or 'disk'"
        )
    if config.url is not None and config.transfer == "ipc":
        raise ConfigError(
            "engine.transfer = 'ipc' needs a server that Lockstep started on the trainer's GPU; set 'auto', "
            "'collective' or 'disk' with engine.url"
        )
    if config.url is not None and not config.url.startswith(("http://", "https://")):
        raise ConfigError(
            f"engine.url = {config.url!r} does not start with http:// or https://, such as "
            "http://127.0.0.1:8000"
        )
    _check_devices(config)
    if config.name == "sglang" and not config.batch_invariant and not config.unseeded:
        raise ConfigError(
            "engine.name = 'sglang' reads seeds only in its deterministic mode, and would draw every sample "
            "from one stream of noise; set engine.batch_invariant = true (a run can be repeated then), or "
            "engine.unseeded = true to accept it"
        )
    if config.unseeded and config.batch_invariant:
        raise ConfigError(
            "engine.unseeded = true has no effect with engine.batch_invariant = true: each sample has its "
            "seed then; leave it out"
        )


def _check_devices(config: EngineConfig) -> None:
    wanted, given = config.replicas * config.tp, config.cuda_devices
    if given and len(given) != wanted:
        raise ConfigError(
            f"engine.cuda_devices = {list(given)} names {len(given)} GPUs, and engine.replicas * engine.tp = "
            f"{config.replicas} * {config.tp} need {wanted}; list each replica's one after the other"
        )
    for start in range(0, len(given), config.tp):
        share = given[start : start + config.tp]
        if len(set(share)) < len(share):
            raise ConfigError(
                f"engine.cuda_devices = {list(given)} gives one replica the GPUs {list(share)}, one of them "
                f"twice; name {config.tp} different ones"
            )
    if len(set(given)) < len(given) and config.memory_fraction is None:
        raise ConfigError(
            f"engine.cuda_devices = {list(given)} puts several replicas on one GPU; set "
            "engine.memory_fraction, of the whole GPU for each of them"
        )


def _shown(value: object) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, Path):
        return repr(str(value))
    return repr(list(value) if isinstance(value, tuple) else value)


def _where(config: EngineConfig) -> str:
    if config.name not in ("vllm", "sglang"):
        return ""
    where = kind(config).partition(", ")[2]
    return {"in process": " in the trainer's process", "started": "", "at a url": " at engine.url"}[where]


def _listed(places: tuple[str, ...]) -> str:
    words = {"in process": "in process", "started": "as a started server", "at a url": "at engine.url"}
    found = []
    for place in places:
        name, _, where = place.partition(", ")
        found.append(f"{name} {words[where]}" if where else name)
    return ", ".join(found)
