"""Forty runs and what a memory planner should choose for them, by byte formulas alone (author A).

Two authors write such a table independently of each other and of the planner's code, so nothing here imports
lockstep. The formulas come first and explain each figure of EXPECTED, which is written out by hand. P is the
number of parameters of a model, W the number of ranks; figures without a unit are GiB (2**30 bytes).

Persistent, on each rank:

    local (W = 1): bf16 parameters 2P, float32 masters 4P, AdamW 8P; on the host: only 2P stays
    fsdp2 (W > 1): float32 shards 4P/W are the masters, AdamW 8P/W; on the host: nothing stays
    LoRA: the frozen bf16 base 2P/W; adapters and their states are negligible
    reference: bf16 2P/W; none with LoRA (the base is the reference)
    PPO: a value model of the policy's size with its own masters, states and gradients

Fullest moment of training: the start of a backward pass, when all activations of a micro-batch are kept:

    gradients: 4P whole where several micro-batches are added up per step; else the shard 4P/W and the layer
        in flight in float32. local: 2P in bf16 for one micro-batch, 4P for several
    gathered: with reshard_after_forward the embedding, the head and two layers in bf16; without, 2P.
        The engine's copy, if kept, serves as the policy's gathered parameters
    activations of a layer and token, bf16: 6 x hidden (inputs and outputs of two norms, two residual sums),
        q, k, v and the attention's output, intermediate x 3 (fused SwiGLU: gate, up, product) to 4 (eager:
        the activation too). Checkpointing keeps one hidden state per layer, and all this for one layer
    logits in chunks: 1 GiB

Fullest moment of generation: the persistent part, the engine's bf16 copy 2P (local shares the trainer's) and
the KV cache, full length for each sample that decodes at once.

tp divides the engine's copy, the KV cache, whole gradients, gathered layers, attention and MLP activations;
hidden states stay whole. Samples are divided over W / tp groups.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil
from typing import Any

GIB = 2**30
USABLE_GIB = {24: 23.6, 40: 39.4, 80: 79.2, 141: 139.8}
OUTSIDE_GIB = 3.0  # CUDA context, NCCL, fragmentation
MARGIN = 0.03
LOGITS_GIB = 1.0
LONGEST_BUDGET = 32768
SWIGLU_TENSORS = (3.0, 3.5, 4.0)  # per token, in units of intermediate: fused, between, eager


@dataclass(frozen=True, slots=True)
class Shape:
    layers: int
    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    tied: bool

    @property
    def layer(self) -> int:
        """Parameters of one decoder layer."""
        attention = 2 * self.hidden * (self.heads + self.kv_heads) * self.head_dim
        return attention + 3 * self.hidden * self.intermediate + 2 * self.hidden

    @property
    def ends(self) -> int:
        """Parameters of the embedding and the head."""
        return self.vocab * self.hidden * (1 if self.tied else 2)

    @property
    def parameters(self) -> int:
        return self.layers * self.layer + self.ends + self.hidden

    @property
    def kv_bytes(self) -> int:
        """Bytes of keys and values of one token, bf16."""
        return 2 * self.layers * self.kv_heads * self.head_dim * 2

    def layer_activation_bytes(self, tp: int, swiglu_tensors: float) -> float:
        """Bytes that one layer keeps of one token for its backward pass, bf16."""
        split = 2 * (self.heads + self.kv_heads) * self.head_dim + swiglu_tensors * self.intermediate
        return 2 * (6 * self.hidden + split / tp)


# layers, hidden, intermediate, heads, kv_heads, head_dim, vocab, tied
SHAPES = {
    "0.1b": Shape(12, 768, 2048, 12, 12, 64, 32000, True),
    "0.5b": Shape(24, 896, 4864, 14, 2, 64, 151936, True),
    "1b": Shape(16, 2048, 8192, 32, 8, 64, 128256, True),
    "3b": Shape(28, 3072, 8192, 24, 8, 128, 128256, True),
    "8b": Shape(32, 4096, 14336, 32, 8, 128, 128256, False),
    "14b": Shape(40, 5120, 17408, 40, 8, 128, 151936, False),
    "32b": Shape(64, 5120, 25600, 64, 8, 128, 151936, False),
    "72b": Shape(80, 8192, 29568, 64, 8, 128, 152064, False),
}

Case = dict[str, Any]
ANY: Case = {"tp": 1, "lora_rank": 0, "kl": False}
GRPO: Case = {**ANY, "kind": "grpo", "group": 8, "prompt_tokens": 140, "max_tokens": 512, "max_batch": 256}
PPO: Case = {**GRPO, "kind": "ppo", "kl": True}
SFT: Case = {**ANY, "kind": "sft"}
DPO: Case = {**ANY, "kind": "dpo"}
CASES: dict[str, Case] = {
    "0.1b grpo 1x24": {**GRPO, "model": "0.1b", "ranks": 1, "gib": 24, "prompts": 16},
    "0.5b grpo 1x24": {**GRPO, "model": "0.5b", "ranks": 1, "gib": 24, "prompts": 16},
    "0.5b grpo 1x24 long": {**GRPO, "model": "0.5b", "ranks": 1, "gib": 24, "prompts": 8, "max_tokens": 4096},
    "1b grpo 1x24": {**GRPO, "model": "1b", "ranks": 1, "gib": 24, "prompts": 16},
    "1b grpo 1x40": {**GRPO, "model": "1b", "ranks": 1, "gib": 40, "prompts": 16},
    "1b grpo 1x80": {**GRPO, "model": "1b", "ranks": 1, "gib": 80, "prompts": 32},
    "1b grpo 4x80": {**GRPO, "model": "1b", "ranks": 4, "gib": 80, "prompts": 32},
    "1b grpo 4x80 128 prompts": {**GRPO, "model": "1b", "ranks": 4, "gib": 80, "prompts": 128},
    "1b grpo 8x24": {**GRPO, "model": "1b", "ranks": 8, "gib": 24, "prompts": 64},
    "1b sft 1x24": {**SFT, "model": "1b", "ranks": 1, "gib": 24, "documents": 64, "length": 2048},
    "3b grpo 1x80": {**GRPO, "model": "3b", "ranks": 1, "gib": 80, "prompts": 16},
    "3b grpo 1x40": {**GRPO, "model": "3b", "ranks": 1, "gib": 40, "prompts": 16},
    "3b grpo 4x40": {**GRPO, "model": "3b", "ranks": 4, "gib": 40, "prompts": 16},
    "3b grpo 8x24": {**GRPO, "model": "3b", "ranks": 8, "gib": 24, "prompts": 64},
    "3b lora grpo 1x24": {**GRPO, "model": "3b", "ranks": 1, "gib": 24, "lora_rank": 16, "prompts": 16},
    "3b ppo 4x80": {**PPO, "model": "3b", "ranks": 4, "gib": 80, "prompts": 16},
    "3b dpo 2x80": {**DPO, "model": "3b", "ranks": 2, "gib": 80, "documents": 64, "length": 1024},
    "8b grpo 4x80": {**GRPO, "model": "8b", "ranks": 4, "gib": 80, "prompts": 16},
    "8b grpo 2x80": {**GRPO, "model": "8b", "ranks": 2, "gib": 80, "prompts": 16},
    "8b grpo 1x80": {**GRPO, "model": "8b", "ranks": 1, "gib": 80, "prompts": 16},
    "8b grpo 8x80": {**GRPO, "model": "8b", "ranks": 8, "gib": 80, "prompts": 128},
    "8b grpo 4x141": {**GRPO, "model": "8b", "ranks": 4, "gib": 141, "prompts": 16},
    "8b grpo 8x40": {**GRPO, "model": "8b", "ranks": 8, "gib": 40, "prompts": 64},
    "8b grpo 8x24": {**GRPO, "model": "8b", "ranks": 8, "gib": 24, "prompts": 64},
    "8b grpo 4x80 kl": {**GRPO, "model": "8b", "ranks": 4, "gib": 80, "kl": True, "prompts": 16},
    "8b grpo 8x80 long": {
        **GRPO,
        "model": "8b",
        "ranks": 8,
        "gib": 80,
        "prompts": 64,
        "prompt_tokens": 1024,
        "max_tokens": 8192,
    },
    "8b lora grpo 1x80": {**GRPO, "model": "8b", "ranks": 1, "gib": 80, "lora_rank": 16, "prompts": 16},
    "8b lora grpo 1x24": {**GRPO, "model": "8b", "ranks": 1, "gib": 24, "lora_rank": 16, "prompts": 16},
    "8b lora grpo 4x40": {**GRPO, "model": "8b", "ranks": 4, "gib": 40, "lora_rank": 16, "prompts": 64},
    "8b sft 4x80 8192": {**SFT, "model": "8b", "ranks": 4, "gib": 80, "documents": 32, "length": 8192},
    "8b sft 8x40": {**SFT, "model": "8b", "ranks": 8, "gib": 40, "documents": 64, "length": 4096},
    "8b dpo 4x80": {**DPO, "model": "8b", "ranks": 4, "gib": 80, "documents": 64, "length": 1024},
    "8b ppo 4x80": {**PPO, "model": "8b", "ranks": 4, "gib": 80, "prompts": 16},
    "8b ppo 8x80": {**PPO, "model": "8b", "ranks": 8, "gib": 80, "prompts": 64},
    "14b grpo 4x80": {**GRPO, "model": "14b", "ranks": 4, "gib": 80, "prompts": 16},
    "14b grpo 8x80": {**GRPO, "model": "14b", "ranks": 8, "gib": 80, "prompts": 64},
    "32b grpo 16x80": {**GRPO, "model": "32b", "ranks": 16, "gib": 80, "prompts": 128},
    "32b grpo 8x80 tp2": {**GRPO, "model": "32b", "ranks": 8, "gib": 80, "tp": 2, "prompts": 64},
    "72b grpo 64x80": {**GRPO, "model": "72b", "ranks": 64, "gib": 80, "prompts": 512},
    "72b grpo 64x141 tp4": {**GRPO, "model": "72b", "ranks": 64, "gib": 141, "tp": 4, "prompts": 512},
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """One combination of settings; the defaults save nothing."""

    activation_checkpointing: bool = False
    reshard_after_forward: bool = False
    reduce_gradients: str = "per_step"
    engine_offload: bool = False
    optimizer_device: str = "model"
    offload_ref: bool = False
    token_budget: int = LONGEST_BUDGET


def available_gib(case: Case) -> float:
    """GiB of the card that a plan may use."""
    return USABLE_GIB[case["gib"]] * (1 - MARGIN) - OUTSIDE_GIB


def documents(case: Case) -> tuple[int, int]:
    """Documents of a tp group in one step, and slots of each."""
    count = case["documents"] if "documents" in case else case["prompts"] * case["group"]
    length = case["length"] if "length" in case else case["prompt_tokens"] + case["max_tokens"]
    return ceil(count * case["tp"] / case["ranks"]), length


def persistent_gib(case: Case, plan: Plan) -> float:
    """Parameters, masters, AdamW states and the reference, as they stay on each rank from step to step."""
    parameters, ranks = SHAPES[case["model"]].parameters, case["ranks"]
    if case["lora_rank"]:
        return 2 * parameters / ranks / GIB
    on_host = plan.optimizer_device == "cpu"
    copies = 0 if ranks > 1 else 2
    model = (copies + (0 if on_host else 12)) * parameters / ranks
    models = 2 if case["kind"] == "ppo" else 1
    has_reference = (case["kl"] or case["kind"] == "dpo") and not plan.offload_ref
    return (models * model + (2 * parameters / ranks if has_reference else 0)) / GIB


def engine_gib(case: Case) -> tuple[float, float]:
    """The engine's copy of the weights and its KV cache."""
    if "max_batch" not in case:
        return 0.0, 0.0
    shape, tp = SHAPES[case["model"]], case["tp"]
    samples, length = documents(case)
    copy = 2 * shape.parameters / tp if case["ranks"] > 1 else 0
    return copy / GIB, min(case["max_batch"], samples) * length * shape.kv_bytes / tp / GIB


def gradients_gib(case: Case, plan: Plan) -> float:
    shape, ranks, tp = SHAPES[case["model"]], case["ranks"], case["tp"]
    if case["lora_rank"]:
        return 0.0
    count, length = documents(case)
    several = ceil(count / (plan.token_budget // length)) > 1
    models = 2 if case["kind"] == "ppo" else 1
    if ranks == 1:
        return models * (4 if several else 2) * shape.parameters / GIB
    if several and plan.reduce_gradients == "per_step":
        return models * 4 * shape.parameters / tp / GIB
    return (models * 4 * shape.parameters / ranks + 4 * shape.layer / tp) / GIB


def gathered_gib(case: Case, plan: Plan) -> float:
    """bf16 parameters for compute beside the shards, and the engine's copy where it is kept."""
    shape, tp = SHAPES[case["model"]], case["tp"]
    if case["ranks"] == 1:
        return 0.0
    whole = 2 * shape.parameters / tp / GIB
    one = 2 * (shape.ends + 2 * shape.layer) / tp / GIB if plan.reshard_after_forward else whole
    copy = engine_gib(case)[0] if not plan.engine_offload else 0.0
    # The value model gathers parameters of its own; the engine's copy is the policy's.
    value = one if case["kind"] == "ppo" and (copy or not plan.reshard_after_forward) else 0.0
    return (copy or one) + value


def activations_gib(case: Case, plan: Plan, swiglu_tensors: float = 3.5) -> float:
    shape = SHAPES[case["model"]]
    count, length = documents(case)
    layer = shape.layer_activation_bytes(case["tp"], swiglu_tensors)
    token = shape.layers * layer
    if plan.activation_checkpointing:
        token = shape.layers * 2 * shape.hidden + layer
    return min(plan.token_budget, count * length) * token / GIB


def training_gib(case: Case, plan: Plan, swiglu_tensors: float = 3.5) -> float:
    return (
        persistent_gib(case, plan)
        + gradients_gib(case, plan)
        + gathered_gib(case, plan)
        + (0.0 if plan.engine_offload else engine_gib(case)[1])
        + activations_gib(case, plan, swiglu_tensors)
        + LOGITS_GIB
    )


def generation_gib(case: Case, plan: Plan) -> float:
    return persistent_gib(case, plan) + sum(engine_gib(case))


def peak_gib(case: Case, plan: Plan, swiglu_tensors: float = 3.5) -> float:
    """The fullest phase, without what lies outside the allocator."""
    return max(generation_gib(case, plan), training_gib(case, plan, swiglu_tensors))


# The expectations. Where SwiGLU's 3 to 4 tensors, or savings of about the same price, leave the choice open,
# a row lists every choice. It does not list a plan if another one saves less, or as cheaply, and still has
# the larger token_budget. A budget below 2,048 slots is no better than checkpointing: both are listed where
# nothing else avoids checkpointing. peak_gib begins at half the largest budget that fits (a planner may try
# only powers of two) and ends at the limit, or at 32,768 slots with eager SwiGLU where that is less.
# Gradients of both PPO models are counted at once; the low ends allow for one at a time.


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    fits: bool
    acceptable: tuple[dict[str, object], ...]
    peak_gib: tuple[float, float]
    why: str


FAST: dict[str, object] = {"activation_checkpointing": False, "optimizer_device": "model"}
CHECKPOINT: dict[str, object] = {"activation_checkpointing": True, "optimizer_device": "model"}
HOST: dict[str, object] = {"activation_checkpointing": False, "optimizer_device": "cpu"}
KEEP: dict[str, object] = {"engine_offload": False}
OFFLOAD: dict[str, object] = {"engine_offload": True}
GATHERED: dict[str, object] = {"reshard_after_forward": False}
RESHARD: dict[str, object] = {"reshard_after_forward": True}
PER_STEP: dict[str, object] = {"reduce_gradients": "per_step"}
PER_MICRO: dict[str, object] = {"reduce_gradients": "per_micro_batch"}


def at_least(slots: int) -> dict[str, object]:
    return {"token_budget_at_least": slots}


def at_most(slots: int) -> dict[str, object]:
    return {"token_budget_at_most": slots}


def fits(low: float, high: float, *acceptable: dict[str, object], why: str) -> Row:
    return Row(fits=True, acceptable=acceptable, peak_gib=(low, high), why=why)


def too_large(why: str) -> Row:
    return Row(fits=False, acceptable=(), peak_gib=(0.0, 0.0), why=why)


TIGHT = {**PER_MICRO, **OFFLOAD, **RESHARD}
EXPECTED: dict[str, Row] = {
    "0.1b grpo 1x24": fits(
        10,
        18,
        {**FAST, **KEEP, **at_least(16384)},
        why="1.4 + gradients 0.4 + KV 2.9 + logits 1 = 5.7; 32,768 slots 10.9: 16.6 of 19.9",
    ),
    "0.5b grpo 1x24": fits(
        14,
        20,
        {**FAST, **KEEP, **at_least(4096)},
        {**FAST, **OFFLOAD, **at_least(8192)},
        why="6.4 + 1.8 + KV 1.0 + 1 = 10.2 of 19.9: 8,704 slots (7,936 eager)",
    ),
    "0.5b grpo 1x24 long": fits(
        13,
        20,
        {**FAST, **KEEP, **at_least(4236)},
        {**FAST, **OFFLOAD, **at_least(8192)},
        why="6.4 + 1.8 + KV of 64 x 4,236 tokens 3.1 + 1 = 12.4 of 19.9: 6,656 slots; without KV 9,472",
    ),
    "1b grpo 1x24": fits(
        13,
        20,
        {**HOST, **KEEP, **at_least(4096)},
        {**HOST, **OFFLOAD, **at_least(6144)},
        why="16.1 + 4.6 > 19.9; on the host 2.3 + 4.6 + KV 2.5 + 1 = 10.5: 6,656 slots; without KV 8,704",
    ),
    "1b grpo 1x40": fits(
        29,
        36,
        {**FAST, **KEEP, **at_least(4096)},
        {**FAST, **OFFLOAD, **at_least(8192)},
        why="16.1 + 4.6 + KV 2.5 + 1 = 24.3 of 35.2: 7,936 slots; without KV 9,728",
    ),
    "1b grpo 1x80": fits(
        46,
        74,
        {**FAST, **KEEP, **at_least(16384)},
        why="16.1 + 4.6 + KV 5.1 + 1 = 26.8; 32,768 slots 45.0: 71.8 of 73.8 (eager 31,232 slots)",
    ),
    "1b grpo 4x80": fits(
        32,
        63,
        {**FAST, **KEEP, **GATHERED, **PER_STEP, **at_least(16384)},
        why="3.5 + whole gradients 4.6 + copy 2.3 + KV 1.3 + 1 = 12.6; 32,768 slots 45.0: 57.6 of 73.8",
    ),
    "1b grpo 4x80 128 prompts": fits(
        36,
        67,
        {**FAST, **KEEP, **GATHERED, **PER_STEP, **at_least(16384)},
        why="3.5 + whole gradients 4.6 + copy 2.3 + KV 5.1 + 1 = 16.5; 32,768 slots 45.0: 61.5 of 73.8",
    ),
    "1b grpo 8x24": fits(
        15,
        20,
        {**FAST, **KEEP, **PER_STEP, **at_least(4096)},
        {**FAST, **KEEP, **PER_MICRO, **at_least(7168)},
        why="1.7 + 4.6 + copy 2.3 + KV 1.3 + 1 = 10.9 of 19.9: 6,400 slots; gradients sharded 7.1: 9,216",
    ),
    "1b sft 1x24": fits(
        12.5,
        20,
        {**HOST, **at_least(4096)},
        why="16.1 + 4.6 (several micro-batches) > 19.9; on the host 2.3 + 4.6 + 1 = 7.9: 8,704 slots",
    ),
    "3b grpo 1x80": fits(
        65,
        74,
        {**FAST, **KEEP, **at_least(2048)},
        {**FAST, **OFFLOAD, **at_least(4096)},
        why="41.9 + 12.0 + KV 8.9 + 1 = 63.8 of 73.8: 3,328 slots; without KV 54.9: 6,400",
    ),
    "3b grpo 1x40": fits(
        29,
        36,
        {**HOST, **KEEP, **at_least(2048)},
        {**HOST, **OFFLOAD, **at_least(4096)},
        why="41.9 > 35.2; on the host 6.0 + 12.0 + KV 8.9 + 1 = 27.9: 2,304 slots; without KV 5,632",
    ),
    "3b grpo 4x40": fits(
        25,
        36,
        {**FAST, **KEEP, **PER_MICRO, **at_least(2048)},
        {**FAST, **OFFLOAD, **PER_MICRO, **at_least(4096)},
        why="9.0 + 3.4 + copy 6.0 + KV 2.2 + 1 = 21.6 of 35.2: 4,608 slots; whole gradients 12.0: 1,536",
    ),
    "3b grpo 8x24": fits(
        14.5,
        20,
        {**FAST, **OFFLOAD, **PER_MICRO, **at_least(2048)},
        why="4.5 + 1.9 + gathered 1.1 + 1 = 8.5 of 19.9: 3,840 slots; kept copy and KV leave 652",
    ),
    "3b lora grpo 1x24": fits(
        14.5,
        20,
        {**FAST, **OFFLOAD, **at_least(2048)},
        why="base 6.0 + 1 = 7.0 of 19.9: 4,352 slots; KV 8.9 kept leaves 1,280; generation 14.9",
    ),
    "3b ppo 4x80": fits(
        56,
        74,
        {**FAST, **KEEP, **PER_STEP, "offload_ref": False, **at_least(4096)},
        {**FAST, **KEEP, **PER_MICRO, "offload_ref": False, **at_least(8192)},
        why="19.5 + gradients 23.9 + gathered 12.0 + KV 2.2 + 1 = 58.6: 5,120 slots; sharded 11,264",
    ),
    "3b dpo 2x80": fits(
        61,
        74,
        {**FAST, **GATHERED, **PER_STEP, "offload_ref": False, **at_least(8192)},
        why="18.0 + reference 3.0 + 12.0 + gathered 6.0 + 1 = 39.9 of 73.8: 11,520 slots",
    ),
    "8b grpo 4x80": fits(
        53,
        74,
        {**FAST, **OFFLOAD, **PER_MICRO, **at_least(4096)},
        {**FAST, **KEEP, **PER_MICRO, **at_least(3072)},
        why="22.4 + 8.3 + gathered 2.8 + 1 = 34.5 of 73.8: 7,680 slots; kept copy 15.0, KV 2.5: 4,608",
    ),
    "8b grpo 2x80": fits(
        66.5,
        74,
        {**CHECKPOINT, **TIGHT, **at_least(8192)},
        {**FAST, **TIGHT, **at_most(2048)},
        why="44.9 + 15.8 + gathered 2.8 + 1 = 64.4 of 73.8: 1,792 slots, or 23,296 with checkpointing",
    ),
    "8b grpo 1x80": fits(
        64,
        74,
        {**HOST, **OFFLOAD, **at_least(4096)},
        {**HOST, **KEEP, **at_least(2048)},
        why="104.7 > 73.8; on the host 15.0 + 29.9 + 1 = 45.9: 5,376 slots; KV 10.2 kept: 3,328",
    ),
    "8b grpo 8x80": fits(
        47,
        74,
        {**FAST, **KEEP, **PER_MICRO, **at_least(4096)},
        {**FAST, **OFFLOAD, **PER_MICRO, **at_least(6144)},
        why="11.2 + 4.6 + copy 15.0 + KV 10.2 + 1 = 41.9 of 73.8: 6,144 slots; offloaded 19.5: 10,496",
    ),
    "8b grpo 4x141": fits(
        65,
        133,
        {**FAST, **at_least(8192)},
        why="nothing saved: 22.4 + 29.9 + copy 15.0 + KV 2.6 + 1 = 70.9 of 132.6: 12,000 slots",
    ),
    "8b grpo 8x40": fits(
        31,
        36,
        {**FAST, **TIGHT, **at_least(2048)},
        why="11.2 + 4.6 + gathered 2.8 + 1 = 19.5 of 35.2: 3,072 slots; generation 11.2 + 15.0 + 5.1 = 31.3",
    ),
    "8b grpo 8x24": too_large(
        "generation 11.2 + copy 15.0 + KV 5.1 = 31.3 > 19.9; all masters on the host 20.1, still more"
    ),
    "8b grpo 4x80 kl": fits(
        53,
        74,
        {**FAST, **OFFLOAD, **PER_MICRO, **at_least(4096)},
        {**FAST, **KEEP, **PER_MICRO, **at_least(2048)},
        why="22.4 + reference 3.7 + 8.3 + 2.8 + 1 = 38.2 of 73.8: 6,912 slots; kept copy and KV 4,096",
    ),
    "8b grpo 8x80 long": too_large(
        "KV of 64 samples of 9,216 tokens 72.0 + copy 15.0 = 87.0 > 73.8; 42 samples at once would fit"
    ),
    "8b lora grpo 1x80": fits(
        53,
        74,
        {**FAST, **KEEP, **at_least(6144)},
        {**FAST, **OFFLOAD, **at_least(8192)},
        why="base 15.0 + KV 10.2 + 1 = 26.1 of 73.8: 9,216 slots; without KV 11,264",
    ),
    "8b lora grpo 1x24": too_large("base 15.0 + KV of 128 samples 10.2 = 25.1 > 19.9"),
    "8b lora grpo 4x40": fits(
        28.5,
        36,
        {**FAST, **OFFLOAD, **at_least(2048)},
        why="3.7 + gathered 2.8 + 1 = 7.5 of 35.2: 5,376 slots; kept copy and KV: 1,024; generation 28.9",
    ),
    "8b sft 4x80 8192": fits(
        37,
        74,
        {**CHECKPOINT, **at_least(8192)},
        {**FAST, **RESHARD, **PER_MICRO, **at_most(9216)},
        why="22.4 + 8.3 + 2.8 + 1 = 34.5; one document 41.5 (38.0 fused) > 39.3, checkpointed 3.3",
    ),
    "8b sft 8x40": fits(
        22,
        36,
        {**CHECKPOINT, **PER_MICRO, **at_least(8192)},
        {**CHECKPOINT, **RESHARD, **at_least(32768)},
        why="11.2 + 4.6 + 2.8 + 1 = 19.5 of 35.2; one document 20.8 (19.0 fused); 32,768 checkpointed 13.2",
    ),
    "8b dpo 4x80": fits(
        48.5,
        74,
        {**FAST, **PER_MICRO, **at_least(3072)},
        why="22.4 + reference 3.7 + 8.3 + 2.8 + 1 = 38.2 of 73.8: 6,912 slots; all gathered 15.0: 4,608",
    ),
    "8b ppo 4x80": fits(
        62,
        74,
        {**CHECKPOINT, **TIGHT, **at_least(4096)},
        {**CHECKPOINT, **OFFLOAD, **RESHARD, **at_least(20864)},
        {**FAST, **TIGHT, **at_most(3584)},
        why="44.9 + reference 3.7 + gradients 15.8 + 2.8 + 1 = 68.2: 1,024 slots, 1,792 without reference",
    ),
    "8b ppo 8x80": fits(
        49,
        74,
        {**FAST, **TIGHT, **at_least(4096)},
        {**FAST, **KEEP, **PER_MICRO, **RESHARD, **at_least(2048)},
        why="22.4 + reference 1.9 + gradients 8.3 + 2.8 + 1 = 36.4 of 73.8: 7,168 slots; kept 56.4: 3,328",
    ),
    "14b grpo 4x80": fits(
        71.5,
        74,
        {**CHECKPOINT, **TIGHT, **at_least(8192)},
        {**CHECKPOINT, **OFFLOAD, **RESHARD, **at_least(20864)},
        {**FAST, **TIGHT, **at_most(2048)},
        why="generation 41.3 + copy 27.5 + KV 3.2 = 72.0 of 73.8; training 61.4: 1,536 slots or all 20,864",
    ),
    "14b grpo 8x80": fits(
        54,
        74,
        {**FAST, **OFFLOAD, **PER_MICRO, **at_least(2048)},
        why="20.6 + 8.1 + gathered 4.1 + 1 = 33.9 of 73.8: 5,120 slots; generation 20.6 + 27.5 + 6.4 = 54.5",
    ),
    "32b grpo 16x80": fits(
        71,
        74,
        {**HOST, **TIGHT, **at_least(2048)},
        why="generation 22.9 + copy 61.0 + KV 10.2 = 94.1 > 73.8; all masters on the host 71.2, 3,328 slots",
    ),
    "32b grpo 8x80 tp2": fits(
        40,
        74,
        {**HOST, **OFFLOAD, **PER_MICRO, **at_least(2048)},
        why="generation 45.8 + 30.5 + KV 10.2 = 86.5 > 73.8; on the host 40.7; training 19.5: 5,120 slots",
    ),
    "72b grpo 64x80": too_large("the engine's copy alone 135.4 > 73.8"),
    "72b grpo 64x141 tp4": fits(
        66,
        133,
        {**FAST, **OFFLOAD, **PER_MICRO, **at_least(4096)},
        {**FAST, **KEEP, **PER_MICRO, **at_least(4096)},
        why="12.7 + 5.0 + gathered 2.0 + 1 = 20.7 of 132.6: 9,216 slots; kept copy 33.9, KV 12.7: 5,632",
    ),
}
