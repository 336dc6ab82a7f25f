"""Author B's table: what a memory planner should answer for the 40 rows of `planner_rows_a.CASES`.

The figures come from the byte formulas below, without the planner's code and without author A's table. Sizes
are in GiB of one rank, without CUDA context, NCCL and fragmentation: `available` subtracts 3 GiB for these.

P is the number of parameters, W the ranks, t = tp, W / t the data-parallel ranks. The fullest phase is one of

    W = 1   train      weights 2P, masters 4P, AdamW 8P, gradients 4P (2P with one micro-batch), activations,
                       logits, and the KV cache unless offloaded
            generate   weights 2P, masters 4P, AdamW 8P, KV cache; the engine decodes the trainer's weights
    W > 1   train      masters 4P/W, AdamW 8P/W, gradients, gathered layers, activations, logits, and the
                       engine's copy 2P/t and KV cache unless offloaded
            generate   masters 4P/W, AdamW 8P/W, the engine's copy 2P/t, KV cache

With masters and AdamW on the host, weights 2P/W stay. A micro-batch holds whole documents, so the budget that
the planner picks (`slots`) is at least one document. How many bytes a layer keeps per token depends on what
is fused, so it is a range (`LEAN`, `TYPICAL`, `WASTEFUL`).

Checkpointing is accepted beside the plan without it where this fits with LEAN only, or with few documents.
A micro-batch of 1,800 tokens computes about as long as NVLink takes to gather the layers twice and to reduce
their gradients (8P bytes at 300 GB/s, 6P operations a token at 400 TFLOP/s); other links take longer.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

GIB = 2**30


class Shape(NamedTuple):
    """What of a model's config counts here."""

    layers: int
    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    tied: bool


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

USABLE = {24: 23.6, 40: 39.4, 80: 79.2, 141: 139.8}  # GiB that the driver shows for a card of so many GB
OUTSIDE = 3.0  # GiB: CUDA context, NCCL, fragmentation
MARGIN = 0.03
LOGITS = 1.0  # GiB: one chunk in float32 and its gradient
MAX_SLOTS = 32768

# bf16 values that a layer keeps per token: multiples of (hidden, q and k, v and attention out, intermediate).
# Hidden: residual and normed input twice are 4; a norm's float32 copy counts 2 more, both norms' make 8.
# q and k: once, or before and after rope. Intermediate: gate, up, their product, and unless fused silu(gate).
LEAN = (4, 1, 1, 3)
TYPICAL = (6, 1, 1, 3.5)
WASTEFUL = (8, 2, 1, 4)
Kept = tuple[float, float, float, float]
Keys = dict[str, object]


@dataclass(frozen=True, kw_only=True, slots=True)
class Settings:
    """One choice of what the planner resolves, `slots` being the token budget."""

    slots: int
    checkpointing: bool = False
    reshard: bool = False
    per_micro_batch: bool = False
    offload: bool = False
    host: bool = False
    offload_ref: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """What one case should end in."""

    fits: bool
    acceptable: tuple[Keys, ...]  # the plan agrees with every key of at least one
    peak_gib: tuple[float, float]  # of the fullest phase of an acceptable plan; (0, 0) if none fits
    why: str


def available(gib: int) -> float:
    """GiB that a plan may use on a card of `gib` GB: 19.9 of 24, 35.2 of 40, 73.8 of 80, 132.6 of 141."""
    return USABLE[gib] * (1 - MARGIN) - OUTSIDE


def layer_params(shape: Shape) -> int:
    """Parameters of one decoder layer: q, o, k, v, gate, up, down and two norms."""
    hidden, width = shape.hidden, shape.head_dim
    attention = 2 * hidden * width * (shape.heads + shape.kv_heads)
    return attention + 3 * hidden * shape.intermediate + 2 * hidden


def outer_params(shape: Shape) -> int:
    """Parameters of the embedding and, unless tied, the head."""
    return shape.vocab * shape.hidden * (1 if shape.tied else 2)


def params(shape: Shape) -> int:
    """P."""
    return shape.layers * layer_params(shape) + outer_params(shape) + shape.hidden


def adapters_gib(shape: Shape, rank: int) -> float:
    """LoRA on a layer's seven projections: float32 weights, gradients and AdamW, a bf16 copy (18 bytes)."""
    hidden, q, kv = shape.hidden, shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    sides = 2 * (hidden + q) + 2 * (hidden + kv) + 3 * (hidden + shape.intermediate)
    return 18 * rank * sides * shape.layers / GIB


def layer_bytes(shape: Shape, *, tp: int, kept: Kept) -> float:
    """Bytes that one layer keeps per token without checkpointing; tp splits all but the hidden states."""
    q, kv = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    split = kept[1] * (q + kv) + kept[2] * (kv + q) + kept[3] * shape.intermediate
    return 2 * (kept[0] * shape.hidden + split / tp)


def activations_gib(shape: Shape, slots: int, *, tp: int, checkpointing: bool, kept: Kept) -> float:
    """GiB of one micro-batch's activations; checkpointing keeps a hidden state per layer, and one layer."""
    layer = layer_bytes(shape, tp=tp, kept=kept)
    if checkpointing:
        return slots * (2 * shape.hidden * shape.layers + layer) / GIB
    return slots * layer * shape.layers / GIB


def kv_gib(shape: Shape, *, samples: int, length: int, tp: int) -> float:
    """GiB of the KV cache of so many samples of full length."""
    return 4 * shape.layers * shape.kv_heads * shape.head_dim * samples * length / tp / GIB


@dataclass(frozen=True, slots=True)
class Case:
    """The sizes of a case, in GiB unless said otherwise."""

    case: dict[str, object]

    def number(self, key: str) -> int:
        """The number under `key`, 0 if the kind of run has none."""
        value = self.case.get(key, 0)
        assert isinstance(value, int)
        return value

    @property
    def shape(self) -> Shape:
        """The model's shape."""
        return SHAPES[str(self.case["model"])]

    @property
    def p(self) -> float:
        """2^30 parameters, so that 4 * p is the float32 model in GiB."""
        return params(self.shape) / GIB

    @property
    def decodes(self) -> bool:
        """GRPO and PPO have an engine."""
        return self.case["kind"] in ("grpo", "ppo")

    @property
    def document(self) -> int:
        """Tokens of the longest document."""
        return self.number("length") or self.number("prompt_tokens") + self.number("max_tokens")

    @property
    def documents(self) -> int:
        """Documents of a rank, the same for all ranks of a tp group; DPO's are pairs, two sequences each."""
        whole = self.number("documents") * (2 if self.case["kind"] == "dpo" else 1)
        return (
            (whole or self.number("prompts") * self.number("group"))
            * self.number("tp")
            // self.number("ranks")
        )

    @property
    def kv_cache(self) -> float:
        """KV cache of all samples that may be decoded together."""
        return self._cache(min(self.number("max_batch"), self.documents))

    def _cache(self, samples: int) -> float:
        return kv_gib(self.shape, samples=samples, length=self.document, tp=self.number("tp"))

    def states(self, host: bool) -> float:
        """Parameters, masters and AdamW states of policy and value model, in every phase."""
        p, ranks = self.p, self.number("ranks")
        if self.number("lora_rank"):
            return 2 * p / ranks + adapters_gib(self.shape, self.number("lora_rank")) / ranks
        models = 2 if self.case["kind"] == "ppo" else 1
        bf16 = 2 if ranks == 1 or host else 0  # with fsdp2 the float32 shards are the parameters
        return models * (bf16 + (0 if host else 12)) * p / ranks

    def reference(self, settings: Settings) -> float:
        """The frozen reference's shard; LoRA switches its adapters off instead."""
        needed = (self.case["kl"] or self.case["kind"] == "dpo") and not self.number("lora_rank")
        return 2 * self.p / self.number("ranks") if needed and not settings.offload_ref else 0.0

    def gradients(self, settings: Settings) -> float:
        """Gradients in a backward pass; beside shards, one layer's (float32) and the head's (bf16)."""
        p, ranks, tp, shape = self.p, self.number("ranks"), self.number("tp"), self.shape
        several = self.documents * self.document > settings.slots
        if self.number("lora_rank"):
            return 0.0
        if ranks == 1:
            return (4 if several else 2) * p
        if several and not settings.per_micro_batch:
            return 4 * p / tp
        in_flight = (4 * layer_params(shape) + 2 * shape.vocab * shape.hidden) / tp / GIB
        return 4 * p / ranks + in_flight

    def gathered(self, settings: Settings) -> float:
        """bf16 layers gathered for computing; the engine's copy, if kept, serves a forward not resharding."""
        if self.number("ranks") == 1:
            return 0.0
        if settings.reshard:
            return 2 * (outer_params(self.shape) + 2 * layer_params(self.shape)) / self.number("tp") / GIB
        return 0.0 if self.copy and not settings.offload else 2 * self.p / self.number("tp")

    @property
    def copy(self) -> float:
        """The engine's whole bf16 copy."""
        return 2 * self.p / self.number("tp") if self.decodes and self.number("ranks") > 1 else 0.0

    def train(self, settings: Settings, kept: Kept = TYPICAL) -> float:
        """Peak of the training phase."""
        tp, checkpointing = self.number("tp"), settings.checkpointing
        engine = self.copy + self.kv_cache if self.decodes and not settings.offload else 0.0
        activations = activations_gib(
            self.shape, settings.slots, tp=tp, checkpointing=checkpointing, kept=kept
        )
        states = self.states(settings.host) + self.reference(settings)
        return states + self.gradients(settings) + self.gathered(settings) + engine + activations + LOGITS

    def room_for_keys(self, settings: Settings) -> float:
        """What generation leaves for the KV cache; negative if weights and states alone do not fit."""
        return (
            available(self.number("gib")) - self.states(settings.host) - self.reference(settings) - self.copy
        )

    def generate(self, settings: Settings) -> float:
        """Peak of generation; samples that the cache has no room for wait, down to one at a time."""
        if not self.decodes:
            return 0.0
        room = self.room_for_keys(settings)
        return available(self.number("gib")) - room + min(self.kv_cache, max(room, self._cache(1)))

    def peak(self, settings: Settings, kept: Kept = TYPICAL) -> float:
        """Peak of the fullest phase."""
        return max(self.train(settings, kept), self.generate(settings))


NOTHING: Keys = {"reduce_gradients": "per_step", "reshard_after_forward": False, "engine_offload": False}
# Resharding, sharded gradients and offloading the engine cost a few % each, less than recomputing does.
# Several mixes cost about the same: shards with any of the others, whole gradients with both, or all three.
SHARDS: Keys = {"reduce_gradients": "per_micro_batch"}
WHOLE: Keys = {"reduce_gradients": "per_step", "reshard_after_forward": True, "engine_offload": True}
ALL_CHEAP: Keys = {
    "reduce_gradients": "per_micro_batch",
    "reshard_after_forward": True,
    "engine_offload": True,
}
RESHARD: Keys = {"reshard_after_forward": True}
KEEP_ENGINE: Keys = {"engine_offload": False}
OFFLOAD: Keys = {"engine_offload": True}
KEEP_REF: Keys = {"offload_ref": False}


def plan(
    checkpointing: bool, at_least: int, *mixes: Keys, at_most: int = MAX_SLOTS, host: bool = False
) -> Keys:
    """One acceptable plan; keys that are left out do not matter."""
    keys: Keys = {
        "activation_checkpointing": checkpointing,
        "optimizer_device": "cpu" if host else "model",
        "token_budget_at_least": at_least,
        "token_budget_at_most": at_most,
    }
    for mix in mixes:
        keys |= mix
    return keys


# Generation has no room for the keys of all samples of a rank at once: these fit because the others wait, as
# engine.kv_cache_tokens has it. A planner that insists on the whole cache has to refuse them.
SMALLER_CACHE = ("8b grpo 8x24", "8b grpo 8x80 long", "8b lora grpo 1x24", "32b grpo 16x80")

EXPECTED: dict[str, Row] = {
    "0.1b grpo 1x24": Row(
        fits=True,
        acceptable=(plan(False, 16384, KEEP_ENGINE),),
        peak_gib=(9.0, 20.0),
        why=("18P is 1.8, cache 2.9, logits 1: 14 of 19.9 left, and 32,600 slots take 9 to 14"),
    ),
    "0.5b grpo 1x24": Row(
        fits=True,
        acceptable=(
            plan(False, 4096, KEEP_ENGINE),
            plan(False, 8192, OFFLOAD),
        ),
        peak_gib=(12.0, 20.0),
        why=("18P is 8.3, cache 1.0, logits 1: 9.6 left at 1.0 to 1.4 MB a slot are 7,000 to 10,000 slots"),
    ),
    "0.5b grpo 1x24 long": Row(
        fits=True,
        acceptable=(plan(False, 4236, at_most=12708),),
        peak_gib=(12.0, 20.0),
        why=(
            "18P is 8.3, cache 3.1: one document of 4,236 (4 to 6) fits with the cache kept, two without it"
        ),
    ),
    "1b grpo 1x24": Row(
        fits=True,
        acceptable=(plan(False, 4096, host=True, at_most=12288),),
        peak_gib=(11.0, 20.0),
        why=(
            "18P is 20.7, over 19.9 before any activation; on the host 6P is 6.9, cache 2.6, 9 to 12 left "
            "at 1.2 to 1.8 MB"
        ),
    ),
    "1b grpo 1x40": Row(
        fits=True,
        acceptable=(
            plan(False, 4096, KEEP_ENGINE),
            plan(False, 6144, OFFLOAD),
        ),
        peak_gib=(27.0, 35.4),
        why=(
            "18P is 20.7, cache 2.6, logits 1: 11 of 35.2 left are 6,000 to 9,000 slots, 2,000 more without"
            " the cache"
        ),
    ),
    "1b grpo 1x80": Row(
        fits=True,
        acceptable=(plan(False, 16384, KEEP_ENGINE),),
        peak_gib=(44.0, 74.0),
        why=("18P is 20.7, cache 5.1: 47 of 73.8 left, 27,000 slots or more"),
    ),
    "1b grpo 4x80": Row(
        fits=True,
        acceptable=(plan(False, 16384, NOTHING),),
        peak_gib=(30.0, 69.0),
        why=("12P/4 is 3.5, whole gradients 4.6, copy 2.3, cache 1.3: 12.6, and 32,600 slots take 37 to 55"),
    ),
    "1b grpo 4x80 128 prompts": Row(
        fits=True,
        acceptable=(plan(False, 16384, NOTHING),),
        peak_gib=(33.0, 73.0),
        why=("as with 32 prompts, cache 5.1: 16.5, and 32,600 slots take 37 to 55 of the 57 left"),
    ),
    "1b grpo 8x24": Row(
        fits=True,
        acceptable=(
            plan(False, 4096, KEEP_ENGINE),
            plan(False, 6144, OFFLOAD),
        ),
        peak_gib=(10.0, 20.0),
        why=(
            "12P/8 is 1.7, whole gradients 4.6 or shard and head 1.4, copy 2.3, cache 1.3: 9 to 12 left, "
            "8,192 slots take 9 to 14"
        ),
    ),
    "1b sft 1x24": Row(
        fits=True,
        acceptable=(plan(False, 4096, host=True, at_most=10240),),
        peak_gib=(11.0, 20.0),
        why=("18P is 20.7, over 19.9; on the host 6P is 6.9, logits 1: 12 left are 6,000 to 10,000 slots"),
    ),
    "3b grpo 1x80": Row(
        fits=True,
        acceptable=(
            plan(False, 4096, OFFLOAD, at_most=8192),
            plan(False, 2048, KEEP_ENGINE, at_most=8192),
        ),
        peak_gib=(63.0, 74.0),
        why=(
            "18P is 53.9, logits 1: 19 left at 2.5 to 3.9 MB are 5,200 to 7,800 slots, half of it beside "
            "the cache of 8.9"
        ),
    ),
    "3b grpo 1x40": Row(
        fits=True,
        acceptable=(
            plan(False, 2608, OFFLOAD, host=True, at_most=8192),
            plan(False, 1304, KEEP_ENGINE, host=True, at_most=4096),
        ),
        peak_gib=(24.0, 35.4),
        why=("14P is 41.9, over 35.2; on the host 6P is 18, logits 1: 16 left, 7 beside the cache of 8.9"),
    ),
    "3b grpo 4x40": Row(
        fits=True,
        acceptable=(
            plan(False, 2048, SHARDS),
            plan(False, 2048, WHOLE),
        ),
        peak_gib=(18.0, 35.4),
        why=(
            "12P/4 is 9; shards 4, copy 6, cache 2.2: 13 left are 3,260 slots or more, 20 without copy and "
            "cache; whole gradients 12"
        ),
    ),
    "3b grpo 8x24": Row(
        fits=True,
        acceptable=(
            plan(False, 1304, ALL_CHEAP, at_most=4096),
            plan(True, 8192, ALL_CHEAP),
        ),
        peak_gib=(13.0, 20.0),
        why=(
            "12P/8 is 4.5, copy 6, cache 4.5: generation 14.9; training 9.2, 10.7 of 19.9 left are 2,600 to"
            " 3,900 slots; small for 8 ranks without NVLink"
        ),
    ),
    "3b lora grpo 1x24": Row(
        fits=True,
        acceptable=(
            plan(False, 2048, OFFLOAD, at_most=6144),
            plan(False, 1304, KEEP_ENGINE, at_most=2048),
        ),
        peak_gib=(14.0, 20.0),
        why=(
            "2P is 6, adapters 0.4, cache 8.9: 12.5 of 19.9 left without the cache, 3,260 to 5,216 slots; "
            "3.6 with it"
        ),
    ),
    "3b ppo 4x80": Row(
        fits=True,
        acceptable=(
            plan(False, 4096, KEEP_ENGINE, KEEP_REF),
            plan(False, 8192, OFFLOAD, KEEP_REF),
        ),
        peak_gib=(41.0, 74.0),
        why=(
            "two models 12P/4 18, reference 1.5, whole gradients 12, copy 6, cache 2.2: 40.6, 33 left are "
            "9,000 to 13,700 slots"
        ),
    ),
    "3b dpo 2x80": Row(
        fits=True,
        acceptable=(plan(False, 8192, KEEP_REF),),
        peak_gib=(48.0, 74.0),
        why=(
            "12P/2 is 18, reference 3, whole gradients 12, gathered 6: 39.9, 34 left are 9,216 slots or more"
        ),
    ),
    "8b grpo 4x80": Row(
        fits=True,
        acceptable=(
            plan(False, 2608, SHARDS, at_most=10240),
            plan(False, 2048, WHOLE, at_most=5216),
        ),
        peak_gib=(45.0, 74.0),
        why=(
            "12P/4 is 22.4; shards and head 9.3, copy 15, cache 2.6: 23 left at 4.5 to 6.8 MB are 3,260 to "
            "5,216 slots; all cheap savings 38, 5,868 to 9,128"
        ),
    ),
    "8b grpo 2x80": Row(
        fits=True,
        acceptable=(
            plan(False, 652, ALL_CHEAP, at_most=2608),
            plan(True, 4096, ALL_CHEAP),
        ),
        peak_gib=(65.0, 74.0),
        why=(
            "12P/2 is 44.9, shards and head 16.8, gathered 2.8, logits 1: 8.4 left are 2 or 3 documents, so"
            " a slightly larger estimate needs checkpointing"
        ),
    ),
    "8b grpo 1x80": Row(
        fits=True,
        acceptable=(plan(False, 2048, host=True, at_most=8192),),
        peak_gib=(53.0, 74.0),
        why=(
            "18P is 134.6; on the host 6P is 44.9, logits 1: 28 left, 18 beside the cache of 10.2, 2,608 to"
            " 6,520 slots"
        ),
    ),
    "8b grpo 8x80": Row(
        fits=True,
        acceptable=(
            plan(False, 3260, SHARDS),
            plan(False, 3260, WHOLE, at_most=8192),
        ),
        peak_gib=(35.0, 74.0),
        why=(
            "12P/8 is 11.2; shards and head 5.5, copy 15, cache 10.2: 31 left are 4,564 slots or more, "
            "8,476 or more with all cheap savings"
        ),
    ),
    "8b grpo 4x141": Row(
        fits=True,
        acceptable=(
            {"activation_checkpointing": False, "optimizer_device": "model", "token_budget_at_least": 8192},
        ),
        peak_gib=(55.0, 134.0),
        why=("12P/4 is 22.4; whole gradients 29.9, copy 15, cache 2.6: 62 left are 8,500 to 14,000 slots"),
    ),
    "8b grpo 8x40": Row(
        fits=True,
        acceptable=(plan(False, 1304, ALL_CHEAP, at_most=4096),),
        peak_gib=(30.0, 35.4),
        why=(
            "generation 11.2 + 15 + 5.1; training 20.5: 14.7 of 35.2 left are 1,956 to 3,260 slots; the "
            "copy and the cache (20) cannot stay"
        ),
    ),
    "8b grpo 8x24": Row(
        fits=True,
        acceptable=(
            plan(False, 652, ALL_CHEAP, host=True, at_most=2048),
            plan(True, 4096, ALL_CHEAP, host=True),
        ),
        peak_gib=(18.0, 20.0),
        why=(
            "12P/8 + 2P is 26.2, over 19.9; on the host 2P/8 + 2P is 16.8 and the cache gets 3.1 of 5.1 (38"
            " of 64 samples); training 11.2, 8.7 left"
        ),
    ),
    "8b grpo 4x80 kl": Row(
        fits=True,
        acceptable=(
            plan(False, 2608, SHARDS, at_most=10240),
            plan(False, 1304, WHOLE, at_most=5216),
        ),
        peak_gib=(45.0, 74.0),
        why=(
            "as without KL, and the reference's 3.7: 20 left are 2,608 to 4,564 slots, 35 with all cheap "
            "savings 5,216 to 7,824"
        ),
    ),
    "8b grpo 8x80 long": Row(
        fits=True,
        acceptable=(
            plan(True, 9216, OFFLOAD),
            plan(False, 9216, ALL_CHEAP, at_most=9216),
        ),
        peak_gib=(49.0, 74.0),
        why=(
            "a document takes 38 to 58 without checkpointing, 53 are left at best; the cache gets 47.6 of "
            "72 (42 of 64 samples)"
        ),
    ),
    "8b lora grpo 1x80": Row(
        fits=True,
        acceptable=(
            plan(False, 4096, KEEP_ENGINE),
            plan(False, 8192, OFFLOAD),
        ),
        peak_gib=(42.0, 74.0),
        why=("2P is 15, adapters 0.7, cache 10.2, logits 1: 47 left are 7,172 to 11,084 slots"),
    ),
    "8b lora grpo 1x24": Row(
        fits=True,
        acceptable=(
            plan(True, 4096, OFFLOAD),
            plan(False, 652, OFFLOAD, at_most=652),
        ),
        peak_gib=(17.0, 20.0),
        why=(
            "2P is 15, adapters 0.7: 3.2 left in training, one document takes 2.7 to 4.1, checkpointed "
            "7,172 slots fit; the cache gets 4.2 of 10.2"
        ),
    ),
    "8b lora grpo 4x40": Row(
        fits=True,
        acceptable=(plan(False, 1304, OFFLOAD, at_most=8192),),
        peak_gib=(28.0, 35.4),
        why=(
            "2P/4 is 3.7; generation 29; training 7.7 resharded, 19.9 gathered whole: 27 left are 3,912 to "
            "6,520 slots, 15 are 1,956 to 3,260; with copy and cache kept one document"
        ),
    ),
    "8b sft 4x80 8192": Row(
        fits=True,
        acceptable=(
            plan(True, 8192),
            plan(False, 8192, RESHARD, SHARDS, at_most=8192),
        ),
        peak_gib=(37.0, 73.0),
        why=("a document takes 34 to 51 without checkpointing, 38.3 are left with resharding and shards"),
    ),
    "8b sft 8x40": Row(
        fits=True,
        acceptable=(
            plan(True, 16384, RESHARD, SHARDS),
            plan(True, 32768, RESHARD),
        ),
        peak_gib=(25.0, 35.4),
        why=(
            "a document takes 17 to 26 without checkpointing, 14.7 are left; checkpointed 32,768 slots take"
            " 12 to 14"
        ),
    ),
    "8b dpo 4x80": Row(
        fits=True,
        acceptable=(
            plan(False, 2048, SHARDS),
            plan(False, 2048, {"reduce_gradients": "per_step"}, RESHARD, at_most=5120),
        ),
        peak_gib=(42.0, 74.0),
        why=(
            "12P/4 22.4, reference 3.7, shards and head 9.3, gathered 2.8 or 15: 22 to 35 left are 3,072 to"
            " 8,192 slots; whole gradients leave 14"
        ),
    ),
    "8b ppo 4x80": Row(
        fits=True,
        acceptable=(
            plan(False, 652, ALL_CHEAP, at_most=3912),
            plan(True, 4096, ALL_CHEAP),
        ),
        peak_gib=(61.0, 74.0),
        why=(
            "two models 12P/4 44.9, reference 3.7, shards and head 9.3, gathered 2.8, logits 1: 12 left are"
            " 1,304 to 2,608 slots, fewer if both models' gradients live at once"
        ),
    ),
    "8b ppo 8x80": Row(
        fits=True,
        acceptable=(
            plan(False, 2048, SHARDS, at_most=10240),
            plan(False, 1304, WHOLE, at_most=4096),
        ),
        peak_gib=(41.0, 74.0),
        why=(
            "two models 12P/8 22.4, reference 1.9, shards and head 5.5, copy 15, cache 5.1: 23 left, 40 "
            "with all cheap savings"
        ),
    ),
    "14b grpo 4x80": Row(
        fits=True,
        acceptable=(
            plan(False, 652, ALL_CHEAP, at_most=1956),
            plan(True, 4096, ALL_CHEAP),
        ),
        peak_gib=(70.0, 74.0),
        why=(
            "generation 41.3 + 27.5 + 3.2 is 72.0 of 73.8; training 62.8: 11 left are 1 or 2 documents at "
            "6.8 to 10.3 MB, checkpointed 17,604 slots or more"
        ),
    ),
    "14b grpo 8x80": Row(
        fits=True,
        acceptable=(plan(False, 2608, ALL_CHEAP, at_most=8192),),
        peak_gib=(53.0, 74.0),
        why=(
            "generation 20.6 + 27.5 + 6.4; training 35.3: 38.5 left are 3,912 to 5,868 slots; with the copy"
            " and the cache 1 or 2 documents"
        ),
    ),
    "32b grpo 16x80": Row(
        fits=True,
        acceptable=(
            plan(False, 1304, ALL_CHEAP, host=True, at_most=4096),
            plan(True, 8192, ALL_CHEAP, host=True),
        ),
        peak_gib=(69.0, 74.0),
        why=(
            "12P/16 + 2P is 83.9, over 73.8; on the host 2P/16 + 2P is 64.8 and the cache gets 9.0 of 10.2 "
            "(56 of 64 samples); training 20.4, 53 left; two hosts' links prefer large micro-batches"
        ),
    ),
    "32b grpo 8x80 tp2": Row(
        fits=True,
        acceptable=(plan(False, 2608, ALL_CHEAP, host=True, at_most=8192),),
        peak_gib=(48.0, 72.0),
        why=(
            "12P/8 + 2P/2 is 76.3, over 73.8; on the host generation 7.6 + 30.5 + 10.2; training 27.9: 46 "
            "left at 8.7 to 13.6 MB are 3,260 to 5,216 slots"
        ),
    ),
    "72b grpo 64x80": Row(
        fits=False,
        acceptable=(),
        peak_gib=(0.0, 0.0),
        why=(
            "the engine's whole copy 2P is 135.4, over 73.8 without anything else: tp 2 at least (67.7), tp"
            " 4 in practice"
        ),
    ),
    "72b grpo 64x141 tp4": Row(
        fits=True,
        acceptable=(
            plan(False, 3260, SHARDS, at_most=16384),
            plan(False, 2048, WHOLE, at_most=8192),
        ),
        peak_gib=(58.0, 132.8),
        why=(
            "12P/64 is 12.7; shards, a layer and the head 5.9, copy 33.9, cache 12.7: 67 left are 3,912 to "
            "7,172 slots; with all cheap savings 111 are 7,172 to 12,388"
        ),
    ),
}
