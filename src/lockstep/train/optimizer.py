"""Optimizers over a float32 master copy of the weights, and the learning rate of a step.

The model's Parameters are in the compute dtype; rounding an update of 1e-6 to bfloat16 loses it. So each
Parameter has a float32 master, updates go to the master, and one cast per step writes the Parameter. A
float32 Parameter on the optimizer's device is its own master and costs nothing extra.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.optim.adamw import adamw
from torch.optim.sgd import sgd

from lockstep.config.train import TrainConfig
from lockstep.errors import ConfigError
from lockstep.models.memory import BUCKET_ELEMENTS


@dataclass(frozen=True, kw_only=True, slots=True)
class NamedParameter:
    """A trained Parameter, the name it has in checkpoints, and whether weight decay applies to it."""

    name: str
    parameter: nn.Parameter
    decay: bool


class Rates(NamedTuple):
    """The numbers of one update."""

    lr: float
    weight_decay: float
    scale: float
    """What gradients are multiplied by: the clip coefficient, at most 1."""


def trained_parameters(module: nn.Module) -> list[NamedParameter]:
    """Every Parameter that requires grad, once. Weight decay is for matrices: not norms, biases and
    embeddings (an output head that is tied to the embedding counts as embedding).

    Raises:
        ConfigError: nothing requires grad.
    """
    embeddings = {id(m.weight) for m in module.modules() if isinstance(m, nn.Embedding)}
    named = [
        NamedParameter(name=name, parameter=p, decay=p.ndim >= 2 and id(p) not in embeddings)
        for name, p in module.named_parameters()
        if p.requires_grad
    ]
    if not named:
        raise ConfigError("nothing-to-do: no parameter of the model requires grad; there is nothing to train")
    return named


def lr_at(step: int, *, config: TrainConfig, total_steps: int) -> float:
    """Learning rate of the update number `step` (0 is the first one) of `total_steps`.

    Warm-up is linear and never 0: update s of w warm-up steps has lr * (s + 1) / (w + 1), so that the first
    update already moves the weights. Afterwards it is transformers' get_scheduler (optimization.py:
    constant_with_warmup, linear, cosine with half a period) at the same step, compressed into [min_lr_ratio,
    1]; steps beyond `total_steps` keep the last value.

    Raises:
        ValueError: `step` is negative.
    """
    if step < 0:
        raise ValueError(f"step = {step} is negative; the first update is step 0")
    if step < config.warmup_steps:
        return config.lr * (step + 1) / (config.warmup_steps + 1)
    progress = min(1.0, (step - config.warmup_steps) / max(1, total_steps - config.warmup_steps))
    decay = 1.0  # linear and cosine reach 0 at progress 1
    if config.schedule == "linear":
        decay = 1.0 - progress
    elif config.schedule == "cosine":
        decay = 0.5 * (1.0 + math.cos(math.pi * progress))
    return config.lr * (config.min_lr_ratio + (1.0 - config.min_lr_ratio) * decay)


@dataclass(frozen=True, slots=True)
class Piece:
    """A contiguous run of one parameter's elements, counted as if it were flat."""

    index: int
    start: int
    stop: int


class MasterOptimizer(ABC):
    """Base: masters, buckets, the cast back. A subclass updates the masters of one bucket."""

    splits = True
    """Whether a large parameter may be updated in several pieces."""

    def __init__(self, parameters: Sequence[NamedParameter], *, config: TrainConfig) -> None:
        self.config = config
        self.parameters = list(parameters)
        model_device = parameters[0].parameter.device
        self.device = torch.device("cpu") if config.optimizer_device == "cpu" else model_device
        self.offloaded = self.device.type != model_device.type
        self.masters = [self._master(p.parameter) for p in self.parameters]
        self._casts = not self.offloaded and any(p.parameter.dtype != torch.float32 for p in parameters)
        self._pinned: dict[tuple[int, torch.dtype], Tensor] = {}

    def _master(self, parameter: nn.Parameter) -> Tensor:
        if parameter.dtype == torch.float32 and not self.offloaded:
            return parameter.detach()
        # Contiguous, because updates see a master as one flat run of elements.
        return parameter.detach().to(self.device, torch.float32, copy=True).contiguous()

    def step(self, gradients: Sequence[Tensor | None], *, lr: float, scale: float = 1.0) -> None:
        """Update masters and Parameters.

        Args:
            gradients: one per parameter, float32 or the parameter's dtype; None leaves that parameter as it
                is. Their contents are not defined afterwards.
            lr: learning rate of this update.
            scale: the gradients are multiplied by this (the clip coefficient) on their way.
        """
        local = self._to_host(gradients) if self.offloaded else list(gradients)
        for decay in (True, False):
            # A call of torch's kernels has one weight_decay for all its tensors.
            rates = Rates(lr, self.config.weight_decay if decay else 0.0, scale)
            for bucket in self._buckets(local, decay):
                # Cast per bucket: a float32 copy of all gradients at once would take 4 bytes per parameter.
                flat = [_flat(local[p.index], p).to(torch.float32) for p in bucket]  # type: ignore[arg-type]
                self._update(bucket, flat, rates)
                if self._casts:
                    self._cast(bucket)
        if self.offloaded:
            self._to_device(local)

    def _buckets(self, gradients: Sequence[Tensor | None], decay: bool) -> Iterator[list[Piece]]:
        limit = BUCKET_ELEMENTS.get(self.device.type, BUCKET_ELEMENTS["cuda"])
        bucket: list[Piece] = []
        filled = 0
        for index, (named, gradient) in enumerate(zip(self.parameters, gradients, strict=True)):
            if gradient is None or named.decay != decay:
                continue
            start, total = 0, gradient.numel()
            while start < total:
                stop = min(total, start + limit - filled) if self.splits else total
                bucket.append(Piece(index, start, stop))
                filled += stop - start
                start = stop
                if filled >= limit:
                    yield bucket
                    bucket, filled = [], 0
        if bucket:
            yield bucket

    def _cast(self, bucket: Sequence[Piece]) -> None:
        """Write the Parameters from their masters: the one cast of the step."""
        pairs = [(self.parameters[p.index].parameter, self.masters[p.index], p) for p in bucket]
        # A float32 Parameter is its own master, so nothing is left to cast.
        apart = [(t, m, p) for t, m, p in pairs if t.data_ptr() != m.data_ptr()]
        if apart:
            targets = [_flat(t.detach(), p) for t, _, p in apart]
            # One launch for the bucket. These kernels have no public name; torch's own optimizers call them
            # by this one.
            torch._foreach_copy_(targets, [_flat(m, p) for _, m, p in apart])

    def _to_host(self, gradients: Sequence[Tensor | None]) -> list[Tensor | None]:
        """All gradients in pinned host memory: one wait for the lot."""
        host: list[Tensor | None] = []
        for index, gradient in enumerate(gradients):
            host.append(None if gradient is None else self._staging(index, gradient.dtype))
            if gradient is not None:
                self._staging(index, gradient.dtype).copy_(gradient, non_blocking=True)
        self._synchronize()
        return host

    def _to_device(self, gradients: Sequence[Tensor | None]) -> None:
        for index, gradient in enumerate(gradients):
            if gradient is None:
                continue
            parameter = self.parameters[index].parameter
            staged = self._staging(index, parameter.dtype).copy_(self.masters[index])
            # The staging memory serves the next step too, so the copies must have ended (below) before this
            # returns.
            parameter.detach().copy_(staged, non_blocking=True)
        self._synchronize()

    def _staging(self, index: int, dtype: torch.dtype) -> Tensor:
        key = (index, dtype)
        if key not in self._pinned:
            shape = self.masters[index].shape
            # Copies from pageable memory are synchronous, whatever non_blocking says.
            self._pinned[key] = torch.empty(shape, dtype=dtype, pin_memory=torch.cuda.is_available())
        return self._pinned[key]

    def _synchronize(self) -> None:
        if self.parameters[0].parameter.device.type == "cuda":
            torch.cuda.synchronize(self.parameters[0].parameter.device)

    def separate_masters(self) -> dict[str, Tensor]:
        """Name to master, for those that are not the Parameter itself."""
        return {
            named.name: master
            for named, master in zip(self.parameters, self.masters, strict=True)
            if master.data_ptr() != named.parameter.data_ptr()
        }

    def state(self) -> dict[str, Tensor]:
        """The live optimizer state, "kind/parameter name" to tensor. Writing into these tensors restores
        it."""
        return {}

    @abstractmethod
    def _update(self, bucket: Sequence[Piece], gradients: list[Tensor], rates: Rates) -> None:
        """Update the masters of one bucket.

        Args:
            gradients: one per piece, flat, not clipped.
        """


class AdamW(MasterOptimizer):
    """Decoupled weight decay (arXiv 1711.05101) by torch's fused kernel, bucket by bucket."""

    def __init__(self, parameters: Sequence[NamedParameter], *, config: TrainConfig) -> None:
        super().__init__(parameters, config=config)
        self.exp_avg = [torch.zeros_like(m) for m in self.masters]
        self.exp_avg_sq = [torch.zeros_like(m) for m in self.masters]
        # On the host: a count is read to build a bucket, never by a kernel that could have waited.
        self.updates = [torch.zeros((), dtype=torch.float32) for _ in self.masters]

    def step(self, gradients: Sequence[Tensor | None], *, lr: float, scale: float = 1.0) -> None:
        super().step(gradients, lr=lr, scale=scale)
        # A rank without a row of a Parameter counts its updates as others do: any of them saves the count.
        for count, gradient in zip(self.updates, gradients, strict=True):
            if gradient is not None and gradient.numel() == 0:
                count += 1

    def _update(self, bucket: Sequence[Piece], gradients: list[Tensor], rates: Rates) -> None:
        fused = self.device.type in ("cpu", "cuda")
        if not fused and rates.scale != 1.0:
            torch._foreach_mul_(gradients, rates.scale)
        for piece in bucket:
            # Of the pieces of a large Parameter only the first counts the update.
            if piece.start == 0:
                self.updates[piece.index] += 1
        # The kernel counts the update itself, so it gets the count before this one; a piece has a count of
        # its own.
        counts = [(self.updates[p.index] - 1).to(self.device) for p in bucket]
        # The functional form, because torch.optim.AdamW updates whole Parameters: here they are pieces of
        # masters.
        adamw(
            [_flat(self.masters[p.index], p) for p in bucket],
            gradients,
            [_flat(self.exp_avg[p.index], p) for p in bucket],
            [_flat(self.exp_avg_sq[p.index], p) for p in bucket],
            [],
            counts,
            fused=fused,
            foreach=not fused,
            # the fused kernel divides by grad_scale: clipping costs no pass of its own
            grad_scale=torch.tensor(1.0 / rates.scale, device=self.device)
            if fused and rates.scale != 1.0
            else None,
            amsgrad=False,
            beta1=self.config.betas[0],
            beta2=self.config.betas[1],
            lr=rates.lr,
            weight_decay=rates.weight_decay,
            eps=self.config.eps,
            maximize=False,
        )

    def state(self) -> dict[str, Tensor]:
        kinds = {"exp_avg": self.exp_avg, "exp_avg_sq": self.exp_avg_sq, "updates": self.updates}
        return {
            f"{kind}/{named.name}": tensor
            for kind, tensors in kinds.items()
            for named, tensor in zip(self.parameters, tensors, strict=True)
        }


class SGD(MasterOptimizer):
    """Plain gradient descent, no momentum; weight decay is added to the gradient, as in torch.optim.SGD."""

    def _update(self, bucket: Sequence[Piece], gradients: list[Tensor], rates: Rates) -> None:
        if rates.scale != 1.0:
            torch._foreach_mul_(gradients, rates.scale)
        sgd(
            [_flat(self.masters[p.index], p) for p in bucket],
            gradients,
            [None] * len(bucket),
            foreach=True,
            weight_decay=rates.weight_decay,
            momentum=0.0,
            lr=rates.lr,
            dampening=0.0,
            nesterov=False,
            maximize=False,
        )


def _flat(tensor: Tensor, piece: Piece) -> Tensor:
    return tensor.view(-1)[piece.start : piece.stop]
