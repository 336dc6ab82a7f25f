"""The state of train/deepspeed/backend.py as whole tensors by name, for checkpoints that any backend loads.

DeepSpeed's own accessors (safe_set_full_fp32_param and its like) are not used: at stage 3 they cannot set a
tensor whose size the number of ranks does not divide, and none of them knows a moment before the first step.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lockstep.errors import CheckpointError
from lockstep.models.lora import has_lora, merged_state_dict
from lockstep.train.deepspeed.engine import Fragment, ZeroEngine
from lockstep.train.state.parts import MASTER, MODEL, Reader, TensorMeta, read_flat

_MOMENTS = ("exp_avg", "exp_avg_sq")
_UPDATES = "updates/"


class ZeroParts:
    """Implements lockstep.train.state.parts.TensorParts.

    Args:
        module: the policy.
        trained_only: leave frozen weights and buffers out (LoRA).
        with_optimizer: whether there are masters and moments to keep.
        adamw: the optimizer has moments.
    """

    def __init__(
        self, zero: ZeroEngine, module: nn.Module, *, trained_only: bool, with_optimizer: bool, adamw: bool
    ) -> None:
        self.group: dist.ProcessGroup | None = dist.group.WORLD
        self._zero, self._adamw = zero, adamw and with_optimizer
        self._weights: dict[str, nn.Parameter | Tensor] = {
            name: p for name, p in module.named_parameters() if p.requires_grad or not trained_only
        }
        if not trained_only:
            persistent = module.state_dict().keys()
            self._weights |= {name: b for name, b in module.named_buffers() if name in persistent}
        self._fragments = dict(zero.fragments()) if zero.masters_apart or with_optimizer else {}
        low = (
            [n for n in self._fragments if self._weights[n].dtype != torch.float32] if with_optimizer else []
        )
        self._masters = set(low)
        self._count: int | None = None

    def tensors(self) -> Mapping[str, TensorMeta]:
        """See TensorParts. The counts of updates come first: they are checked before anything is changed."""
        tensors: dict[str, TensorMeta] = {}
        if self._adamw:
            tensors |= {f"{_UPDATES}{name}": TensorMeta((), torch.float32) for name in self._fragments}
        for name, tensor in self._weights.items():
            tensors[f"{MODEL}{name}"] = TensorMeta(_whole_shape(tensor), tensor.dtype)
        kinds = [(MASTER, self._masters)] + [(f"{m}/", self._fragments) for m in _MOMENTS if self._adamw]
        for prefix, names in kinds:
            for name in self._fragments:
                if name in names:
                    shape = _whole_shape(self._weights[name])
                    tensors[f"{prefix}{name}"] = TensorMeta(shape, torch.float32)
        return tensors

    # --- saving ---------------------------------------------------------------------------------------------

    def whole(self, name: str, *, owner: int) -> Tensor | None:
        """See TensorParts."""
        kind, _, path = name.partition("/")
        mine = dist.get_rank() == owner
        if kind == "model":
            return self._whole_weight(self._weights[path], mine=mine)
        fragment = self._fragments[path]
        if kind == "updates":
            return torch.tensor(float(self._steps_of(fragment)))
        partition = fragment.flat if kind == "master" else self._moment(fragment, kind)
        shape = _whole_shape(self._weights[path])
        if self._zero.stage == 0:
            return torch.zeros(shape) if partition is None else partition.detach().view(shape)
        # Exact: integers, of which at most one is not 0 (a float -0 would not survive a sum).
        buffer = torch.zeros(shape, dtype=torch.float32, device=self._zero.device)
        if partition is not None:
            buffer.view(-1)[fragment.start : fragment.stop] = fragment.of(partition)
        dist.reduce(buffer.view(torch.int32), dst=owner)
        return buffer if mine else None

    def _whole_weight(self, weight: nn.Parameter | Tensor, *, mine: bool) -> Tensor | None:
        # ds_tensor is this rank's part of a Parameter that ZeRO 3 keeps empty.
        if self._zero.stage < 3 or not hasattr(weight, "ds_tensor"):
            return weight.detach() if mine else None
        assert isinstance(weight, nn.Parameter)
        with torch.no_grad(), self._zero.gathered([weight]):
            return weight.detach().clone() if mine else None

    def _moment(self, fragment: Fragment, kind: str) -> Tensor | None:
        """The moment of a fragment's partition; None before the first update."""
        moment: Tensor | None = self._zero.states.get(fragment.flat, {}).get(kind)
        return moment

    def _steps_of(self, fragment: Fragment) -> int:
        return int(self._zero.states.get(fragment.flat, {}).get("step", 0))

    # --- loading --------------------------------------------------------------------------------------------

    @torch.no_grad()
    def fill(self, name: str, read: Reader) -> None:
        """See TensorParts.

        Raises:
            CheckpointError: parameters have been updated different numbers of times.
        """
        kind, _, path = name.partition("/")
        if kind == "model":
            self._fill_weight(path, read)
            return
        fragment = self._fragments[path]
        if kind == "updates":
            count = int(read())
            if self._count not in (None, count):
                raise CheckpointError(
                    f"unsupported-combination: {path} has been updated {count} times, other parameters "
                    f"{self._count} times, as in a model some of whose experts were not always used; "
                    "DeepSpeed keeps one count for all; load it with train.backend = 'local' or 'fsdp2'"
                )
            self._count = count
        elif fragment.start < fragment.stop:
            target = fragment.flat if kind == "master" else self._state(fragment.flat)[kind]
            fragment.of(target).copy_(read_flat(read, fragment.start, fragment.stop))

    def _fill_weight(self, path: str, read: Reader) -> None:
        weight = self._weights[path]
        part: Tensor | None = getattr(weight, "ds_tensor", None)
        if part is None:
            weight.detach().copy_(read())
        else:
            size = torch.Size(read.shape).numel()
            start = min(part.numel() * dist.get_rank(), size)
            stop = min(start + part.numel(), size)
            part.detach().view(-1)[: stop - start].copy_(read_flat(read, start, stop))
        fragment = self._fragments.get(path)
        if fragment is None or path in self._masters or fragment.flat is weight:
            return
        if fragment.start < fragment.stop:  # a float32 weight has a master too
            fragment.of(fragment.flat).copy_(read_flat(read, fragment.start, fragment.stop))

    def _state(self, flat: Tensor) -> dict[str, Tensor]:
        """The live moments of a partition; DeepSpeed makes them in the first step."""
        state: dict[str, Tensor] = self._zero.states[flat]
        if "exp_avg" not in state:
            state["step"] = self._zero.first_step(flat)
            state |= {kind: torch.zeros_like(flat, requires_grad=False) for kind in _MOMENTS}
        return state

    def finish_loading(self) -> None:
        """Call after the last `fill`. Collective."""
        if self._adamw:
            for flat in {id(f.flat): f.flat for f in self._fragments.values() if f.stop > f.start}.values():
                state = self._state(flat)
                step, count = state["step"], self._count or 0
                state["step"] = step.fill_(count) if isinstance(step, Tensor) else count
        self._zero.refresh_persistent()


def whole_weights(zero: ZeroEngine, module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Hugging Face name -> whole weight, LoRA merged, tied ones under every name. Collective at stage 3:
    copies on the backend's device, gathered one at a time (with LoRA all of them)."""
    if zero.stage < 3:
        yield from merged_state_dict(module).items()
        return
    if has_lora(module):
        with torch.no_grad(), zero.gathered(list(module.parameters())):
            merged = {name: tensor.clone() for name, tensor in merged_state_dict(module).items()}
        yield from merged.items()
        return
    parameters = dict(module.named_parameters(remove_duplicate=False))
    for name, tensor in module.state_dict().items():
        if name not in parameters:
            yield name, tensor
            continue
        with torch.no_grad(), zero.gathered([parameters[name]]):
            whole = parameters[name].detach().clone()
        yield name, whole


def _whole_shape(tensor: Tensor) -> tuple[int, ...]:
    return tuple(getattr(tensor, "ds_shape", tensor.shape))
