"""Gradients between backward and the optimizer: float32 accumulation over micro-batches, and the global
norm."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

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

    def clear(self) -> None:
        """Drop every gradient. On a CPU the buffers are kept: fresh pages cost as much as the sums
        themselves; on a GPU their memory is what the engine's KV cache wants."""
        for parameter in self.parameters:
            parameter.grad = None
        self._spare = {p: b for p, b in self._buffers.items() if b.device.type == "cpu"}
        self._buffers = {}
        self._accumulating = False


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
