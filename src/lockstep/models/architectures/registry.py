"""The known architectures: one record each, in the file of its name here, or in an installed package."""

from __future__ import annotations

import importlib
import pkgutil
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

from lockstep.invariant.forms import register_forms
from lockstep.models.architectures.record import Architecture

ENTRY_POINTS = "lockstep.architectures"
"""The group of entry points, each the `module:NAME` of a record, in which other packages bring theirs."""

ARCHITECTURES: dict[str, Architecture] = {}
"""model_type -> record."""
SHIPPED: dict[str, Architecture] = {}
"""Those that come with Lockstep."""


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


def register_all() -> None:
    """Register the records in this folder, then those of installed packages."""
    for file in pkgutil.iter_modules([str(Path(__file__).parent)]):
        module = importlib.import_module(f"{__package__}.{file.name}")
        if hasattr(module, "ARCHITECTURE"):
            register(module.ARCHITECTURE)
    SHIPPED.update(ARCHITECTURES)
    for entry in entry_points(group=ENTRY_POINTS):
        register(entry.load())
