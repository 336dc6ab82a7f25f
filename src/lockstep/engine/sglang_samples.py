"""Samples on their way out of SGLang's /generate: what is asked for, and how its chunks become samples.

One request asks for many samples, each with its own id, prompt, sampling parameters and seed, and is answered
by one stream of events, in which each sample's chunks come as they are made:

    {"output_ids": [5, 9], "meta_info": {"id": "ab-0-0.", "completion_tokens": 2, "finish_reason": null,
     "output_token_logprobs": [[-0.7, 5, null], [-1.2, 9, null]], ...}, "index": 0}

With `incremental_streaming_output`, which a started server has, a chunk holds what is new; else all that
there is, so such a server is asked to send the first token and the end only.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from pydantic_core import from_json

from lockstep.engine.driver import Job, Sample
from lockstep.engine.http import BadReply
from lockstep.engine.stop import StopStrings
from lockstep.errors import EngineError

CHUNK_TOKENS = 128
"""Tokens of a sample between two chunks: few enough for the client to work while the GPU does."""
STOP_CHUNK_TOKENS = 8
"""With stop strings, which are found here: more than this many tokens are rarely computed in vain."""
NO_CHUNKS = 1 << 30
NOT_FINITE = "NaN happened"
"""What SGLang calls the stop reason of a sample whose next token is outside the vocabulary."""
_FIXED = {
    "return_logprob": True,
    "logprob_start_len": -1,  # of completions only
    "top_logprobs_num": 0,
    "return_text_in_logprobs": False,
    "stream": True,
}


class NotAsked(EngineError):
    """The server ended a sample that it was not asked to end."""


def rid(job: Job) -> str:
    """The id of a sample at the server.

    /abort_request ends every sample whose id *begins* with the one it is given: with a sign at its end no id
    is the beginning of another.
    """
    return f"{job.id}."


def request_body(jobs: Sequence[Job], sampling: Sequence[Mapping[str, Any]], *, incremental: bool) -> bytes:
    """The body of one POST /generate for all of `jobs`; a prompt is made JSON once for its group."""
    prompts: dict[int, str] = {}
    for job in jobs:
        if id(job.request) not in prompts:
            prompts[id(job.request)] = _json(job.request.prompt_token_ids)
    asked = [
        {**params, "stream_interval": _interval(job, incremental=incremental)}
        for job, params in zip(jobs, sampling, strict=True)
    ]
    rest = _json({"rid": [rid(job) for job in jobs], "sampling_params": asked, **_FIXED})
    ids = ",".join(prompts[id(job.request)] for job in jobs)
    return f'{{"input_ids":[{ids}],{rest[1:]}'.encode()


def _interval(job: Job, *, incremental: bool) -> int:
    if job.request.sampling.stop:
        return STOP_CHUNK_TOKENS
    return CHUNK_TOKENS if incremental else NO_CHUNKS


def _json(value: Any) -> str:
    return json.dumps(value, separators=(",", ":"))


def read_event(text: bytes, what: str) -> dict[str, Any]:
    """One event of the stream. Raises BadReply, and EngineError for an error that the server reports."""
    try:
        event = from_json(text, allow_inf_nan=False)
    except ValueError as error:
        raise BadReply(f"{what} sent an event that is not JSON ({error}): {text[:200]!r}") from error
    if not isinstance(event, dict):
        raise BadReply(f"{what} sent an event that is not an object: {text[:200]!r}")
    if "error" in event:
        said = event["error"]
        raise EngineError(f"{what} refused: {said.get('message', said) if isinstance(said, dict) else said}")
    return event


@dataclass(slots=True, kw_only=True)
class Partial:
    """One sample as far as it has come."""

    job: Job
    incremental: bool
    stops: StopStrings | None = None
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    cached_tokens: int = 0

    def add(self, event: Mapping[str, Any], *, aborting: bool, weight_version: str | None) -> Sample | None:
        """The sample, once this chunk ends it.

        Args:
            aborting: whether this sample may end by an abort: it was asked for.
            weight_version: what the server must say that it sampled with; None: anything.

        Raises:
            BadReply: fields are missing, or contradict each other.
            EngineError: the server failed on this sample, or sampled with other weights.
        """
        try:
            meta = event["meta_info"]
            reason = meta["finish_reason"]
            kind = reason["type"] if reason is not None else None
            if kind == "abort":
                self._take(event, meta, exact=False)
                return self._aborted(reason, aborting=aborting)
            self._check_meta(meta, weight_version)
            start = len(self.token_ids)
            self._take(event, meta, exact=True)
            self.cached_tokens = int(meta["cached_tokens"])
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise BadReply(
                f"engine sglang: an event of sample {self.job.sample} of request {self.job.index} cannot be "
                f"read: {error!r} in {str(event)[:400]}"
            ) from error
        found = self._stop_string(start)
        if found is not None:
            return self.sample("stop", found)
        if kind is None:
            return None
        if kind == "length":
            return self.sample("length", None)
        if reason["matched"] == NOT_FINITE:
            raise EngineError(
                f"engine sglang: request {self.job.index}: the logits of token {len(self.token_ids) - 1} of "
                f"sample {self.job.sample} are not finite; the weights have diverged or the compute dtype "
                "overflows (model.dtype)"
            )
        return self.sample("stop", reason["matched"])

    def sample(self, finish_reason: Any, stop_reason: Any) -> Sample:
        """What has come, as a finished sample."""
        return Sample(
            token_ids=self.token_ids,
            logprobs=self.logprobs,
            finish_reason=finish_reason,
            stop_reason=stop_reason,
            cached_tokens=self.cached_tokens,
        )

    def _take(self, event: Mapping[str, Any], meta: Mapping[str, Any], *, exact: bool) -> None:
        """Appends what is new. A chunk of an aborted sample may repeat its last token, and every logprob."""
        have = len(self.token_ids)
        new = meta["completion_tokens"] - have
        ids, entries = event["output_ids"], meta.get("output_token_logprobs") or []
        if not self.incremental and exact:
            ids, entries = ids[have:], entries[have:]
        if exact and not new == len(ids) == len(entries):
            raise ValueError(f"{new} new tokens, {len(ids)} ids and {len(entries)} logprobs")
        if not exact:
            new = min(new, len(ids), len(entries)) if self.incremental else 0
            ids, entries = ids[: max(new, 0)], entries[: max(new, 0)]
        self.token_ids += ids
        # A logprob that is not finite is null in JSON; the check of the sample refuses it.
        self.logprobs += [entry[0] if entry[0] is not None else float("nan") for entry in entries]

    def _check_meta(self, meta: Mapping[str, Any], weight_version: str | None) -> None:
        prompt = len(self.job.request.prompt_token_ids)
        if meta["prompt_tokens"] != prompt:
            raise ValueError(f"the server read a prompt of {meta['prompt_tokens']} tokens, not of {prompt}")
        if weight_version is not None and meta["weight_version"] != weight_version:
            raise EngineError(
                f"engine sglang sampled with weights {meta['weight_version']!r} and must have "
                f"{weight_version!r}: somebody else updated it, or it was started again; let only one run "
                "use a server"
            )

    def _stop_string(self, start: int) -> str | None:
        """Cuts the sample at the token with which a stop string is complete."""
        if self.stops is None:
            return None
        params = self.job.request.sampling
        for count in range(start + 1, len(self.token_ids) + 1):
            found = self.stops.find(self.token_ids[:count])
            if found is not None and count >= params.min_tokens:
                del self.token_ids[count:], self.logprobs[count:]
                return found
        return None

    def _aborted(self, reason: Mapping[str, Any], *, aborting: bool) -> Sample:
        said = reason.get("message")
        if reason.get("status_code") is not None:
            raise EngineError(
                f"engine sglang cannot sample request {self.job.index}: {said} ({reason['status_code']})"
            )
        if not aborting:
            raise NotAsked(
                f"engine sglang aborted sample {self.job.sample} of request {self.job.index} ({said}), and "
                "was not asked to: somebody else uses the server; let only one run use it"
            )
        return self.sample("abort", None)
