"""The rows of rollouts/ and of ledger.jsonl."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import numpy as np

from lockstep.loop.token_details import TokenDetails
from lockstep.observe.metrics import sample_id
from lockstep.observe.run_dir import RunDir
from lockstep.schema.rollout import RolloutGroup, SampleRecord, Trajectory

Rows = list[dict[str, Any]]


class RolloutLog:
    """Writes rollouts in a thread, since a GPU leaves the processor idle in forward and backward.

    Args:
        token_details: whether rows get `details`. They are then written a second time, after the step's
            updates; the first time is for a step that fails.
    """

    def __init__(self, directory: RunDir, *, token_details: bool = False) -> None:
        self._dir = directory
        self.details = TokenDetails() if token_details else None
        """Gets what the policy's updates compute; None: the rows do not tell."""
        # One thread: steps are written in order.
        self._writer = ThreadPoolExecutor(1, "rollouts")
        self._rows: Future[tuple[Rows, Rows]] | None = None
        self._step = 0

    def begin(
        self,
        step: int,
        groups: Sequence[RolloutGroup],
        *,
        requested: Sequence[SampleRecord],
        save: bool,
        skip_special_tokens: bool,
    ) -> None:
        """Begin to make the rows of a step and, under `save`, to write those of its rollouts.

        Args:
            groups: that the step is trained on.
            requested: every sample that the step asked for.
        """

        def write() -> tuple[Rows, Rows]:
            # By default a thread keeps Python for 5 ms: the GPU would wait for the kernels of the other one.
            before = sys.getswitchinterval()
            sys.setswitchinterval(5e-4)
            try:
                rows = rollout_rows(step, groups, skip_special_tokens=skip_special_tokens)
                if save:
                    self._dir.write_rollouts(step, rows)
            finally:
                sys.setswitchinterval(before)
            trained = Counter(rollout.trajectory.seed for group in groups for rollout in group.rollouts)
            return rows, ledger_rows(step, requested, trained)

        self._rows, self._step = self._writer.submit(write), step

    def wait(self) -> tuple[Rows, Rows]:
        """Return the rows of the step that was begun last, once they are written, and those of the ledger,
        which are not. Raises LockstepError."""
        assert self._rows is not None, "begin() comes first"
        begun, self._rows = self._rows, None
        rows, ledger = begun.result()
        if self.details is not None:
            self.details.add_to(rows)
            self._dir.write_rollouts(self._step, rows)
        return rows, ledger

    @property
    def begun(self) -> bool:
        """Whether a step was begun that nobody has waited for."""
        return self._rows is not None


def rollout_rows(step: int, groups: Sequence[RolloutGroup], *, skip_special_tokens: bool) -> Rows:
    """Return one plain row per rollout, for JSONL. `skip_special_tokens` says how `completion` was decoded,
    see SamplingConfig. `token_ids` are those after the prompt. With several turns `spans` says how many of
    them each author wrote, in order; only the policy's have logprobs. The author "prompt" begins a part with
    another context, whose ids are not repeated."""
    return [
        {
            "step": step,
            "prompt_index": group.prompt.index,
            "sample": rollout.sample,
            "prompt": group.prompt.text
            if rollout.trajectory.prompt_text is None
            else rollout.trajectory.prompt_text,
            "completion": rollout.trajectory.text,
            "skip_special_tokens": skip_special_tokens,
            "prompt_token_ids": list(rollout.trajectory.parts[0][0].token_ids),
            "token_ids": list(rollout.trajectory.added_token_ids),
            "rollout_logprobs": _rounded(
                [p for spans in rollout.trajectory.parts for span in spans for p in span.logprobs]
            ),
            **_turns(rollout.trajectory),
            "finish_reason": rollout.trajectory.finish_reason,
            "reward": rollout.reward,
            "rewards": dict(rollout.rewards),
            "seed": rollout.trajectory.seed,
            "policy_version": rollout.trajectory.policy_version,
        }
        for group in groups
        for rollout in group.rollouts
    ]


def ledger_rows(step: int, requested: Sequence[SampleRecord], trained: Mapping[int, int]) -> Rows:
    """Return a plain row for each sample of a step, and one more for each further time that it was trained.

    Args:
        trained: how often, by seed.
    """
    return [
        {
            "id": sample_id(step, record.prompt_index, record.sample),
            "step": step,
            "seed": record.seed,
            "policy_versions": list(record.policy_versions),
            "attempt": record.attempt,
            "trained_step": step if trained.get(record.seed) else None,
            "dropped": record.dropped,
        }
        for record in requested
        for _ in range(max(1, trained.get(record.seed, 0)))
    ]


def _rounded(values: Sequence[float]) -> list[float]:
    # As Python's round() of a float32, because 1e6 times it is exact in float64.
    rounded: list[float] = np.round(values, 6).tolist()
    return rounded


def _turns(trajectory: Trajectory) -> dict[str, Any]:
    if len(trajectory.spans) == 2 and not trajectory.earlier:
        return {}
    spans = [[span.author, len(span.token_ids)] for spans in trajectory.parts for span in spans]
    return {"spans": spans[1:], "turns": trajectory.turns, "end": trajectory.end}
