"""What engines sample and are made for in tests, with what most of them do not look at filled in."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from lockstep.engine.spec import EngineSpec
from lockstep.protocols.engine import Finished, Handle
from lockstep.schema.rollout import Completion, GenerationRequest, Prompt, Rollout, RolloutGroup, Trajectory


def completion(prompt: Sequence[int], tokens: Sequence[int], logprobs: Any = -1.0, **more: Any) -> Completion:
    """A sample of `tokens`; logprobs: of each, or one of all. `more`: other fields."""
    each = [logprobs] * len(tokens) if isinstance(logprobs, float) else logprobs
    unseen = {"finish_reason": "stop", "stop_reason": None, "text": None, "seed": 0, "engine": "test"}
    fields: dict[str, Any] = {**unseen, "policy_version": 0, **more}
    return Completion(prompt_token_ids=tuple(prompt), token_ids=tuple(tokens), logprobs=tuple(each), **fields)


def rollout(sampled: Completion, reward: float = 0.0, rewards: Mapping[str, float] | None = None) -> Rollout:
    """The rollout of one turn."""
    return Rollout(trajectory=Trajectory.of(sampled), reward=reward, rewards=rewards or {})


def group(rollouts: Sequence[Rollout], index: int = 0, **prompt: Any) -> RolloutGroup:
    """The rollouts of a prompt, whose ids are those that the first one begins with."""
    ids = rollouts[0].trajectory.spans[0].token_ids
    fields: dict[str, Any] = {"text": ""} | prompt
    return RolloutGroup(prompt=Prompt(index=index, token_ids=ids, **fields), rollouts=tuple(rollouts))


def engine_spec(**changes: Any) -> EngineSpec:
    """What an engine must know of a model that nobody reads."""
    fields: dict[str, Any] = {
        "folder": Path("/models/m"),
        "weights": "pushed",
        "model_name": "m",
        "dtype": "float32",
        "vocab_size": 100,
        "max_model_len": 64,
        "eos_token_ids": (2,),
        "tokenizer": None,
        "device": "cpu",
        "shares_device": False,
        "temperatures": frozenset({1.0}),
        "work_dir": Path("/run/engine"),
    }
    return EngineSpec(**fields | changes)


class FakeEngine:
    """Streams the seed's last two digits as tokens; keeps the requests."""

    def __init__(self, finish_reason: Any = "length") -> None:
        self.requests: list[GenerationRequest] = []
        self.waiting: list[tuple[Handle, int, tuple[int, ...]]] = []
        self.finish_reason = finish_reason

    def submit(self, request: GenerationRequest) -> Handle:
        self.requests.append(request)
        handle = Handle(request=request, index=len(self.requests))
        self.waiting += [(handle, i, request.prompt_token_ids) for i in range(len(request.seeds))]
        return handle

    def continue_(self, finished: Finished, token_ids: Sequence[int] = (), *, sampling: Any) -> None:
        before = finished.completion
        context = (*before.prompt_token_ids, *before.token_ids, *token_ids)
        self.waiting.append((finished.handle, finished.sample, context))

    def finished(self) -> Iterator[Finished]:
        while self.waiting:
            yield self.next(*self.waiting.pop(0))

    def next(self, handle: Handle, sample: int, prompt: tuple[int, ...]) -> Finished:
        seed = handle.request.seeds[sample]
        text, tokens = str(seed % 100), [seed % 100]
        made = completion(prompt, tokens, finish_reason=self.finish_reason, text=text, seed=seed)
        return Finished(handle=handle, sample=sample, completion=made)

    def abort(self) -> None:
        pass
