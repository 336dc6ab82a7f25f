"""The models beside the policy: a value model, reward models, and all models of a run as one thing."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lockstep.algorithms.ppo import ValueLoss
from lockstep.common_errors import damaged
from lockstep.config.model import ModelConfig
from lockstep.config.ppo import POLICY, ValueConfig
from lockstep.config.run import GRPORun
from lockstep.errors import CheckpointError, ConfigError, ModelError
from lockstep.loop.metrics import combine
from lockstep.loop.policy import Trained
from lockstep.loop.resolve import Resolved
from lockstep.models.architectures import text_config
from lockstep.models.export import weights_fingerprint
from lockstep.models.load import LoadedModel, check_positions, load_model
from lockstep.observe.metrics import Spans
from lockstep.observe.run_dir import RunDir
from lockstep.ops.advantages import explained_variance
from lockstep.ops.losses import loss_weights
from lockstep.packing import Planner, split_samples
from lockstep.protocols import Saved, TokenLoss, TrainBackend, ValueAlgorithm
from lockstep.protocols.train import Estimates, FinishSave
from lockstep.ranks.context import RankContext
from lockstep.recording.reader import VALUE_LOSS
from lockstep.recording.recorder import Recorder
from lockstep.rollout.reward_models import RewardModels
from lockstep.schema.batch import RolloutSample, StateSample, ValueSample, trajectory_slices
from lockstep.schema.recording import VALUE, RecordingHeader
from lockstep.train import BACKENDS
from lockstep.train.state.files import read_json, write_json

# The value model's part in a step: it scores the rollouts, and is then trained towards their returns.
#
# It is a train backend of its own. Packs go in and numbers come out on the host, so it may live in this
# process or anywhere else, and nothing of it reaches the policy but values.


@dataclass(kw_only=True)
class Critic(Trained):
    """The value model of a run."""

    model: LoadedModel
    backend: TrainBackend
    plan: Planner
    config: ValueConfig
    minibatches: int
    """Optimizer steps per pass over a rollout batch."""
    epochs: int
    """Passes over a rollout batch."""
    spans: Spans
    recorder: Recorder | None = None
    """The recorder of its inputs, which then wraps `backend`."""

    @property
    def updates_per_step(self) -> int:
        """Optimizer steps per rollout batch."""
        return self.minibatches * self.epochs

    def recording_header(self, policy: RecordingHeader) -> RecordingHeader:
        """Return the header of a recording of its inputs, given that of the policy's."""
        dtype = str(self.model.dtype).removeprefix("torch.")
        model = self.config.model(ModelConfig.model_validate(dict(policy.model)))
        own = {"dtype": dtype} | (
            {"name": str(Path(model.name).resolve())} if Path(model.name).is_dir() else {}
        )
        checkpointing = self.config.activation_checkpointing
        axes = {**policy.axes, "dtype": dtype, "batch_invariant": False}
        if checkpointing != "auto":
            axes["activation_checkpointing"] = checkpointing
        return dataclasses.replace(
            policy,
            model=model.model_copy(update=own).model_dump(mode="json"),
            algorithm={"name": VALUE} | self.config.model_dump(mode="json", include=set(VALUE_LOSS)),
            temperature=1.0,
            axes=axes,
            contract=None,
        )

    def score(self, samples: Sequence[RolloutSample]) -> list[Tensor]:
        """Return [L] float32 per sample, on the host: the values of the states in which the policy wrote a
        token, and of that of the whole document; 0 elsewhere."""
        documents = [_states(sample) for sample in samples]
        by_sample: dict[int, Tensor] = {}
        with self._working(), self.spans("values"):
            for part in split_samples(documents, self.minibatches):
                batches = self.plan(part, [sample.loss_mask.float() for sample in part])
                for batch, values in zip(batches, self.backend.logprobs(batches), strict=True):
                    by_sample.update(zip(batch.sample_ids, batch.split(values.cpu()), strict=True))
        return [by_sample[sample.sample_id] for sample in samples]

    def begin_score(self, samples: Sequence[RolloutSample]) -> Callable[[], list[Tensor]]:
        """Return `score` as a call: the values are computed in this process, when they are needed."""
        return partial(self.score, samples)

    def begin_update(
        self, samples: Sequence[RolloutSample], estimates: Estimates
    ) -> Callable[[], dict[str, float]]:
        """Return `update` as a call that may still wait for it; here it is done at once."""
        if self.recorder is not None:
            self.recorder.see(estimates.groups)
        metrics = self.update(samples, values=estimates.values, returns=estimates.returns)
        return lambda: metrics

    def update(
        self,
        samples: Sequence[RolloutSample],
        *,
        values: Sequence[Tensor],
        returns: Sequence[Tensor],
    ) -> dict[str, float]:
        """Do every optimizer step of the rollout batch.

        Args:
            values: of `score`. returns: [L] float32 per sample, 0 where loss_mask is False.

        Returns:
            Metrics of the whole batch, named value/...: in units of reward, but for explained_variance, lr
            and shares of tokens.
        """
        loss: TokenLoss = ValueLoss(self.config)
        trained = [
            ValueSample(
                token_ids=sample.token_ids,
                loss_mask=sample.loss_mask,
                sample_id=sample.sample_id,
                trajectory=sample.trajectory,
                returns=target,
                old_values=torch.where(sample.loss_mask, value, 0.0),
            )
            for sample, value, target in zip(samples, values, returns, strict=True)
        ]
        updates: list[dict[str, float]] = []
        with self._working(), self.spans("value"):
            minibatches = [
                self.plan(
                    part,
                    loss_weights(
                        [sample.loss_mask for sample in part],
                        aggregation=self.config.aggregation,
                        sequences=trajectory_slices(part),
                    ),
                )
                for part in split_samples(trained, self.minibatches)
            ]
            for _ in range(self.epochs):
                for batches in minibatches:
                    stats = self.backend.forward_backward(batches, loss)
                    update = self.backend.optimizer_step()
                    updates.append({"loss": float(sum(stats.losses))} | update | loss.metrics(batches, stats))
        return {f"value/{name}": value for name, value in (_figures(trained) | combine(updates)).items()}


def build_value(
    resolved: Resolved[GRPORun],
    config: ValueConfig,
    policy: LoadedModel,
    *,
    plan: Planner,
    ranks: RankContext,
    spans: Spans,
) -> Critic:
    """Load the value model on the policy's device and build its backend, whose schedule spans all optimizer
    steps of the run.

    Args:
        config: run.critic.

    Raises:
        ConfigError: its token ids are not the policy's, or it has too few positions.
        ModelError: it cannot be loaded, or its head gives more than one number.
    """
    run = resolved.run
    train = config.train(run.train)
    make = BACKENDS.load(train.backend)
    with ranks.fail_together("loading the value model"):
        try:
            model = load_model(
                config.model(run.model),
                attention=resolved.attention,
                device=torch.device(resolved.device),
                materialize=not make.shards_weights,
                head="scalar",
            )
        except ModelError as error:
            text = f"the value model (value.name = {config.name!r}): {error}"
            raise error.with_message(text) from error
        if config.name != POLICY:
            _check_token_ids(model, policy)
        setting = f"data.max_prompt_tokens + {run.rollout.length_setting}"
        check_positions(model, run.longest_unit, setting=setting)
    model = dataclasses.replace(model, execution=resolved.execution)
    backend: TrainBackend = make(
        train,
        model=model,
        total_steps=run.steps * train.minibatches * train.epochs_per_batch,
    )
    return Critic(
        model=model,
        backend=backend,
        plan=plan,
        spans=spans,
        config=config,
        minibatches=train.minibatches,
        epochs=train.epochs_per_batch,
    )


def _check_token_ids(model: LoadedModel, policy: LoadedModel) -> None:
    """Raises ConfigError."""
    size, needed = text_config(model.module).vocab_size, text_config(policy.module).vocab_size
    problem = None
    if model.tokenizer is not None and policy.tokenizer is not None:
        own, theirs = model.tokenizer.get_vocab(), policy.tokenizer.get_vocab()
        if own != theirs:
            differing = sorted(t for t in own.keys() | theirs.keys() if own.get(t) != theirs.get(t))
            problem = f"{len(differing)} tokens have different ids, such as {differing[0]!r}"
    elif size < needed:
        problem = f"its vocabulary has {size} ids, but the policy's has {needed}"
    if problem is not None:
        raise ConfigError(
            f"other-model: value.name = {model.name!r} reads token ids differently from the policy "
            f"{policy.name!r}: {problem}. It receives the policy's ids; choose a model with the same "
            "tokenizer, or 'policy'"
        )


def _states(sample: RolloutSample) -> StateSample:
    mask = sample.loss_mask.clone()
    mask[-1] = True
    return StateSample(token_ids=sample.token_ids, loss_mask=mask, sample_id=sample.sample_id)


def _figures(samples: Sequence[ValueSample]) -> dict[str, float]:
    """Return the metrics of the values before the update."""
    values = torch.cat([sample.old_values[sample.loss_mask] for sample in samples])
    returns = torch.cat([sample.returns[sample.loss_mask] for sample in samples])
    if not len(values):
        return {}
    numbers = torch.stack([explained_variance(values, returns), values.mean(), returns.mean()])
    names = ("explained_variance", "mean", "returns_mean")
    return dict(zip(names, numbers.tolist(), strict=True)) | {
        # Without the correction, which makes NaN of a single return.
        "returns_std": float(returns.std(correction=0)),
    }


# The reward models' part in a run: loaded once in the trainer's process, asked by the sampler.
#
# Nothing trains them, so a checkpoint holds nothing of them: on resume the manifest says whether their
# weights are still those that the run was started with.


def build_reward_models(
    resolved: Resolved[GRPORun], policy: LoadedModel, *, ranks: RankContext
) -> RewardModels | None:
    """Load the reward models of the run on the policy's device, whole on every rank; None: it has none.

    Raises:
        ConfigError: the policy has no tokenizer, so its samples are no text.
        ModelError: a model cannot be loaded, has another number of labels than one or a head of another
            width, or scores documents by their neighbours or as NaN.
    """
    run = resolved.run
    if run.reward_model is None:
        return None
    with ranks.fail_together("loading the reward model"):
        if policy.tokenizer is None:
            raise ConfigError(
                f"no-tokenizer: reward_model.name = {run.reward_model.name!r} reads text, but the policy "
                f"{policy.name!r} has no tokenizer to decode its samples; add the tokenizer's files to "
                "the policy's folder"
            )
        models = RewardModels(run.reward_model, device=torch.device(resolved.device))
        if "reward_model" in run.offloaded:
            models.offload()
        return models


def describe_reward_models(
    models: RewardModels | None, directory: RunDir, *, policy_tokenizer: Any, ranks: RankContext
) -> list[str]:
    """Write to the manifest which weights score, and return the notes for the display.

    Raises:
        ModelError: a resumed run finds other weights than it was started with.
    """
    if models is None:
        return []
    with ranks.fail_together("comparing the reward model with what it was"):
        now = {
            name: weights_fingerprint(ModelConfig(name=name, revision=revision))
            for name, revision in models.config.sources
        }
        then = directory.read_manifest().get("reward_models")
        for name, before in (then if isinstance(then, dict) else {}).items():
            if now.get(name) != before:
                raise ModelError(
                    f"values-differ: reward model {name!r} has changed since {str(directory.path)!r} was "
                    "started, so the run cannot be resumed; restore the original model, or start a new run",
                    name=name,
                )
    ranks.require_same(now, what="the weights of the reward models")
    directory.update_manifest({"reward_models": now})
    return models.notes(policy_tokenizer)


# The models that a run trains, as one thing to save, load and export.
#
# The policy's files lie at the top of a checkpoint, those of every other role in a folder of its name, and
# what the algorithm remembers in algorithm.json. So the checkpoint of a run without other roles is one of
# its policy alone, and tools that read a policy read both.


ALGORITHM = "algorithm.json"


@dataclass(frozen=True, kw_only=True, slots=True)
class Roles:
    """See protocols.Saved. Collective where the roles' backends are."""

    policy: Saved
    others: Mapping[str, Saved]
    algorithm: ValueAlgorithm
    """Its numbers are ALGORITHM."""
    ranks: RankContext

    def save(self, directory: Path, *, background: bool = False) -> FinishSave:
        """Save all of them; what is random is in the state of each, and nothing is drawn between."""
        finishes = {"": self.policy.save(directory, background=background)}
        for role, backend in self.others.items():
            folder = directory / role
            with self.ranks.fail_together(f"beginning the checkpoint of role {role}"):
                folder.mkdir(exist_ok=True)  # of each node that has a folder of its own
            finishes[f"{role}/"] = backend.save(folder, background=background)
        numbers = self.ranks.on_rank_zero(
            lambda: write_json(directory / ALGORITHM, self.algorithm.state()).sha256,
            str,
            what="saving the algorithm's state",
        )

        def finish() -> dict[str, str]:
            own = {f"{prefix}{name}": sha for prefix, of in finishes.items() for name, sha in of().items()}
            return own | ({ALGORITHM: numbers} if self.ranks.is_first else {})

        return finish

    def load(self, directory: Path, *, verified: bool = False) -> None:
        """Load all of them."""
        with self.ranks.fail_together(
            "loading the algorithm's state"
        ):  # else one would go on without the others
            state = read_json(directory / ALGORITHM)
            if not isinstance(state, dict) or not all(_is_number(value) for value in state.values()):
                file = directory / ALGORITHM
                raise damaged(CheckpointError, file, "it is not a table of named numbers", path=file)
            self.algorithm.load_state(state)
        for role, backend in self.others.items():
            backend.load(directory / role, verified=verified)
        # Last: what is random in this process is in its state. Others may have been saved by another process.
        self.policy.load(directory, verified=verified)

    def export(self, directory: Path) -> None:
        """Export the policy to `directory`, and each other role beside it: export-value beside export."""
        self.policy.export(directory)
        for role, backend in self.others.items():
            backend.export(directory.with_name(f"{directory.name}-{role}"))


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
