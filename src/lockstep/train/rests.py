"""What a train backend gives back of its memory between its calls."""

from __future__ import annotations

import contextlib
from abc import ABC, abstractmethod
from collections.abc import Iterable

import torch
from torch import Tensor

from lockstep.models.rest import Rest, awake
from lockstep.protocols.train import RestPart


class Rests(ABC):
    """Base of the backends that can rest: they say which tensors a part has, and wake the parts that a call
    uses."""

    device: torch.device
    _rests: dict[RestPart, Rest]

    def rest(self, *parts: RestPart) -> None:
        """See RestingBackend."""
        weights = {_address(tensor) for tensor in self._tensors_of("weights")}
        found = {
            part: [
                tensor
                for tensor in self._tensors_of(part)
                if tensor.device.type == self.device.type
                # A float32 Parameter is its own master.
                and (part == "weights" or _address(tensor) not in weights)
            ]
            for part in parts
        }
        self._rests.update({part: Rest(tensors) for part, tensors in found.items()})

    def _awake(self, *parts: RestPart) -> contextlib.AbstractContextManager[None]:
        return awake(*(self._rests.get(part) for part in parts))

    @abstractmethod
    def _tensors_of(self, part: RestPart) -> Iterable[Tensor]:
        """The tensors of a part, some of which may be in host memory."""


def _address(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()
