"""An inference engine without a KV cache: prompt by prompt, each token a forward over everything before it.

lockstep train grpo --recipe tiny --engine.name plain_engine:PlainEngine
"""

import threading
import time
from collections.abc import Sequence

import torch

from lockstep.config.engine import EngineConfig
from lockstep.engine.requests import check_requests
from lockstep.engine.sampling import Sampler, SampleState
from lockstep.engine.stop import completion_text
from lockstep.engine.weights import copy_weights
from lockstep.errors import EngineError
from lockstep.models.causal_lm import causal_lm, text_config
from lockstep.models.load import LoadedModel, share_parameters
from lockstep.protocols.engine import EngineStats, OnCompletion
from lockstep.schema.rollout import Completion, FinishReason, GenerationRequest
from lockstep.schema.weights import WeightUpdate

COUNTS = ("requests", "prompt_tokens", "cached_tokens", "completion_tokens", "kv_cache_bytes")


class PlainEngine:
    """See lockstep.protocols.SharesWeights; over the trainer's Parameters, without stop strings."""

    external, contract = False, None

    def __init__(self, config: EngineConfig, *, model: LoadedModel) -> None:
        self.model, self.vocab = model, text_config(model.module).vocab_size
        self.module = causal_lm(share_parameters(model.module, attention="hf:sdpa"))
        self.sampler, self.aborted, self.state = Sampler(), threading.Event(), "awake"
        self.version, self.seconds, self.counts = 0, 0.0, dict.fromkeys(COUNTS, 0)

    def generate(
        self, requests: Sequence[GenerationRequest], *, on_completion: OnCompletion | None = None
    ) -> list[list[Completion]]:
        if self.state != "awake":
            raise EngineError(f"engine plain is {self.state}")
        most = self.model.max_positions
        check_requests(requests, vocab_size=self.vocab, max_positions=most, tokenizer=self.model.tokenizer)
        if any(request.sampling.stop for request in requests):
            raise EngineError("engine plain has no stop strings: leave sampling.stop out")
        self.aborted.clear()
        started = time.perf_counter()
        results = [self._group(i, r, on_completion or (lambda *_: None)) for i, r in enumerate(requests)]
        self.seconds += time.perf_counter() - started
        self.counts["requests"] += len(requests)
        return results

    def _group(self, index: int, request: GenerationRequest, report: OnCompletion) -> list[Completion]:
        """Samples that run have one length, so nothing is padded."""
        p, ids = request.sampling, request.prompt_token_ids
        ends = (() if p.ignore_eos else self.model.eos_token_ids) + p.stop_token_ids
        states = [SampleState(params=p, seed=s, prompt_token_ids=ids, end_ids=ends) for s in request.seeds]
        samples: list[tuple[SampleState, list[float]]] = [(state, []) for state in states]
        done: dict[int, Completion] = {}
        while running := [i for i in range(len(samples)) if i not in done]:
            if not (aborted := self.aborted.is_set()):
                self._add_tokens([samples[i] for i in running])
            for i in running:
                reason: FinishReason | None = "abort" if aborted else self._finish_reason(samples[i][0])
                if reason is not None:
                    done[i] = self._completion(*samples[i], reason)
                    report(index, i, done[i])
        return [done[i] for i in range(len(samples))]

    @torch.no_grad()
    def _add_tokens(self, samples: list[tuple[SampleState, list[float]]]) -> None:
        states = [state for state, _ in samples]
        ids = torch.tensor([[*s.prompt_token_ids, *s.token_ids] for s in states], device=self.module.device)
        out = self.module(input_ids=ids, use_cache=False, logits_to_keep=1)
        tokens, chances = self.sampler.sample(out.logits[:, -1], states)
        for (state, logprobs), token, chance in zip(samples, tokens.tolist(), chances.tolist(), strict=True):
            state.token_ids.append(token)
            logprobs.append(chance)

    def _finish_reason(self, state: SampleState) -> FinishReason | None:
        full = len(state.token_ids) == state.params.max_tokens or state.position == self.model.max_positions
        return "stop" if state.token_ids[-1] in state.end_ids else "length" if full else None

    def _completion(self, state: SampleState, logprobs: list[float], reason: FinishReason) -> Completion:
        self.counts["prompt_tokens"] += len(state.prompt_token_ids)
        self.counts["completion_tokens"] += len(state.token_ids)
        return Completion(
            prompt_token_ids=state.prompt_token_ids,
            token_ids=tuple(state.token_ids),
            logprobs=tuple(logprobs),
            finish_reason=reason,
            stop_reason=state.token_ids[-1] if reason == "stop" else None,
            text=completion_text(self.model.tokenizer, state.token_ids, stop=None, keep=True),
            seed=state.seed,
            engine="plain",
            policy_version=self.version,
        )

    def update_weights(self, update: WeightUpdate) -> None:
        """Of the trainer's own module there is nothing to copy, and nothing is cached."""
        if update.shared_module is not self.model.module:
            copy_weights(self.module, update.tensors, engine="plain")
        self.version = update.policy_version

    def stats(self) -> EngineStats:
        return EngineStats(policy_version=self.version, generate_seconds=self.seconds, **self.counts)

    def sleep(self) -> None:
        self.state = "asleep"

    def wake(self) -> None:
        self.state = "awake"

    def abort(self) -> None:
        self.aborted.set()

    def close(self) -> None:
        self.state = "closed"
