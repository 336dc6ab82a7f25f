"""The routers of a policy in training: their losses, and counts of what they chose."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from lockstep.config.train import TrainConfig
from lockstep.invariant.experts import routers
from lockstep.models.forward import DecoderInputs
from lockstep.ops.routing import expert_counts, load_balancing_loss, load_metrics, router_z_loss
from lockstep.schema.batch import PackedBatch


@dataclass(frozen=True, kw_only=True, slots=True)
class Routes:
    """The experts that the rows of one forward went to."""

    batch: PackedBatch
    """On its device."""
    chosen: list[Tensor]
    """[rows, k] int64 of each layer."""
    times: Tensor
    """[rows] float32: see `expert_counts`."""

    def changed(self, now: Sequence[Tensor]) -> Tensor:
        """[2] float64: routes of these rows that are not among `now`, and all of them. The order of a token's
        experts does not count."""
        kept = [
            (old[:, :, None] == new[:, None, :]).any(-1).sum(-1)
            for old, new in zip(self.chosen, now, strict=True)
        ]
        every = self.times.double().sum() * self.chosen[0].shape[1] * len(kept)
        return torch.stack([every - (torch.stack(kept).sum(0) * self.times.double()).sum(), every])


class Routing:
    """Reads what the routers of a module chose in a forward, and makes their losses of it.

    Args:
        module: with experts; see `routing_of`.
        config: router_aux_loss and router_z_loss.
    """

    def __init__(self, module: nn.Module, config: TrainConfig) -> None:
        self._routers = [part for _, part in routers(module)]
        self._aux, self._z = config.router_aux_loss, config.router_z_loss
        self._compares = config.route_changes_every > 0
        self.first: Routes | None = None
        """Of the first micro-batch since the last `metrics`; this and the next only where the config has
        route_changes_every."""
        self.latest: list[Tensor] = []
        """[rows, k] of each layer: the experts of the last forward."""
        self._losses: Tensor | None = None
        self._counts: Tensor | None = None
        self._tokens = 0
        for part in self._routers:
            part.watched = True

    @property
    def has_losses(self) -> bool:
        """Whether a micro-batch without trained tokens has a gradient too: router losses are of every
        token."""
        return bool(self._aux or self._z)

    def loss(self, batch: PackedBatch, inputs: DecoderInputs, share: float | None) -> Tensor | None:
        """The losses of the forward that has just run, times their coefficients; None: both are 0.

        Args:
            share: this micro-batch's tokens, as a share of the optimizer step's. 0: an empty one, of a rank
                that has none left; None: it is not trained on. Neither is counted.
        """
        seen = [part.seen for part in self._routers]
        for part in self._routers:
            part.seen = None
        logits, chosen = [each[0] for each in seen], [each[1] for each in seen]
        if self._compares:
            self.latest = chosen
        if share is None:
            return None
        times = _times(batch, inputs, logits[0])
        if self._compares and self.first is None:
            self.first = Routes(batch=batch, chosen=chosen, times=times * bool(share))
        if not share:
            return None
        self._count(batch, chosen, times, logits[0].shape[1])
        if not self.has_losses:
            return None
        both = torch.stack([load_balancing_loss(logits, chosen, times), router_z_loss(logits, times)]) * share
        self._losses = both.detach() if self._losses is None else self._losses + both.detach()
        return self._aux * both[0] + self._z * both[1]

    def _count(self, batch: PackedBatch, chosen: list[Tensor], times: Tensor, num_experts: int) -> None:
        counts = torch.stack([expert_counts(each, times, num_experts) for each in chosen]).double()
        self._counts = counts if self._counts is None else self._counts + counts
        self._tokens += batch.num_tokens * chosen[0].shape[1] * len(chosen)

    def metrics(self, add_up: Callable[[Tensor], None]) -> dict[str, float]:
        """Return experts/* since the last call.

        Args:
            add_up: adds a tensor of float64 up over ranks, in place.
        """
        device = self._routers[0].weight.device
        counts = self._counts
        if counts is None:
            counts = torch.zeros(len(self._routers), self._routers[0].weight.shape[0], device=device).double()
        losses = torch.zeros(2, device=device) if self._losses is None else self._losses
        tokens = torch.tensor([self._tokens], device=device)
        flat = torch.cat([counts.flatten(), losses.double(), tokens.double()])
        add_up(flat)
        self._counts, self._losses, self._tokens, self.first = None, None, 0, None
        total, (aux, z, wanted) = flat[:-3].view_as(counts), flat[-3:].tolist()
        if not wanted:
            return {}
        found = load_metrics(total) | {"dropped_tokens": wanted - float(total.sum())}
        found |= {"aux_loss": aux} if self._aux else {}
        found |= {"z_loss": z} if self._z else {}
        return {f"experts/{name}": value for name, value in found.items()}


def step_shares(batches: Sequence[PackedBatch]) -> list[float]:
    """Return the tokens of each micro-batch, as a share of the optimizer step's."""
    every = sum(batch.num_tokens for batch in batches)
    return [batch.num_tokens / (batch.step_tokens or every) for batch in batches]


def routing_of(module: nn.Module, config: TrainConfig) -> Routing | None:
    """Return the Routing of a policy; None: it has no experts."""
    return Routing(module, config) if any(True for _ in routers(module)) else None


def _times(batch: PackedBatch, inputs: DecoderInputs, logits: Tensor) -> Tensor:
    """[rows] float32: of how many tokens of documents each row of the decoder is."""
    ones = torch.ones(batch.num_tokens, device=logits.device)
    times = ones.new_zeros(logits.shape[0])
    if inputs.cells is None:
        times[: batch.num_tokens] = 1.0
        return times
    return times.index_add(0, inputs.cells[: batch.num_tokens], ones)  # whole numbers: exact in any order
