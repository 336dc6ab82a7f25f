"""The units of the memory plan: the sizes of a model, uses of memory, and what forward and backward hold.

Counted from the architecture: what autograd keeps of one decoder layer in transformers' eager modules, per
token (b = bytes of the compute dtype; C hidden, I intermediate, N and K query and key/value heads, H head
dim):

    a norm of width W       b = 4: input, normalised, output (12 W).  b = 2: float32 input and two more (8 W)
    attention               q, k, v, output, and the output once more for o_proj: b H (3 N + 2 K)
    gated MLP               gate, up, activated gate, product: 4 b I

It is an estimate: what a layer keeps is within 15 % (tests/models/test_memory.py measures it).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from lockstep.config.train import TrainConfig, token_slots
from lockstep.ops.logprobs import CHUNK_ELEMENTS

Phase = Literal["always", "generate", "train", "update", "host"]
BUCKET_ELEMENTS = {"cpu": 2**22, "cuda": 2**28}
"""Elements that an optimizer of lockstep.train updates together. CPU: the float32 gradient of one bucket
stays in cache (SmolLM2-135M, 2 threads: 0.22 s against 0.30 s in one piece). GPU: bounds the float32 gradient
copy to 1 GiB without adding launches that matter."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelShape:
    """The sizes that memory depends on."""

    layers: int
    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    norm_width: int
    """Channels of all norms of one layer."""
    parameters: int
    """All, tied ones once."""
    trained: int
    """Those with a gradient; with LoRA the adapters only."""
    dtype_bytes: int
    lora: bool

    @property
    def activation_bytes_per_layer(self) -> int:
        """Bytes that one layer keeps for backward, per token."""
        norms = self.norm_width * (12 if self.dtype_bytes == 4 else 8)
        attention = self.dtype_bytes * self.head_dim * (3 * self.heads + 2 * self.kv_heads)
        return norms + attention + 4 * self.dtype_bytes * self.intermediate

    @property
    def layer_parameters(self) -> int:
        """Parameters of one decoder layer's matrices; norms and biases are negligible."""
        attention = self.hidden * self.head_dim * (2 * self.heads + 2 * self.kv_heads)
        return attention + 3 * self.hidden * self.intermediate

    @property
    def outer_parameters(self) -> int:
        """Parameters outside the layers: embedding and head."""
        return max(0, self.parameters - self.layers * self.layer_parameters)

    @property
    def kv_bytes_per_token(self) -> int:
        """Bytes of one token's keys and values over all layers."""
        return 2 * self.layers * self.kv_heads * self.head_dim * self.dtype_bytes


@dataclass(frozen=True, kw_only=True, slots=True)
class MemoryPart:
    """One use of memory."""

    name: str
    bytes: int
    phase: Phase
    """always; generate, train or update: only in that part of a step; host: in host memory beside a GPU."""
    setting: str
    """The setting that makes it smaller."""
    role: str = "policy"
    """Which of the run's models it is for: policy, value or reward_model."""
    place: str = ""
    """What it is on a GPU of its own with, such as "second world"; "": the rank's device."""


def forward_sizes(
    shape: ModelShape, train: TrainConfig, *, tokens: int, device: str
) -> list[tuple[str, int, Phase, str]]:
    """(name, bytes, phase, setting) of what forward and backward of one micro-batch hold."""
    b, layer = shape.dtype_bytes, shape.activation_bytes_per_layer
    budget = f"train.token_budget (now {token_slots(train)})"
    if train.activation_checkpointing:
        kept, how = shape.layers * b * shape.hidden + layer, "activations, checkpointed"
    else:
        kept, how = shape.layers * layer, "activations"
        budget += " or train.activation_checkpointing = true"
    kept += shape.hidden * (12 if b == 4 else 8)  # the last norm
    # Gradients of the widest intermediate values, and the final hidden states with theirs.
    transient = b * (3 * shape.intermediate + 4 * shape.hidden)
    kind = "compiled" if train.execution not in ("eager", "auto") else device
    rows = min(tokens, max(1, CHUNK_ELEMENTS[kind] // shape.vocab))
    per_logit = {"cpu": 2 * b, "cuda": b + 8, "compiled": 2 * b}[kind]
    sizes: list[tuple[str, int, Phase, str]] = [
        (how, tokens * (kept + transient), "train", budget),
        ("logits of one chunk", rows * shape.vocab * per_logit, "train", "model.name (its vocabulary)"),
    ]
    if rows < tokens and not shape.lora:
        sizes.append(
            ("head gradient, float32", 4 * shape.vocab * shape.hidden, "train", "model.name (its vocabulary)")
        )
    return sizes


def joint_gradients(shape: ModelShape, train: TrainConfig) -> tuple[str, float, Phase, str]:
    """The gradients that a joint graph's backward returns at once; other modes return a layer's."""
    at_once = train.execution == "joint" and not train.cuda_graph
    setting = "train.execution = 'compile'"
    return "gradients of a joint graph", shape.dtype_bytes * shape.trained * at_once, "train", setting


def either(*settings: str | bool) -> str:
    """Join the settings that are strings with "or"."""
    return " or ".join(setting for setting in settings if isinstance(setting, str))
