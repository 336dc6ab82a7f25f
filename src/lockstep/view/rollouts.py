"""Rollouts of a run: pages, search, and groups of one prompt."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from lockstep.observe.run_history import STEP_FILE

Pieces = Callable[[Sequence[int]], list[str] | None]
"""Returns the text of each token; None: the run has no tokenizer."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Span:
    """Consecutive tokens of one author."""

    author: str
    """prompt, policy or tool."""
    text: str | None
    """None: the run has no tokenizer."""
    token_ids: tuple[int, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Token:
    """One token that the policy wrote."""

    id: int
    text: str | None
    """None: its run has no tokenizer that can be read."""
    logprob: float | None
    """Nats, at sampling, by the engine."""
    gap: float | None
    """The trainer's logprob minus the engine's, in nats; None without log.token_details."""
    entropy: float | None
    """Nats; None without log.token_details."""
    advantage: float | None
    """None without log.token_details."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Rollout:
    """One row of rollouts/."""

    step: int
    evaluation: str | None
    """Name of the evaluation, such as "before"; None: a training step."""
    prompt_index: int
    sample: int
    spans: tuple[Span, ...]
    reward: float | None
    rewards: Mapping[str, float]
    """By name, before weights."""
    advantage: float | None
    """Mean over the policy's tokens; None without log.token_details."""
    gap: float | None
    """The largest abs(gap) of a token; None without log.token_details."""
    finish_reason: str
    length: int
    """Tokens that the policy wrote."""
    seed: int | None
    version: int | None
    """Of the policy that wrote it."""
    logprobs: tuple[float, ...] = ()
    """One per token of the policy, as are the next three (or empty)."""
    gaps: tuple[float, ...] = ()
    entropies: tuple[float, ...] = ()
    advantages: tuple[float, ...] = ()
    _pieces: Pieces = field(repr=False, compare=False, default=lambda ids: None)

    @property
    def id(self) -> str:
        """STEP/PROMPT_INDEX/SAMPLE, as in ledger.jsonl."""
        return f"{self.step}/{self.prompt_index}/{self.sample}"

    def tokens(self, first: int = 0, count: int | None = None) -> list[Token]:
        """Return the policy's tokens from `first` on, at most `count`; all of a long rollout can be many."""
        ids = [one for span in self.spans if span.author == "policy" for one in span.token_ids]
        stop = len(ids) if count is None else min(len(ids), first + count)
        pieces = self._pieces(ids[first:stop])
        columns = (self.logprobs, self.gaps, self.entropies, self.advantages)

        def at(column: tuple[float, ...], index: int) -> float | None:
            return column[index] if index < len(column) else None

        return [
            Token(
                id=ids[index],
                text=None if pieces is None else pieces[index - first],
                logprob=at(columns[0], index),
                gap=at(columns[1], index),
                entropy=at(columns[2], index),
                advantage=at(columns[3], index),
            )
            for index in range(first, stop)
        ]


Order = Literal["step", "reward", "gap", "length"]
Only = Literal["largest gap", "highest reward", "truncated"]


@dataclass(frozen=True, kw_only=True, slots=True)
class RolloutQuery:
    """Which rollouts of a run, in which order. Ranges include both ends; None: open."""

    first_step: int | None = None
    last_step: int | None = None
    text: str = ""
    """Part of the prompt or completion, in any case."""
    ids: tuple[int, ...] = ()
    """Consecutive token ids of the completion or the prompt."""
    min_reward: float | None = None
    max_reward: float | None = None
    min_length: int | None = None
    max_length: int | None = None
    finish_reason: str | None = None
    prompt_index: int | None = None
    order: Order = "step"
    descending: bool = False
    only: Only | None = None
    """largest gap: those with token details, by gap; highest reward: by reward; truncated: cut off at the
    maximum length."""
    evaluation: str | None = None
    """Rollouts of this evaluation instead of those of training steps."""
    offset: int = 0
    limit: int = 50
    """At most 100."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RolloutPage:
    """Rollouts that a query found."""

    rollouts: tuple[Rollout, ...]
    total: int | None
    """Number that match; None: not known without the index, but there are more."""
    query: RolloutQuery
    indexed: float
    """Share of the rollouts that the index holds, 0 to 1."""
    scanned: tuple[int, ...]
    """Steps whose files were read instead, because the index does not hold them; empty: it answered."""
    problems: tuple[str, ...] = ()

    @property
    def whole(self) -> bool:
        """Whether all steps that the query asks for were looked at."""
        return self.total is not None


class RolloutReader:
    """The rollouts of one run."""

    def __init__(self, run: Path, *, pieces: Pieces = lambda ids: None) -> None:
        self.run, self._pieces = run, pieces

    def steps(self) -> list[int]:
        """Return the steps of which there are rollouts, in order."""
        return sorted(self._files())

    def evaluations(self) -> list[str]:
        """Return the names of the evaluations of which there are rollouts."""
        folder = self.run / "rollouts"
        names = [path.stem.removeprefix("evaluation-") for path in folder.glob("evaluation-*.jsonl")]
        return sorted(names, key=lambda name: (name == "after", name != "before", name))

    def page(self, query: RolloutQuery) -> RolloutPage:
        """Return the rollouts that a query asks for."""
        found = [
            one
            for step in self.steps()
            if (query.first_step is None or step >= query.first_step)
            and (query.last_step is None or step <= query.last_step)
            for one in self._of_file(self._files()[step])
        ]
        return RolloutPage(
            rollouts=tuple(found[query.offset : query.offset + query.limit]),
            total=len(found),
            query=query,
            indexed=0.0,
            scanned=tuple(self.steps()),
        )

    def group(self, step: int, prompt_index: int, *, evaluation: str | None = None) -> list[Rollout]:
        """Return the rollouts of one prompt in a step, by sample."""
        path = self._files().get(step)
        rows = [] if path is None else self._of_file(path)
        return [one for one in rows if one.prompt_index == prompt_index]

    def _files(self) -> dict[int, Path]:
        found = {}
        for path in (self.run / "rollouts").glob("step-*.jsonl"):
            if (match := STEP_FILE.fullmatch(path.name)) and not match[1]:
                found[int(match[2])] = path
        return found

    def _of_file(self, path: Path) -> list[Rollout]:
        with path.open("rb") as file:
            return [rollout(json.loads(line), pieces=self._pieces) for line in file if line.endswith(b"\n")]


def rollout(row: Mapping[str, Any], *, pieces: Pieces, evaluation: str | None = None) -> Rollout:
    """Return the rollout of a row."""
    ids = tuple(row["token_ids"])
    logprobs = tuple(row.get("rollout_logprobs") or ())
    trainer = tuple(row.get("policy_logprobs") or ())
    gaps = tuple(a - b for a, b in zip(trainer, logprobs, strict=False))
    advantages = tuple(row.get("advantages") or ())
    return Rollout(
        step=row["step"],
        evaluation=evaluation,
        prompt_index=row["prompt_index"],
        sample=row["sample"],
        spans=(
            Span(author="prompt", text=row.get("prompt"), token_ids=tuple(row.get("prompt_token_ids") or ())),
            Span(author="policy", text=row.get("completion"), token_ids=ids),
        ),
        reward=row.get("reward"),
        rewards=row.get("rewards") or {},
        advantage=sum(advantages) / len(advantages) if advantages else None,
        gap=max(map(abs, gaps)) if gaps else None,
        finish_reason=str(row.get("finish_reason")),
        length=len(ids),
        seed=row.get("seed"),
        version=row.get("policy_version"),
        logprobs=logprobs,
        gaps=gaps,
        entropies=tuple(row.get("entropies") or ()),
        advantages=advantages,
        _pieces=pieces,
    )
