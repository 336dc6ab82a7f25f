"""Reward models of an RL run, which score the rollouts of a batch once all samples have finished.

    rollouts ──► the conversation in the model's own template ──► batches by length ──► one score per rollout

The text is read exactly as `lockstep score` and `lockstep train rm` read it, with the model's own tokenizer:
what it learned to judge is a conversation in that form, not the policy's token ids. All samples of a call are
scored together, so that a score does not depend on which of them ended first.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from lockstep.config.batch import RewardModelConfig, RewardRoleConfig
from lockstep.errors import ConfigError, DataError, RewardError
from lockstep.models.reward import RewardModel
from lockstep.protocols.reward import RewardInput
from lockstep.rollout.rewards import Scored, check_total

MODEL = "model"
"""Name of the reward model in `Rollout.rewards`; members of an ensemble are numbered: model#1."""
AGGREGATIONS: dict[str, Callable[[Sequence[float]], float]] = {
    "mean": lambda scores: math.fsum(scores) / len(scores),
    "min": min,
}


class RewardModels:
    """The reward model of a run, or an ensemble of them.

    Raises:
        ModelError: a model cannot be loaded or is not a reward model; see lockstep.models.reward.
    """

    def __init__(self, config: RewardRoleConfig, *, device: torch.device) -> None:
        self.config = config
        shared = config.model_dump(include=set(RewardModelConfig.model_fields) - {"name", "revision"})
        self.models = [
            RewardModel(
                RewardModelConfig(name=name, revision=revision, **shared),
                device=device,
            )
            for name, revision in config.sources
        ]
        self.truncated = 0
        """Documents truncated on the left since the last `pop_counts`."""

    def offload(self) -> None:
        """From now on keep the models in host memory, each except while it scores."""
        for model in self.models:
            model.offload()

    def notes(self, policy_tokenizer: Any) -> list[str]:
        """Return notes for the start of a run: which models read other tokens than the policy writes."""
        own = policy_tokenizer.get_vocab()
        return [
            f"reward model {model.config.name}: its tokenizer differs from the policy's, so completions are "
            "decoded and then encoded again for it"
            for model in self.models
            if model.tokenizer.get_vocab() != own
        ]

    def score(self, inputs: Sequence[RewardInput]) -> list[dict[str, float]]:
        """Return the unweighted scores of each input by name: MODEL, and for an ensemble also MODEL#1 and so
        on.

        Raises:
            RewardError: a score is not finite, or a document cannot be scored; names model and row.
        """
        if not inputs:
            return []
        columns = [self._scores(model, inputs) for model in self.models]
        aggregate = AGGREGATIONS[self.config.aggregation]
        rows = [list(row) for row in zip(*columns, strict=True)]
        if len(columns) == 1:
            return [{MODEL: row[0]} for row in rows]
        return [
            {MODEL: aggregate(row)} | {f"{MODEL}#{number}": score for number, score in enumerate(row, 1)}
            for row in rows
        ]

    def added(self, score: Scored, by_name: Mapping[str, float]) -> Scored:
        """Return the score of a rollout with one entry of `score` added. A score of 0.0 is valid.

        Raises:
            ConfigError: a reward function has the same name.
        """
        if taken := score.by_name.keys() & by_name.keys():
            raise ConfigError(
                f"duplicate: a reward function has the name {min(taken)!r}, which is reserved for the "
                "reward model's scores; rename the function"
            )
        weights = {name: self.config.weight if name == MODEL else 0.0 for name in by_name}
        total = score.total + self.config.weight * by_name[MODEL]
        check_total(total, by_name)
        return Scored(
            total=total,
            by_name={**score.by_name, **by_name},
            weights={**score.weights, **weights},
        )

    def pop_counts(self) -> dict[str, int]:
        """Return and reset the counts: model/truncated."""
        counts = {f"{MODEL}/truncated": self.truncated} if self.truncated else {}
        self.truncated = 0
        return counts

    def _scores(self, model: RewardModel, inputs: Sequence[RewardInput]) -> list[float]:
        name = f"reward model {model.config.name!r}"
        try:
            documents = [
                model.document(_prompt(sample), sample.completion, _where(sample), row=sample.row)
                for sample in inputs
            ]
        except DataError as error:
            raise error.with_message(f"{name}: {error}", kind=RewardError) from error
        self.truncated += sum(document.truncated for document in documents)
        scores = model.score(documents)
        for score, sample in zip(scores, inputs, strict=True):
            if not math.isfinite(score):
                raise RewardError(
                    f"not-finite: {name} scored {_where(sample)} with {score}, which cannot be trained on; "
                    "set reward_model.dtype = 'float32', or choose another model"
                )
        return scores


def _prompt(sample: RewardInput) -> Any:
    return sample.prompt if sample.conversation is None else sample.conversation


def _where(sample: RewardInput) -> str:
    return sample.where or "a row"
