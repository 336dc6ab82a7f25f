"""Requests to an inference engine, its completions, and rollouts with their rewards."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import Any, Literal

FinishReason = Literal["stop", "length", "abort"]
"""stop: an end-of-sequence token, a stop id or a stop string. length: max_tokens or the context limit."""

Author = Literal["prompt", "policy", "tool"]
"""The writer of a span. tool: anything other than the policy, after the prompt."""

EndReason = Literal["done", "length", "turns", "tokens", "abort"]
"""What ended a trajectory. done: its environment, or the policy's end of sequence in a single turn. length:
its last turn was cut off. turns, tokens: a limit of the trajectory left no room for another turn."""

LogprobKind = Literal["temperature_scaled"]
"""The only kind that can be compared with a trainer's: log_softmax(logits / temperature) in float32,
untruncated. At temperature 0 (greedy) the scale is 1."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SamplingParams:
    """Sampling parameters. Every field is explicit; engine defaults and generation_config are never merged
    in."""

    max_tokens: int
    min_tokens: int = 0
    temperature: float = 1.0
    """0 is greedy."""
    top_p: float = 1.0
    top_k: int = -1
    """-1: off."""
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    stop: tuple[str, ...] = ()
    """Stop strings, matched in the decoded completion."""
    stop_token_ids: tuple[int, ...] = ()
    """Stop ids besides the end-of-sequence ids. A matched stop or end-of-sequence id stays in the
    completion."""
    keep_stop: bool = True
    """Whether the *text* keeps a matched stop string. Token ids always do: they are the policy's actions."""
    ignore_eos: bool = False
    skip_special_tokens: bool = False
    """Whether the text leaves out all special tokens, not only the end of sequence."""
    logprob_kind: LogprobKind = "temperature_scaled"


@dataclass(frozen=True, kw_only=True, slots=True)
class GenerationRequest:
    """One prompt and n samples of it, as token ids: text is never tokenised again between engine and
    trainer."""

    prompt_token_ids: tuple[int, ...]
    sampling: SamplingParams
    seeds: tuple[int, ...]
    """One 63-bit seed per sample; n = len(seeds). A sample's noise is a pure function of (seed, position)."""
    trajectory_tokens: int = 0
    """Tokens after the first turn's prompt that all turns and replies may come to; engines size their KV
    cache by it. 0: as many as this turn."""
    begun: tuple[tuple[Span, ...], ...] = ()
    """For each seed, what the policy has written of the sample so far (see `Trajectory.begun`): the sample
    goes on after it, as if it had never been cut off, and its completion has all of it. Empty: none has
    begun. Engines without `partial_rollouts` refuse it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Border:
    """Where samples are cut off in logical time (rollout.schedule = "fixed"): as many tokens after the end of
    the step's samples as all slots together draw while they draw the tokens of the step once more."""

    seeds: frozenset[int]
    """Of the step's samples that have not ended; the others of the stream belong to later steps."""
    tokens: int
    """In the step's samples that have ended."""
    slots: int
    """Samples that are drawn at the same time."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Completion:
    """One sample that an engine returned."""

    prompt_token_ids: tuple[int, ...]
    token_ids: tuple[int, ...]
    """The completion, including the end-of-sequence or stop id that ended it."""
    logprobs: tuple[float, ...]
    """Nats, one per entry of token_ids, of the request's logprob_kind."""
    finish_reason: FinishReason
    stop_reason: int | str | None
    """The id or string that ended it. None unless finish_reason is "stop"."""
    text: str | None
    """Decoded completion without the end of sequence; see SamplingParams.skip_special_tokens. None without a
    tokenizer."""
    seed: int
    engine: str
    policy_version: int
    """The version that wrote it, or the last of them."""
    versions: tuple[tuple[int, int], ...] = ()
    """(version, number of tokens) in order, if several versions wrote it, because the engine took an update
    while the sample was running; else empty."""
    cached_tokens: int = 0
    """Prompt tokens whose keys and values were shared with the group or cached."""
    attempt: int = 1
    """Attempts at this sample; above 1 after the server died or a connection broke."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Prompt:
    """One row of a prompt set, rendered and tokenised."""

    index: int
    """Row number in the source, from 0; identifies the prompt across epochs and resumes."""
    token_ids: tuple[int, ...]
    text: str
    """The rendered prompt, chat template applied; for id-level sources a readable form of the ids."""
    row: Mapping[str, Any] = field(default_factory=dict)
    """The dataset row, for reward functions (answer, metadata, ...)."""
    conversation: str | Sequence[Mapping[str, Any]] | None = None
    """The prompt before its chat template, as text or messages; a reward model renders it with its own
    template. None for id-level sources."""
    where: str = ""
    """Location of the row for error messages: its source, and its line or row there, from 1."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Span:
    """Consecutive tokens of a trajectory with the same author."""

    author: Author
    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...] = ()
    """Nats, one per token of a policy span; empty for other authors."""
    policy_version: int | None = None
    """Version of the policy that wrote it. None for other authors."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TurnEnd:
    """Where a turn of a trajectory ended, and how."""

    spans: int
    """Of the trajectory, up to there, all parts counted."""
    finish_reason: FinishReason
    stop_reason: int | str | None
    text: str | None
    cached_tokens: int
    attempt: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Trajectory:
    """One sample from its prompt to its end (or as far as it has come), as a sequence of spans.

    A single turn is [prompt, policy]. The reply of a tool or environment is a span of its own, followed by
    the next turn: [prompt, policy, tool, policy]. Two policy spans in a row are a turn that was interrupted
    and continued, perhaps by another version of the policy.

    Example:
        >>> one = Trajectory.of(completion)
        >>> two = one.continued(tool_token_ids, next_completion)
        >>> [span.author for span in two.spans]
        ['prompt', 'policy', 'tool', 'policy']
    """

    spans: tuple[Span, ...]
    finish_reason: FinishReason
    """Of the last turn, like the next two fields."""
    stop_reason: int | str | None
    text: str | None
    seed: int
    engine: str
    cached_tokens: int = 0
    """Completion.cached_tokens, summed over the turns."""
    attempt: int = 1
    """The largest Completion.attempt of its turns."""
    earlier: tuple[tuple[Span, ...], ...] = ()
    """The spans of earlier parts, oldest first, if the trajectory went on with another context; `spans` are
    those of the last part. The first span of a part is its context, in which the policy's words from earlier
    parts are copies."""
    turns: int = 1
    """Turns of the policy."""
    end: EndReason = "done"
    prompt_text: str | None = None
    """The text of its first context; None: the task's."""
    wait_seconds: float = field(default=0.0, compare=False)
    """Seconds that its environment took between turns."""
    ends: tuple[TurnEnd, ...] = ()
    """Of its whole turns, where another call may go on with it; else empty."""

    @classmethod
    def of(cls, completion: Completion) -> Trajectory:
        """Return the trajectory of a single turn."""
        prompt = Span(author="prompt", token_ids=completion.prompt_token_ids)
        return cls(
            spans=(prompt, *_policy_spans(completion)),
            finish_reason=completion.finish_reason,
            stop_reason=completion.stop_reason,
            text=completion.text,
            seed=completion.seed,
            engine=completion.engine,
            cached_tokens=completion.cached_tokens,
            attempt=completion.attempt,
            end="done" if completion.finish_reason == "stop" else completion.finish_reason,
        )

    def continued(self, token_ids: tuple[int, ...], completion: Completion) -> Trajectory:
        """Return the trajectory with another turn: `token_ids` that the policy did not write, if any, and
        `completion`, whose prompt is everything before it.

        Raises:
            ValueError: the completion does not continue this trajectory.
        """
        if completion.prompt_token_ids != self.token_ids + token_ids:
            raise ValueError(
                f"the completion's prompt ({len(completion.prompt_token_ids)} tokens) is not the trajectory "
                f"({len(self.token_ids)} tokens) followed by the {len(token_ids)} added tokens"
            )
        added = (Span(author="tool", token_ids=token_ids),) if token_ids else ()
        later = self._with(completion)
        return replace(later, spans=(*self.spans, *added, *later.spans[1:]), earlier=self.earlier)

    def branched(self, completion: Completion) -> Trajectory:
        """Return the trajectory with another turn in a part of its own, whose context is the completion's
        prompt."""
        return replace(self._with(completion), earlier=self.parts)

    def _with(self, completion: Completion) -> Trajectory:
        return replace(
            Trajectory.of(completion),
            cached_tokens=self.cached_tokens + completion.cached_tokens,
            attempt=max(self.attempt, completion.attempt),
            turns=self.turns + 1,
        )

    @property
    def parts(self) -> tuple[tuple[Span, ...], ...]:
        """The spans of all parts, oldest first; each is a document of its own."""
        return (*self.earlier, self.spans)

    @property
    def added_token_ids(self) -> tuple[int, ...]:
        """Everything after the contexts of all parts: what the policy and tools wrote."""
        added = (span.token_ids for spans in self.parts for span in spans[1:])
        return tuple(chain.from_iterable(added))

    @property
    def added_tokens(self) -> int:
        """Number of `added_token_ids`."""
        return sum(len(span.token_ids) for spans in self.parts for span in spans[1:])

    @property
    def token_ids(self) -> tuple[int, ...]:
        """All tokens of the last part, from its context on."""
        return tuple(chain.from_iterable(span.token_ids for span in self.spans))

    @property
    def prompt_token_ids(self) -> tuple[int, ...]:
        """The tokens before the first policy token of the last part."""
        return self.spans[0].token_ids

    @property
    def begun(self) -> tuple[Span, ...]:
        """What the policy wrote of the turn that was cut off, so that another request may go on with it."""
        before = self.ends[-1].spans if self.ends else 0
        here = self.spans[max(1, before - sum(map(len, self.earlier))) :]
        return tuple(span for span in here if span.author == "policy" and span.token_ids)

    def whole_turns(self) -> Iterator[Trajectory]:
        """Yield the trajectory as it was after each of its whole turns (`ends`)."""
        for number, end in enumerate(self.ends):
            parts, left = list[tuple[Span, ...]](), end.spans
            for spans in self.parts:
                parts += [spans[:left]] if left else []
                left -= len(parts[-1]) if left else 0
            yield Trajectory(
                spans=parts[-1],
                earlier=tuple(parts[:-1]),
                finish_reason=end.finish_reason,
                stop_reason=end.stop_reason,
                text=end.text,
                seed=self.seed,
                engine=self.engine,
                cached_tokens=end.cached_tokens,
                attempt=end.attempt,
                turns=number + 1,
                end="done" if end.finish_reason == "stop" else end.finish_reason,
            )

    @property
    def policy_tokens(self) -> int:
        """Number of tokens that the policy wrote."""
        every = chain.from_iterable(self.parts)
        return sum(len(span.token_ids) for span in every if span.author == "policy")

    @property
    def policy_versions(self) -> tuple[int, ...]:
        """Versions of the policy that wrote parts of it, oldest first."""
        every = chain.from_iterable(self.parts)
        return tuple(sorted({span.policy_version for span in every if span.policy_version is not None}))

    @property
    def policy_version(self) -> int:
        """The oldest version of the policy that wrote a part of it."""
        return self.policy_versions[0]


def _policy_spans(completion: Completion) -> Iterator[Span]:
    """A span for each version that wrote a part of the completion."""
    start = 0
    for version, count in completion.versions or ((completion.policy_version, len(completion.token_ids)),):
        stop = start + count
        yield Span(
            author="policy",
            token_ids=completion.token_ids[start:stop],
            logprobs=completion.logprobs[start:stop],
            policy_version=version,
        )
        start = stop


@dataclass(frozen=True, kw_only=True, slots=True)
class Rollout:
    """A trajectory and its rewards."""

    trajectory: Trajectory
    reward: float
    """The total reward that the algorithm uses."""
    rewards: Mapping[str, float]
    """Unweighted rewards by name, including shaping terms (overlong, kl)."""
    weights: Mapping[str, float] = field(default_factory=dict)
    """Weights of the rewards in the total, by name; 1 for missing names (shaping terms)."""
    sample: int = 0
    """Index among the samples that the step requested for its prompt."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SampleRecord:
    """One sample that a step requested, for the ledger of the run."""

    prompt_index: int
    sample: int
    """Index among the samples of the prompt, counted on through rounds of dynamic sampling."""
    seed: int
    policy_versions: tuple[int, ...]
    """Versions of the policy that wrote it, oldest first."""
    attempt: int
    dropped: Literal["reward", "group", "no-signal"] | None = None
    """Why the sample is not trained on. reward: a reward with on_error = "drop" failed on it. group: rewards
    failed on too many others of its group. no-signal: dynamic sampling replaced its group. None: it is
    trained on."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RolloutGroup:
    """All rollouts of one prompt in one step, in sample order."""

    prompt: Prompt
    rollouts: tuple[Rollout, ...]
