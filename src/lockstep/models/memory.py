"""How much memory a run needs, part by part, before anything is loaded, and which setting lowers each part.

Counted from the architecture: what autograd keeps of one decoder layer in transformers' eager modules, per
token (b = bytes of the compute dtype; C hidden, I intermediate, N and K query and key/value heads, H head
dim):

    a norm of width W       b = 4: input, normalised, output (12 W).  b = 2: float32 input and two more (8 W)
    attention               q, k, v, output, and the output once more for o_proj: b H (3 N + 2 K)
    gated MLP               gate, up, activated gate, product: 4 b I

It is an estimate: what a layer keeps is within 15 % and a process's peak within a factor of 1.5
(tests/models/test_memory.py measures both).
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn

from lockstep.config.backends import shards_weights
from lockstep.config.model import ModelConfig
from lockstep.config.run import DPORun, GRPORun, OfflineRun, RunConfig
from lockstep.config.train import TrainConfig
from lockstep.models.causal_lm import text_config
from lockstep.models.dtypes import resolve_dtype
from lockstep.models.memory_ranks import Parallelism as Parallelism
from lockstep.models.memory_ranks import rank_parts as rank_parts
from lockstep.models.memory_shape import BUCKET_ELEMENTS as BUCKET_ELEMENTS
from lockstep.models.memory_shape import MemoryPart as MemoryPart
from lockstep.models.memory_shape import ModelShape as ModelShape
from lockstep.models.memory_shape import Phase as Phase
from lockstep.models.memory_shape import either, forward_sizes, joint_gradients
from lockstep.packing.packs import MAX_BUCKETS

GIB = 1024**3
_RUNTIME_BYTES = {"cpu": int(0.6 * GIB), "cuda": int(0.8 * GIB)}


@dataclass(frozen=True, kw_only=True, slots=True)
class MemoryPlan:
    """The memory that a run needs."""

    shape: ModelShape
    dtype: torch.dtype
    device: torch.device
    parts: tuple[MemoryPart, ...]
    tokens_per_micro_batch: int
    """Token slots of the fullest micro-batch."""
    micro_batches: int
    """In one optimizer step, when every document has its greatest length."""
    documents_per_step: int
    """Per optimizer step."""
    longest_document: int
    """Tokens."""
    ranks: int
    """Ranks in all; the parts are those of one rank."""

    @property
    def peak_bytes(self) -> int:
        """Bytes on the device: what is always there plus the largest phase."""
        totals = phase_totals(self.parts)
        return totals["always"] + max(totals["generate"], totals["train"], totals["update"])

    @property
    def peak_phase(self) -> str:
        """generate, train or update."""
        totals = phase_totals(self.parts)
        return max(("generate", "train", "update"), key=lambda phase: totals[phase])


def plan_memory(run: RunConfig, *, device: torch.device, ranks: int = 1) -> MemoryPlan:
    """Plan the memory of a run; builds the model on the meta device, so it allocates next to nothing.

    Args:
        ranks: processes that train together; `config.run.check_ranks` has passed them.

    Raises:
        ModelError: the model's config is not on this machine (the hub is not asked), or is not supported.
    """
    dtype = resolve_dtype(run.model.dtype, device)
    shape = planned_shape(run.model, dtype=dtype)
    documents, longest = _documents(run)
    per_pack = max(1, run.train.token_budget // longest)
    micro_batches = math.ceil(documents / per_pack)
    tokens = min(run.train.token_budget, min(per_pack, documents) * longest)
    if _is_static(run.train):
        tokens = run.train.token_budget
    kind = "cuda" if device.type == "cuda" else "cpu"
    parts = [
        MemoryPart(name="Python, torch, libraries", bytes=_RUNTIME_BYTES[kind], phase="always", setting=""),
        *_train_parts(shape, run, step=(tokens, micro_batches), device=kind, ranks=ranks),
        *(generate_parts(shape, run, device=kind) if isinstance(run, GRPORun) else ()),
    ]
    return MemoryPlan(
        shape=shape,
        dtype=dtype,
        device=device,
        parts=tuple(part for part in parts if part.bytes),
        tokens_per_micro_batch=tokens,
        micro_batches=micro_batches,
        documents_per_step=documents,
        longest_document=longest,
        ranks=ranks,
    )


def _train_parts(
    shape: ModelShape, run: RunConfig, *, step: tuple[int, int], device: str, ranks: int
) -> list[MemoryPart]:
    """As the run's backend holds them; `step` is of rank_parts."""
    train, ref = run.train, _has_ref(run)
    if train.backend != "local":
        parallelism = Parallelism(ranks=ranks, ring=train.ring, tp=train.tp)
        return rank_parts(shape, train, parallelism=parallelism, step=step, device=device, ref=ref)
    return train_parts(shape, train, tokens=step[0], micro_batches=step[1], device=device, ref=ref)


def train_parts(
    shape: ModelShape,
    train: TrainConfig,
    *,
    tokens: int,
    micro_batches: int,
    device: str,
    ref: bool = False,
) -> list[MemoryPart]:
    """Return every part of memory that training with this backend holds.

    Args:
        tokens: slots of the largest micro-batch.
        micro_batches: of one optimizer step.
        device: "cpu" or "cuda".
        ref: a frozen reference model is kept (free with LoRA).
    """
    b, trained = shape.dtype_bytes, shape.trained
    summed = b < 4 and train.grad_accum_dtype == "float32" and micro_batches > 1
    offloaded = train.optimizer_device == "cpu" and device != "cpu"
    place: Phase = "host" if offloaded else "always"
    states = {"adamw": 8, "adamw8bit": 2, "sgd": 0}[train.optimizer]
    smaller = either("model.name", "model.num_layers", b == 4 and "model.dtype = 'bfloat16'")
    lora = not shape.lora and "model.lora"
    optimizer = either(
        lora,
        train.optimizer == "adamw" and "train.optimizer = 'adamw8bit'",
        device != "cpu" and not offloaded and "train.optimizer_device = 'cpu'",
        "model.name",
    )
    sizes = [
        ("parameters", shape.parameters * b, "always", smaller),
        (
            "reference model",
            shape.parameters * b * (ref and not shape.lora),
            "always",
            "algorithm.kl.coef = 0",
        ),
        ("float32 master weights", 4 * trained * (b < 4 or offloaded), place, optimizer),
        ("optimizer states", states * trained, place, optimizer),
        # On a CPU the float32 sums are kept from step to step.
        (
            "gradients, summed in float32" if summed else "gradients",
            trained * (4 if summed else b),
            "always" if summed and device == "cpu" else "train",
            either(lora, summed and "train.grad_accum_dtype = 'model'", "model.name"),
        ),
        (
            "gradients of CUDA graphs, a set for each capacity",
            MAX_BUCKETS * trained * b * train.cuda_graph,
            "always",
            "train.cuda_graph = false",
        ),
        joint_gradients(shape, train),
        *forward_sizes(shape, train, tokens=tokens, device=device),
        ("optimizer step's buffer", 4 * min(trained, BUCKET_ELEMENTS[device]), "update", optimizer),
    ]
    if not (summed and device == "cpu"):
        sizes.append(("gradients in the update", sizes[4][1], "update", sizes[4][3]))
    return [
        MemoryPart(name=name, bytes=int(size), phase=phase, setting=setting)  # type: ignore[arg-type]
        for name, size, phase, setting in sizes
    ]


def generate_parts(shape: ModelShape, run: GRPORun, *, device: str) -> list[MemoryPart]:
    """Return the parts of memory that sampling one rollout batch holds beside the weights."""
    apart = shards_weights(run.train)
    batch = min(run.engine.max_batch, run.rollout.prompts_per_step * run.rollout.group_size)
    length = run.data.max_prompt_tokens + run.rollout.sampling.max_tokens
    # What auto means where the run starts. Native keeps its cache, and its CUDA graphs, between rollouts.
    native = run.engine.name == "native" or (run.engine.name == "auto" and device == "cuda")
    sizes = "data.max_prompt_tokens or rollout.sampling.max_tokens"
    return [
        MemoryPart(
            name="weights of the engine, whole",
            bytes=shape.parameters * shape.dtype_bytes * apart,
            phase="always",
            setting="model.name",
        ),
        MemoryPart(
            name="KV cache",
            bytes=shape.kv_bytes_per_token * (run.engine.kv_cache_tokens or batch * length),
            phase="always" if native and not run.engine.sleep else "generate",
            setting=either(native and "engine.sleep = true", f"engine.max_batch, {sizes}"),
        ),
        MemoryPart(
            name="logits of one decoding step",
            bytes=3 * 4 * batch * shape.vocab,
            phase="generate",
            setting="engine.max_batch",
        ),
    ]


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


def advice(
    module: nn.Module, train: TrainConfig, *, tokens: int, micro_batches: int, ref: bool = False
) -> str:
    """Return a message for training of a loaded model that ran out of memory: what to change, and the
    estimate.

    Args:
        tokens: slots of the micro-batch that did not fit.
    """
    device = "cuda" if next(module.parameters()).device.type == "cuda" else "cpu"
    parts = train_parts(
        module_shape(module), train, tokens=tokens, micro_batches=micro_batches, device=device, ref=ref
    )
    on_device = [part for part in parts if part.phase in ("always", "train")]
    listed = ", ".join(
        f"{p.name} {gib(p.bytes)}" for p in sorted(on_device, key=lambda p: -p.bytes) if p.bytes
    )
    return f"{explain_oom(on_device)}. Estimated: {listed}"


def module_shape(module: nn.Module) -> ModelShape:
    """Return the sizes of a loaded model, which may be on the meta device."""
    from lockstep.models.lora import has_lora

    config = text_config(module)
    heads = config.num_attention_heads
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // heads
    layer = [name for name, _ in module.named_parameters() if ".layers.0." in name and "norm" in name]
    on_heads = any("q_norm" in name for name in layer)
    wide = sum("q_norm" not in name and "k_norm" not in name for name in layer)
    parameters = list(module.parameters())
    return ModelShape(
        layers=config.num_hidden_layers,
        hidden=config.hidden_size,
        intermediate=config.intermediate_size,
        heads=heads,
        kv_heads=config.num_key_value_heads,
        head_dim=head_dim,
        vocab=config.vocab_size,
        norm_width=wide * config.hidden_size + on_heads * (heads + config.num_key_value_heads) * head_dim,
        parameters=sum(p.numel() for p in parameters),
        trained=sum(p.numel() for p in parameters if p.requires_grad),
        dtype_bytes=parameters[0].element_size(),
        lora=has_lora(module),
    )


def planned_shape(config: ModelConfig, *, dtype: torch.dtype) -> ModelShape:
    """Sizes of a model that is not loaded.

    Raises:
        ModelError: its config is not on this machine, or not supported.
    """
    from lockstep.models.load import meta_module

    return module_shape(meta_module(config, dtype=dtype))


def phase_totals(parts: Sequence[MemoryPart]) -> Mapping[str, int]:
    """Bytes per phase."""
    totals = dict.fromkeys(("always", "generate", "train", "update", "host"), 0)
    for part in parts:
        totals[part.phase] += part.bytes
    return totals


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


def _documents(run: RunConfig) -> tuple[int, int]:
    """Documents of one optimizer step and the tokens of the longest."""
    if isinstance(run, GRPORun):
        samples = run.rollout.prompts_per_step * run.rollout.group_size
        return samples // run.train.minibatches, run.data.max_prompt_tokens + run.rollout.sampling.max_tokens
    assert isinstance(run, OfflineRun)
    return run.documents_per_update, run.data.max_length


def _has_ref(run: RunConfig) -> bool:
    return isinstance(run, DPORun) or (isinstance(run, GRPORun) and run.algorithm.kl.coef > 0)


def _is_static(train: TrainConfig) -> bool:
    return train.execution != "eager" if train.static_capacity is None else train.static_capacity
