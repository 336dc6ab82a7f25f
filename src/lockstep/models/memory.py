"""The memory of a machine, the sizes of a model, and what to change where memory runs out."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import nn

from lockstep.config.model import ModelConfig
from lockstep.config.train import TrainConfig, token_slots
from lockstep.models.architectures import (
    architecture_of,
    caps_scores,
    is_moe,
    kv_heads,
    option,
    text_config,
)
from lockstep.ops.logprobs import CHUNK_ELEMENTS

if TYPE_CHECKING:
    from lockstep.models.load import OpenedModel

GIB = 1024**3


def explain_oom(parts: Sequence[MemoryPart], *, before: Sequence[MemoryPart] = ()) -> str:
    """Name the part that uses most memory and the setting that makes it smaller.

    Args:
        before: the parts when they still fitted: then the part that grew most is named, else the largest.

    Raises:
        ValueError: there are no parts.

    Example:
        >>> explain_oom([MemoryPart(name="KV cache", bytes=GIB, phase="generate",
        setting="engine.max_batch")]) 'the largest part is KV cache (1.00 GiB); to make it smaller, change
        engine.max_batch'
    """
    old = {part.name: part.bytes for part in before}
    part = max(parts, key=lambda p: p.bytes - old.get(p.name, 0))
    grown = part.bytes - old.get(part.name, 0)
    if before and grown > 0:
        what = f"{part.name} grew by {gib(grown)} to {gib(part.bytes)}"
    else:
        part = max((p for p in parts if p.setting), key=lambda p: p.bytes)
        what = f"the largest part is {part.name} ({gib(part.bytes)})"
    return f"{what}; to make it smaller, change {part.setting}"


def module_shape(module: nn.Module) -> ModelShape:
    """Return the sizes of a loaded model, which may be on the meta device."""
    from lockstep.models.lora import has_lora

    config = text_config(module)
    heads = config.num_attention_heads
    keys = kv_heads(config)
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // heads
    record = architecture_of(config)
    layer = [name for name, _ in module.named_parameters() if ".layers.0." in name and "norm" in name]
    on_heads = any("q_norm" in name for name in layer)
    wide = sum("q_norm" not in name and "k_norm" not in name for name in layer)
    parameters = list(module.parameters())
    return ModelShape(
        layers=config.num_hidden_layers,
        hidden=config.hidden_size,
        intermediate=_computed_width(config),
        heads=heads,
        kv_heads=keys,
        head_dim=head_dim,
        vocab=config.vocab_size,
        norm_width=wide * config.hidden_size + on_heads * (heads + keys) * head_dim,
        parameters=sum(p.numel() for p in parameters),
        trained=sum(p.numel() for p in parameters if p.requires_grad),
        dtype_bytes=parameters[0].element_size(),
        lora=has_lora(module),
        slots=config.num_experts_per_tok if is_moe(config) else 0,
        experts=sum(p.numel() for n, p in module.named_parameters() if ".experts." in n)
        // config.num_hidden_layers,
        num_experts=option(config, "num_local_experts", None) or option(config, "num_experts", 0) or 0,
        native=record is not None and record.native,
        capped=caps_scores(config),
        compiles=record is not None and not is_moe(config),
    )


def _computed_width(config: Any) -> int:
    """The gate's outputs for one token: of a model with experts those of the token's experts together."""
    if not is_moe(config):
        return int(config.intermediate_size)
    of_one = option(config, "moe_intermediate_size") or config.intermediate_size
    return int(config.num_experts_per_tok * of_one + option(config, "shared_expert_intermediate_size", 0))


def planned_shape(
    config: ModelConfig, *, dtype: torch.dtype, head: Literal["logits", "scalar"] = "logits"
) -> ModelShape:
    """Sizes of a model that is not loaded. A scalar head counts as a vocabulary of one.

    Raises:
        ModelError: its config is not on this machine, or not supported.
    """
    from lockstep.models.load import meta_module

    shape = module_shape(meta_module(config, dtype=dtype, head=head))
    return shape if head == "logits" else dataclasses.replace(shape, vocab=1)


def opened_shape(opened: OpenedModel, config: ModelConfig, *, dtype: torch.dtype) -> ModelShape:
    """Return the sizes that the model will have when it is loaded. opened: of `config`."""
    from lockstep.models.load import meta_module

    return module_shape(meta_module(config, dtype=dtype, opened=opened))


def phase_totals(parts: Sequence[MemoryPart]) -> Mapping[str, int]:
    """Bytes per phase. Roles train and update one after the other: there the largest counts."""
    by_role: dict[str, dict[str, int]] = {}
    for part in parts:
        phases = by_role.setdefault(part.role, {})
        phases[part.phase] = phases.get(part.phase, 0) + part.bytes
    add_up: dict[str, Callable[[Iterable[int]], int]] = {
        "always": sum,
        "generate": sum,
        "train": max,
        "update": max,
        "host": sum,
    }
    return {
        phase: add([phases.get(phase, 0) for phases in by_role.values()] or [0])
        for phase, add in add_up.items()
    }


def available_bytes(device: torch.device) -> tuple[int, str]:
    """Memory that is free now, and where the number comes from: the GPU's, or the host's within its
    cgroup."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0], f"free on {torch.cuda.get_device_name(device)}"
    free = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    source = "free host memory"
    meminfo = Path("/proc/meminfo")
    if meminfo.exists():
        values = dict(line.split(":", 1) for line in meminfo.read_text().splitlines() if ":" in line)
        if "MemAvailable" in values:
            free, source = int(values["MemAvailable"].split()[0]) * 1024, "available host memory"
    limit = _cgroup_left(Path("/sys/fs/cgroup"))
    if limit is not None and limit < free:
        return limit, "left under the cgroup's memory limit"
    return free, source


def total_bytes() -> int:
    """Return the host's memory in bytes, or the limit of its cgroup where that is less."""
    total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    cgroup = _cgroup_limit(Path("/sys/fs/cgroup"))
    return total if cgroup is None else min(total, cgroup[0])


def gib(size: int) -> str:
    """Format bytes as GiB or MiB."""
    return f"{size / GIB:.2f} GiB" if size >= 0.1 * GIB else f"{size / 2**20:.1f} MiB"


def _cgroup_limit(root: Path) -> tuple[int, Path] | None:
    """The limit of cgroup v2 (memory.max) or v1, and the file with the usage; None: no limit."""
    for limit_file, usage_file in (
        ("memory.max", "memory.current"),
        ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes"),
    ):
        limit_path, usage_path = root / limit_file, root / usage_file
        if not (limit_path.is_file() and usage_path.is_file()):
            continue
        text = limit_path.read_text().strip()
        if not text.isdigit() or int(text) >= 1 << 60:  # "max", or v1's way of saying it
            return None
        return int(text), usage_path
    return None


def _cgroup_left(root: Path) -> int | None:
    """Bytes until the cgroup's limit; None: no limit. Page cache counts as free."""
    cgroup = _cgroup_limit(root)
    if cgroup is None:
        return None
    limit, usage = cgroup
    stat = usage.with_name("memory.stat")
    lines = [line.split() for line in stat.read_text().splitlines()] if stat.is_file() else []
    cache = sum(int(v) for k, v in lines if k in ("inactive_file", "total_inactive_file"))
    return max(0, limit - int(usage.read_text()) + cache)


# The units of the memory plan: the sizes of a model, uses of memory, and what forward and backward hold.
#
# Counted from the architecture: what autograd keeps of one decoder layer in transformers' eager modules, per
# token (b = bytes of the compute dtype; C hidden, I intermediate, N and K query and key/value heads, H head
# dim):
#
#     a norm of width W       b = 4: input, normalised, output (12 W); b = 2: float32 input, two more (8 W)
#     attention               q, k, v, output, and the output once more for o_proj: b H (3 N + 2 K)
#     gated MLP               gate, up, activated gate, product: 4 b I
#
# Where a norm is one op it keeps input and output (2 b W), and o_proj the attention's own output (b H (2 N +
# 2 K), and 4 N for the log of its sums). Compiled layers compute the activated gate again (3 b I).
#
# It is an estimate: what a layer keeps is within 15 % (tests/models/test_memory.py measures it).


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
    slots: int = 0
    """Experts of a token; 0: the model has no experts. `intermediate` is then of all of them together."""
    experts: int = 0
    """Parameters of one layer's experts, on average."""
    num_experts: int = 0
    """Experts of a layer; 0: the model has none."""
    native: bool = True
    """Whether engine native can call the layers."""
    capped: bool = False
    """Whether attention scores have soft caps."""
    compiles: bool = True
    """Whether tests cover compiled execution of the architecture."""

    def activation_bytes_per_layer(self, *, compiled: bool = False, fused_norms: bool = False) -> int:
        """Return the bytes that one layer keeps for backward, per token.

        Args:
            compiled: by torch.compile.
            fused_norms: a norm is one op, as in a batch-invariant model.
        """
        b, queries, keys = self.dtype_bytes, self.heads * self.head_dim, self.kv_heads * self.head_dim
        rows = 2 * b * self.slots * self.hidden  # a token's row for each of its experts, in and out
        if not (compiled or fused_norms):
            norms = self.norm_width * (12 if b == 4 else 8)
            return norms + b * (3 * queries + 2 * keys) + 4 * b * self.intermediate + rows
        attention = b * (2 * queries + 2 * keys) + 4 * self.heads
        return 2 * b * self.norm_width + attention + (3 if compiled else 4) * b * self.intermediate + rows

    @property
    def layer_parameters(self) -> int:
        """Parameters of one decoder layer's matrices; norms and biases are negligible."""
        attention = self.hidden * self.head_dim * (2 * self.heads + 2 * self.kv_heads)
        return attention + (self.experts or 3 * self.hidden * self.intermediate)

    @property
    def outer_parameters(self) -> int:
        """Parameters outside the layers: embedding and head."""
        return max(0, self.parameters - self.layers * self.layer_parameters)

    @property
    def active_parameters(self) -> int:
        """Parameters that one token is computed with: all, but for the experts that it does not choose."""
        if not self.num_experts:
            return self.parameters
        return (
            self.parameters - self.layers * self.experts * (self.num_experts - self.slots) // self.num_experts
        )

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
    """The run's model that it is for: policy, value or reward_model."""
    place: str = ""
    """The dedicated GPU that it is on, such as "remote group 1"; "": the rank's device."""


def forward_sizes(
    shape: ModelShape, train: TrainConfig, *, tokens: int, device: str
) -> list[tuple[str, int, Phase, str]]:
    """(name, bytes, phase, setting) of what forward and backward of one micro-batch hold."""
    b, compiled = shape.dtype_bytes, train.execution not in ("eager", "auto")
    layer = shape.activation_bytes_per_layer(compiled=compiled, fused_norms=bool(train.batch_invariant))
    budget = f"train.token_budget (now {token_slots(train.token_budget)})"
    if train.activation_checkpointing is True:
        kept, how = shape.layers * b * shape.hidden + layer, "activations, checkpointed"
    else:
        kept, how = shape.layers * layer, "activations"
        budget += " or train.activation_checkpointing = true"
    kept += shape.hidden * (12 if b == 4 else 8)  # the last norm
    # Gradients of the widest intermediate values, and the final hidden states with theirs.
    transient = b * (3 * shape.intermediate + 4 * shape.hidden)
    kind = "compiled" if compiled else device
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
