"""An inference engine without a KV cache: prompt by prompt, each token a forward over everything before it.

lockstep train grpo --recipe tiny --engine.name plain_engine:PlainEngine
"""

import torch

from lockstep.config.engine import EngineConfig
from lockstep.engine.embedded import copy_weights
from lockstep.engine.sampling import Sampler, SampleState
from lockstep.engine.spec import Decoding, RequestCheck, completion_text
from lockstep.engine.streaming import Ended, Streaming, Turn
from lockstep.errors import EngineError
from lockstep.models.architectures import causal_lm, text_config
from lockstep.models.load import LoadedModel, share_parameters
from lockstep.protocols.engine import EngineStats
from lockstep.schema.rollout import Completion, FinishReason
from lockstep.schema.weights import WeightUpdate

COUNTS = ("prompt_tokens", "cached_tokens", "completion_tokens", "kv_cache_bytes")


class PlainEngine(Streaming):
    """See lockstep.protocols.SharesWeights; over the trainer's Parameters, without stop strings."""

    external, contract = False, None

    def __init__(self, config: EngineConfig, *, model: LoadedModel) -> None:
        super().__init__("plain")
        self.model = model
        self.check_request = RequestCheck(
            vocab_size=text_config(model.module).vocab_size,
            max_positions=model.max_positions,
            tokenizer=model.tokenizer,
            eos_token_ids=model.eos_token_ids,
        )
        self.module = causal_lm(share_parameters(model.module, attention="hf:sdpa"))
        self.sampler, self.state = Sampler(), "awake"
        self.version, self.counts = 0, dict.fromkeys(COUNTS, 0)

    def _require_ready(self) -> None:
        if self.state != "awake":
            raise EngineError(f"wrong-state: engine plain is {self.state}")

    def _check(self, turn: Turn) -> None:
        self.check_request(turn.request, index=turn.index)
        if turn.request.sampling.stop:
            raise EngineError(
                "unsupported-sampling: engine plain has no stop strings: leave sampling.stop out"
            )

    def _advance(self) -> list[Ended]:
        """The turn that came first. Its samples that run have one length, so nothing is padded."""
        turn = self._inbox.popleft()
        p, ids = turn.request.sampling, turn.request.prompt_token_ids
        ends = (() if p.ignore_eos else self.model.eos_token_ids) + p.stop_token_ids
        seeds = turn.request.seeds
        states = [SampleState(params=p, seed=s, prompt_token_ids=ids, end_ids=ends) for s in seeds]
        samples: list[tuple[SampleState, list[float]]] = [(state, []) for state in states]
        done: dict[int, Completion] = {}
        while running := [i for i in range(len(samples)) if i not in done]:
            if not (aborted := self._abort.is_set()):
                self._add_tokens([samples[i] for i in running])
            for i in running:
                reason: FinishReason | None = "abort" if aborted else self._finish_reason(samples[i][0])
                if reason is not None:
                    done[i] = self._completion(*samples[i], reason)
        return [(turn, i, completion) for i, completion in done.items()]

    def _end(self) -> None:
        """Nothing is kept between turns."""

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
        tokenizer, ends = self.model.tokenizer, self.model.eos_token_ids
        decoding = None if tokenizer is None else Decoding.of(tokenizer, state.params, eos_token_ids=ends)
        return Completion(
            prompt_token_ids=state.prompt_token_ids,
            token_ids=tuple(state.token_ids),
            logprobs=tuple(logprobs),
            finish_reason=reason,
            stop_reason=state.token_ids[-1] if reason == "stop" else None,
            text=completion_text(decoding, state.token_ids, stop=None, keep=True),
            seed=state.seed,
            engine="plain",
            policy_version=self.version,
        )

    def update_weights(self, update: WeightUpdate) -> None:
        """Of the trainer's own module there is nothing to copy, and nothing is cached."""
        self._require_idle("update_weights")
        if update.shared_module is not self.model.module:
            copy_weights(self.module, update, engine="plain")
        self.version = update.policy_version

    def stats(self) -> EngineStats:
        done = {"requests": self._requests, "generate_seconds": self._seconds, "queued": self._open}
        return EngineStats(policy_version=self.version, **done, **self.counts)

    def sleep(self) -> None:
        self._require_idle("sleep")
        self.state = "asleep"

    def wake(self) -> None:
        self.state = "awake"

    def close(self) -> None:
        self._close_stream()
        self.state = "closed"
