"""The optimizer of a config, by name."""

from __future__ import annotations

from collections.abc import Sequence

from lockstep.config.train import TrainConfig
from lockstep.train.optimizer import SGD, AdamW, MasterOptimizer, NamedParameter
from lockstep.train.optimizer8bit import AdamW8bit


def make_optimizer(parameters: Sequence[NamedParameter], *, config: TrainConfig) -> MasterOptimizer:
    """The optimizer that `config.optimizer` names.

    Raises:
        ConfigError: adamw8bit without torchao.
    """
    if config.optimizer == "adamw8bit":
        return AdamW8bit(parameters, config=config)
    return {"adamw": AdamW, "sgd": SGD}[config.optimizer](parameters, config=config)
