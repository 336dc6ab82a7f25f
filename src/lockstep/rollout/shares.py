"""A rank's share of the rollouts of a step, and the form in which the other ranks get it."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain, islice
from typing import ClassVar

from pydantic import ConfigDict

from lockstep.schema.rollout import Prompt, Rollout, SampleRecord, Span, Trajectory

Prompts = Sequence[Prompt] | Mapping[int, Prompt]
"""The prompts of a call, by number."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Share:
    """One rank's share of the prompts of a call."""

    numbers: tuple[int, ...] = ()
    """Of its prompts, among those of the call."""
    rollouts: tuple[tuple[Rollout, ...] | None, ...] = ()
    """By prompt of the share; None: the group was dropped."""
    requested: tuple[SampleRecord, ...] = ()
    counts: dict[str, float] = field(default_factory=dict)
    aborted: bool = False
    why_dropped: str | None = None
    """See Environment.why_dropped."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SentShare:
    """A share on its way: tokens and logprobs are bytes, since reading and writing each as a JSON number
    would take as long as many steps of decoding. Prompts of tasks are not sent, as every rank has them."""

    __pydantic_config__: ClassVar[ConfigDict] = ConfigDict(ser_json_bytes="base64", val_json_bytes="base64")

    share: Share
    """Without the tokens and logprobs of its spans."""
    lengths: bytes
    """uint32: of each span, in order, the number of its tokens and of its logprobs; a context of 0 tokens is
    the task's prompt."""
    token_ids: bytes
    """uint32, of all these spans."""
    logprobs: bytes
    """float64."""

    @classmethod
    def of(cls, share: Share, prompts: Prompts) -> SentShare:
        """Return what to send. prompts: of the call."""
        lengths, token_ids, logprobs = array("I"), array("I"), array("d")

        def emptied(number: int, span: Span) -> Span:
            known = span.author == "prompt" and span.token_ids == prompts[number].token_ids
            ids = () if known else span.token_ids
            lengths.extend((len(ids), len(span.logprobs)))
            token_ids.extend(ids)
            logprobs.extend(span.logprobs)
            return replace(span, token_ids=(), logprobs=())

        return cls(
            share=_with_spans(share, emptied),
            lengths=lengths.tobytes(),
            token_ids=token_ids.tobytes(),
            logprobs=logprobs.tobytes(),
        )

    @classmethod
    def joined(cls, parts: Sequence[SentShare]) -> SentShare:
        """Return the groups of all parts as one share."""
        shares = [part.share for part in parts]
        numbers = chain.from_iterable(share.numbers for share in shares)
        rollouts = chain.from_iterable(share.rollouts for share in shares)
        return cls(
            share=Share(numbers=tuple(numbers), rollouts=tuple(rollouts)),
            lengths=b"".join(part.lengths for part in parts),
            token_ids=b"".join(part.token_ids for part in parts),
            logprobs=b"".join(part.logprobs for part in parts),
        )

    def received(self, prompts: Prompts) -> Share:
        """Return the share that was sent. prompts: of the call."""
        lengths = iter(array("I", self.lengths))
        token_ids, logprobs = iter(array("I", self.token_ids)), iter(array("d", self.logprobs))

        def filled(number: int, span: Span) -> Span:
            ids = tuple(islice(token_ids, next(lengths)))
            if span.author == "prompt" and not ids:
                ids = prompts[number].token_ids
            return replace(span, token_ids=ids, logprobs=tuple(islice(logprobs, next(lengths))))

        return _with_spans(self.share, filled)


def _with_spans(share: Share, change: Callable[[int, Span], Span]) -> Share:
    """The share with other spans. change: is given the number of the prompt and the span, in order."""
    changed: list[tuple[Rollout, ...] | None] = []

    def of_trajectory(number: int, trajectory: Trajectory) -> Trajectory:
        *earlier, last = (tuple(change(number, span) for span in spans) for spans in trajectory.parts)
        return replace(trajectory, earlier=tuple(earlier), spans=last)

    for number, rollouts in zip(share.numbers, share.rollouts, strict=True):
        if rollouts is None:
            changed.append(None)
            continue
        changed.append(
            tuple(
                replace(rollout, trajectory=of_trajectory(number, rollout.trajectory)) for rollout in rollouts
            )
        )
    return replace(share, rollouts=tuple(changed))
