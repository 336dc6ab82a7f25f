"""What an engine outside the trainer's modules must know besides its config."""

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
    """pushed: the engine starts with random weights, dirty, and the first update brings the real ones."""
    model_name: str
    """ModelConfig.name, for messages."""
    dtype: str
    """bfloat16, float16 or float32: always said, never the engine's "auto"."""
    vocab_size: int
    max_model_len: int
    """Longest prompt and completion together, in tokens."""
    eos_token_ids: tuple[int, ...]
    tokenizer: Any | None
    """Ours: stop strings are found and texts decoded with it. None: the model has none."""
    device: str
    """cpu, or cuda:N of the trainer: where an engine that gets no GPU of its own runs."""
    shares_device: bool
    """Whether a trainer uses the same GPU."""
    temperatures: frozenset[float]
    """All sampling temperatures to come; some engines fix at start which logprobs they give."""
    work_dir: Path
    """For logs, folders and files of weights; the run directory's `engine/`."""
    seed: int = 0
