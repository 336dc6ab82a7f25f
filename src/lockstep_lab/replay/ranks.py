"""A replay on several ranks, real or simulated in this process.

Each step gives every rank one input; gradients are added up over the ranks. A report before the first step
says what the same steps would do in a data-parallel job (lockstep_lab.replay.step_plan); if ranks really get
out of step, an error says who waits for whom, where a job would hang (lockstep.ranks.guard).
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import TypeAdapter

from lockstep.errors import ConfigError
from lockstep.observe.text import counted
from lockstep.ranks.context import PeerFailed, RankContext
from lockstep.ranks.guard import Desync, Guard
from lockstep.schema.batch import PackedBatch
from lockstep_lab.replay.cell import ReplayOptions
from lockstep_lab.replay.rank_backend import RankBackend, SimulatedBackend
from lockstep_lab.replay.replayer import Deadline, Replayer
from lockstep_lab.replay.results import ReplayFiles, ReplayRow
from lockstep_lab.replay.run import OnRow, ReplayResult, Session, opening
from lockstep_lab.replay.step_plan import PlannedStep, PlanReport, StepPlan, diagnose, plan_steps

if TYPE_CHECKING:
    from lockstep.recording import Recording

SECONDS, UNGUARDED_SECONDS = 300.0, 20.0
"""Seconds that a rank waits for another, with and without the guard. With it the wait includes the slowest
compilation of one rank; without it, waiting is what the replay demonstrates."""
_FAREWELL_SECONDS = 5.0
"""After a desync or Ctrl-C: how long rank 0 waits for the other ranks' last reports."""

_ROW: TypeAdapter[ReplayRow] = TypeAdapter(ReplayRow)


@dataclass(kw_only=True)
class _Session(Session):
    """Of the steps of several ranks."""

    notes: list[str] = field(default_factory=list)
    summed: list[int] = field(default_factory=list)
    """Inputs whose gradients were kept."""
    desync: Desync | None = None


class _RankSession(_Session):
    """Of one real rank, whose files have no summary."""

    steps = 0
    """Of all ranks."""

    def _progress(self, row: ReplayRow) -> tuple[int, int]:
        return row.step + 1, self.steps

    def _timed_out(self, index: int) -> None:
        assert self.files is not None
        self.files.row(self.replayer.timed_out_row(index))


def rank_options(options: ReplayOptions, ranks: RankContext) -> ReplayOptions:
    """The options of one rank: its device, and the number of ranks.

    Raises:
        ConfigError: --ranks and the launcher disagree about the number.
    """
    requested = options.cell.ranks
    if requested not in (1, ranks.world_size):
        raise ConfigError(
            f"contradiction: --ranks {requested}, but {ranks.world_size} ranks were started; leave --ranks "
            "out under torchrun and deepspeed, or give the same number"
        )
    cell = dataclasses.replace(options.cell, ranks=ranks.world_size, device=str(ranks.device))
    return dataclasses.replace(options, cell=cell)


def waiting_seconds(requested: float | None, *, checked: bool) -> float:
    """The deadline of one rank's waits for another."""
    return requested or (SECONDS if checked else UNGUARDED_SECONDS)


def agree_on_directory(ranks: RankContext, out: Path) -> Path:
    """Take rank 0's OUT, as the default name contains the time. Raises Desync."""
    return Path(Guard(ranks).exchange(-1, {"out": str(out)}, what="the start", name="out")[0]["out"])


def plan_of(recording: Recording, order: Sequence[int], options: ReplayOptions) -> StepPlan:
    """The steps of a replay, the same on every rank."""
    return plan_steps(
        recording.metas,
        recording.lengths,
        ranks=options.cell.ranks,
        indices=sorted(order),
        shuffle=options.shuffle,
        seed=options.seed,
    )


def simulated_ranks(recording: Recording, options: ReplayOptions) -> int:
    """The number of ranks to simulate: --ranks if given, else as many as recorded, at least 2."""
    if options.cell.ranks > 1:
        return options.cell.ranks
    return max(2, recording.header.world_size)


# --- simulated ----------------------------------------------------------------------------------------------


def replay_simulated(
    recording: Recording,
    options: ReplayOptions,
    *,
    files: ReplayFiles | None = None,
    on_row: OnRow | None = None,
    on_ready: Callable[[Replayer], None] | None = None,
) -> ReplayResult:
    """Replay the steps of several ranks in this process, one rank after the other.

    Raises:
        ConfigError: --optimizer-step with DeepSpeed, whose gradients cannot wait for the next rank.
        RecordingError, ModelError: before the first forward.
    """
    if options.cell.deepspeed and options.optimizer_step:
        raise ConfigError(
            "unsupported-combination: --optimizer-step with DeepSpeed needs real ranks: DeepSpeed reduces "
            "gradients in every backward; give --ranks N without --simulate"
        )
    started, ranks = time.perf_counter(), simulated_ranks(recording, options)
    # The cell is that of one process: nothing of what it computes is distributed.
    options = dataclasses.replace(options, cell=dataclasses.replace(options.cell, ranks=ranks))
    replayer = Replayer(recording, options, files=files)
    state = _Session(replayer=replayer, files=files, on_row=on_row, started=started)
    with state.deadline() as deadline:
        replayer.warm_up(deadline)
    plan = plan_of(recording, replayer.order, options)
    report = diagnose(plan, recording.lengths, zero_stage=_zero_stage(options))
    backend = SimulatedBackend(
        replayer.policy.backend,
        want_gradients=lambda: replayer.outputs is not None and replayer.outputs.wants_gradients,
    )
    replayer.policy.backend = backend
    how = f"{ranks} simulated ranks, one after the other in this process"
    state.begin(*_about(replayer, report, how=how), on_ready=on_ready)
    with state.inputs() as deadline:
        for step in plan.steps:
            for row in _simulated_step(replayer, backend, step, state, deadline):
                state.keep(row)
    if replayer.outputs is not None:
        replayer.outputs.summed = state.summed
    mixed = _mixed_weights(replayer, report)
    extra = {"simulated": True, "notes": state.notes, "desync": None, "mixed_weights": mixed}
    return state.end(_with_ranks(state.summary(), report, extra))


def _simulated_step(
    replayer: Replayer, backend: SimulatedBackend, step: PlannedStep, state: _Session, deadline: Deadline
) -> list[ReplayRow]:
    backend.start()
    own = [(rank, index) for rank, index in enumerate(step.inputs) if index is not None]
    rows: list[ReplayRow] = []
    for position, (rank, index) in enumerate(own):
        backend.last = position == len(own) - 1
        deadline.start(index)
        row = replayer.run(index)
        deadline.stop()
        if row.status != "ok":
            backend.fail()
            state.notes.append(f"step {step.step} has no gradients: rank {rank} failed at input {index}")
        _keep(replayer, index, [i for _, i in own], backend.delivered, state)
        rows.append(dataclasses.replace(row, step=step.step, rank=rank))
    norm = rows[-1].grad_norm if rows and not backend.failed else None
    norm = None if norm is None or math.isnan(norm) else norm
    return [dataclasses.replace(row, grad_norm=norm) for row in rows]


def _keep(replayer: Replayer, index: int, inputs: Sequence[int], delivered: bool, state: _Session) -> None:
    """Correct KeptOutputs, which counts every call: only a step with gradients counts."""
    outputs = replayer.outputs
    if outputs is None or not outputs.summed or outputs.summed[-1] != index:
        return
    if not delivered:
        outputs.summed.pop()
    elif not set(inputs) <= set(state.summed):
        state.summed += inputs


# --- real ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class RankSetup:
    """One rank of a replay: its context and where it writes."""

    ranks: RankContext
    out: Path
    """Every rank writes OUT/rank-N/results.jsonl; the ranks of several machines must share it."""
    files: ReplayFiles | None = None
    """The files of OUT itself, where rank 0 merges the rows by step and rank; None on other ranks."""
    checked: bool = True
    """False (--no-guard): ranks do not agree before a step, so that one without an input really leaves the
    others waiting."""


def replay_ranks(
    recording: Recording,
    options: ReplayOptions,
    *,
    setup: RankSetup,
    on_row: OnRow | None = None,
    on_ready: Callable[[Replayer], None] | None = None,
) -> ReplayResult:
    """Run this rank's part of a replay; every rank calls it. Rank 0's result is that of all ranks.

    Raises:
        ConfigError, RecordingError, ModelError: before the first forward.
        Desync: the ranks differ in what they are about to do.
    """
    started, ranks, files = time.perf_counter(), setup.ranks, setup.files
    options = rank_options(options, ranks)
    guard = Guard(ranks, checked=setup.checked)
    guard.at(-1, "loading the policy")
    own = ReplayFiles(setup.out / f"rank-{ranks.rank}", echo=_nothing)
    replayer = Replayer(recording, options, files=own)
    state = _RankSession(replayer=replayer, files=own, on_row=on_row, started=started)
    with state.deadline() as deadline:
        replayer.warm_up(deadline)
    plan = plan_of(recording, replayer.order, options)
    report = diagnose(plan, recording.lengths, zero_stage=_zero_stage(options))
    backend = RankBackend(
        replayer.policy.backend,
        guard,
        terms={"cell": options.cell.label(), "backward": options.backward, "steps": len(plan.steps)},
        spare=lambda: _spare(replayer),
        zero_stage=_zero_stage(options),
    )
    replayer.policy.backend = backend
    state.steps = len(plan.steps)
    if files is not None:
        for line in [*opening(replayer), *_about(replayer, report, how=ranks.description)]:
            files.line(line)
    guard.exchange(-1, {"weights": replayer.policy.fingerprint}, what="the start", same=("weights",))
    if on_ready is not None:
        on_ready(replayer)
    try:
        _run_steps(replayer, backend, plan, state)
    finally:
        own.close()
    if ranks.rank != 0 and replayer.outputs is not None:
        replayer.outputs.write(own.out)
    result = _merged(replayer, backend, report, state, setup=setup)
    if state.desync is None:
        replayer.close()
    return result


def _run_steps(replayer: Replayer, backend: RankBackend, plan: StepPlan, state: _Session) -> None:
    """Run all steps of this rank, until the ranks are out of step."""
    rank = backend.guard.ranks.rank
    with state.inputs() as deadline:
        for step in plan.steps:
            index = step.inputs[rank]
            if index is not None and state.desync is not None:
                base = replayer._base(index) | {"step": step.step, "rank": rank}
                state.keep(ReplayRow(**base, status="skipped"))
            elif state.desync is None:
                deadline.start(-1 if index is None else index)
                row = _step(replayer, backend, step, state)
                deadline.stop()
                if row is not None:
                    state.keep(row)


def _step(replayer: Replayer, backend: RankBackend, step: PlannedStep, state: _Session) -> ReplayRow | None:
    """Run one step of this rank; None: it has no input."""
    rank, options = backend.guard.ranks.rank, replayer.options
    index, row = step.inputs[rank], None
    backend.start(step)
    if index is not None:
        row = replayer.run(index)
        row = dataclasses.replace(row, step=step.step, rank=rank)
        if row.status != "ok" and backend.desync is None:
            line = row.error["line"] if row.error is not None else row.status
            with contextlib.suppress(Desync):  # kept by the backend
                backend.report_failure(line)
        if backend.desync is not None:
            row = dataclasses.replace(row, status="desync")
    elif backend.guard.checked:
        try:
            backend.without_input(replayer.loss, backward=options.backward)
            if options.backward:
                replayer._after_backward(-1)  # the same collectives as after an input
        except (Desync, PeerFailed):  # both are kept by the backend
            replayer.policy.backend.drop_gradients()
    state.desync = backend.desync
    state.notes += backend.notes
    inputs = [i for i in step.inputs if i is not None]
    _keep(replayer, -1 if index is None else index, inputs, backend.delivered, state)
    if row is not None and row.grad_norm is not None and math.isnan(row.grad_norm) and backend.dropped:
        row = dataclasses.replace(row, grad_norm=None)
    return row


def _spare(replayer: Replayer) -> PackedBatch:
    """The smallest input, for ranks that have none."""
    lengths = replayer.recording.lengths
    smallest = min(replayer.order, key=lambda index: (sum(lengths[index]), index))
    return replayer.bucketing.fit(replayer.recording[smallest].batch)


# --- results of all -----------------------------------------------------------------------------------------


def _merged(
    replayer: Replayer,
    backend: RankBackend,
    report: PlanReport,
    state: _Session,
    *,
    setup: RankSetup,
) -> ReplayResult:
    """Exchange what each rank has done; rank 0 merges it into one result."""
    guard, ranks, out, files = backend.guard, setup.ranks, setup.out, setup.files
    ended_early = state.desync is not None or state.interrupted
    guard.at(report.steps[-1].step + 1, "the end")
    own_state = {
        "matches": dict(replayer.matches),
        "peak": replayer.memory.overall,
        "recompiles": replayer.recompiles,
        "notes": state.notes,
        "desync": None if state.desync is None else str(state.desync),
        "interrupted": state.interrupted,
    }
    # One that waits in a collective must be able to give up, and say so, before the others leave.
    farewell = Guard(ranks, seconds=_FAREWELL_SECONDS if ended_early else 2 * guard.seconds + 10)
    try:
        states: Sequence[dict[str, Any] | None] = farewell.exchange(0, own_state, what="the end", name="end")
    except Desync as missing:
        states = [own_state if rank == ranks.rank else None for rank in range(ranks.world_size)]
        state.desync = state.desync or missing
        own_state["desync"] = str(state.desync)
    if files is not None:
        state.rows = _rows_of_all(out, ranks.world_size)
        _take_over(replayer, [other for other in states[1:] if other is not None])
        for row in state.rows:
            files.row(row)
        if replayer.outputs is not None:
            replayer.outputs.summed = state.summed
            _merge_logprobs(replayer, out, ranks.world_size)
            replayer.outputs.write(out)
    state.interrupted |= any(other is not None and other["interrupted"] for other in states)
    present = [other for other in states if other is not None]
    extra: dict[str, Any] = {
        "simulated": False,
        "guard": guard.checked,
        "statement": ranks.description,
        "notes": list(dict.fromkeys(note for other in present for note in other["notes"])),
        "mixed_weights": _mixed_weights(replayer, report),
        "desync": next((other["desync"] for other in present if other["desync"]), own_state["desync"]),
    }
    summary = _with_ranks(state.summary(), report, extra)
    if files is not None:
        for note in extra["notes"]:
            files.line(note)
        if extra["desync"]:
            files.line(str(extra["desync"]))
        files.summary(summary)
    return state.result(summary)


def _take_over(replayer: Replayer, others: Sequence[dict[str, Any]]) -> None:
    """Add the other ranks' figures to the replayer, from which the summary takes them."""
    for other in others:
        replayer.matches += Counter(other["matches"])
        replayer.memory.overall = max(replayer.memory.overall, other["peak"])
        replayer.recompiles += other["recompiles"]


def _rows_of_all(out: Path, world_size: int) -> list[ReplayRow]:
    """All ranks' rows by step and rank, including what a rank that has gone had written."""
    rows = []
    for rank in range(world_size):
        path = out / f"rank-{rank}" / "results.jsonl"
        lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
        for line in lines:
            row = _ROW.validate_json(line)
            if row.error is not None and row.error["log"]:
                error = {**row.error, "log": f"rank-{rank}/{row.error['log']}"}
                row = dataclasses.replace(row, error=error)
            rows.append(row)
    return sorted(rows, key=lambda row: (row.step, row.rank))


def _merge_logprobs(replayer: Replayer, out: Path, world_size: int) -> None:
    from safetensors.torch import load_file

    assert replayer.outputs is not None
    for rank in range(1, world_size):
        path = out / f"rank-{rank}" / "outputs.safetensors"
        for name, value in (load_file(path) if path.exists() else {}).items():
            kind, _, index = name.partition("/")
            if kind == "logprobs":
                replayer.outputs.logprobs[int(index)] = value


def _about(replayer: Replayer, report: PlanReport, *, how: str) -> list[str]:
    """Lines about the ranks and what their steps would do in a job."""
    mixed = _mixed_weights(replayer, report)
    about = [
        f"mixed weights in {mixed} of {len(report.steps)} steps: the inputs of one step ran with different "
        "stored weights, each with its own, and their gradients are added up all the same: a sum that no job "
        "computes"
    ]
    return [how, *report.lines(), *(about if mixed else [])]


def _mixed_weights(replayer: Replayer, report: PlanReport) -> int:
    """The number of steps whose gradients are summed over inputs with different weights."""
    if not replayer.options.backward:
        return 0
    metas, policy = replayer.recording.metas, replayer.policy
    inputs = ([index for index in step.inputs if index is not None] for step in report.steps)
    return sum(len({policy.weights_of(metas[index]) for index in own}) > 1 for own in inputs)


def _with_ranks(summary: dict[str, Any], report: PlanReport, extra: dict[str, Any]) -> dict[str, Any]:
    """Add the figures about ranks to a summary and to its verdict."""
    count, kinds = report.ranks, ", ".join(finding.kind for finding in report.findings)
    about = f"{count} {'simulated ' if extra['simulated'] else ''}ranks"
    verdict = f"{summary['verdict']}; {about}, {f'in a job: {kinds}' if kinds else 'nothing to diagnose'}"
    if extra["mixed_weights"]:
        verdict += f"; gradients of {counted(extra['mixed_weights'], 'step')} are sums over DIFFERENT weights"
    if extra["desync"]:
        verdict += "; the ranks got OUT OF STEP"
    return summary | {"ranks": report.to_json() | extra, "verdict": verdict}


def _zero_stage(options: ReplayOptions) -> int | None:
    cell = options.cell
    return (1 if cell.zero_stage is None else cell.zero_stage) if cell.deepspeed else None


def _nothing(_: str) -> None:
    pass
