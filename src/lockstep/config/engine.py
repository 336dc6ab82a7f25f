"""Which inference engine samples, where it lives, and how it gets the weights."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, model_validator

from lockstep.config.base import Config, FilePath, Name, NonNegativeInt, PositiveInt, Seconds
from lockstep.config.engines import check_engine


class EngineConfig(Config):
    """Which inference engine samples."""

    name: Name = "auto"
    """native, hf, vllm, sglang, `module:Class` for your own, or auto: native on CUDA, hf on a CPU."""
    max_batch: PositiveInt = 256
    """Samples decoded together."""
    kv_cache_tokens: PositiveInt | None = None
    """native: tokens that its KV cache holds, of all samples together; where they do not fit, samples wait.
    None: what max_batch samples can need, as far as memory_fraction allows."""
    prefill_chunk: PositiveInt = 2048
    """native: prompt tokens of one forward; longer prompts take several."""
    python: FilePath | None = None
    """Interpreter of an environment that has vLLM or SGLang: that project's own server is started with it."""
    url: Name | None = None
    """A server that is already running, such as http://127.0.0.1:8000; it is never stopped."""
    token_env: Name | None = None
    """Name of the environment variable that holds the token (API key) of the server at url; none: it asks for
    none. A server that Lockstep starts gets one by itself."""
    replicas: PositiveInt = Field(1, le=1024)
    """Engines behind one dispatcher, each with the whole model."""
    cuda_devices: tuple[NonNegativeInt, ...] = ()
    """GPUs of started servers, tp of them for each replica; none: the trainer's own GPU."""
    tp: PositiveInt = 1
    """GPUs that share each matrix of one engine."""
    max_model_len: PositiveInt | None = None
    """Longest prompt and completion together, in tokens; none: the longest that the run can have."""
    memory_fraction: float | None = Field(None, gt=0.0, lt=1.0)
    """Of the GPU's memory for one engine; vLLM counts everything, SGLang weights and KV cache, native its KV
    cache (on a CPU, of the host's memory). None: 0.45 of a GPU that the trainer uses too (native on a CPU:
    0.25), else the engine's own default."""
    prefix_caching: bool = True
    """Keep keys and values of prompts that come again."""
    eager: bool = False
    """No CUDA graphs and no compilation in the engine."""
    batch_invariant: bool = False
    """The engine's own mode in which a sample does not depend on its batch, to the bit."""
    unseeded: bool = False
    """Accept samples that no seed decides: of sglang without batch_invariant."""
    sleep: bool = False
    """Give the engine's memory back while the trainer trains."""
    transfer: Literal["auto", "memory", "ipc", "collective", "disk"] = "auto"
    """How weights reach the engine: in the same process, CUDA IPC, NCCL or gloo, or files."""
    bucket_mb: PositiveInt = 512
    """Weights are packed into buffers of this size on their way."""
    verify: Literal["off", "first", "always"] = "first"
    """After which updates it is checked that the engine holds the trained weights."""
    start_seconds: Seconds = 600.0
    """Deadline of an engine's start."""
    request_seconds: Seconds = 600.0
    """Deadline of anything new from an engine that generates: a finished sample, or progress."""
    update_seconds: Seconds = 300.0
    """Deadline of one weight update."""
    max_restarts: NonNegativeInt = 2
    """How often a started server that died is started again, in one run."""
    options: dict[str, str | int | float | bool] = Field(default_factory=dict)
    """More arguments for the engine's constructor, under its own names, such as attention_backend."""
    env: dict[str, str] = Field(default_factory=dict)
    """More environment variables for a started server, such as LD_LIBRARY_PATH or NCCL_SOCKET_IFNAME."""

    @model_validator(mode="after")
    def _check(self) -> EngineConfig:
        check_engine(self)
        return self


def resolved(config: EngineConfig, *, native: bool) -> EngineConfig:
    """`config` with the engine that "auto" comes to, checked as if it had been named.

    Args:
        native: whether it is native; otherwise hf.

    Raises:
        ConfigError: a setting has no effect with that engine.
    """
    if config.name != "auto":
        return config
    found = config.model_copy(update={"name": "native" if native else "hf"})
    check_engine(found)
    return found
