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

from lockstep.common_errors import missing_package
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
    """The factor of gradients: the clip coefficient, at most 1."""


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


# AdamW with 8-bit moments (arXiv 2110.02861) through torchao, over float32 masters.
#
# The only importer of torchao.


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
            other = "set train.optimizer = 'adamw' and train.optimizer_device = 'cpu' for its states"
            raise missing_package("train.optimizer = 'adamw8bit'", "torchao", or_else=other) from error
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


# The optimizer of a config, by name.


def make_optimizer(parameters: Sequence[NamedParameter], *, config: TrainConfig) -> MasterOptimizer:
    """The optimizer that `config.optimizer` names.

    Raises:
        ConfigError: adamw8bit without torchao.
    """
    if config.optimizer == "adamw8bit":
        return AdamW8bit(parameters, config=config)
    return {"adamw": AdamW, "sgd": SGD}[config.optimizer](parameters, config=config)


# Gradients between backward and the optimizer: float32 accumulation over micro-batches, and the global norm.


_NORM_CHUNK = 1 << 17  # elements; their float32 copy stays in a core's cache


class GradientStore:
    """Holds the gradients of one optimizer step in `Parameter.grad`, or accumulates them in float32 buffers.

    One micro-batch needs no buffer: its gradients stay in `Parameter.grad`, in the parameter's dtype, which
    is all the precision a single backward has. From the second micro-batch on, a low-precision sum would drop
    small terms, so each gradient is added to a float32 buffer as soon as autograd has it, and its own memory
    is freed.
    """

    def __init__(self, parameters: Sequence[nn.Parameter], *, float32: bool) -> None:
        self.parameters = list(parameters)
        self._buffered = [p for p in self.parameters if float32 and p.dtype != torch.float32]
        self._buffers: dict[nn.Parameter, Tensor] = {}
        self._spare: dict[nn.Parameter, Tensor] = {}
        self._accumulating = False
        for parameter in self._buffered:
            # The only hook that may take .grad away: a tensor's own hook runs before autograd has stored it.
            parameter.register_post_accumulate_grad_hook(self._drain)

    def expect(self, micro_batches: int) -> None:
        """Prepare for the backward passes of `micro_batches` micro-batches; call it before the first."""
        pending = [p for p in self._buffered if p.grad is not None]
        self._accumulating = micro_batches > 1 or bool(self._buffers) or bool(pending)
        if self._accumulating:
            for parameter in pending:
                self._drain(parameter)

    def _drain(self, parameter: Tensor) -> None:
        if not self._accumulating or parameter.grad is None:
            return
        assert isinstance(parameter, nn.Parameter)
        buffer = self._buffers.get(parameter)
        if buffer is not None:
            buffer.add_(parameter.grad)
        else:
            buffer = self._spare.pop(parameter, None)
            buffer = torch.empty_like(parameter, dtype=torch.float32) if buffer is None else buffer
            # The first gradient is copied, not added to zeros: one pass over the memory less.
            self._buffers[parameter] = buffer.copy_(parameter.grad)
        parameter.grad = None

    def collect(self) -> list[Tensor | None]:
        """Return one gradient per parameter, float32 where it was accumulated; None for unused parameters."""
        return [self._buffers.get(p, p.grad) for p in self.parameters]

    def copies(self) -> list[tuple[Tensor | None, Tensor | None]]:
        """Return copies on the host of each parameter's `grad` and float32 buffer."""
        pairs = [(p.grad, self._buffers.get(p)) for p in self.parameters]
        return [(_on_host(grad), _on_host(buffer)) for grad, buffer in pairs]

    def restore(self, copies: Sequence[tuple[Tensor | None, Tensor | None]]) -> None:
        """Take what `copies` returned in place of all gradients."""
        self.clear()
        for parameter, (grad, buffer) in zip(self.parameters, copies, strict=True):
            if grad is not None:
                parameter.grad = grad.to(parameter.device)
            if buffer is not None:
                self._buffers[parameter] = buffer.to(parameter.device)

    def zeros_for_unused(
        self, gradients: Sequence[Tensor | None], used: Sequence[bool]
    ) -> list[Tensor | None]:
        """Return the gradients that `collect` returned as they are added up: in the dtype of sums, and zeros
        where there is none though it is used."""
        buffered = set(self._buffered)
        made: list[Tensor | None] = []
        for p, gradient, wanted in zip(self.parameters, gradients, used, strict=True):
            dtype = torch.float32 if p in buffered else p.dtype
            if not wanted:
                made.append(None)
            else:
                made.append(torch.zeros_like(p, dtype=dtype) if gradient is None else gradient.to(dtype))
        return made

    def replace(self, gradients: Sequence[Tensor | None]) -> None:
        """Take these, of the dtype of sums, in place of all gradients."""
        self.clear()
        buffered = set(self._buffered)
        for p, gradient in zip(self.parameters, gradients, strict=True):
            if gradient is None:
                continue
            if p in buffered:
                self._buffers[p] = gradient.detach()
            else:
                p.grad = gradient.detach()

    def clear(self) -> None:
        """Drop every gradient. On a CPU the buffers are kept: fresh pages cost as much as the sums
        themselves; on a GPU their memory is what the engine's KV cache wants."""
        for parameter in self.parameters:
            parameter.grad = None
        self._spare = {p: b for p, b in self._buffers.items() if b.device.type == "cpu"}
        self._buffers = {}
        self._accumulating = False


def _on_host(tensor: Tensor | None) -> Tensor | None:
    return None if tensor is None else tensor.detach().to("cpu", copy=True)


def global_norm(gradients: Sequence[Tensor]) -> Tensor:
    """Euclidean norm over all gradients together, float32 scalar, computed in float32 whatever their dtype.

    torch.nn.utils.get_total_norm works in the gradients' own dtype; bfloat16 has 8 bits for a sum
    over millions.
    """
    if not gradients:
        return torch.zeros(())
    if gradients[0].device.type == "cpu":
        norms = [_cpu_norm(g) for g in gradients]
    else:
        # dtype: what it adds up in.
        # Private, and what torch's own clip_grad_norm_ calls: one launch for all gradients.
        norms = list(torch._foreach_norm(list(gradients), 2, dtype=torch.float32))
    total: Tensor = torch.linalg.vector_norm(torch.stack(norms))
    return total


def _cpu_norm(gradient: Tensor) -> Tensor:
    """Norm from one dot product per chunk: vector_norm of bfloat16 on a CPU runs element by element on one
    thread."""
    flat = gradient.reshape(-1)
    chunks = flat.split(_NORM_CHUNK)
    squares = torch.stack([torch.dot(c, c) for c in (chunk.float() for chunk in chunks)])
    # float64, because these are thousands of partial sums of very different size.
    return squares.double().sum().sqrt().float()
