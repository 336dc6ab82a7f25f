"""Whether documents fit a model's position encoding."""

from __future__ import annotations

from lockstep.errors import ConfigError
from lockstep.models.load import LoadedModel, OpenedModel


def check_positions(model: LoadedModel | OpenedModel, longest: int, *, setting: str) -> None:
    """Refuse documents of more tokens than the model has positions.

    Args:
        longest: tokens of the longest document that the run has or may have.
        setting: which settings make it that long.

    Raises:
        ConfigError: the numbers, and what to lower.
    """
    if longest > model.max_positions:
        raise ConfigError(
            f"{setting} allows documents of {longest} tokens, which exceeds the {model.max_positions} "
            f"positions of {model.name} (max_position_embeddings); lower it to {model.max_positions}",
            code="too-long",
            setting=setting,
        )
