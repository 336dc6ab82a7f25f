"""What every config shares: frozen, and an unknown key is an error."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict


class Config(BaseModel):
    """Base of all configs. Immutable; `model_copy(update=...)` is not validated, so use
    `lockstep.config.load.override`."""

    model_config = ConfigDict(
        frozen=True,
        extra="forbid",
        use_attribute_docstrings=True,
        validate_default=True,
        allow_inf_nan=False,
        ser_json_inf_nan="constants",  # in the free-form tables, which are not checked
    )
