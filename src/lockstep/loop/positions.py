"""Whether documents fit a model's position encoding."""

from __future__ import annotations

from lockstep.errors import ConfigError
from lockstep.models.load import LoadedModel, OpenedModel


def check_positions(
    model: LoadedModel | OpenedModel, longest: int, *, setting: str, subject: str | None = None
) -> None:
    """Refuse documents of more tokens than the model has positions.

    Args:
        longest: tokens of the longest document that the run has or may have.
        setting: which settings make it that long.
        subject: the beginning of the message; None: the settings allow it.

    Raises:
        ConfigError: the numbers, and what to lower.
    """
    if longest > model.max_positions:
        subject = subject or f"{setting} allows documents of {longest} tokens"
        raise ConfigError(
            f"too-long: {subject}, which exceeds the {model.max_positions} positions of {model.name} "
            f"(max_position_embeddings); lower {setting} to {model.max_positions}",
            setting=setting,
            tokens=longest,
            limit=model.max_positions,
        )
