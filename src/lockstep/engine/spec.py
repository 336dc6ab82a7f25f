"""What an engine that does not share the trainer's modules needs besides its config."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineSpec:
    """The model that an engine serves, and where it runs."""

    folder: Path
    """A Hugging Face folder; with weights "pushed" it needs the config and the tokenizer, if there is one."""
    weights: Literal["folder", "pushed"]
    """pushed: the engine starts dirty, with random weights, and the first update sends the real ones."""
    model_name: str
    """ModelConfig.name, for messages."""
    dtype: str
    """bfloat16, float16 or float32: always explicit, never the engine's "auto"."""
    vocab_size: int
    max_model_len: int
    """Longest prompt and completion together, in tokens."""
    eos_token_ids: tuple[int, ...]
    tokenizer: Any | None
    """Lockstep's tokenizer, used to find stop strings and decode texts. None: the model has none."""
    device: str
    """cpu, or cuda:N of the trainer: where an engine that gets no GPU of its own runs."""
    shares_device: bool
    """Whether a trainer uses the same GPU."""
    temperatures: frozenset[float]
    """All temperatures that will be used; some engines fix at start which logprobs they return."""
    work_dir: Path
    """For logs, folders and files of weights; the run directory's `engine/`."""
    seed: int = 0
    batch_invariant: bool = False
    """Of the trainer's forward: native in a process of its own then computes with the same kernels."""
    execution: str = "eager"
    """LoadedModel.execution of the trainer."""
    threads: int = 0
    """CPU threads of torch, which decide bits; 0: the default of the process."""
