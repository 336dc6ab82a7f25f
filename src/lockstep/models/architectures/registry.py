"""The known architectures: one record each, in the file of its name."""

from __future__ import annotations

from typing import Any

from lockstep.invariant.forms import register_forms
from lockstep.models.architectures import (
    gemma3_text,
    llama,
    mistral,
    mixtral,
    qwen2,
    qwen2_moe,
    qwen3,
    qwen3_moe,
)
from lockstep.models.architectures.record import Architecture

_OWN = (llama, qwen2, qwen3, mistral, gemma3_text, qwen2_moe, qwen3_moe, mixtral)

ARCHITECTURES: dict[str, Architecture] = {}
"""model_type -> record."""


def register(record: Architecture) -> None:
    """Add a record.

    Raises:
        ValueError: its model_type, or a class in `forms`, has another record already.
    """
    if ARCHITECTURES.setdefault(record.model_type, record) != record:
        raise ValueError(f"architecture {record.model_type!r} has a record already")
    register_forms(record.forms)


def architecture_of(config: Any) -> Architecture | None:
    """Return the record of a config's text model; None: it has none."""
    return ARCHITECTURES.get(config.get_text_config().model_type)


for _module in _OWN:
    register(_module.ARCHITECTURE)
