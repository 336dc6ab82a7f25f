"""Combinations of settings of `train` that are refused, one row each; see `lockstep.config.rules`."""

from __future__ import annotations

from lockstep.config.rule import Rule
from lockstep.errors import ConfigError

TRAIN_RULES: dict[str, tuple[Rule, ...]] = {
    "train": (
        Rule(
            lambda c: c.tp_plan != "auto" and c.tp == 1,
            "no-effect: train.tp_plan = {0.tp_plan!r} splits nothing with train.tp = 1; set train.tp, or "
            "leave train.tp_plan at 'auto'",
        ),
        Rule(
            lambda c: c.ring_comm != "auto" and c.ring == 1,
            "no-effect: train.ring_comm = {0.ring_comm!r} has no effect with train.ring = 1; set "
            "train.ring, or leave train.ring_comm at 'auto'",
        ),
        Rule(
            lambda c: c.cuda_graph and c.execution != "joint",
            "no-effect: train.cuda_graph = true has no effect with train.execution = {0.execution!r}, "
            "because it replays joint graphs; set train.execution = 'joint', or leave train.cuda_graph out",
        ),
    ),
    "train (backends of several ranks)": (
        Rule(
            lambda c: c.optimizer == "adamw8bit",
            "unsupported-combination: train.optimizer = 'adamw8bit' is not available with train.backend = "
            "{0.backend!r}: its blocks of 8-bit codes would straddle the ranks' shards; set "
            "train.optimizer = 'adamw', and train.optimizer_device = 'cpu' to save GPU memory",
        ),
        Rule(
            lambda c: c.device.startswith("cuda:"),
            "unsupported-combination: train.device = {0.device!r} names one GPU, but train.backend = "
            "{0.backend!r} gives each rank a GPU: local rank r takes cuda:r. Set train.device = 'cuda', "
            "and CUDA_VISIBLE_DEVICES to use fewer GPUs",
        ),
    ),
    "train (experts)": (
        Rule(
            lambda c: c.ep > 1 and c.tp * c.ring > 1,
            "unsupported-combination: train.ep = {0.ep} with train.tp = {0.tp} and train.ring = {0.ring}: no "
            "parity test covers experts split beside these; set train.tp = 1 and train.ring = 1, or "
            "train.ep = 1",
        ),
        Rule(
            lambda c: c.ep > 1 and c.execution not in ("eager", "auto"),
            "unsupported-combination: train.ep = {0.ep}: how many rows a rank gets for its experts is known "
            "only inside a layer, which is impossible with train.execution = {0.execution!r}; set "
            "train.execution = 'eager', or train.ep = 1",
        ),
    ),
    "train (batch-invariant)": (
        Rule(
            lambda c: c.batch_invariant and c.ring > 1 and c.ring_comm == "p2p",
            "unsupported-combination: train.batch_invariant = true with train.ring = {0.ring} and "
            "train.ring_comm = 'p2p': a rank attends to one part of the keys after the other and merges the "
            "results, so logprobs would differ in their last bits from those of one rank; set "
            "train.ring_comm = 'all_gather', or train.batch_invariant = false",
            at="train.ring_comm",
        ),
        Rule(
            lambda c: c.reuse_rollout_logprobs and c.batch_invariant is False,
            "unsupported-combination: train.reuse_rollout_logprobs = true needs train.batch_invariant = "
            "true: otherwise the engine's logprobs are not the trainer's. Leave it out to have them "
            "recomputed",
        ),
    ),
    "train (deepspeed)": (
        Rule(
            lambda c: c.execution == "deepcompile" and c.zero_stage == 0,
            "unsupported-combination: train.execution = 'deepcompile' (--deepcompile) works with ZeRO 1, "
            "2 and 3 only; set train.zero_stage = 1 (--zero-stage 1), or another execution",
        ),
        Rule(
            lambda c: c.execution == "joint" and c.zero_stage == 3,
            "unsupported-combination: train.execution = 'joint' (--joint) needs ZeRO 0, 1 or 2: at stage 3 "
            "module hooks gather the weights, but hooks do not run inside the graph; set train.zero_stage "
            "= 2 (--zero-stage 2), or 'compile' (--compile)",
        ),
        Rule(
            lambda c: c.ring > 1,
            "unsupported-combination: train.ring = {0.ring} is not available with train.backend = "
            "'deepspeed': its data-parallel group consists of all ranks; set train.backend = 'fsdp2', or "
            "train.ring = 1",
        ),
        Rule(
            lambda c: c.tp > 1,
            "unsupported-combination: train.tp = {0.tp} is not available with train.backend = 'deepspeed': "
            "its AutoTP replaces the policy's modules by its own and splits the vocabulary of the head, "
            "whose weight the loss reads; set train.backend = 'fsdp2', or train.tp = 1",
        ),
        Rule(
            lambda c: c.optimizer_device == "cpu" and c.zero_stage == 0,
            "unsupported-combination: train.optimizer_device = 'cpu' needs train.zero_stage = 1, 2 or 3: "
            "at stage 0 DeepSpeed has no partition that it could move to host memory",
        ),
        Rule(
            lambda c: c.parameter_device == "cpu" and c.zero_stage != 3,
            "unsupported-combination: train.parameter_device = 'cpu' needs train.zero_stage = 3, not "
            "{0.zero_stage}: at the other stages every rank computes with whole weights on its device",
        ),
        Rule(
            lambda c: c.parameter_device == "cpu" and c.optimizer_device != "cpu",
            "unsupported-combination: train.parameter_device = 'cpu' with DeepSpeed needs "
            "train.optimizer_device = 'cpu', too, because the optimizer step writes the weights where the "
            "master weights are",
        ),
        Rule(
            lambda c: c.execution == "deepcompile" and "cpu" in (c.optimizer_device, c.parameter_device),
            "unsupported-combination: train.execution = 'deepcompile' does not offload; set "
            "train.optimizer_device and train.parameter_device to 'model', or train.execution = 'compile'",
        ),
    ),
    "train (deepspeed's optimizers)": (
        Rule(
            lambda c: c.optimizer == "adamw8bit",
            "unsupported-combination: train.optimizer = 'adamw8bit' is not available with train.backend = "
            "'deepspeed', whose optimizers update flat float32 partitions; set 'adamw' or 'sgd', or "
            "train.backend = 'fsdp2'",
        ),
    ),
    "train (joint graphs)": (
        Rule(
            lambda c: c.execution == "joint" and c.static_capacity is False,
            "unsupported-combination: train.static_capacity = false with train.execution = 'joint' "
            "compiles one graph of the whole decoder for every length of a pack; leave it out, or set "
            "train.execution = 'compile'",
        ),
    ),
    "train (ring)": (
        Rule(
            lambda c: c.ring > 1 and c.layout not in ("auto", "packed"),
            "unsupported-combination: train.ring = {0.ring}: it shards packs, but train.layout = "
            "{0.layout!r} has no packs; set train.layout = 'packed', or train.ring = 1",
        ),
        Rule(
            lambda c: c.ring > 1 and c.execution not in ("eager", "auto"),
            "unsupported-combination: train.ring = {0.ring}: ring attention communicates with other ranks "
            "inside a layer, which is impossible with train.execution = {0.execution!r}; set "
            "train.execution = 'eager', or train.ring = 1",
        ),
        Rule(
            lambda c: c.ring > 1 and c.attention not in ("auto", "varlen", "sdpa"),
            "unsupported-combination: train.ring = {0.ring}: ring attention runs the kernels of 'varlen', "
            "not of train.attention = {0.attention!r}; set train.attention = 'varlen', or train.ring = 1",
        ),
    ),
}


def ep_does_not_divide(ep: int, *, ranks: int) -> ConfigError:
    """Return the error for ranks that form no groups of train.ep."""
    return ConfigError(
        f"not-divisible: train.ep = {ep} does not divide {ranks} rank{'s' if ranks > 1 else ''}; start a "
        f"multiple of {ep} ranks (--ranks {ep}, {2 * ep}, ...), or lower train.ep"
    )
