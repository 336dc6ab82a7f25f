"""Which settings a train backend supports; others are refused when a run is constructed.

What depends on the model's sizes, the device or the number of ranks is refused when those are known.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from lockstep.errors import ConfigError

if TYPE_CHECKING:
    from lockstep.config.train import TrainConfig

_ONLY: dict[str, tuple[object, tuple[str, ...], str]] = {
    "tp": (1, ("fsdp2",), "only fsdp2's mesh splits matrices"),
    "ring": (1, ("fsdp2",), "ring attention shards packs over ranks of fsdp2's mesh"),
    "tp_plan": ("auto", ("fsdp2",), "it names who splits the matrices of train.tp"),
    "zero_stage": (2, ("deepspeed",), "ZeRO stages are DeepSpeed's"),
    "reshard_after_forward": (True, ("fsdp2",), "only fsdp2 gathers weights block by block"),
    "parameter_device": ("model", ("fsdp2", "deepspeed"), "the others keep whole weights where they compute"),
    "accumulate": ("pack", ("local",), "ranks would have unequal numbers of samples to meet for"),
    "cuda_graph": (False, ("local",), "it replays the joint graphs of one process"),
}
"""Setting -> its default, which backends read it, and why no other does."""


def shards_weights(train: TrainConfig) -> bool:
    """Return whether weights are sharded between steps, so that no rank has whole ones."""
    return train.backend == "fsdp2" or (train.backend == "deepspeed" and train.zero_stage == 3)


def check_backend(train: TrainConfig, *, lora: bool) -> None:
    """Raise ConfigError unless `train.backend` supports the other settings.

    Args:
        lora: whether the policy has LoRA layers.

    Raises:
        ConfigError: what, why, and what to set.
    """
    for name, (default, backends, why) in _ONLY.items():
        value = getattr(train, name)
        if value != default and train.backend not in backends:
            raise ConfigError(
                f"train.{name} = {value!r} has no effect with train.backend = {train.backend!r}: {why}; set "
                f"train.backend = {' or '.join(map(repr, backends))}, or leave train.{name} at {default!r}"
            )
    if train.tp_plan != "auto" and train.tp == 1:
        raise ConfigError(
            f"train.tp_plan = {train.tp_plan!r} splits nothing with train.tp = 1; set train.tp, or leave "
            "train.tp_plan at 'auto'"
        )
    if train.cuda_graph and train.execution != "joint":
        raise ConfigError(
            f"train.cuda_graph = true has no effect with train.execution = {train.execution!r}: it replays "
            "joint graphs; set train.execution = 'joint', or leave train.cuda_graph out"
        )
    check_capacity(train)
    _check_batch_invariant(train)
    if train.ring > 1:
        _check_ring(train)
    if train.backend != "local":
        _check_spanning(train, lora=lora)
    if train.backend == "deepspeed":
        _check_deepspeed(train)


def check_capacity(train: TrainConfig) -> None:
    """Raises ConfigError for joint graphs of every shape that comes along."""
    if train.execution == "joint" and train.static_capacity is False:
        raise ConfigError(
            "train.static_capacity = false with train.execution = 'joint' makes one graph of the whole "
            "decoder for every length of a pack; leave it out, or set train.execution = 'compile'"
        )


def _check_batch_invariant(train: TrainConfig) -> None:
    if train.batch_invariant:
        for name, why in (
            ("tp", "sums over ranks add up in another order than one rank does"),
            ("ring", "its ranks each attend to a part of the keys and merge what they got"),
        ):
            if getattr(train, name) > 1:
                raise ConfigError(
                    f"train.batch_invariant = true with train.{name} = {getattr(train, name)}: {why}, so "
                    "that logprobs differ in their last bits from those of one rank; set "
                    f"train.{name} = 1, or train.batch_invariant = false"
                )
    if train.reuse_rollout_logprobs and train.batch_invariant is False:
        raise ConfigError(
            "train.reuse_rollout_logprobs = true needs train.batch_invariant = true: elsewhere the engine's "
            "logprobs are not the trainer's. Leave it out, and they are computed"
        )


def _check_ring(train: TrainConfig) -> None:
    ring = f"train.ring = {train.ring}"
    if train.layout != "packed":
        raise ConfigError(
            f"{ring} shards packs, and train.layout = {train.layout!r} has none; set train.layout = "
            "'packed', or train.ring = 1"
        )
    if train.execution != "eager":
        raise ConfigError(
            f"{ring}: ring attention talks to other ranks inside of a layer, which compiled layers cannot; "
            f"set train.execution = 'eager' instead of {train.execution!r}, or train.ring = 1"
        )
    if train.attention not in ("auto", "varlen", "sdpa"):
        raise ConfigError(
            f"{ring}: ring attention runs the kernels of 'varlen', not of train.attention = "
            f"{train.attention!r}; set train.attention = 'varlen', or train.ring = 1"
        )


def _check_spanning(train: TrainConfig, *, lora: bool) -> None:
    backend = train.backend
    if train.optimizer == "adamw8bit":
        raise ConfigError(
            f"train.optimizer = 'adamw8bit' is not available with train.backend = {backend!r}: its blocks of "
            "8-bit codes would lie across the ranks' shards; set train.optimizer = 'adamw', and "
            "train.optimizer_device = 'cpu' for memory"
        )
    if lora and backend == "fsdp2":
        raise ConfigError(
            "model.lora is not available with train.backend = 'fsdp2'; set train.backend = 'local' or "
            "'deepspeed', or train all weights"
        )
    if train.device.startswith("cuda:"):
        raise ConfigError(
            f"train.device = {train.device!r} names one GPU, and train.backend = {backend!r} gives each rank "
            "one: local rank r takes cuda:r. Set train.device = 'cuda', and CUDA_VISIBLE_DEVICES for fewer"
        )


def _check_deepspeed(train: TrainConfig) -> None:
    stage = train.zero_stage
    if train.optimizer_device == "cpu" and stage == 0:
        raise ConfigError(
            "train.optimizer_device = 'cpu' needs train.zero_stage = 1, 2 or 3: at stage 0 DeepSpeed has no "
            "partition that it could put into host memory"
        )
    if train.parameter_device == "cpu" and stage != 3:
        raise ConfigError(
            f"train.parameter_device = 'cpu' needs train.zero_stage = 3, not {stage}: at the others every "
            "rank computes with whole weights where they are"
        )
    if train.execution == "joint" and stage == 3:
        raise ConfigError(
            "train.execution = 'joint' works with train.zero_stage = 0, 1 and 2 only: at stage 3 weights are "
            "gathered by hooks of modules, and none runs inside of the graph; set one of them, or "
            "train.execution = 'compile'"
        )
    if train.execution == "deepcompile" and stage == 0:
        raise ConfigError(
            "train.execution = 'deepcompile' works with train.zero_stage = 1, 2 and 3 only; set one of them, "
            "or train.execution = 'compile'"
        )
