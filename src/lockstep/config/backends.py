"""Which settings a train backend supports; others are refused when a run is constructed.

What depends on the model's sizes, the device or the number of ranks is refused when those are known.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import TYPE_CHECKING, Any

from lockstep.config.declarations import Refusal, backends
from lockstep.errors import ConfigError, unknown_name

if TYPE_CHECKING:
    from lockstep.config.train import TrainConfig


def shards_weights(train: TrainConfig) -> bool:
    """Return whether weights are sharded between steps, so that no rank has whole ones."""
    backend = backends().get(train.backend)
    if backend is None or isinstance(backend.shards_weights, bool):
        return backend is not None and bool(backend.shards_weights)
    return all(getattr(train, name) in values for name, values in backend.shards_weights.items())


def check_backend(train: TrainConfig, *, lora: bool, lora_dropout: float = 0.0) -> None:
    """Raise ConfigError unless `train.backend` supports the other settings. What a `module:Class` reads and
    refuses is its own matter: see check_own_settings.

    Args:
        lora: whether the policy has LoRA layers.
        lora_dropout: of theirs, in training.

    Raises:
        ConfigError: what, why, and what to set.
    """
    backend = backends().get(train.backend)
    if backend is not None:
        _check_reads(train, backend.reads)
    if train.tp_plan != "auto" and train.tp == 1:
        raise ConfigError(
            f"no-effect: train.tp_plan = {train.tp_plan!r} splits nothing with train.tp = 1; set train.tp, "
            "or leave train.tp_plan at 'auto'"
        )
    if train.cuda_graph and train.execution != "joint":
        raise ConfigError(
            f"no-effect: train.cuda_graph = true has no effect with train.execution = {train.execution!r}: "
            "it replays joint graphs; set train.execution = 'joint', or leave train.cuda_graph out"
        )
    check_capacity(train)
    _check_batch_invariant(train)
    refusal = shared_refusal(train, lora_dropout=lora_dropout) if train.layout == "shared" else None
    if refusal is not None:
        raise ConfigError(f"unsupported-combination: train.layout = 'shared': {refusal}")
    if train.ring > 1:
        _check_ring(train)
    if backend is None or backend.spans_ranks:
        _check_spanning(train)
    _check_refused(train, backend.refuses if backend is not None else (), lora=lora)


def check_own_settings(train: TrainConfig, *, lora: bool, reads: Any, refuses: Any) -> None:
    """Check the settings of a run whose backend is a class of the user's.

    Args:
        reads: its attribute `reads`: the settings, among those that not every backend reads, that it does.
        refuses: its attribute `refuses`: mappings with the keys of lockstep.config.declarations.Refusal.

    Raises:
        ConfigError: a setting that it does not read, or one that it refuses; or the attributes hold something
            else.
    """
    what = f"train.backend = {train.backend!r}: its attributes reads and refuses"
    values = _values(train, lora=lora)
    try:
        read = tuple(reads)
        rows = [Refusal.model_validate(row) for row in refuses]
        for row in rows:
            row.error.format_map(values)
    except (ValueError, TypeError, LookupError) as error:
        raise ConfigError(f"wrong-part: {what} are wrong: {error}") from error
    for name in (*read, *(name for row in rows for name in row.when)):
        if name not in values:
            raise ConfigError(f"unknown-setting: {what}: {unknown_name('setting', str(name), values)}")
    _check_reads(train, read)
    _check_refused(train, rows, lora=lora)


def _check_reads(train: TrainConfig, reads: Collection[str]) -> None:
    """Raises ConfigError: a setting that other backends read."""
    for name, field in type(train).model_fields.items():
        readers = [backend for backend in backends().values() if name in backend.reads]
        value, default = getattr(train, name), field.default
        if readers and value != default and name not in reads:
            names = " or ".join(repr(backend.name) for backend in readers)
            raise ConfigError(
                f"no-effect: train.{name} = {value!r} has no effect with train.backend = {train.backend!r}: "
                f"{readers[0].reads[name]}; set train.backend = {names}, or leave train.{name} at {default!r}"
            )


def _check_refused(train: TrainConfig, refuses: Iterable[Refusal], *, lora: bool) -> None:
    """Raises ConfigError: what the backend declares as refused."""
    values = _values(train, lora=lora)
    for refusal in refuses:
        if refusal.applies(values):
            raise ConfigError(refusal.error.format_map(values), code="unsupported-combination")


def _values(train: TrainConfig, *, lora: bool) -> dict[str, Any]:
    """What refusals are about."""
    return {**dict(train), "lora": lora}


def _check_spanning(train: TrainConfig) -> None:
    if train.optimizer == "adamw8bit":
        raise ConfigError(
            "unsupported-combination: train.optimizer = 'adamw8bit' is not available with train.backend = "
            f"{train.backend!r}: its blocks of 8-bit codes would lie across the ranks' shards; set "
            "train.optimizer = 'adamw', and train.optimizer_device = 'cpu' for memory"
        )
    if train.device.startswith("cuda:"):
        raise ConfigError(
            f"unsupported-combination: train.device = {train.device!r} names one GPU, and train.backend = "
            f"{train.backend!r} gives each rank one: local rank r takes cuda:r. Set train.device = 'cuda', "
            "and CUDA_VISIBLE_DEVICES for fewer"
        )


def check_capacity(train: TrainConfig) -> None:
    """Raises ConfigError for joint graphs of every shape that comes along."""
    if train.execution == "joint" and train.static_capacity is False:
        raise ConfigError(
            "unsupported-combination: train.static_capacity = false with train.execution = 'joint' makes one "
            "graph of the whole decoder for every length of a pack; leave it out, or set train.execution = "
            "'compile'"
        )


def _check_batch_invariant(train: TrainConfig) -> None:
    if train.batch_invariant:
        for name, why in (
            ("tp", "sums over ranks add up in another order than one rank does"),
            ("ring", "its ranks each attend to a part of the keys and merge what they got"),
        ):
            if getattr(train, name) > 1:
                raise ConfigError(
                    f"unsupported-combination: train.batch_invariant = true with train.{name} = "
                    f"{getattr(train, name)}: {why}, so that logprobs differ in their last bits from those "
                    f"of one rank; set train.{name} = 1, or train.batch_invariant = false",
                    setting=f"train.{name}",
                )
    if train.reuse_rollout_logprobs and train.batch_invariant is False:
        raise ConfigError(
            "unsupported-combination: train.reuse_rollout_logprobs = true needs train.batch_invariant = "
            "true: elsewhere the engine's logprobs are not the trainer's. Leave it out, and they are computed"
        )


def shared_refusal(train: TrainConfig, *, lora_dropout: float) -> str | None:
    """Say which other setting train.layout = "shared" cannot be combined with, and why; None: there is none.
    The support table says the rest."""
    refused = (
        (train.ring > 1, f"train.ring = {train.ring} shards whole documents", "train.ring = 1"),
        (
            train.accumulate == "sample",
            "train.accumulate = 'sample' computes one sample at a time, which shares nothing",
            "train.accumulate = 'pack'",
        ),
        (
            lora_dropout > 0,
            f"model.lora.dropout = {lora_dropout} would drop the same parts of a prompt for all of its "
            "completions",
            "model.lora.dropout = 0",
        ),
    )
    for applies, why, instead in refused:
        if applies:
            return f"{why}; set {instead}, or train.layout = 'packed'"
    return None


def _check_ring(train: TrainConfig) -> None:
    refused = (
        (
            train.layout not in ("auto", "packed"),
            f"it shards packs, and train.layout = {train.layout!r} has none",
            "train.layout = 'packed'",
        ),
        (
            train.execution not in ("eager", "auto"),
            "ring attention talks to other ranks inside of a layer, which layers under train.execution = "
            f"{train.execution!r} cannot",
            "train.execution = 'eager'",
        ),
        (
            train.attention not in ("auto", "varlen", "sdpa"),
            f"ring attention runs the kernels of 'varlen', not of train.attention = {train.attention!r}",
            "train.attention = 'varlen'",
        ),
    )
    for applies, why, instead in refused:
        if applies:
            raise ConfigError(
                f"unsupported-combination: train.ring = {train.ring}: {why}; set {instead}, or train.ring = 1"
            )
