"""The settings of a value model."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field, NonNegativeFloat, PositiveFloat

from lockstep.config.base import Config, Name, NonNegativeInt, PositiveInt, check
from lockstep.config.model import Dtype, LoraConfig, ModelConfig
from lockstep.config.rules import refuse
from lockstep.config.train import TrainConfig

POLICY = "policy"
"""value.name that stands for the policy's own model."""


class ValueConfig(Config):
    """The value model: which one, how it is trained, and what its loss is. An option left at None is that of
    `train`, or of `model`, for the policy."""

    name: Name = POLICY
    """policy: the policy's own model as it was at the start, with a fresh head. Else a folder, a hub name or
    shape:NAME: of a classifier with one label, such as a reward model, whose head is kept; or of a causal LM,
    which gets a fresh one. Token ids must mean the same as the policy's."""
    revision: Name | None = None
    """Hub revision of `name`."""
    dtype: Dtype | Literal["auto"] | None = None
    """Compute dtype of parameters and activations."""
    lora: LoraConfig | None = None
    """Train adapters and the head only. None: all weights, whatever the policy trains."""

    lr: PositiveFloat = 1e-5
    """Learning rate after warm-up; 1e-5 in verl, 9e-6 in OpenRLHF."""
    schedule: Literal["constant", "linear", "cosine"] | None = None
    """Learning rate schedule after warm-up."""
    warmup_steps: NonNegativeInt | None = None
    """Optimizer steps of the value model until `lr` is reached."""
    min_lr_ratio: float | None = Field(None, ge=0.0, le=1.0)
    """Learning rate at the end of a decay, as a fraction of lr."""
    betas: tuple[float, float] | None = None
    """Betas of AdamW."""
    eps: PositiveFloat | None = None
    """Epsilon of AdamW."""
    weight_decay: NonNegativeFloat | None = None
    """AdamW's weight decay. It applies to matrices only."""
    max_grad_norm: PositiveFloat | None = None
    """A gradient with a larger L2 norm is scaled down to this norm."""
    optimizer: Literal["adamw", "adamw8bit", "sgd"] | None = None
    """adamw8bit needs torchao."""
    optimizer_device: Literal["model", "cpu"] | None = None
    """cpu: master weights and optimizer states live in host memory."""
    grad_accum_dtype: Literal["float32", "model"] | None = None
    """Dtype in which the gradients of several micro-batches are added up."""
    activation_checkpointing: bool | None = None
    """Recompute the inside of each block in backward."""
    minibatches: PositiveInt | None = None
    """Optimizer steps per pass over a rollout batch."""
    epochs_per_batch: PositiveInt | None = None
    """Passes over a rollout batch."""

    warmup_batches: NonNegativeInt = 0
    """Rollout batches at the start of the run in which only the value model is trained; verl's critic_warmup
    (0 there)."""

    loss: Literal["squared", "huber"] = "squared"
    """Of the error value - return: half its square; huber is linear beyond `huber_delta`."""
    huber_delta: PositiveFloat = 1.0
    """In units of reward."""
    clip: NonNegativeFloat = 0.5
    """A value that has moved further than this from its value before the update counts as if it had moved
    only this far, if that gives the larger loss; 0.5 in verl and OpenRLHF, 0.2 in TRL. 0: no bound."""
    aggregation: Literal["token_mean", "sequence_mean"] = "token_mean"
    """token_mean: over all tokens of an optimizer step. sequence_mean: per sequence, then over sequences."""

    def model(self, policy: ModelConfig) -> ModelConfig:
        """Return which model it is, given which the policy is."""
        own: dict[str, Any] = {"lora": self.lora}
        if self.name != POLICY:
            own |= {"name": self.name, "revision": self.revision, "num_layers": None}
        if self.dtype is not None:
            own["dtype"] = self.dtype
        return policy.model_copy(update=own)

    def train(self, policy: TrainConfig) -> TrainConfig:
        """Return the train settings of its backend, given those of the policy's. Nothing promises bits of
        values."""
        shared = [name for name in type(self).model_fields if name in TrainConfig.model_fields]
        own = {name: value for name in shared if (value := getattr(self, name)) is not None}
        return policy.model_copy(update=own | {"batch_invariant": False, "reuse_rollout_logprobs": None})

    @check
    def _check(self) -> ValueConfig:
        refuse(self, "value")
        return self
