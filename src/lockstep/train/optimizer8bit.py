"""AdamW with 8-bit moments (arXiv 2110.02861) through torchao, over float32 masters.

The only importer of torchao.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from lockstep.config.train import TrainConfig
from lockstep.errors import ConfigError
from lockstep.train.optimizer import MasterOptimizer, NamedParameter, Piece, Rates


class AdamW8bit(MasterOptimizer):
    """Moments of parameters with at least 4096 elements in blocks of 256 8-bit codes; the others in float32.

    Raises:
        ConfigError: torchao is not installed.
    """

    # torchao updates whole Parameters: its blocks of 256 codes do not know where a piece would begin.
    splits = False

    def __init__(self, parameters: Sequence[NamedParameter], *, config: TrainConfig) -> None:
        super().__init__(parameters, config=config)
        try:
            from torchao.optim import AdamW8bit as TorchaoAdamW
        except ModuleNotFoundError as error:
            raise ConfigError(
                "missing-package: train.optimizer = 'adamw8bit' needs the package torchao: pip install "
                "torchao; or set train.optimizer = 'adamw' and train.optimizer_device = 'cpu' to keep its "
                "states off the GPU"
            ) from error
        self._masters = [nn.Parameter(master, requires_grad=False) for master in self.masters]
        # Decay is 0 here and set per bucket in `_update`: one optimizer serves both kinds of Parameters.
        self._torchao = TorchaoAdamW(
            self._masters, lr=config.lr, betas=config.betas, eps=config.eps, weight_decay=0.0
        )
        # torchao makes the states at the first step, too late to load a checkpoint into
        for master in self._masters:
            self._torchao.state[master] = {
                "step": torch.tensor(0.0),
                "exp_avg": self._torchao._new_buffer(master, True),
                "exp_avg_sq": self._torchao._new_buffer(master, False),
            }

    def _update(self, bucket: Sequence[Piece], gradients: list[Tensor], rates: Rates) -> None:
        group = self._torchao.param_groups[0]
        # torchao keeps lr as a tensor, so that its compiled update is not compiled again when lr changes.
        group["lr"].fill_(rates.lr)
        group["weight_decay"] = rates.weight_decay
        for piece, gradient in zip(bucket, gradients, strict=True):
            master = self._masters[piece.index]
            shaped = gradient.view_as(master)
            master.grad = shaped.mul_(rates.scale) if rates.scale != 1.0 else shaped
        self._torchao.step()
        self._torchao.zero_grad(set_to_none=True)

    def state(self) -> dict[str, Tensor]:
        live: dict[str, Tensor] = {}
        for named, master in zip(self.parameters, self._masters, strict=True):
            for kind, tensor in self._torchao.state[master].items():
                if hasattr(tensor, "codes"):
                    live[f"{kind}.codes/{named.name}"] = tensor.codes
                    live[f"{kind}.scale/{named.name}"] = tensor.scale
                else:
                    live[f"{kind}/{named.name}"] = tensor
        return live
