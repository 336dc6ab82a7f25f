"""The roles of a world, inside of its process: loaded as the trainer would, and called by name."""

from __future__ import annotations

import contextlib
import dataclasses
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor

from lockstep.config.load import build, parse_toml
from lockstep.config.ppo import PPORun
from lockstep.config.run import GRPORun
from lockstep.errors import TrainError
from lockstep.loop.axes import Axes
from lockstep.loop.batch_invariance import make_invariant, prepare_kernels
from lockstep.loop.build import build_backend, make_planner, seed_generators
from lockstep.loop.determinism import deterministic
from lockstep.loop.reward_role import build_reward_models
from lockstep.loop.sleep import put_to_sleep
from lockstep.loop.value_role import ValueRole, build_value
from lockstep.models.load import LoadedModel, load_model
from lockstep.observe.spans import Spans
from lockstep.protocols import TrainBackend
from lockstep.protocols.reward import RewardInput
from lockstep.protocols.train import FinishSave, RestingBackend
from lockstep.ranks.context import RankContext, init_ranks
from lockstep.rollout.reward_models import RewardModels
from lockstep.schema.batch import PackedBatch, RolloutSample
from lockstep.train import BACKENDS

Role = TypeVar("Role")


class RoleHost:
    """Empty until `build`. Collective where the backends are: the process of every rank gets the same
    calls."""

    def __init__(self) -> None:
        self._ref: TrainBackend | None = None
        self._value: ValueRole | None = None
        self._rewards: RewardModels | None = None
        self._saving: dict[str, FinishSave] = {}
        self._open = contextlib.ExitStack()

    def call(self, name: str) -> Callable[..., Any]:
        """Return what a call of this name does. Raises KeyError."""
        calls: dict[str, Callable[..., Any]] = {
            "build": self.build,
            "logprobs": self.logprobs,
            "rewards": self.rewards,
            "score": self.score,
            "update": self.update,
            "save": self.save,
            "finish": self.finish,
            "load": self.load,
            "export": self.export,
        }
        return calls[name]

    def build(
        self,
        run: str,
        axes: Mapping[str, Any],
        roles: Sequence[str],
        threads: int,
        meeting: Mapping[str, str] | None,
    ) -> dict[str, Any]:
        """Load the roles.

        Args:
            run: the resolved run file. axes: as the trainer has resolved them.
            threads: of torch, which decide bits.
            meeting: the environment of a rank; None: this process is alone.

        Raises:
            ConfigError, ModelError: what the trainer's process would raise.
        """
        torch.set_num_threads(threads)
        made = build(parse_toml(run.encode(), origin="the trainer's run"), origin="the trainer's run")
        assert isinstance(made, GRPORun) and made.cluster is not None
        self._open.enter_context(deterministic(made.train))
        own, ranks = Axes(**axes), RankContext.alone(axes["device"])
        if meeting is not None:
            os.environ.update(meeting)
            kind = own.device.partition(":")[0]
            ranks = init_ranks(device=kind, seconds=made.cluster.world_seconds)
            own = dataclasses.replace(own, device=str(ranks.device))
        device = torch.device(own.device)
        if device.type == "cuda" and device.index is not None:
            torch.cuda.set_device(device)
        seed_generators(made, ranks)
        prepare_kernels(own)
        policy = _policy(made, own, weights="ref" in roles)
        if "ref" in roles:
            temperature = made.rollout.sampling.temperature
            self._ref = build_backend(made, own, policy, total_steps=0, temperature=temperature, ref=False)
            if "ref" in made.sleep:
                _rest(self._ref)
        if "reward_model" in roles:
            self._rewards = build_reward_models(made, own, policy, ranks=RankContext.alone(own.device))
        if "value" in roles:
            assert isinstance(made, PPORun)
            plan = make_planner(made, own, ranks)
            self._value = build_value(made, own, policy, plan=plan, ranks=ranks)
            put_to_sleep(made, "value", backend=self._value.backend)
        notes = [] if self._rewards is None else self._rewards.notes(policy.tokenizer)
        return {"pid": os.getpid(), "notes": notes}

    # --- scores ---------------------------------------------------------------------------------------------

    def logprobs(self, batches: Sequence[PackedBatch]) -> list[Tensor]:
        """The reference's, see protocols.Scorer; on the host."""
        return [each.cpu() for each in _there(self._ref, "ref").logprobs(batches)]

    def rewards(self, inputs: Sequence[RewardInput]) -> dict[str, Any]:
        """The reward models' scores by name of each input, and how many documents lost their beginning."""
        models = _there(self._rewards, "reward_model")
        scores = models.score(inputs)
        truncated, models.truncated = models.truncated, 0
        return {"scores": scores, "truncated": truncated}

    def score(self, samples: Sequence[RolloutSample]) -> list[Tensor]:
        """See ValueRole."""
        return _there(self._value, "value").score(samples)

    # --- the value model's training -------------------------------------------------------------------------

    def update(
        self, samples: Sequence[RolloutSample], values: Sequence[Tensor], returns: Sequence[Tensor]
    ) -> dict[str, float]:
        """See ValueRole."""
        value = _there(self._value, "value")
        return value.update(samples, values=values, returns=returns, spans=Spans())

    def save(self, directory: str, background: bool, in_memory: bool) -> None:
        """Begin to save the value model's backend; `finish` ends it."""
        backend = _there(self._value, "value").backend
        how = {"background": background} | ({"in_memory": True} if in_memory else {})
        self._saving[directory] = backend.save(Path(directory), **how)

    def finish(self, directory: str) -> dict[str, str]:
        """End a save; in any thread."""
        return self._saving.pop(directory)()

    def load(self, directory: str, verified: bool) -> None:
        """Load what `save` or a trainer has saved."""
        _there(self._value, "value").backend.load(Path(directory), verified=verified)

    def export(self, directory: str) -> None:
        """Write a Hugging Face folder."""
        _there(self._value, "value").backend.export(Path(directory))


def _there(role: Role | None, name: str) -> Role:
    if role is None:
        raise TrainError(f"wrong-state: role {name} is not in this world")
    return role


def _policy(run: GRPORun, axes: Axes, *, weights: bool) -> LoadedModel:
    """The policy as it was at the start, for the reference; without weights, what others compare with."""
    whole = weights and not BACKENDS.load(run.train.backend).shards_weights
    model = load_model(
        run.model, attention=axes.attention, device=torch.device(axes.device), materialize=whole
    )
    if weights and axes.batch_invariant:
        make_invariant(model, axes=axes, required=True)
    return dataclasses.replace(model, execution=axes.execution)


def _rest(backend: TrainBackend) -> None:
    resting: RestingBackend = backend  # type: ignore[assignment]
    resting.rest("weights")
