"""The settings of a value model."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field, NonNegativeFloat, PositiveFloat

from lockstep.config.base import Config, Name, NonNegativeInt, PositiveInt, check
from lockstep.config.model import Dtype, LoraConfig, ModelConfig
from lockstep.config.rules import refuse
from lockstep.config.train import Auto, TrainConfig

POLICY = "policy"
"""value.name that stands for the policy's own model."""


class ValueConfig(Config):
    """The value model: its weights, its training and its loss. Training options and a
    dtype that default to None have the same values as for the policy, from `train` or `model`."""

    name: Name = POLICY
    """Model to start from: policy (the initial policy with a fresh head), a folder, a hub name or shape:NAME.
    A classifier with one label, such as a reward model, keeps its head; a causal LM gets a fresh one. Token
    ids must mean the same as for the policy."""
    revision: Name | None = None
    """Hub revision of `name`."""
    dtype: Dtype | Literal["auto"] | None = None
    """Compute dtype of parameters and activations."""
    lora: LoraConfig | None = None
    """Only the adapters and the head are trained. Without lora, all weights are trained, whatever the policy
    trains."""

    lr: PositiveFloat = 1e-5
    """Learning rate after warm-up. verl uses 1e-5, OpenRLHF 9e-6."""
    schedule: Literal["constant", "linear", "cosine"] | None = None
    """Learning rate schedule after warm-up."""
    warmup_steps: NonNegativeInt | None = None
    """Optimizer steps during which the value model's learning rate rises to `lr`."""
    min_lr_ratio: float | None = Field(None, ge=0.0, le=1.0)
    """Learning rate at the end of a decay, as a fraction of lr."""
    betas: tuple[float, float] | None = None
    """Betas of AdamW."""
    eps: PositiveFloat | None = None
    """Epsilon of AdamW."""
    weight_decay: NonNegativeFloat | None = None
    """AdamW's weight decay. It applies to matrices only."""
    max_grad_norm: PositiveFloat | None = None
    """Maximum L2 norm of the gradient; a larger gradient is scaled down to this norm."""
    optimizer: Literal["adamw", "adamw8bit", "sgd"] | None = None
    """adamw8bit needs torchao."""
    optimizer_device: Literal["model", "cpu"] | Auto = "auto"
    """cpu: keep master weights and optimizer states in host memory. auto: as the memory plan needs, or as for
    the policy if that is set."""
    grad_accum_dtype: Literal["float32", "model"] | None = None
    """Dtype in which gradients are accumulated over micro-batches."""
    activation_checkpointing: bool | Auto = "auto"
    """Keep only the input of each block and recompute the rest in the backward pass. auto: as the memory plan
    needs, or as for the policy if that is set."""
    minibatches: PositiveInt | None = None
    """Number of optimizer steps per pass over a rollout batch."""
    epochs_per_batch: PositiveInt | None = None
    """Number of passes over a rollout batch."""

    warmup_batches: NonNegativeInt = 0
    """Number of rollout batches at the start of the run in which only the value model is trained (verl's
    critic_warmup, 0 there)."""

    loss: Literal["squared", "huber"] = "squared"
    """Loss of the error, value - return. squared: half the square of the error. huber: the same, but linear
    beyond `huber_delta`."""
    huber_delta: PositiveFloat = 1.0
    """Error beyond which huber is linear, in units of reward."""
    clip: NonNegativeFloat = 0.5
    """Bound on how far a value may move from its value before the update. A value that has moved further is
    treated as if it had moved this far, if that gives the larger loss. verl and OpenRLHF use 0.5, TRL 0.2; 0
    means no bound."""
    aggregation: Literal["token_mean", "sequence_mean"] = "token_mean"
    """token_mean: average over all tokens of an optimizer step. sequence_mean: average per sequence, then
    over sequences."""

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
        own = {name: value for name in shared if (value := getattr(self, name)) not in (None, "auto")}
        return policy.model_copy(update=own | {"batch_invariant": False, "reuse_rollout_logprobs": None})

    @check
    def _check(self) -> ValueConfig:
        refuse(self, "value")
        return self
