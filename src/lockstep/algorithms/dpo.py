"""Direct preference optimisation (arXiv 2305.18290) and the losses of pairs that came after it."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import Tensor

from lockstep.algorithms.pairs import PairLoss, pair_weights
from lockstep.config.algorithm import DPOConfig
from lockstep.ops.preferences import dpo, ipo, orpo, robust_dpo, simpo
from lockstep.schema.batch import PreferenceBatch, TrainSample

_LOSSES: dict[str, tuple[Callable[..., Tensor], tuple[str, ...]]] = {
    "dpo": (dpo, ("beta", "label_smoothing")),
    "robust_dpo": (robust_dpo, ("beta", "label_smoothing")),
    "ipo": (ipo, ("beta",)),
    "simpo": (simpo, ("beta", "margin")),
    "orpo": (orpo, ("beta",)),
}
"""name -> the loss of a pair, and which options it takes."""


class DPOLoss(PairLoss):
    """The loss that `config.name` names."""

    def __init__(self, config: DPOConfig) -> None:
        config = config.resolved()
        assert config.beta is not None, "resolved"
        super().__init__(needs_ref=config.needs_ref, average=bool(config.average), beta=config.beta)
        self.config = config

    def pair_losses(self, chosen: Tensor, rejected: Tensor, batch: PreferenceBatch) -> Tensor:
        """See PairLoss."""
        loss, names = _LOSSES[self.config.name]
        return loss(chosen, rejected, **{name: getattr(self.config, name) for name in names})


class DPO:
    """Preference pairs, with ref_logprobs where the loss needs them. Shares loss_weights and loss with
    Algorithm."""

    def __init__(self, config: DPOConfig) -> None:
        self.config = config

    def loss_weights(self, samples: Sequence[TrainSample]) -> list[Tensor]:
        """See pair_weights."""
        return pair_weights(samples)

    def loss(self) -> DPOLoss:
        """Return the loss, which is not separable."""
        return DPOLoss(self.config)
