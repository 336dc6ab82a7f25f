from __future__ import annotations

import re

from pydantic import Field, field_validator

from lockstep.config.base import Config, NonNegativeInt, PositiveInt, check
from lockstep.config.rules import refuse
from lockstep.config.train import TrainConfig
from lockstep.errors import ConfigError

_EVERY = re.compile(r"every ([1-9]\d{0,8})", re.ASCII)


class RecordConfig(Config):
    """Recordings of the policy's training inputs, kept under recordings/ for `lockstep replay`."""

    enabled: bool = Field(False, json_schema_extra={"alias": "--record"})
    """Record the policy's inputs (micro-batches) and its outputs for them. Also available as `--record`."""
    every: PositiveInt = 1
    """Record every k-th input of the run; 1 records all of them."""
    first_step: NonNegativeInt = 0
    """First step to record; steps count from 0."""
    last_step: NonNegativeInt | None = None
    """Last step to record. If unset, recording continues to the last step of the run."""
    weights: str = Field("first", json_schema_extra={"alias": "--record-weights"})
    """Weights to store for replay. first: the weights at the first recorded input. `every K`: also the
    weights of every K-th step. none: no weights. Also available as `--record-weights`."""

    @field_validator("weights")
    @classmethod
    def _check_weights(cls, weights: str) -> str:
        if weights not in ("first", "none") and not _EVERY.fullmatch(weights):
            raise ConfigError(
                f"wrong-format: weights = {weights!r} must be 'first', 'none', or 'every K' with K of at "
                "least 1, such as 'every 10'"
            )
        return weights

    @check
    def _check_steps(self) -> RecordConfig:
        refuse(self, "record")
        return self

    @property
    def weights_every(self) -> int | None:
        """K of "every K"; None where weights are stored once or never."""
        match = _EVERY.fullmatch(self.weights)
        return None if match is None else int(match[1])

    def covers(self, step: int) -> bool:
        """Return whether inputs of `step` are recorded."""
        return step >= self.first_step and (self.last_step is None or step <= self.last_step)


def record_refusal(record: RecordConfig, train: TrainConfig, *, lora: bool) -> str | None:
    """Say why a run whose backend shards weights between steps cannot be recorded as it is; None: it can."""
    updates = train.minibatches * train.epochs_per_batch
    if not record.enabled or (updates == 1 and not lora):
        return None
    what = "model.lora" if updates == 1 else f"{updates} optimizer steps per rollout batch"
    return (
        f"record.enabled = true with train.backend = {train.backend!r} and {what}: the weights that process "
        "the inputs are sharded over ranks, and they are gathered only between rollout batches. Set "
        "train.minibatches and train.epochs_per_batch to 1 and leave model.lora out, or set train.backend "
        "= 'local', or 'deepspeed' with train.zero_stage below 3"
    )
