"""Assign an input to each rank at each step, and diagnose what a data-parallel job would do with it. Pure.

Example: three inputs of 5, 3 and 9 tokens on two ranks. Step 0 gives rank 0 input 0 and rank 1 input 1; step
1 gives rank 0 input 2, and rank 1 has run out.

    tokens       rank 0   rank 1   max / mean
    step 0            5        3         1.25
    step 1            9        -         2.00    rank 1 never enters step 1's collectives
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

from lockstep.errors import ConfigError
from lockstep.schema.recording import InputMeta

_UNEVEN_EVERY = 8
"""Shuffled: one step in this many leaves a rank without an input."""

Kind = Literal["no-input", "lengths-differ", "rows-differ", "mean-of-means", "imbalance"]


@dataclass(frozen=True, kw_only=True, slots=True)
class PlannedStep:
    """One step of all ranks: one micro-batch each."""

    step: int
    """Position in the plan, from 0."""
    update: int | None
    """The recorded optimizer step that all inputs come from; None: shuffled."""
    inputs: tuple[int | None, ...]
    """[ranks]: index of the input; None: this rank has none."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StepPlan:
    """All steps of a replay on several ranks. A pure function of the recording and the arguments, so that
    every rank makes the same one."""

    ranks: int
    steps: tuple[PlannedStep, ...]
    order: Literal["recorded ranks", "round robin", "shuffled"]

    def inputs_of(self, rank: int) -> list[int | None]:
        """The inputs of one rank, step by step."""
        return [step.inputs[rank] for step in self.steps]


def plan_steps(
    metas: Sequence[InputMeta],
    lengths: Sequence[Sequence[int]],
    *,
    ranks: int,
    indices: Sequence[int] | None = None,
    shuffle: bool = False,
    seed: int = 0,
) -> StepPlan:
    """Assign inputs to steps and ranks.

    Recorded order: step after step as recorded. If the recording was made on as many ranks, each rank gets
    its own inputs again; otherwise the inputs of each optimizer step are assigned round robin. A step never
    mixes optimizer steps, so a rank whose share is smaller runs out, as it did in the run.

    Shuffled: a seeded permutation, such that the inputs of a step differ in tokens where there are any that
    do; and in one of 8 steps (at least once, where there are two steps) one rank gets nothing, as happens
    where each rank packs its own samples into as many micro-batches as these need.

    Args:
        lengths: of the real documents, per input.
        indices: the inputs to use, in this order within an optimizer step; None: all.

    Raises:
        ConfigError: fewer than 1 rank, or no input.
    """
    if ranks < 1:
        raise ConfigError(f"out-of-range: --ranks {ranks}: at least 1 rank is needed")
    chosen = list(range(len(metas)) if indices is None else indices)
    if not chosen:
        raise ConfigError("nothing-to-do: there is no input to assign to ranks; raise --max-inputs")
    if shuffle:
        rows = _shuffled(chosen, [sum(part) for part in lengths], ranks, random.Random(seed))
        steps = [PlannedStep(step=i, update=None, inputs=tuple(row)) for i, row in enumerate(rows)]
        return StepPlan(ranks=ranks, steps=tuple(steps), order="shuffled")
    by_rank = all(metas[i].world_size == ranks and 0 <= metas[i].rank < ranks for i in chosen)
    steps = []
    for update in sorted({metas[i].update for i in chosen}):
        own = [i for i in chosen if metas[i].update == update]
        for row in _by_recorded_rank(own, metas, ranks) if by_rank else _round_robin(own, ranks):
            steps.append(PlannedStep(step=len(steps), update=update, inputs=tuple(row)))
    order: Literal["recorded ranks", "round robin"] = "recorded ranks" if by_rank else "round robin"
    return StepPlan(ranks=ranks, steps=tuple(steps), order=order)


def _round_robin(indices: Sequence[int], ranks: int) -> list[list[int | None]]:
    rows = [list(indices[i : i + ranks]) for i in range(0, len(indices), ranks)]
    return [[*row, *[None] * (ranks - len(row))] for row in rows]


def _by_recorded_rank(
    indices: Sequence[int], metas: Sequence[InputMeta], ranks: int
) -> list[list[int | None]]:
    """One row per step; each column holds a rank's own micro-batches in order."""
    columns = [
        sorted((i for i in indices if metas[i].rank == r), key=lambda i: metas[i].key) for r in range(ranks)
    ]
    height = max(map(len, columns))
    return [[column[row] if row < len(column) else None for column in columns] for row in range(height)]


def _shuffled(
    indices: Sequence[int], tokens: Sequence[int], ranks: int, rng: random.Random
) -> list[list[int | None]]:
    queue = list(indices)
    rng.shuffle(queue)
    full_steps = len(queue) // ranks
    every = min(_UNEVEN_EVERY, full_steps)
    short = rng.randrange(every) if every >= 2 and ranks > 1 else None
    rows: list[list[int | None]] = []
    while queue:
        missing = rng.randrange(ranks) if short is not None and len(rows) % every == short else None
        row: list[int | None] = []
        seen: set[int] = set()
        for rank in range(ranks):
            if rank == missing or not queue:
                row.append(None)
                continue
            at = next((at for at, i in enumerate(queue) if tokens[i] not in seen), 0)
            row.append(queue.pop(at))
            seen.add(tokens[row[-1]])  # type: ignore[index]
        rows.append(row)
    return rows


# --- diagnosis ----------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True, slots=True)
class StepReport:
    """One step as a data-parallel job sees it."""

    step: int
    update: int | None
    inputs: tuple[int | None, ...]
    lengths: tuple[tuple[int, ...], ...]
    """Lengths of the documents, per rank; empty: no input."""
    tokens: tuple[int, ...]
    """Tokens per rank."""
    shapes: tuple[tuple[int, int], ...]
    """[B, L] of the padded layout, per rank; (0, 0): no input."""
    padding_added: int
    """Slots added when every rank pads its rows to the longest row of any rank."""
    imbalance: float
    """Largest / mean tokens of a rank; ranks without an input count as 0."""

    @property
    def without_input(self) -> tuple[int, ...]:
        """Ranks that have no input."""
        return tuple(rank for rank, index in enumerate(self.inputs) if index is None)

    def line(self) -> str:
        """One line such as `step 3: rank 0 input 7, 812 tokens, [4, 310]; rank 1 no input`."""
        parts = [
            f"rank {rank} no input"
            if index is None
            else f"rank {rank} input {index}, {self.tokens[rank]:,} tokens, {list(self.shapes[rank])}"
            for rank, index in enumerate(self.inputs)
        ]
        return f"step {self.step}: " + "; ".join(parts)


@dataclass(frozen=True, kw_only=True, slots=True)
class Finding:
    """A step pattern that fails, is silently wrong, or is slow in a real job."""

    kind: Kind
    steps: tuple[int, ...]
    """All steps in which it happens."""
    example: str
    """The first of them, or the worst."""
    what: str
    """What a job does in such a step."""
    fix: str

    def lines(self, *, total: int) -> list[str]:
        """The finding as lines of a log."""
        where = f"{len(self.steps)} of {total} steps" if len(self.steps) > 1 else f"step {self.steps[0]}"
        return [f"{self.kind} ({where})", f"  {self.example}", f"  {self.what}", f"  fix: {self.fix}"]


@dataclass(frozen=True, kw_only=True, slots=True)
class PlanReport:
    """The diagnosis of a whole plan."""

    ranks: int
    order: str
    steps: tuple[StepReport, ...]
    findings: tuple[Finding, ...]
    tokens: int
    padding_added: int
    idle_share: float
    """Share of rank-time lost waiting for the step's largest rank, were time proportional to tokens."""
    worst_step: int
    """Position of the largest imbalance."""

    def lines(self) -> list[str]:
        """The report as lines of a log."""
        worst = self.steps[self.worst_step]
        shape = (
            f"{len(self.steps)} steps on {self.ranks} ranks ({self.order}), {self.tokens:,} tokens; ranks "
            f"wait {self.idle_share:.0%} of their time for the largest one if time goes with tokens; padding "
            f"all ranks to one length would add {self.padding_added:,} slots"
        )
        lines = [shape, f"most uneven ({worst.imbalance:.2f}x the mean): {worst.line()}"]
        if self.order == "shuffled":
            lines.append(
                f"shuffled: one of {_UNEVEN_EVERY} steps leaves a rank without an input on purpose, as "
                "happens where each rank packs its own samples"
            )
        for finding in self.findings:
            lines += finding.lines(total=len(self.steps))
        if not self.findings:
            lines.append("all ranks have inputs of equal shapes in every step: nothing to diagnose")
        return lines

    def to_json(self) -> dict[str, Any]:
        """The report as summary.json has it; steps without a finding are left out."""
        affected = {step for finding in self.findings for step in finding.steps}
        steps = tuple(step for step in self.steps if step.step in affected)
        return asdict(replace(self, steps=steps)) | {"num_steps": len(self.steps)}


def diagnose(
    plan: StepPlan, lengths: Sequence[Sequence[int]], *, zero_stage: int | None = None
) -> PlanReport:
    """Diagnose what a plan would do in a job whose ranks run it together.

    Args:
        lengths: of the real documents, per input.
        zero_stage: DeepSpeed's; it decides where a rank without an input makes the others wait. None: plain
            data parallelism.
    """
    steps = tuple(_step_report(step, lengths) for step in plan.steps)
    largest = sum(max(step.tokens) for step in steps)
    tokens = sum(sum(step.tokens) for step in steps)
    worst = max(range(len(steps)), key=lambda i: (steps[i].imbalance, -i))
    return PlanReport(
        ranks=plan.ranks,
        order=plan.order,
        steps=steps,
        findings=tuple(_findings(steps, plan, zero_stage)),
        tokens=tokens,
        padding_added=sum(step.padding_added for step in steps),
        idle_share=1 - tokens / (plan.ranks * largest) if largest else 0.0,
        worst_step=worst,
    )


def _step_report(step: PlannedStep, lengths: Sequence[Sequence[int]]) -> StepReport:
    own = tuple(() if i is None else tuple(lengths[i]) for i in step.inputs)
    tokens = tuple(map(sum, own))
    shapes = tuple((len(part), max(part)) if part else (0, 0) for part in own)
    longest = max(width for _, width in shapes)
    mean = sum(tokens) / len(tokens)
    return StepReport(
        step=step.step,
        update=step.update,
        inputs=step.inputs,
        lengths=own,
        tokens=tokens,
        shapes=shapes,
        padding_added=sum(rows * (longest - width) for rows, width in shapes),
        imbalance=max(tokens) / mean if mean else 1.0,
    )


def waits_in(zero_stage: int | None) -> str:
    """The collective in which the others wait for a rank that has no micro-batch."""
    if zero_stage == 3:
        return (
            "in the all-gather of the first layer's parameters, in forward (ZeRO-3; FSDP's FULL_SHARD alike)"
        )
    if zero_stage == 2:
        return "in the reduction of the first gradient bucket, in backward (ZeRO-2 reduces every micro-batch)"
    if zero_stage in (0, 1):
        return f"in the all-reduce of gradients at the end of the accumulation (ZeRO-{zero_stage})"
    return (
        "in the gradient all-reduce, in backward (with DDP's no_sync around all but the last micro-batch, "
        "counts may differ as long as each rank has at least one)"
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class _Pattern:
    """What a finding is about: which steps, the one that shows it best, and the texts of `Finding`, in which
    {NAME} is one of that step's figures."""

    kind: Kind
    happens: Callable[[StepReport], bool]
    size: Callable[[StepReport], float]
    """The first step with the largest one is the example."""
    what: str
    fix: str


_PATTERNS = (
    _Pattern(
        kind="no-input",
        happens=lambda step: bool(step.without_input),
        size=lambda step: 0.0,
        what="rank {missing} has no micro-batch (per rank over the whole replay: {counts}). If it skips the "
        "step, the others wait {waits} until the process group's timeout (NCCL: 10 minutes by default). "
        "Worse, if it goes on to its next step: its next collective has the same shapes, so it pairs with "
        "this one, and from here on gradients of different steps are added up without any error, until the "
        "ranks run out at different times",
        fix="before the step, agree on the number of micro-batches (all_reduce MAX of the count) and let "
        "ranks that have fewer run an empty one: any small batch, loss_mask all False, loss x 0, through "
        "forward and backward. Or pack for all ranks in one place with at least one pack per rank "
        "(min_packs). For DDP alone: torch's Join context",
    ),
    _Pattern(
        kind="lengths-differ",
        happens=lambda step: len({width for rows, width in step.shapes if rows}) > 1,
        size=lambda step: step.padding_added,
        what="each rank pads to its own longest document. Whatever is gathered across ranks as [B, L] "
        "(logprobs, masks, rewards per token) has another shape on every rank: all_gather of gloo raises; "
        "NCCL compares no shapes, so it hangs, or values land in other ranks' places; torch.compile sees a "
        "new shape on one rank and recompiles there while the others wait",
        fix="gather the lengths first, pad to the longest of all ranks before gathering (here up to "
        "{padding:,} more slots in a step), and cut afterwards; or gather packed tokens with their "
        "cu_seqlens (all_gather_object, or all_gather of a list of exact shapes); a static capacity keeps "
        "compiled shapes equal",
    ),
    _Pattern(
        kind="rows-differ",
        happens=lambda step: len({rows for rows, _ in step.shapes if rows}) > 1,
        size=lambda step: _ratio([rows for rows, _ in step.shapes]),
        what="ranks have different numbers of documents. A gather of one value per document (rewards, "
        "advantages, sequence logprobs) needs equal numbers, and group baselines computed from it assume "
        "them; a loss averaged per document and then over ranks weights the documents of the smaller rank "
        "more",
        fix="gather the counts first and pad; divide by the number of documents of all ranks together",
    ),
    _Pattern(
        kind="mean-of-means",
        happens=lambda step: _ratio(step.tokens) > 1,
        size=lambda step: _ratio(step.tokens),
        what="no error, another gradient: DDP, FSDP and DeepSpeed average gradients over ranks, so a loss "
        "that each rank averages over its own tokens counts a token of the smallest rank {ratio:.2f}x as "
        "much as one of the largest (as many trained tokens as tokens assumed)",
        fix="divide by the number of trained tokens of all ranks (all_reduce the count, multiply by the "
        "world size against the average), or add gradients up over ranks as Lockstep does: its loss_weights "
        "hold the normaliser of the whole step",
    ),
    _Pattern(
        kind="imbalance",
        happens=lambda step: step.imbalance > 1.25 and not step.without_input,
        size=lambda step: step.imbalance,
        what="the largest rank has {imbalance:.2f}x the mean number of tokens; the others wait for it in the "
        "gradient all-reduce, and a profiler shows that as slow communication",
        fix="balance tokens over ranks before assigning micro-batches (lockstep.packing.balance)",
    ),
)


def _findings(steps: Sequence[StepReport], plan: StepPlan, zero_stage: int | None) -> Iterator[Finding]:
    counts = [sum(index is not None for index in plan.inputs_of(rank)) for rank in range(plan.ranks)]
    for pattern in _PATTERNS:
        own = [step for step in steps if pattern.happens(step)]
        if not own:
            continue
        example = max(own, key=pattern.size)
        figures = {
            "missing": ", ".join(map(str, example.without_input)),
            "counts": counts,
            "waits": waits_in(zero_stage),
            "padding": example.padding_added,
            "ratio": _ratio(example.tokens),
            "imbalance": example.imbalance,
        }
        yield Finding(
            kind=pattern.kind,
            steps=tuple(step.step for step in own),
            example=example.line(),
            what=pattern.what.format_map(figures),
            fix=pattern.fix.format_map(figures),
        )


def _ratio(counts: Sequence[int]) -> float:
    """The largest over the smallest of those that are not 0; 1 where there are none."""
    own = [count for count in counts if count] or [1]
    return max(own) / min(own)
