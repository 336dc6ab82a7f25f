"""The inference engine of a run: its settings, and which engines each of them has an effect on."""

from __future__ import annotations

from typing import ClassVar, Literal

from pydantic import Field

from lockstep.common_errors import no_effect
from lockstep.config.base import (
    Config,
    FilePath,
    Name,
    NonNegativeInt,
    PositiveInt,
    Seconds,
    SecretPlace,
    Variable,
    check,
)
from lockstep.config.declarations import engines
from lockstep.config.rules import refuse
from lockstep.config.train import Auto
from lockstep.errors import ConfigError

_WHY = {
    "replicas": "a process can hold only one vLLM or native engine, and a URL names a single server",
    "cuda_devices": "Lockstep can assign GPUs only to a server that it starts",
    "tp": "Lockstep can split a server over GPUs only if it starts that server",
    "max_model_len": "the trainer's modules accept any length that the model accepts",
    "kv_cache_tokens": "it sizes its KV cache itself",
    "prefill_chunk": "it splits prompts itself",
    "memory_fraction": "no memory is reserved for this engine",
    "prefix_caching": "it has no prefix cache",
    "eager": "it has no CUDA graphs",
    "batch_invariant": (
        "an embedded engine runs the trainer's modules, which train.batch_invariant = true makes invariant "
        "(with engine.name = 'native'), and Lockstep cannot tell whether a vLLM server that is already "
        "running uses this mode"
    ),
    "unseeded": "it always uses the seed of each sample",
    "offload": "a server that Lockstep did not start keeps its memory",
    "bucket_mb": "weights are not sent",
    "start_seconds": "nothing is started or waited for",
    "request_seconds": "it runs in the trainer's own thread",
    "update_seconds": "weights are not sent",
    "max_restarts": "only a server that Lockstep starts can be restarted",
    "options": "its constructor does not take options",
    "env": "only a server that Lockstep starts has its own environment",
    "secrets": "only a server that Lockstep starts has its own environment",
    "python": "it names a server's Python interpreter",
    "token_env": "a server that Lockstep starts gets a token automatically",
    "url": "it is the address of a vLLM or SGLang server",
    "process": "vllm and sglang run in a separate process with engine.python or engine.url",
}
"""Setting with an effect in some engines only -> why it has none in the others. Each engine declares the
settings that it reads (`settings` in its support.toml)."""


def _places() -> dict[str, tuple[str, ...]]:
    """Return the places where an engine may run, as `kind` names them -> the settings with an effect
    there."""
    return {
        name if place == "embedded" else f"{name}, {place}": known
        for name, engine in engines().items()
        for place, known in engine.settings.items()
    }


HAS_EFFECT: dict[str, tuple[tuple[str, ...], str]] = {
    name: (tuple(place for place, known in _places().items() if name in known), why)
    for name, why in _WHY.items()
}
"""Setting -> where it has an effect, and why it has none elsewhere. Other settings always have an effect."""

_OFF = {"offload": False}
"""Values that no engine need support, as they are what it does anyway."""
_EMBEDDED = tuple(name for name, engine in engines().items() if not engine.external)
"""The engines that "auto" can resolve to: Lockstep's own, which need no separate process."""


class EngineConfig(Config):
    """The inference engine that samples."""

    section: ClassVar[str | None] = "engine"

    name: Name = "auto"
    """native, hf, vllm, sglang, or `module:Class` for your own engine. auto: native on CUDA, hf on a CPU."""
    process: Literal["auto", "separate"] = "auto"
    """Only for native and hf. separate: Lockstep starts the engine in a separate process and sends it
    weights, as for a vLLM server. auto: the engine runs in the trainer's process and reads the trainer's
    weights."""
    max_batch: PositiveInt = 256
    """Maximum number of samples decoded together."""
    kv_cache_tokens: PositiveInt | Auto = "auto"
    """native: capacity of the KV cache in tokens, shared by all samples. Samples that do not fit wait. auto:
    as many tokens as max_batch samples can need, or fewer if the memory plan has no room for them, within
    memory_fraction."""
    prefill_chunk: PositiveInt = 2048
    """native: maximum number of prompt tokens per forward pass. Longer prompts take several passes."""
    python: FilePath | None = None
    """Python interpreter of an environment with vLLM or SGLang. Lockstep uses it to start that engine's own
    server."""
    url: Name | None = None
    """Address of a running server, such as http://127.0.0.1:8000. Lockstep never stops it."""
    token_env: Variable | None = None
    """Name of the environment variable with the token (API key) for the server at url. Leave it unset if the
    server needs no token. A server that Lockstep starts gets a token automatically."""
    replicas: PositiveInt = Field(1, le=1024)
    """Number of engines behind one dispatcher, each with the whole model."""
    cuda_devices: tuple[NonNegativeInt, ...] = ()
    """GPUs for started servers, tp of them for each replica. If the list is empty, started servers use the
    trainer's GPU."""
    tp: PositiveInt = 1
    """Tensor parallel size: number of GPUs that share each matrix of one engine."""
    max_model_len: PositiveInt | None = None
    """Maximum length of prompt plus completion, in tokens. If unset, the limit is the longest sample that the
    run can produce."""
    memory_fraction: float | None = Field(None, gt=0.0, lt=1.0)
    """Fraction of GPU memory for one engine. In vLLM it covers everything, in SGLang weights and KV cache,
    and in native only the KV cache (on a CPU, it is a fraction of host memory). If unset, the engine gets
    0.45 of a GPU that the trainer also uses (0.25 for native on a CPU), and otherwise its own default."""
    prefix_caching: bool = True
    """Keep the keys and values of prompts and reuse them when a prompt is repeated."""
    eager: bool = False
    """Turn off CUDA graphs and compilation in the engine."""
    batch_invariant: bool = False
    """Use the engine's own batch-invariant mode, in which a sample is bitwise independent of its batch."""
    unseeded: bool = False
    """Accept an engine whose samples do not depend on the seed: sglang without batch_invariant."""
    offload: bool | Auto = "auto"
    """Release the engine's GPU memory while the policy trains. auto: as the memory plan needs; false for an
    engine whose memory no plan counts."""
    transfer: Literal["auto", "memory", "ipc", "collective", "disk"] = "auto"
    """How weights are sent to the engine. memory: within the process. ipc: by CUDA IPC. collective: by NCCL
    or gloo. disk: in files. auto: the fastest of these that trainer and engine support."""
    bucket_mb: PositiveInt = 512
    """Size in MB of the buffers in which weights are sent."""
    verify: Literal["off", "first", "always"] = "first"
    """When to verify that the engine holds the trained weights: after no weight update, after the first, or
    after each one."""
    start_seconds: Seconds = 600.0
    """Deadline in seconds for the start of the engine."""
    request_seconds: Seconds = 600.0
    """How many seconds the engine may generate without making progress."""
    update_seconds: Seconds = 300.0
    """Deadline in seconds for one weight update."""
    max_restarts: NonNegativeInt = 2
    """How often a dead server may be restarted in a run."""
    options: dict[str, str | int | float | bool] = Field(default_factory=dict)
    """Additional arguments for the engine's constructor, under the engine's names for them, such as
    attention_backend."""
    env: dict[str, str] = Field(default_factory=dict)
    """Additional environment variables for a started server, such as LD_LIBRARY_PATH or
    NCCL_SOCKET_IFNAME."""
    secrets: dict[Variable, SecretPlace] = Field(default_factory=dict)
    """Additional secret environment variables for a started server, each with the location of its value:
    env:VARIABLE, or file:/absolute/path of a file with mode 0600. The values never appear in files, logs or
    errors."""

    @property
    def offloads(self) -> bool:
        """Whether its GPU memory is released while the policy trains; "auto" is resolved by a run."""
        return self.offload is True

    @property
    def kv_cache_limit(self) -> int | None:
        """Tokens of KV cache that are set, in the config or by the memory plan; None: as many as needed."""
        return None if self.kv_cache_tokens == "auto" else self.kv_cache_tokens

    @property
    def shares(self) -> list[tuple[int, ...]]:
        """The GPUs of each replica, of cuda_devices."""
        return [self.cuda_devices[at : at + self.tp] for at in range(0, len(self.cuda_devices), self.tp)]

    @check
    def _check(self) -> EngineConfig:
        check_engine(self)
        if both := self.secrets.keys() & self.env.keys():
            raise ConfigError(
                f"duplicate: {min(both)} is in both env and secrets; remove it from one of them",
                setting="secrets",
            )
        return self


def resolved(config: EngineConfig, *, native: bool) -> EngineConfig:
    """Return `config` with "auto" resolved, checked as if the engine had been named.

    Args:
        native: whether "auto" resolves to native; otherwise hf.

    Raises:
        ConfigError: a setting has no effect with that engine.
    """
    if config.name != "auto":
        return config
    with_name = config.model_copy(update={"name": "native" if native else "hf"})
    check_engine(with_name)
    return with_name


def has_own_weights(config: EngineConfig) -> bool:
    """Return whether weights are sent to the engine. For a `module:Class`, only the class knows:
    lockstep.engine.build.is_external."""
    engine, own = engines().get(config.name), config.process == "separate"
    return config.name == "auto" and own if engine is None else engine.external or own


def kind(config: EngineConfig) -> str:
    """Return the engine and where it runs: "native", "hf", "native, started", "vllm, in process", ..."""
    engine = engines().get(config.name)
    if engine is None or not engine.external:
        return config.name + (", started" if config.process == "separate" else "")
    if config.url is not None:
        return f"{config.name}, at a url"
    here = config.python is None and "in process" in engine.settings
    return f"{config.name}, {'in process' if here else 'started'}"


def check_engine(config: EngineConfig) -> None:
    """Raise ConfigError unless the engine supports the other settings. A `module:Class` may support them all.

    A name that is not known here is refused where engines are looked up.

    Raises:
        ConfigError: what, why, and what to set.
    """
    if config.name != "auto" and config.name not in engines():
        return
    refuse(config, "engine (servers)")
    names = _EMBEDDED if config.name == "auto" else (config.name,)
    here = tuple(kind(config.model_copy(update={"name": name})) for name in names)
    fields = type(config).model_fields
    for name, (places, why) in HAS_EFFECT.items():
        value, default = getattr(config, name), fields[name].get_default(call_default_factory=True)
        if value not in (default, _OFF.get(name, default)) and not set(here) & set(places):
            where = f"with engine.name = {config.name!r}{_where(config)}"
            raise no_effect(f"engine.{name}", value, f"{where}: {why}", fix=f"use it with {_listed(places)}")
    if has_own_weights(config):
        _check_own_weights(config)
    else:
        refuse(config, "engine (in the trainer's process)")


def _check_own_weights(config: EngineConfig) -> None:
    here = kind(config)
    if not here.endswith(", in process") and config.transfer == "memory":
        raise ConfigError(
            "unsupported-combination: engine.transfer = 'memory' needs the engine in the trainer's "
            "process, but this engine is a server; set 'auto', 'ipc', 'collective' or 'disk'"
        )
    refuse(config, "engine")
    refuse(config, "engine (devices)")
    if here in HAS_EFFECT["unseeded"][0] and not config.batch_invariant and not config.unseeded:
        raise ConfigError(
            f"unsupported-combination: engine.name = {config.name!r} uses seeds only in its deterministic "
            "mode; otherwise it draws all samples from one stream of random numbers. Set "
            "engine.batch_invariant = true, which makes the run reproducible, or accept it with "
            "engine.unseeded = true",
            setting="engine.batch_invariant",
        )
    refuse(config, "engine (seeds)")


def _where(config: EngineConfig) -> str:
    where = kind(config).partition(", ")[2]
    return {"in process": " in the trainer's process", "at a url": " at engine.url"}.get(where, "")


def _listed(places: tuple[str, ...]) -> str:
    words = {"in process": "in process", "started": "as a started server", "at a url": "at engine.url"}
    names = []
    for place in places:
        name, _, where = place.partition(", ")
        names.append(f"{name} {words[where]}" if where else name)
    return ", ".join(names)
