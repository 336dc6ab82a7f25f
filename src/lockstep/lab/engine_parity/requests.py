"""The requests of each pass: pure functions of the job, so that every engine gets the same."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from lockstep.lab.engine_parity.job import EnginesJob
from lockstep.rollout.sampler import sample_seed
from lockstep.schema.rollout import Completion, GenerationRequest, SamplingParams

SOME = 2
"""Prompts from the beginning and as many from the end (which has the long ones) of the smaller passes."""
_GREEDY, _SAMPLED, _OTHER = -3, -4, -5
"""Used in place of the step in seeds."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PromptRequest:
    """The generation request of one prompt."""

    prompt: int
    """Index into the job's prompts."""
    request: GenerationRequest
    first_sample: int = 0
    stop_id: int | None = None


Batch = list[PromptRequest]
"""One call of `generate`."""


def greedy(job: EnginesJob) -> Batch:
    """Request one completion of every prompt at temperature 0."""
    return [_prompt_request(job, prompt, step=_GREEDY, temperature=0.0) for prompt in range(len(job.prompts))]


def stop(job: EnginesJob, completions: Iterable[tuple[PromptRequest, Completion]]) -> Batch:
    """Repeat some greedy requests, each with the id in the middle of its completion as a stop id."""
    batch = []
    selected = set(some(job))
    for source, completion in completions:
        if source.prompt in selected and len(completion.token_ids) > 1:
            stop_id = completion.token_ids[len(completion.token_ids) // 2]
            batch.append(_prompt_request(job, source.prompt, step=_GREEDY, temperature=0.0, stop_id=stop_id))
    return batch


def sampled(job: EnginesJob) -> Batch:
    """Request n samples of every prompt."""
    return [_samples(job, prompt, step=_SAMPLED) for prompt in range(len(job.prompts))]


def alone(job: EnginesJob) -> list[Batch]:
    """Request the last sample of some prompts, each in a call of its own."""
    last = job.num_samples - 1
    return [
        [_prompt_request(job, prompt, step=_SAMPLED, temperature=job.temperature, sample=last)]
        for prompt in some(job)
    ]


def other(job: EnginesJob) -> Batch:
    """Request some prompts with seeds that no other pass has."""
    return [_samples(job, prompt, step=_OTHER) for prompt in some(job)]


def some(job: EnginesJob) -> list[int]:
    """Prompts of the smaller passes."""
    count = len(job.prompts)
    return sorted({*range(min(SOME, count)), *range(max(0, count - SOME), count)})


def _samples(job: EnginesJob, prompt: int, *, step: int) -> PromptRequest:
    seeds = tuple(sample_seed(job.seed, step, prompt, i) for i in range(job.num_samples))
    return PromptRequest(
        prompt=prompt,
        request=GenerationRequest(
            prompt_token_ids=job.prompts[prompt],
            sampling=_params(job, temperature=job.temperature),
            seeds=seeds,
        ),
    )


def _prompt_request(
    job: EnginesJob,
    prompt: int,
    *,
    step: int,
    temperature: float,
    sample: int = 0,
    stop_id: int | None = None,
) -> PromptRequest:
    return PromptRequest(
        prompt=prompt,
        request=GenerationRequest(
            prompt_token_ids=job.prompts[prompt],
            sampling=_params(
                job, temperature=temperature, stop_token_ids=() if stop_id is None else (stop_id,)
            ),
            seeds=(sample_seed(job.seed, step, prompt, sample),),
        ),
        first_sample=sample,
        stop_id=stop_id,
    )


def _params(job: EnginesJob, *, temperature: float, stop_token_ids: Sequence[int] = ()) -> SamplingParams:
    return SamplingParams(
        max_tokens=job.max_tokens,
        temperature=temperature,
        ignore_eos=job.ignore_eos,
        stop_token_ids=tuple(stop_token_ids),
    )
