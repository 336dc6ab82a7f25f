"""The contents of a recording: the policy's inputs, its outputs, and the settings of the run.

A recording is a directory:

    recording.json                     RecordingHeader
    rank-0000/
      shard-000000.safetensors         many inputs, concatenated; what is known of each is in its metadata
      open-000064.safetensors          inputs of steps that no shard holds yet; the last one may be unfinished
    weights/step-000000/               weights that inputs need (see InputMeta.checkpoint)

safetensors and JSON only, nothing is ever unpickled. lockstep.recording reads and writes it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

from torch import Tensor

from lockstep.schema.batch import PackedBatch

FORMAT = "lockstep-recording"
VERSION = 1
VALUE = "value"
"""The name of the algorithm in the header of a value model's inputs, which is its role, too."""
REWARD = "bradley_terry"
"""The name of the algorithm in the header of a reward model's inputs."""

Outcome = Literal["finished", "pending", "failed"]


class InputKey(NamedTuple):
    """The key of an input; inputs of a recording are in this order."""

    update: int
    """Optimizer step since the run's start, from 0."""
    micro_batch: int
    rank: int


@dataclass(frozen=True, kw_only=True, slots=True)
class InputMeta:
    """The origin of an input: its step, rank and weights."""

    step: int
    """The loop's step (rollout batch, or SFT step), from 0."""
    update: int
    """Optimizer step since the run's start, from 0: step x updates per step + its number."""
    micro_batch: int
    """Position in the rank's list of micro-batches of this optimizer step."""
    num_micro_batches: int
    """Length of that list: micro-batches of one optimizer step on this rank."""
    rank: int = 0
    world_size: int = 1
    mesh: Mapping[str, int] = field(default_factory=dict)
    """Mesh axis -> coordinate of this rank, such as {"dp": 1}."""
    time: float = 0.0
    """Unix time, seconds."""
    weights: str | None = None
    """Fingerprint of the weights that saw this input (recording/files.py); None: unknown."""
    checkpoint: str | None = None
    """A folder with these weights: "weights/step-000000" in the recording, or "../checkpoints/step-000010" of
    the run that the recording is in; None: not stored."""
    outcome: Outcome = "finished"
    """pending: the run ended before this input's step did. failed: the step raised; `error` says what."""
    error: str | None = None
    documents: tuple[Mapping[str, Any], ...] = ()
    """Further facts about each real document, in the order of sample_ids: reward, rewards by name,
    prompt_index, finish_reason, ...; may be empty. spans: [version of the policy, tokens] of each of its
    spans, in order."""

    @property
    def key(self) -> InputKey:
        return InputKey(self.update, self.micro_batch, self.rank)

    @property
    def unusable(self) -> str | None:
        """Why a foreign module's input is not kept as documents (ids outside the vocabulary, no token, ...);
        None: it is. Its arguments are then among the extras as they were, `input_ids` too, and the batch is a
        placeholder of one token."""
        call = self.documents[0].get("call") if self.documents else None
        reason = call.get("unusable") if isinstance(call, Mapping) else None
        return reason if isinstance(reason, str) else None


@dataclass(frozen=True, kw_only=True, slots=True)
class RecordedOutputs:
    """The outputs of the policy for an input; of a value model, its values in the place of logprobs."""

    loss: float | None
    """This micro-batch's share of the loss of the step; None: the loss was not seen (foreign modules)."""
    logprobs: Tensor | None
    """[T] float32, nats, 0 where loss_mask is False."""
    entropy: Tensor | None = None
    """[T] float32, nats, 0 where loss_mask is False."""
    grad_norm: float | None = None
    """Of the whole optimizer step, before clipping."""
    fingerprints: Mapping[str, str] = field(default_factory=dict)
    """Output name -> fingerprint of its bits: tensors too large to keep, such as logits."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RecordedInput:
    """One micro-batch of the policy, with its outputs."""

    meta: InputMeta
    batch: PackedBatch
    """On the host. A PolicyBatch for RL, a ValueBatch of a value model."""
    outputs: RecordedOutputs | None
    """None: the run ended before there were any."""
    rng: Tensor | None = None
    """torch's CPU generator state [5056] uint8 before the step's first micro-batch; only there, and only if
    the forward draws random numbers (dropout)."""
    extras: Mapping[str, Tensor] = field(default_factory=dict)
    """Other tensors that a foreign module was called with, by argument name, as they were."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RecordingHeader:
    """The facts that all inputs of a recording share. JSON values only."""

    created: str
    """ISO 8601, UTC."""
    framework: str
    """lockstep, or the source of the inputs: "trl", "torch", "import:pickle"."""
    versions: Mapping[str, str]
    """Library -> version."""
    model: Mapping[str, Any]
    """lockstep.config.model.ModelConfig as a dict, with dtype resolved."""
    vocab_size: int
    algorithm: Mapping[str, Any]
    """GRPOConfig or SFTConfig as a dict, resolved; its "name" says which algorithm
    (SFT: {"name": "sft", ...}; a value model: {"name": "value"} and the options of its loss; a reward model:
    RewardModelLossConfig's). {"name":
    "surrogate"}: loss_weights hold -dL/dlogprob of a foreign loss, so that SFT's sum -loss_weights * logprobs
    has its gradients."""
    temperature: float
    max_tokens: int | None
    """Longest completion, which the constant aggregation divides by; None for SFT and foreign modules."""
    axes: Mapping[str, Any]
    """backend, engine, attention, execution, layout, padding_side, device, dtype, static_capacity,
    activation_checkpointing, batch_invariant: what the policy ran with."""
    capacity: Mapping[str, int]
    """token_budget, max_seqlen, max_documents: what static capacities are made for."""
    world_size: int = 1
    mesh: Mapping[str, int] = field(default_factory=dict)
    """Mesh axis -> size."""
    device_name: str = ""
    contract: Mapping[str, Any] | None = None
    """The kernel contract of a batch-invariant policy (lockstep.schema.contract.KernelContract.as_json);
    None: it was not batch-invariant."""
    router_losses: Mapping[str, float] = field(default_factory=dict)
    """The settings train.router_aux_loss and train.router_z_loss by name, those above 0, of a policy with
    experts: their losses are part of RecordedOutputs.loss."""
    notes: Mapping[str, Any] = field(default_factory=dict)
    """Free: how the recording was made."""

    @property
    def role(self) -> str:
        """Whose inputs these are: of the policy, or of the value model, which has a scalar head."""
        return VALUE if self.algorithm.get("name") == VALUE else "policy"

    @property
    def has_scores(self) -> bool:
        """Whether the model gives one number per slot, as value and reward models do, and no logprobs."""
        return self.algorithm.get("name") in (VALUE, REWARD)
