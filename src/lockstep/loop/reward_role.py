"""The reward models' part in a run: loaded once in the trainer's process, asked by the sampler.

Nothing trains them, so a checkpoint holds nothing of them: on resume the manifest says whether their weights
are still those that the run was started with.
"""

from __future__ import annotations

from typing import Any

import torch

from lockstep.config.model import ModelConfig
from lockstep.config.run import GRPORun
from lockstep.errors import ConfigError, ModelError
from lockstep.loop.axes import Axes
from lockstep.loop.session import Session
from lockstep.models.exported import weights_fingerprint
from lockstep.models.load import LoadedModel
from lockstep.ranks.context import RankContext
from lockstep.rollout.reward_models import RewardModels


def build_reward_models(
    run: GRPORun, axes: Axes, policy: LoadedModel, *, ranks: RankContext
) -> RewardModels | None:
    """Load the reward models of the run on the policy's device, whole on every rank; None: it has none.

    Raises:
        ConfigError: the policy has no tokenizer, so its samples are no text.
        ModelError: a model cannot be loaded, has another number of labels than one or a head of another
            width, or scores documents by their neighbours or as NaN.
    """
    if run.reward_model is None:
        return None
    with ranks.together("loading the reward model"):
        if policy.tokenizer is None:
            raise ConfigError(
                f"no-tokenizer: reward_model.name = {run.reward_model.name!r} reads text, and the policy "
                f"{policy.name!r} has no tokenizer to decode its samples; add the tokenizer's files to it"
            )
        models = RewardModels(run.reward_model, device=torch.device(axes.device))
        if "reward_model" in run.sleep:
            models.rest()
        return models


def describe_reward_models(
    models: RewardModels | None, session: Session, *, policy_tokenizer: Any, ranks: RankContext
) -> list[str]:
    """Write to the manifest which weights score, and return the notes for the display.

    Raises:
        ModelError: a resumed run finds other weights than it was started with.
    """
    if models is None:
        return []
    with ranks.together("comparing the reward model with what it was"):
        now = {
            name: weights_fingerprint(ModelConfig(name=name, revision=revision))
            for name, revision in models.config.sources
        }
        then = session.dir.read_manifest().get("reward_models")
        for name, before in (then if isinstance(then, dict) else {}).items():
            if now.get(name) != before:
                raise ModelError(
                    f"values-differ: reward model {name!r} has other weights than when "
                    f"{str(session.dir.path)!r} was started, so the run cannot continue as it was; restore "
                    "its files, or start a new run",
                    name=name,
                )
    ranks.require_same(now, what="the weights of the reward models")
    session.dir.update_manifest({"reward_models": now})
    return models.notes(policy_tokenizer)
