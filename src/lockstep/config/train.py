from __future__ import annotations

import re
from typing import Annotated, Literal

from pydantic import AfterValidator, Field, NonNegativeFloat, PositiveFloat, field_validator

from lockstep.config.base import Config, Name, NonNegativeInt, OneOf, PositiveInt, Temperature, check
from lockstep.config.declarations import names
from lockstep.config.rules import refuse
from lockstep.errors import ConfigError

Backend = Annotated[str, AfterValidator(OneOf("train backend", ("auto", *names("backend"))))]
Auto = Literal["auto"]
Layout = Literal["auto", "packed", "padded", "shared"]
Execution = Literal["eager", "compile", "joint", "deepcompile"]
_DEVICE = re.compile(r"auto|cpu|cuda(:\d{1,3})?", re.ASCII)


class TrainConfig(Config):
    """How the policy is trained: backend, kernel, execution mode, optimizer and schedule."""

    backend: Backend = "auto"
    """Backend that trains the policy. local is one process on one device; the others span the ranks that
    --ranks, torchrun or deepspeed starts. auto: local with one rank, fsdp2 with more."""
    tp: PositiveInt = 1
    """Tensor parallel size: number of ranks that share each matrix. Only for backend fsdp2."""
    ring: PositiveInt = 1
    """Ring attention size: number of ranks that share the tokens of each pack. Only for backend fsdp2. The
    data parallel size is ranks / (tp * ring)."""
    ep: PositiveInt = 1
    """Expert parallel size: number of neighbouring ranks that share a model's experts. They are ranks of data
    parallelism, and send each other their tokens' rows. Only for backend fsdp2."""
    ring_comm: Literal["auto", "p2p", "all_gather"] = "auto"
    """How ring attention brings keys and values to a rank's queries. p2p: they go round the ring while
    attention runs. all_gather: each layer first gathers those of divided documents from all ranks, so every
    logprob has the bits it has on one rank; this takes more memory and hides no communication. auto:
    all_gather with batch invariance, else p2p."""
    tp_plan: Literal["auto", "hf", "lockstep"] = "auto"
    """How tensor parallelism splits matrices: by transformers' plan (hf) or by Lockstep's. auto: lockstep."""
    zero_stage: int = Field(2, ge=0, le=3)
    """DeepSpeed's ZeRO stage. Only for backend deepspeed."""
    reshard_after_forward: bool | Auto = "auto"
    """fsdp2: free a block's gathered weights after its forward pass and gather them again for the backward
    pass, which saves memory but adds traffic. auto: as the memory plan needs; true on a CPU."""
    parameter_device: Literal["model", "cpu"] = "model"
    """cpu: fsdp2 and deepspeed (ZeRO 3) keep each rank's share of the weights in host memory between uses."""
    attention: Name = "auto"
    """Attention kernel: sdpa, varlen, flex, hf:NAME, or your own `module:function`. auto: varlen if the run
    is batch-invariant or uses a 16-bit dtype on CUDA, else sdpa."""
    execution: Execution | Literal["auto"] = "auto"
    """compile: compile each decoder layer with torch.compile. joint: run forward and backward of the whole
    decoder as one graph (not with ZeRO 3 or ring attention). deepcompile: use DeepSpeed's DeepCompile. auto:
    compile on CUDA if a parity test covers it and it saves more time over the run's steps than compiling
    takes; else eager."""
    layout: Layout = "auto"
    """packed: documents end to end in one row. padded: one document per row, with padding that is computed,
    too. shared: like packed, but a prefix that several documents have in common, such as a group's prompt, is
    computed once. auto: shared if it is tested and the run has groups or pairs, else packed."""
    padding_side: Literal["left", "right"] = "right"
    """Side on which the padded layout adds padding."""
    device: Name = "auto"
    """auto: cuda if available, else cpu."""

    token_budget: PositiveInt | Literal["auto"] = "auto"
    """Token slots of one micro-batch; in the shared layout, only slots that are computed count. The budget
    determines the activation memory. auto: 4096 on a CPU; on CUDA a value up to 32768 from the memory plan;
    never less than the length of the longest document."""
    static_capacity: bool | None = None
    """Pad every pack to one of a few static capacities, with one graph per capacity. If unset, packs are
    padded in compiled modes only."""
    max_recompiles: NonNegativeInt | None = None
    """Compiled modes: number of recompiles allowed after the run's first step; with more, the run stops. If
    unset, there is no limit."""
    batch_invariant: bool | None = None
    """Make every row of a forward pass, and so every logprob, bitwise independent of the rest of the batch.
    With engine.name = 'native' the rollout's logprobs then equal the trainer's. If unset, batch invariance is
    on with the native engine on CUDA in bfloat16 with varlen attention, and off otherwise."""
    reuse_rollout_logprobs: bool | None = None
    """Use the rollout's logprobs as old_logprobs instead of recomputing them for every sample. As a check, a
    few micro-batches of each step are recomputed and must be bitwise equal. If unset, the logprobs are reused
    if trainer and engine have the same kernel contract."""
    deterministic: bool = Field(False, json_schema_extra={"alias": "--deterministic"})
    """Make the run reproducible: repeated on the same machine, it produces bitwise identical weights. A hash
    of the weights is logged each step. Slower on CUDA. Also available as `--deterministic`."""
    plan_for_free: bool = Field(False, json_schema_extra={"alias": "--plan-for-free"})
    """On a GPU: plan memory with what is free when the run starts, not with the GPU's total. If false, a run
    is refused where other processes hold memory that its plan needs. Also available as `--plan-for-free`."""
    minibatches: PositiveInt = 1
    """Number of optimizer steps per pass over a rollout batch."""
    accumulate: Literal["pack", "sample"] = "pack"
    """How much of a micro-batch goes through forward, loss and backward at a time. pack: all of it. sample:
    one sample (with DPO, one pair) at a time, so that only one sample's activations are in memory. The
    gradients are the same."""
    score_all_every: PositiveInt = 10
    """Compute all groups in every k-th step, starting with step 0. The other steps skip groups whose
    advantages are all zero, if the loss has no KL or entropy term. The gradients stay the same, but metrics
    such as entropy then cover only a part of the tokens, logged as scored_share. When the run is recorded,
    and in compiled modes when max_recompiles is set, all groups are computed in every step."""
    cuda_graph: bool = False
    """With execution joint on CUDA: run the decoder's forward pass and its backward pass as one CUDA graph
    each, with static buffers. The head and the loss run between the two graphs."""
    epochs_per_batch: PositiveInt = 1
    """PPO epochs: number of passes over a rollout batch."""
    activation_checkpointing: bool | Auto = "auto"
    """Keep only the input of each block and recompute the rest in the backward pass, which saves memory but
    takes time. auto: as the memory plan needs; false on a CPU."""

    lr: PositiveFloat = 1e-6
    """Learning rate after warm-up."""
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    """Learning rate schedule after warm-up; linear and cosine end at min_lr_ratio * lr."""
    warmup_steps: NonNegativeInt = 0
    """Optimizer steps during which the learning rate rises linearly to lr."""
    min_lr_ratio: float = Field(0.0, ge=0.0, le=1.0)
    """Learning rate at the end of linear and cosine decay, as a fraction of lr."""
    betas: tuple[float, float] = (0.9, 0.999)
    """Betas of AdamW."""
    eps: PositiveFloat = 1e-8
    """Epsilon of AdamW."""
    weight_decay: NonNegativeFloat = 0.0
    """AdamW's weight decay. Only matrices are decayed, not norms, biases or embeddings."""
    max_grad_norm: PositiveFloat = 1.0
    """Maximum L2 norm of the gradient; a larger gradient is scaled down to this norm."""
    router_aux_loss: NonNegativeFloat = 0.0
    """Models with experts: coefficient of the load-balancing loss of Switch Transformer (arXiv 2101.03961) as
    transformers has it, over all layers and all tokens of a micro-batch, also those that are not trained on.
    Micro-batches count by their tokens. transformers' default is 0.001."""
    router_z_loss: NonNegativeFloat = 0.0
    """Models with experts: coefficient of ST-MoE's router z-loss (arXiv 2202.08906, there 0.001), the mean of
    the squared logsumexp of the router's logits."""
    route_changes_every: NonNegativeInt = 0
    """Models with experts: in every k-th step run the first micro-batch's forward again after the update, for
    the metric experts/routes_changed. 0: never."""
    optimizer: Literal["adamw", "adamw8bit", "sgd"] = "adamw"
    """adamw8bit keeps its states in 8 bits and needs torchao."""
    optimizer_device: Literal["model", "cpu"] | Auto = "auto"
    """cpu: keep master weights and optimizer states in host memory. auto: as the memory plan needs; model on
    a CPU."""
    grad_accum_dtype: Literal["float32", "model"] = "float32"
    """Dtype in which gradients are accumulated over micro-batches. deepspeed always uses the model's
    dtype."""
    reduce_gradients: Literal["auto", "per_step", "per_micro_batch"] = "auto"
    """When fsdp2 adds up gradients over ranks. per_step: once, in the last micro-batch's backward pass; until
    then each rank keeps the whole sum of its own micro-batches. per_micro_batch: in every backward pass; in
    between, each rank keeps only its share of the sum, which saves memory but adds traffic. auto:
    per_step."""
    num_threads: PositiveInt | None = Field(None, le=4096)
    """Number of CPU threads that torch uses. If unset, OMP_NUM_THREADS applies, or else torch's own
    default."""

    @property
    def gathers_keys(self) -> bool:
        """Whether ring attention gathers keys, once batch_invariant is resolved."""
        if self.ring_comm == "auto":
            return self.ring > 1 and bool(self.batch_invariant)
        return self.ring_comm == "all_gather"

    @field_validator("device")
    @classmethod
    def _check_device(cls, device: str) -> str:
        if not _DEVICE.fullmatch(device):
            raise ConfigError(
                f"wrong-format: device = {device!r} must be 'auto', 'cpu', 'cuda' or 'cuda:N', such as "
                "'cuda:0'"
            )
        return device

    @field_validator("betas")
    @classmethod
    def _check_betas(cls, betas: tuple[float, float]) -> tuple[float, float]:
        if not all(0.0 <= beta < 1.0 for beta in betas):
            raise ConfigError(
                f"out-of-range: betas = {list(betas)} must be at least 0 and below 1, such as [0.9, 0.999]"
            )
        return betas


DEFAULT_TOKEN_BUDGET = 4096
"""train.token_budget = "auto" on a CPU."""


WITHOUT_PLAN = {
    "execution": "eager",
    "activation_checkpointing": False,
    "reshard_after_forward": True,
    "reduce_gradients": "per_step",
    "optimizer_device": "model",
}
"""Values of "auto" where nothing depends on the memory of a GPU and on the run's steps."""


def outside_of_runs(train: TrainConfig) -> TrainConfig:
    """Return `train` as a backend takes it that no run builds: without an "auto" that a run resolves."""
    return train.model_copy(update={n: v for n, v in WITHOUT_PLAN.items() if getattr(train, n) == "auto"})


def token_slots(budget: int | Literal["auto"]) -> int:
    """Return train.token_budget as a run has resolved it; outside of runs "auto" is that of a CPU."""
    return DEFAULT_TOKEN_BUDGET if budget == "auto" else budget


class EvalConfig(Config):
    """Evaluation on held-out prompts: before training, every k steps, and after training."""

    every: NonNegativeInt = 0
    """Steps between evaluations; 0: evaluate only before and after training."""
    before: bool = True
    """Evaluate before the first step."""
    after: bool = True
    """Evaluate after the last step."""
    num_prompts: PositiveInt = 256
    """Number of held-out prompts. If a file has fewer than twice as many rows, a fifth of its rows are held
    out."""
    samples_per_prompt: PositiveInt = 1
    """Completions per prompt. Accuracies cover all of them."""
    temperature: Temperature = 0.0
    """Sampling temperature of evaluations; 0 is greedy."""
    max_tokens: PositiveInt | None = None
    """Maximum length of a completion in an evaluation, in tokens. If unset, rollout.sampling.max_tokens
    applies."""
    before_max_tokens_factor: PositiveInt = 1
    """Factor by which max_tokens is multiplied in the evaluation before training. With 2, a policy does not
    seem to improve merely because it learns to stop in time. Above 1, the lines that compare evaluations
    mention the different limits."""
    kinds: dict[Name, str] = Field(default_factory=dict)
    """Kinds of problems whose lenient accuracy is also reported separately, as eval/lenient_accuracy/NAME.
    Each NAME has a regular expression that is searched for in the rendered prompt."""

    @property
    def enabled(self) -> bool:
        """Whether a run has evaluations."""
        return self.before or self.after or self.every > 0

    @check
    def _check(self) -> EvalConfig:
        for name, expression in self.kinds.items():
            try:
                re.compile(expression)
            except re.error as error:
                raise ConfigError(
                    f"wrong-format: kinds.{name} = {expression!r} is not a regular expression: {error}; "
                    "correct it"
                ) from error
        refuse(self, "eval")
        return self


class CheckpointConfig(Config):
    """Checkpoints under checkpoints/, from which a run resumes exactly."""

    every: NonNegativeInt = 0
    """Steps between checkpoints; 0: save only at the end and on Ctrl-C."""
    keep_last: PositiveInt = 2
    """Number of newest checkpoints to keep."""
    keep_best: NonNegativeInt = 0
    """Also keep this many of the best checkpoints by `metric`. A checkpoint has a metric only if the run is
    evaluated at the same step."""
    metric: Name = "eval/lenient_accuracy"
    """Metric for keep_best. grpo and ppo: eval/strict_accuracy, eval/lenient_accuracy, eval/mean_reward or
    eval/mean_completion_tokens. sft: eval/loss or eval/perplexity. dpo and rm: eval/loss, eval/accuracy or
    eval/reward_margin."""
    mode: Literal["max", "min"] = "max"
    """Whether a larger or a smaller `metric` is better."""
    save_at_end: bool = True
    """Write a checkpoint after the last step."""
    background: bool = True
    """Save checkpoints while training continues: a step is delayed only while the state is copied, and the
    checkpoint counts once it is complete. The last checkpoint is always saved in the foreground. If false,
    all checkpoints are saved in the foreground, without host memory for a copy."""
    export_at_end: bool = True
    """Write the trained model as a Hugging Face folder under export/."""
    push_to_hub: Name | None = Field(None, json_schema_extra={"alias": "--push-to-hub"})
    """Repository (OWNER/NAME) of the Hugging Face hub to which export/ is uploaded at the end. It is created
    if it does not exist. This needs a token: `hf auth login`, or HF_TOKEN."""
    hub_private: bool = True
    """Whether a repository that push_to_hub creates is private."""

    @check
    def _check_hub(self) -> CheckpointConfig:
        if self.push_to_hub is not None and not self.export_at_end:
            raise ConfigError(
                f"contradiction: push_to_hub = {self.push_to_hub!r} with export_at_end = false, so there is "
                "nothing to upload; leave export_at_end out",
                setting="push_to_hub",
            )
        return self


class LogConfig(Config):
    """What to log in addition to metrics.jsonl, and where."""

    tensorboard: bool | Auto = "auto"
    """Write event files under logs/tensorboard. auto: if the package tensorboard is installed."""
    wandb: bool = False
    """Log to Weights & Biases, which needs the package and a login."""
    wandb_project: Name = "lockstep"
    """Name of the wandb project."""
    display: Literal["auto", "live", "plain", "off"] = "auto"
    """auto: live in a terminal, otherwise plain, which is one line per step."""
    samples_per_step: NonNegativeInt = 1
    """Number of completions shown per step in the plain log."""
    token_details: bool = False
    """Add the trainer's logprob, the entropy and the advantage of each policy token to the rows of rollouts/.
    They take about 31 bytes per token: 16 MB in a step with 512 rollouts of 1000 tokens. Metrics and weights
    do not depend on it."""


def _check_best(checkpoint: CheckpointConfig, *, every: int, known: tuple[str, ...]) -> None:
    """Refuse keep_best without a metric to go by: it would silently keep nothing."""
    if checkpoint.keep_best == 0:
        return
    names = [f"eval/{name}" for name in known]
    if checkpoint.metric not in names:
        raise ConfigError(
            f"unsupported-combination: checkpoint.keep_best = {checkpoint.keep_best} uses checkpoint.metric "
            f"= {checkpoint.metric!r}, which this run does not measure; set one of {', '.join(names)}",
            setting="checkpoint.metric",
        )
    if checkpoint.every and (every == 0 or checkpoint.every % every):
        raise ConfigError(
            f"contradiction: checkpoint.keep_best = {checkpoint.keep_best} needs an evaluation at every "
            f"checkpoint, but evaluations take place every {every} steps and checkpoints every "
            f"{checkpoint.every}; set both to the same number, or set keep_best = 0"
        )
