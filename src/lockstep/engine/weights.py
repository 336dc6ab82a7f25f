"""Taking named weights over into a module, all or nothing."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from lockstep.errors import EngineError
from lockstep.schema.weights import TensorSource


def copy_weights(module: nn.Module, tensors: TensorSource, *, engine: str) -> None:
    """Copy every weight by its Hugging Face name; values are cast to the module's dtype.

    Raises:
        EngineError: a name is unknown, missing or duplicate, a shape differs, or two names of one tied
            weight bring different values. Nothing was changed then.
    """
    own = dict(module.named_parameters(remove_duplicate=False))
    new: dict[str, Tensor] = {}
    for name, tensor in tensors():
        if name in new:
            raise EngineError(
                f"duplicate: engine {engine}: the weight update brings {name!r} twice", name=name
            )
        new[name] = tensor
    unknown, missing = sorted(new.keys() - own.keys()), sorted(own.keys() - new.keys())
    if unknown or missing:
        raise EngineError(
            f"wrong-weights: engine {engine}: the weight update does not fit the model: {len(unknown)} "
            f"unknown names {unknown[:5]}, {len(missing)} missing names {missing[:5]}; weights were left as "
            "they are",
            unknown=unknown,
            missing=missing,
        )
    first_name: dict[int, str] = {}
    for name, tensor in new.items():
        parameter = own[name]
        if tensor.shape != parameter.shape:
            raise EngineError(
                f"wrong-shape: engine {engine}: weight {name!r} has shape {list(tensor.shape)}, the model's "
                f"is {list(parameter.shape)}; weights were left as they are",
                name=name,
            )
        twin = first_name.setdefault(id(parameter), name)
        if twin != name and not torch.equal(new[twin], tensor):
            raise EngineError(
                f"values-differ: engine {engine}: {twin!r} and {name!r} are one tied weight, but the update "
                "brings two values",
                name=name,
            )
    with torch.no_grad():
        for name, tensor in new.items():
            own[name].copy_(tensor)
