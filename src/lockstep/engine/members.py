"""Checks that an engine has the members that its protocol declares."""

from __future__ import annotations

import inspect
from typing import Any

from lockstep.engine import ENGINES
from lockstep.errors import ConfigError
from lockstep.protocols.engine import InferenceEngine, ReceivesWeights, SharesWeights
from lockstep.registry import require_call, require_members


def load_engine_class(name: str) -> Any:
    """Import the engine that `name` means, and check it.

    Returns:
        The class, or a function that makes an engine; either has the attribute `external`.

    Raises:
        ConfigError: there is no such engine, or it lacks members; the text names all of them.
    """
    found = ENGINES.load(name)
    if inspect.isclass(found):
        wanted = ["external", *methods(protocol_of(getattr(found, "external", False)))]
    else:
        wanted = ["external"]
    what = f"engine.name = {name!r}"
    require_members(found, wanted, what=what)
    if ":" in name:
        require_call(found, "config", named=["spec" if found.external else "model"], what=what)
    return found


def require_engine(engine: Any, *, name: str) -> InferenceEngine:
    """Return `engine`. Raises ConfigError, and closes it, if it lacks a member that its protocol declares."""
    what = f"an object of engine.name = {name!r}"
    require_members(engine, ("close", "external"), what=what)
    protocol = protocol_of(engine.external)
    try:
        require_members(engine, [*methods(protocol), *attributes(protocol)], what=what)
    except ConfigError:
        engine.close()
        raise
    checked: InferenceEngine = engine
    return checked


def protocol_of(external: bool) -> type:
    """The protocol of an engine with that attribute."""
    return ReceivesWeights if external else SharesWeights


def methods(protocol: type) -> list[str]:
    """Names of the methods that `protocol` declares, inherited ones first."""
    return [
        name
        for base in _bases(protocol)
        for name, value in vars(base).items()
        if inspect.isfunction(value) and not name.startswith("_")
    ]


def attributes(protocol: type) -> list[str]:
    """Names of the attributes that `protocol` declares, inherited ones first."""
    return [
        name
        for base in _bases(protocol)
        for name in [
            *inspect.get_annotations(base),
            *(name for name, value in vars(base).items() if isinstance(value, property)),
        ]
    ]


def _bases(protocol: type) -> list[type]:
    return [base for base in reversed(protocol.__mro__) if base.__module__ == InferenceEngine.__module__]
