"""Expert parallel: each rank of a group has some of every layer's experts, and all of the rest.

The ranks of a group have different micro-batches, as ranks of dp do; see `lockstep.invariant.expert_exchange`
for what they send each other.
"""

from __future__ import annotations

from typing import Any

import torch.distributed as dist
from torch import nn

from lockstep.errors import ConfigError
from lockstep.invariant.expert_exchange import ExpertExchange
from lockstep.invariant.experts import Experts
from lockstep.models.architectures import is_moe, option, text_config
from lockstep.models.architectures.record import Replicated, Split
from lockstep.models.tensor_parallel import TensorParallel, apply_tensor_parallel


def check_expert_parallel_size(config: Any, size: int) -> None:
    """Refuse a size that the model's experts do not allow.

    Args:
        config: its text config (transformers).

    Raises:
        ConfigError: names the experts and the sizes that work, or says that there are none.
    """
    if size == 1:
        return
    if not is_moe(config):
        raise ConfigError(
            f"no-effect: train.ep = {size} splits experts over ranks, but {config.model_type} has no "
            "experts; set train.ep = 1"
        )
    count = option(config, "num_local_experts", None) or option(config, "num_experts")
    if count % size:
        sizes = ", ".join(str(n) for n in range(1, count + 1) if count % n == 0)
        raise ConfigError(
            f"not-divisible: train.ep = {size} does not divide the model's {count} experts; sizes that work: "
            f"{sizes}"
        )


def apply_expert_parallel(module: nn.Module, *, group: dist.ProcessGroup) -> TensorParallel:
    """Cut the experts of a causal LM down to this rank's, in place, and insert the exchanges.

    Names stay, and Parameters on the meta device stay there, as with `apply_tensor_parallel`.

    Raises:
        ConfigError: the group's size does not divide the experts, or there are none.
    """
    check_expert_parallel_size(text_config(module), group.size())
    blocks = {path: part for path, part in module.named_modules() if isinstance(part, Experts)}
    plan: dict[str, Split | Replicated] = {
        name: Split(0) if name.rpartition(".")[0] in blocks else Replicated()
        for name, _ in module.named_parameters()
    }
    parts = apply_tensor_parallel(module, group=group, plan=plan)
    for block in blocks.values():
        block.exchange = ExpertExchange(group=group)
    return parts
