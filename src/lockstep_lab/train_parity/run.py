"""`lockstep parity train`: every stack in processes of its own, from the same weights, data order and seed.

data ─► OUT/inputs (one recording) ─► job.json per stack ─► ranks ─► metrics, logprobs ─► table and verdict
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from lockstep.config.ppo import ValueConfig
from lockstep.config.support import check_backend, check_support
from lockstep.config.train import TrainConfig, token_slots
from lockstep.errors import ConfigError, LockstepError
from lockstep.observe.files import read_plain
from lockstep_lab.loss_curves.differences import falls
from lockstep_lab.suite.job_files import RANK_LOGS, Options, read_lines, same_fields
from lockstep_lab.suite.process import line_that_matters, read_tail
from lockstep_lab.suite.run import Suite, check_folder, how_it_ended, make_folder
from lockstep_lab.train_parity.compare import compare
from lockstep_lab.train_parity.job import (
    INPUTS,
    METRICS,
    REPORT,
    VALUE_INPUTS,
    InputsReport,
    InputsSettings,
    InputsSpec,
    Outcome,
    ParityJob,
    Role,
    StepRow,
)
from lockstep_lab.train_parity.result import ParityResult, StackResult, judge, learning, row_name
from lockstep_lab.train_parity.stacks import Stack, skipped

WORKER = ("-m", "lockstep_lab.train_parity.worker")
INPUTS_WORKER = ("-m", "lockstep_lab.train_parity.inputs")
"""Arguments of the interpreter that run a job file."""
INPUT_SECONDS = 1800.0
"""Deadline of reading and packing the data."""
_MOST_RANKS = 4
"""The most ranks of a stalled stack whose positions are reported."""
_BEHIND_LAUNCHER = 60.0
"""Seconds after the deadline, at which the launcher ends its ranks, until the launcher is killed itself."""


class ParityOptions(Options, InputsSettings):
    """The stacks to compare, and on what; `timeout` is that of each stack."""

    stacks: Sequence[Stack]
    reference: Stack
    train: TrainConfig
    """The settings that all stacks share: lr, optimizer, schedule, ..."""
    log_dir: Path | None = None
    """None: OUT/logs."""
    skip: Sequence[str] = ()
    gpus: int | None = None
    """Ranks of every stack; None: `default_ranks`, or what a stack needs at least."""
    default_ranks: int = 2
    threshold: float = 0.05
    must_fall: bool = True
    gradients: bool = False
    notes: Sequence[str] = ()


class _Suite(Suite[tuple[Stack, Role], StackResult, ParityResult]):
    """The run under way; the reference comes first."""

    options: ParityOptions

    def __init__(self, options: ParityOptions, progress: Callable[[StackResult, int, int], None]) -> None:
        super().__init__(options, "parity", progress=progress)
        self.logs = (options.log_dir or options.out / "logs").resolve()
        chosen = [stack for stack in options.stacks if stack.name != options.reference.name]
        self.stacks = [options.reference, *chosen]
        roles: tuple[Role, ...] = ("policy", "value") if options.algorithm == "ppo" else ("policy",)
        self.parts = [(stack, role) for role in roles for stack in self.stacks]
        self._static = True if any(stack.execution != "eager" for stack in self.stacks) else None

    # --- inputs ---------------------------------------------------------------------------------------------

    def make_inputs(self) -> InputsReport:
        """Make the recording that all stacks are fed, in a process of its own."""
        options = self.options
        ranks = max([self._ranks(stack) or 1 for stack in self.stacks])
        own = {
            "recording": None if options.recording is None else options.recording.resolve(),
            "min_packs": ranks,
            "token_budget": token_slots(options.train.token_budget),
            "max_length": min(options.max_length, token_slots(options.train.token_budget)),
            "static_capacity": bool(self._static),
            "out": self.out,
        }
        spec = InputsSpec(**same_fields(InputsSpec, options) | own)
        log = self.logs / "inputs.log"
        exit_status = self.work(INPUTS_WORKER, spec, log=log, timeout=INPUT_SECONDS)
        if exit_status.returncode != 0:
            why = line_that_matters(read_tail(log)).removeprefix("parity inputs worker: ")
            raise ConfigError(
                f"process-died: the inputs could not be made: {why or exit_status.describe()} (log: {log})"
            )
        return InputsReport.model_validate_json(read_plain(self.out / REPORT, ConfigError))

    def _ranks(self, stack: Stack) -> int | None:
        try:
            return stack.ranks_for(self.options.gpus, default=self.options.default_ranks)
        except ConfigError:
            return None

    # --- one stack ------------------------------------------------------------------------------------------

    def run(self, part: tuple[Stack, Role]) -> StackResult:
        """Run one stack and compare its row with the reference's."""
        return self._judged(self._row(*part))

    def _row(self, stack: Stack, role: Role) -> StackResult:
        is_reference = stack.name == self.options.reference.name
        base: dict[str, Any] = {"name": row_name(stack.name, role), "role": role}
        word = skipped(stack, self.options.skip)
        if word is not None and not is_reference:
            return StackResult(status="skipped", reason=f"skipped: {word}", **base)
        base["is_reference"] = is_reference
        stem = stack.log_stem if role == "policy" else f"{stack.log_stem}_{role}"
        folder = self.out / stem
        log = self.logs / f"{stem}_test.log"
        try:
            job = self._job(stack, role, folder)
        except LockstepError as error:
            return StackResult(status="refused", reason=str(error), **base)
        base |= {"ranks": job.ranks, "folder": folder.name, "log": str(log)}
        # The launcher ends its ranks at the deadline, and is killed itself if it does not.
        exit_status = self.work(WORKER, job, log=log, timeout=job.timeout + _BEHIND_LAUNCHER)
        rows, outcome = tuple(read_lines(folder / METRICS, StepRow)), Outcome.read(folder)
        base |= {"rows": rows, "seconds": exit_status.seconds}
        if outcome is not None:
            base |= {name: getattr(outcome, name) for name in ("attention", "dtype", "statement")}
        status, reason = how_it_ended(
            exit_status,
            outcome,
            log=log,
            timeout=self.options.timeout,
            where=lambda: where_it_was(folder / RANK_LOGS),
        )
        base["falls"] = falls(self._gains(rows, role)) if status == "ok" else None
        return StackResult(status=status, reason=reason, **base)

    def _job(self, stack: Stack, role: Role, folder: Path) -> ParityJob:
        options, ranks = self.options, stack.ranks_for(self.options.gpus, default=self.options.default_ranks)
        settings = {"device": options.device, "static_capacity": self._static, **stack.train_settings()}
        train = options.train.model_copy(update=settings)
        job = ParityJob(
            stack=row_name(stack.name, role),
            ranks=ranks,
            device=options.device,
            model=options.model if role == "policy" else ValueConfig().model(options.model),
            train=TrainConfig.model_validate(train.model_dump()),
            inputs=self.out / (INPUTS if role == "policy" else VALUE_INPUTS),
            steps=self.report.steps,
            out=folder,
            timeout=options.timeout,
            wait=max(30.0, min(options.timeout / 2, 300.0)),
            gradients_at=(0, len(self.report.steps) - 1) if options.gradients else (),
        )
        if role == "value" and job.train.execution == "deepcompile":
            raise ConfigError(
                f"unsupported-combination: stack {stack.name!r}: its graph contains the policy's head, but a "
                "value model has another head; leave deepcompile out with --algorithm ppo",
                setting="--stacks",
            )
        check_backend(job.train, lora=False)
        check_support(job)
        folder.mkdir()
        return job

    def _gains(self, rows: Sequence[Any], role: Role) -> list[float]:
        """Losses that are comparable over steps: GRPO's and PPO's, of different rollouts, less their starting
        losses."""
        report = self.report
        base = (report.baselines if role == "policy" else report.value_baselines) or [0.0] * len(rows)
        return [row.loss - start for row, start in zip(rows, base, strict=False)]

    # --- all of them ----------------------------------------------------------------------------------------

    def run_all(self) -> ParityResult:
        """Make the inputs, then run all stacks."""
        self.report = self.make_inputs()
        return super().run_all()

    def _judged(self, row: StackResult) -> StackResult:
        reference = next((other for other in self.results if other.role == row.role), row)
        if not row.is_reference and row.rows:
            comparison = compare(
                row.rows,
                reference.rows,
                folders=(self.out / row.folder, self.out / reference.folder),
                relative_to_loss=row.role == "value" or self.options.algorithm not in ("grpo", "ppo"),
            )
            row = dataclasses.replace(row, comparison=comparison)
        problems = judge(
            row,
            threshold=self.options.threshold,
            steps=len(self.report.steps),
            reference_ran=bool(reference.rows),
        )
        return dataclasses.replace(row, problems=problems, learning=learning(row, reference))

    def result(self) -> ParityResult:
        """The result so far."""
        options = self.options
        return ParityResult(
            stacks=tuple(self.results),
            reference=options.reference.name,
            threshold=options.threshold,
            algorithm=options.algorithm,
            settings=self._settings(),
            notes=(*options.notes, *self.report.notes),
            must_fall=options.must_fall,
            **self.facts(),
        )

    def _settings(self) -> Mapping[str, Any]:
        options, report, train = self.options, self.report, self.options.train
        ran = next((row for row in self.results if row.dtype), None)
        return {
            "model": options.model.name,
            "data": report.source,
            "steps": len(report.steps),
            "documents": f"{report.documents}, {options.batch_size} a step",
            "tokens": f"{report.tokens:,}, {report.trained_tokens:,} of them trained on",
            "optimizer": f"{train.optimizer}, lr {train.lr:g}, {train.schedule}",
            "dtype": ran.dtype if ran else options.model.dtype,
            "attention": ran.attention if ran else train.attention,
            "seed": options.seed,
        }


def run_parity(
    options: ParityOptions, *, progress: Callable[[StackResult, int, int], None] = lambda *_: None
) -> ParityResult:
    """Train every stack and compare them with the reference.

    A stack that crashes, hangs or is refused is a row with its reason.

    Args:
        progress: called with each row, its number, and how many there are.

    Raises:
        ConfigError: the inputs cannot be made, OUT holds something, or this process is a rank itself.
    """
    check_folder(options.out, "parity", name="--out (OUTPUT_DIR)")
    make_folder(options.out, "--out (OUTPUT_DIR)")
    make_folder(options.log_dir or options.out / "logs", "--log-dir (LOG_DIR)")
    return _Suite(options, progress).run_all()


def where_it_was(folder: Path) -> str:
    """ "; rank 0 was in NAME (FILE:LINE); rank 1 was in ...", from what ranks write before the deadline."""
    frames: dict[int, str] = {}
    for path in folder.glob("rank-*.log"):
        text = read_tail(path)
        start = text.rfind("Timeout (")
        if start < 0:
            continue
        # the main thread comes last, its innermost frame first
        thread = text.find("most recent call first", text.rfind("\nThread", start))
        frame = re.search(r'File "([^"]+)", line (\d+) in (\S+)', text[max(thread, start) :])
        if frame:
            rank = int(re.sub(r"\D", "", path.name) or 0)
            frames[rank] = f"rank {rank} was in {frame[3]} ({Path(frame[1]).name}:{frame[2]})"
    texts = [frames[rank] for rank in sorted(frames)[:_MOST_RANKS]]
    return "".join(f"; {text}" for text in texts)
