"""Samples from SGLang's /generate: the requests, and how chunks become samples.

One request asks for many samples, each with its own id, prompt, sampling parameters and seed, and is answered
by one stream of events, in which each sample's chunks come as they are made:

    {"output_ids": [5, 9], "meta_info": {"id": "ab-0-0.", "completion_tokens": 2, "finish_reason": null,
     "output_token_logprobs": [[-0.7, 5, null], [-1.2, 9, null]], ...}, "index": 0}

With `incremental_streaming_output`, which a started server has, a chunk holds what is new; else all that
there is, so such a server sends the first token and the end only.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from pydantic_core import from_json

from lockstep.engine.remote.driver import Job, Sample
from lockstep.engine.remote.http import BadReply
from lockstep.engine.remote.reply_fields import logprobs, mapping, token_ids, whole
from lockstep.engine.requests import StopStrings
from lockstep.errors import EngineError
from lockstep.observe.text import printable

CHUNK_TOKENS = 128
"""Tokens of a sample between two chunks: few enough for the client to work while the GPU does."""
STOP_CHUNK_TOKENS = 8
"""The same with stop strings, which are found here: more than this many tokens are rarely computed in
vain."""
# Longer than any sample, which then comes in one chunk.
NO_CHUNKS = 1 << 30
NOT_FINITE = "NaN happened"
"""SGLang's name of the stop reason of a sample whose next token is outside the vocabulary."""
_FIXED = {
    "return_logprob": True,
    "logprob_start_len": -1,  # of completions only
    "top_logprobs_num": 0,
    "return_text_in_logprobs": False,
    "stream": True,
}


class UnrequestedAbort(EngineError):
    """The server aborted a sample without our request."""


def rid(job: Job) -> str:
    """The id of a sample at the server.

    /abort_request ends every sample whose id *begins* with the given one: with a sign at its end no id is the
    beginning of another.
    """
    return f"{job.id}."


def request_body(jobs: Sequence[Job], sampling: Sequence[Mapping[str, Any]], *, incremental: bool) -> bytes:
    """The body of one POST /generate for all of `jobs`; a prompt is made JSON once for its group."""
    prompts: dict[int, str] = {}
    for job in jobs:
        if id(job.request) not in prompts:
            prompts[id(job.request)] = _json(job.request.prompt_token_ids)
    sampling_params = [
        {**params, "stream_interval": _interval(job, incremental=incremental)}
        for job, params in zip(jobs, sampling, strict=True)
    ]
    rest = _json({"rid": [rid(job) for job in jobs], "sampling_params": sampling_params, **_FIXED})
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
        raise BadReply(
            f"not-json: {what} sent an event that is not JSON ({error}): {text[:200]!r}"
        ) from error
    if not isinstance(event, dict):
        raise BadReply(f"wrong-type: {what} sent an event that is not an object: {text[:200]!r}")
    if "error" in event:
        message = event["error"]
        if isinstance(message, dict):
            message = message.get("message", message)
        raise EngineError(f"refused: {what} refused: {printable(str(message)[:400])}")
    return event


@dataclass(slots=True, kw_only=True)
class Partial:
    """The part of a sample that has arrived."""

    job: Job
    incremental: bool
    stops: StopStrings | None = None
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    cached_tokens: int = 0

    def add(self, event: Mapping[str, Any], *, aborting: bool, weight_version: str | None) -> Sample | None:
        """Add a chunk; returns the sample if the chunk ends it.

        Args:
            aborting: whether we requested an abort, so that this sample may end by one.
            weight_version: the version that the server must report; None: any.

        Raises:
            BadReply: fields are missing, or contradict each other.
            EngineError: the server failed on this sample, or sampled with other weights.
        """
        try:
            meta = mapping(event["meta_info"], "meta_info")
            reason = meta["finish_reason"]
            kind = _kind(reason)
            if kind == "abort":
                self._take(event, meta, exact=False)
                return self._aborted(reason, aborting=aborting)
            self._check_meta(meta, weight_version)
            start = len(self.token_ids)
            self._take(event, meta, exact=True)
            self.cached_tokens = whole(meta["cached_tokens"], "cached_tokens")
        except (KeyError, ValueError) as error:
            raise BadReply(
                f"bad-reply: engine sglang: an event of sample {self.job.sample} of request "
                f"{self.job.index} cannot be read: {error!r} in {ascii(event)[:400]}",
                reason=error,
            ) from error
        stop_string = self._stop_string(start)
        if stop_string is not None:
            return self.sample("stop", stop_string)
        if kind is None:
            return None
        if kind == "length":
            return self.sample("length", None)
        matched = reason.get("matched")
        if matched == NOT_FINITE:
            raise EngineError(
                f"not-finite: engine sglang: request {self.job.index}: the logits of token "
                f"{len(self.token_ids) - 1} of sample {self.job.sample} are not finite; the weights have "
                "diverged or the compute dtype overflows (model.dtype)",
                request=self.job.index,
                token=len(self.token_ids) - 1,
            )
        return self.sample("stop", matched)

    def sample(self, finish_reason: Any, stop_reason: Any) -> Sample:
        """What has arrived, as a finished sample."""
        return Sample(
            token_ids=self.token_ids,
            logprobs=self.logprobs,
            finish_reason=finish_reason,
            stop_reason=stop_reason,
            cached_tokens=self.cached_tokens,
        )

    def _take(self, event: Mapping[str, Any], meta: Mapping[str, Any], *, exact: bool) -> None:
        """Append what is new. A chunk of an aborted sample may repeat its last token, and every logprob."""
        have = len(self.token_ids)
        new = whole(meta["completion_tokens"], "completion_tokens") - have
        ids = token_ids(event["output_ids"], "output_ids")
        entries = meta.get("output_token_logprobs") or []
        if not isinstance(entries, list):
            raise ValueError("output_token_logprobs is not a list")
        if not self.incremental and exact:
            ids, entries = ids[have:], entries[have:]
        if exact and not new == len(ids) == len(entries):
            raise ValueError(f"{new} new tokens, {len(ids)} ids and {len(entries)} logprobs")
        if not exact:
            new = min(new, len(ids), len(entries)) if self.incremental else 0
            ids, entries = ids[: max(new, 0)], entries[: max(new, 0)]
        if have + len(ids) > self.job.request.sampling.max_tokens:
            raise ValueError(f"more tokens than max_tokens = {self.job.request.sampling.max_tokens}")
        if any(not isinstance(entry, list) or len(entry) < 2 for entry in entries):
            raise ValueError("an entry of output_token_logprobs is not [logprob, id, text]")
        if any(type(entry[1]) is not int or entry[1] != one for entry, one in zip(entries, ids, strict=True)):
            raise ValueError("logprobs of other tokens than the sampled ones")
        # A logprob that is not finite is null in JSON; the check of the sample refuses it.
        self.logprobs += logprobs([entry[0] for entry in entries], "output_token_logprobs")
        self.token_ids += ids

    def _check_meta(self, meta: Mapping[str, Any], weight_version: str | None) -> None:
        prompt = len(self.job.request.prompt_token_ids)
        if whole(meta["prompt_tokens"], "prompt_tokens") != prompt:
            raise ValueError(f"the server read a prompt of {meta['prompt_tokens']} tokens, not of {prompt}")
        if weight_version is not None and meta["weight_version"] != weight_version:
            raise EngineError(
                f"values-differ: engine sglang sampled with weights {meta['weight_version']!a} and must "
                f"have {weight_version!r}: somebody else updated it, or it was started again; let only one "
                "run use a server",
                name=weight_version,
            )

    def _stop_string(self, start: int) -> str | None:
        """Find a stop string, and cut the sample at the token that completes it."""
        if self.stops is None:
            return None
        params = self.job.request.sampling
        for count in range(start + 1, len(self.token_ids) + 1):
            stop_string = self.stops.find(self.token_ids[:count])
            if stop_string is not None and count >= params.min_tokens:
                del self.token_ids[count:], self.logprobs[count:]
                return stop_string
        return None

    def _aborted(self, reason: Mapping[str, Any], *, aborting: bool) -> Sample:
        message = printable(str(reason.get("message"))[:400])
        if reason.get("status_code") is not None:
            code = ascii(reason["status_code"])[:40]
            raise EngineError(
                f"refused: engine sglang cannot sample request {self.job.index}: {message} ({code})"
            )
        if not aborting:
            raise UnrequestedAbort(
                f"unrequested-abort: engine sglang aborted sample {self.job.sample} of request "
                f"{self.job.index} ({message}), and was not asked to: somebody else uses the server; let "
                "only one run use it"
            )
        return self.sample("abort", None)


def _kind(reason: Any) -> str | None:
    """Return why a sample ended: "stop", "length" or "abort"; None while it goes on."""
    if reason is None:
        return None
    kind = mapping(reason, "finish_reason").get("type")
    if kind not in ("stop", "length", "abort"):
        raise ValueError(f"finish_reason is of an unknown type, {ascii(kind)[:80]}")
    matched = reason.get("matched")
    if matched is not None and type(matched) not in (int, str):
        raise ValueError(f"finish_reason has matched {ascii(matched)[:80]}, neither a token id nor a string")
    return str(kind)
