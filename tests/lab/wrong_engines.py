"""Engines that are hf but for one thing that is wrong; `lockstep parity engines` must name it."""

from __future__ import annotations

import copy
import dataclasses
import os
import time
from collections.abc import Sequence
from typing import Any

from lockstep.config.engine import EngineConfig
from lockstep.config.train import TrainConfig
from lockstep.engine.hf.engine import HFEngine
from lockstep.models.load import LoadedModel
from lockstep.packing import PackLimits, plan_micro_batches
from lockstep.protocols.engine import OnCompletion
from lockstep.schema.batch import rollout_samples
from lockstep.schema.rollout import Completion, GenerationRequest, Trajectory
from lockstep.schema.weights import WeightUpdate
from lockstep.train.local import LocalBackend


class Right(HFEngine):
    """hf itself, with two places where something can be done wrong in `generate`."""

    def __init__(self, config: EngineConfig, *, model: LoadedModel) -> None:
        super().__init__(config, model=model)
        self.model = model

    def asked(self, request: GenerationRequest) -> GenerationRequest:
        return request

    def answered(self, completion: Completion, request: GenerationRequest) -> Completion:
        return completion

    def generate(
        self, requests: Sequence[GenerationRequest], *, on_completion: OnCompletion | None = None
    ) -> list[list[Completion]]:
        groups = super().generate([self.asked(request) for request in requests])
        return [
            [self.answered(completion, request) for completion in group]
            for group, request in zip(groups, requests, strict=True)
        ]


class RawLogprobs(Right):
    """Logprobs of the raw logits, whatever the temperature."""

    def answered(self, completion: Completion, request: GenerationRequest) -> Completion:
        if request.sampling.temperature in (0.0, 1.0):
            return completion
        return dataclasses.replace(completion, logprobs=tuple(self._raw(completion)))

    def _raw(self, completion: Completion) -> list[float]:
        (sample,) = rollout_samples([Trajectory.of(completion)])
        batches = plan_micro_batches([sample], [sample.loss_mask.float()], PackLimits(token_budget=1024))
        backend = LocalBackend(TrainConfig(device="cpu"), model=self.model, total_steps=0)
        (scored,) = backend.logprobs(batches)
        return [float(value) for value in scored[batches[0].loss_mask]]


class DropsSeeds(Right):
    """Every call draws anew; completions still say the seed that was asked for."""

    calls = 0

    def generate(self, requests: Sequence[GenerationRequest], **given: Any) -> list[list[Completion]]:
        self.calls += 1
        return super().generate(requests, **given)

    def asked(self, request: GenerationRequest) -> GenerationRequest:
        return dataclasses.replace(request, seeds=tuple(s ^ (self.calls << 8) for s in request.seeds))

    def answered(self, completion: Completion, request: GenerationRequest) -> Completion:
        return dataclasses.replace(completion, seed=completion.seed ^ (self.calls << 8))


class OneSeed(Right):
    """One seed for every request, as SGLang has where none is given."""

    def asked(self, request: GenerationRequest) -> GenerationRequest:
        return dataclasses.replace(request, seeds=(42,) * len(request.seeds))

    def generate(self, requests: Sequence[GenerationRequest], **given: Any) -> list[list[Completion]]:
        return [
            [dataclasses.replace(c, seed=seed) for c, seed in zip(group, request.seeds, strict=True)]
            for group, request in zip(super().generate(requests), requests, strict=True)
        ]


class AddsToken(Right):
    """A token of its own in front of every prompt, as text that is tokenised again gets."""

    def asked(self, request: GenerationRequest) -> GenerationRequest:
        return dataclasses.replace(request, prompt_token_ids=(1, *request.prompt_token_ids))


class HidesToken(AddsToken):
    """The same, and the completion says the ids that were asked."""

    def answered(self, completion: Completion, request: GenerationRequest) -> Completion:
        return dataclasses.replace(completion, prompt_token_ids=request.prompt_token_ids)


class _OldWeights(Right):
    """Samples some prompts with a copy of the weights of its first update."""

    old: HFEngine | None = None
    version = 0

    def update_weights(self, update: WeightUpdate) -> None:
        if self.old is None:
            module = copy.deepcopy(self.model.module)
            self.old = HFEngine(EngineConfig(), model=dataclasses.replace(self.model, module=module))
        self.version = update.policy_version
        super().update_weights(update)

    def is_stale(self, request: GenerationRequest) -> bool:
        raise NotImplementedError

    def generate(self, requests: Sequence[GenerationRequest], **given: Any) -> list[list[Completion]]:
        def answer(request: GenerationRequest) -> list[Completion]:
            if self.is_stale(request) and self.old is not None:
                return self.old.generate([request])[0]
            return super(_OldWeights, self).generate([request])[0]

        return [
            [dataclasses.replace(c, policy_version=self.version) for c in answer(request)]
            for request in requests
        ]


class MissesUpdate(_OldWeights):
    """It says that it took the update."""

    def is_stale(self, request: GenerationRequest) -> bool:
        return True


class StaleCache(_OldWeights):
    """Prompts longer than a cache block are answered from before the update."""

    def is_stale(self, request: GenerationRequest) -> bool:
        return len(request.prompt_token_ids) > 128


class CutsStop(Right):
    """The stop id is not among the completion's ids."""

    def answered(self, completion: Completion, request: GenerationRequest) -> Completion:
        if completion.finish_reason != "stop" or len(completion.token_ids) < 2:
            return completion
        return dataclasses.replace(
            completion, token_ids=completion.token_ids[:-1], logprobs=completion.logprobs[:-1]
        )


class OldVersion(Right):
    """Completions always say version 1."""

    def answered(self, completion: Completion, request: GenerationRequest) -> Completion:
        return dataclasses.replace(completion, policy_version=1)


class Samples(Right):
    """Greedy requests are sampled at temperature 1; logprobs are right."""

    def asked(self, request: GenerationRequest) -> GenerationRequest:
        if request.sampling.temperature > 0:
            return request
        sampling = dataclasses.replace(request.sampling, temperature=1.0)
        return dataclasses.replace(request, sampling=sampling)


class Crashes(Right):
    """Dies in the third call."""

    calls = 0

    def generate(self, requests: Sequence[GenerationRequest], **given: Any) -> list[list[Completion]]:
        self.calls += 1
        if self.calls == 3:
            os.kill(os.getpid(), 11)
        return super().generate(requests, **given)


class Raises(Right):
    """Its second call is an error."""

    calls = 0

    def generate(self, requests: Sequence[GenerationRequest], **given: Any) -> list[list[Completion]]:
        self.calls += 1
        if self.calls == 2:
            raise ValueError("no kernel for <b>this</b>")
        return super().generate(requests, **given)


class Hangs(Right):
    """Never answers."""

    def generate(self, requests: Sequence[GenerationRequest], **given: Any) -> list[list[Completion]]:
        time.sleep(600)
        return []


class Writes(Right):
    """Its texts are markup."""

    def answered(self, completion: Completion, request: GenerationRequest) -> Completion:
        return dataclasses.replace(completion, text="<script>alert(1)</script>\x1b[31m | `x`")
