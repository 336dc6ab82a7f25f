"""What classes of transformers' models compute, for the converter: the records of architectures say it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class RMSNorm:
    """weight * x / rms(x), over the last dimension, in float32."""

    epsilon: str = "variance_epsilon"
    """The attribute with epsilon."""
    unit_offset: bool = False
    """Whether 1 is added to the weight."""


@dataclass(frozen=True, slots=True)
class GatedMLP:
    """down_proj(act_fn(gate_proj(x)) * up_proj(x))."""


@dataclass(frozen=True, slots=True)
class Rotary:
    """cos and sin of positions, with frequencies in buffers."""


Form = RMSNorm | GatedMLP | Rotary
"""What a class computes; `lockstep.invariant.convert` knows a row-invariant form of each."""

FORMS: dict[str, Form] = {}
"""Class name -> form. `register_forms` fills it."""


def register_forms(forms: Mapping[str, Form]) -> None:
    """Tell the converter what classes compute, by their names.

    Raises:
        ValueError: a class is known already, as something else.
    """
    for name, form in forms.items():
        if FORMS.setdefault(name, form) != form:
            raise ValueError(f"class {name!r} is registered as {FORMS[name]}, not {form}")
