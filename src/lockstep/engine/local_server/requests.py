"""Requests on their way to the server process, as JSON."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from lockstep.schema.rollout import GenerationRequest, SamplingParams, Span


def request_json(request: GenerationRequest, *, ids: Sequence[str], samples: Sequence[int]) -> dict[str, Any]:
    """A request and the ids of those of its samples that are asked for, for `Host.generate`."""
    sampling = {name: getattr(request.sampling, name) for name in SamplingParams.__dataclass_fields__}
    return {
        "ids": list(ids),
        "prompt_token_ids": list(request.prompt_token_ids),
        "sampling": sampling,
        "seeds": [request.seeds[sample] for sample in samples],
        "begun": [
            [[span.token_ids, span.logprobs, span.policy_version] for span in request.begun[sample]]
            for sample in (samples if request.begun else ())
        ],
    }


def request_of(group: Mapping[str, Any]) -> GenerationRequest:
    """The request of which `request_json` is the JSON."""
    sampling: dict[str, Any] = {
        k: tuple(v) if isinstance(v, list) else v for k, v in group["sampling"].items()
    }
    return GenerationRequest(
        prompt_token_ids=tuple(group["prompt_token_ids"]),
        sampling=SamplingParams(**sampling),
        seeds=tuple(group["seeds"]),
        begun=tuple(tuple(_written(*span) for span in spans) for spans in group["begun"]),
    )


def _written(token_ids: Sequence[int], logprobs: Sequence[float], policy_version: int) -> Span:
    return Span(
        author="policy",
        token_ids=tuple(token_ids),
        logprobs=tuple(logprobs),
        policy_version=policy_version,
    )
