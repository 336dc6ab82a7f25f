"""The requests of each pass: pure functions of the job, so that every engine is asked the same."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from lockstep.lab.engine_parity.job import EnginesJob
from lockstep.rollout.seeds import sample_seed
from lockstep.schema.rollout import Completion, GenerationRequest, SamplingParams

SOME = 2
"""Prompts from the beginning and as many from the end (which has the long ones) of the smaller passes."""
_GREEDY, _SAMPLED, _OTHER = -3, -4, -5
"""Stand in for the step in seeds."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Asked:
    """One request."""

    prompt: int
    """Index into the job's prompts."""
    request: GenerationRequest
    first_sample: int = 0
    stop_id: int | None = None


Batch = list[Asked]
"""One call of `generate`."""


def greedy(job: EnginesJob) -> Batch:
    """Every prompt, one completion at temperature 0."""
    return [_asked(job, prompt, step=_GREEDY, temperature=0.0) for prompt in range(len(job.prompts))]


def stop(job: EnginesJob, completions: Iterable[tuple[Asked, Completion]]) -> Batch:
    """Some greedy requests once more, each with the id in the middle of its completion as a stop id."""
    made = []
    wanted = set(some(job))
    for asked, completion in completions:
        if asked.prompt in wanted and len(completion.token_ids) > 1:
            stop_id = completion.token_ids[len(completion.token_ids) // 2]
            made.append(_asked(job, asked.prompt, step=_GREEDY, temperature=0.0, stop_id=stop_id))
    return made


def sampled(job: EnginesJob) -> Batch:
    """Every prompt, n samples."""
    return [_samples(job, prompt, step=_SAMPLED) for prompt in range(len(job.prompts))]


def alone(job: EnginesJob) -> list[Batch]:
    """The last sample of some prompts, each in a call of its own."""
    last = job.num_samples - 1
    return [
        [_asked(job, prompt, step=_SAMPLED, temperature=job.temperature, sample=last)] for prompt in some(job)
    ]


def other(job: EnginesJob) -> Batch:
    """Some prompts with seeds that no other pass has."""
    return [_samples(job, prompt, step=_OTHER) for prompt in some(job)]


def some(job: EnginesJob) -> list[int]:
    """Prompts of the smaller passes."""
    count = len(job.prompts)
    return sorted({*range(min(SOME, count)), *range(max(0, count - SOME), count)})


def _samples(job: EnginesJob, prompt: int, *, step: int) -> Asked:
    seeds = tuple(sample_seed(job.seed, step, prompt, i) for i in range(job.num_samples))
    return Asked(
        prompt=prompt,
        request=GenerationRequest(
            prompt_token_ids=job.prompts[prompt],
            sampling=_params(job, temperature=job.temperature),
            seeds=seeds,
        ),
    )


def _asked(
    job: EnginesJob,
    prompt: int,
    *,
    step: int,
    temperature: float,
    sample: int = 0,
    stop_id: int | None = None,
) -> Asked:
    return Asked(
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
