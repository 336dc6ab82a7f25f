"""One stack of a parity run: `python -m lockstep.lab.train_parity.worker JOB.json` (see job.py).

Started once it starts the ranks; each rank runs the same loop over TrainBackend and nothing else. Exit
status 0: all steps are done; 2: refused before the first; 1: anything else; 124: out of time.
"""

from __future__ import annotations

import faulthandler
import json
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TextIO

from lockstep.errors import ConfigError, ModelError
from lockstep.lab.suite.job_files import RANK_LOGS, RESULT, read_job_file
from lockstep.lab.suite.worker import (
    REFUSED,
    failure,
    job_path,
    leave_with,
    run_job,
    says_it_already,
    watch,
)
from lockstep.lab.train_parity.job import LOGPROBS, METRICS, Outcome, ParityJob, StepRow
from lockstep.observe.files import jsonable
from lockstep.observe.text import echo
from lockstep.ranks.launch import in_launcher, launch_command

if TYPE_CHECKING:
    from torch import Tensor

    from lockstep.models.load import LoadedModel
    from lockstep.models.scalar import HeadKind
    from lockstep.protocols import TrainBackend
    from lockstep.protocols.train import StepStats, TokenLoss
    from lockstep.ranks.context import RankContext
    from lockstep.schema.batch import PackedBatch

MODULE = "lockstep.lab.train_parity.worker"


def main(argv: Sequence[str] | None = None) -> int:
    """Run the job; return the exit status."""
    path = job_path(argv, MODULE)
    if path is None:
        return REFUSED
    job = read_job_file(path, ParityJob)
    if not in_launcher():
        command = [sys.executable, "-u", "-m", MODULE, str(path)]
        return launch_command(command, ranks=job.ranks, timeout=job.timeout, log_dir=job.out / RANK_LOGS)
    return run_rank(job)


def run_rank(job: ParityJob) -> int:
    """Run this rank's part of the job."""
    from lockstep.ranks.context import init_ranks

    run = _Run(job)

    def work() -> None:
        with init_ranks(device=job.device, seconds=job.wait) as ranks:
            run.ranks = ranks
            run.load()
            run.train()
            run.close()

    watch(job.timeout)
    try:
        refuses = (ConfigError, ModelError)
        return run_job(work, give_up=run.give_up, refuses=lambda: () if run.rows else refuses)
    finally:
        faulthandler.cancel_dump_traceback_later()


@dataclass
class _Run:
    """A rank's state."""

    job: ParityJob
    rows: list[StepRow] = field(default_factory=list)
    load_seconds: float = 0.0
    attention: str = ""
    dtype: str = ""
    ranks: RankContext | None = None
    logprobs: dict[str, Tensor] = field(default_factory=dict)
    file: TextIO | None = None

    # --- loading --------------------------------------------------------------------------------------------

    def load(self) -> None:
        """Load the model, its backend, the recording and its loss."""
        import torch

        from lockstep.lab.replay.losses import token_loss
        from lockstep.lab.replay.policy import model_head
        from lockstep.recording import Recording
        from lockstep.train import BACKENDS

        started, job = time.perf_counter(), self.job
        assert self.ranks is not None
        if job.threads is not None:
            torch.set_num_threads(job.threads)
        torch.manual_seed(job.model.seed)
        kind = BACKENDS.load(job.train.backend)
        self.device = self.ranks.device
        self.recording = Recording.open(job.inputs)
        model = self._model(shards=kind.shards_weights, head=model_head(self.recording.header))
        self.loss: TokenLoss = token_loss(self.recording.header, "recorded")
        settings = {"device": self.device.type, "attention": self.attention}
        self.backend: TrainBackend = kind(
            job.train.model_copy(update=settings),
            model=model,
            total_steps=job.total_steps or len(job.steps),
            temperature=self.recording.header.temperature,
        )
        if job.load is not None:
            self.backend.load(job.load)
        if self._first:
            self.file = (job.out / METRICS).open("w", encoding="utf-8")
        self.load_seconds = time.perf_counter() - started
        self.say(f"{job.stack}: {self.ranks.description}; {self.attention}, {self.dtype}")

    def _model(self, *, shards: bool, head: HeadKind) -> LoadedModel:
        from lockstep.loop.axes import resolve_attention
        from lockstep.models.dtypes import resolve_dtype
        from lockstep.models.load import load_model
        from lockstep.models.quiet import quiet_transformers

        dtype = resolve_dtype(self.job.model.dtype, self.device)
        self.dtype = str(dtype).removeprefix("torch.")
        attention = self.job.train.attention
        self.attention = resolve_attention(attention, device=self.device.type, dtype=self.dtype)
        options: dict[str, Any] = {"materialize": False} if shards else {}
        with quiet_transformers():
            return load_model(
                self.job.model, attention=self.attention, device=self.device, head=head, **options
            )

    # --- training -------------------------------------------------------------------------------------------

    def train(self) -> None:
        """Take every step; rank 0 writes the rows."""
        for step, indices in enumerate(self.job.steps):
            batches = [self.recording[index].batch for index in indices]
            tokens = sum(batch.num_tokens for batch in batches)
            started = self._clock()
            stats = self.backend.forward_backward(batches, self.loss)
            if step in self.job.gradients_at:
                self._keep_gradients(step)
            update = self.backend.optimizer_step()
            seconds = self._clock() - started
            row = StepRow(
                step=step + 1,
                loss=float(sum(float(loss) for loss in stats.losses)),
                grad_norm=update["grad_norm"],
                lr=update["lr"],
                tokens=tokens,
                seconds=seconds,
                tokens_per_second=tokens / seconds,
                peak_memory_bytes=self._peak_memory(),
            )
            self._report_step(row, batches, stats)
        if self.job.save is not None:
            self.backend.save(self.job.save)()

    def _report_step(self, row: StepRow, batches: Sequence[PackedBatch], stats: StepStats) -> None:
        self.rows.append(row)
        if not self._first:
            return
        assert self.file is not None
        self.file.write(json.dumps(jsonable(row.model_dump()), allow_nan=False) + "\n")
        self.file.flush()
        if self.job.keep_logprobs:
            self.logprobs[f"step-{row.step - 1:06d}"] = trained_logprobs(batches, stats)
        self.say(
            f"step {row.step}/{len(self.job.steps)} loss: {row.loss:.8g} grad_norm: {row.grad_norm:.8g} "
            f"lr: {row.lr:.4g} tokens/s: {row.tokens_per_second:,.0f} ms: {1000 * row.seconds:.1f}"
        )

    def _keep_gradients(self, step: int) -> None:
        """Gather the gradients (collective); rank 0 writes the file."""
        from safetensors.torch import save_file

        gradients: dict[str, Tensor] = self.backend.gradients()  # type: ignore[attr-defined]
        if self._first:
            save_file(
                {name: g.contiguous() for name, g in gradients.items()},
                self.job.out / f"gradients-{step:06d}.safetensors",
            )

    def _clock(self) -> float:
        if self.device.type == "cuda":
            import torch

            torch.cuda.synchronize(self.device)
        return time.perf_counter()

    def _peak_memory(self) -> int:
        """The largest peak of all ranks, bytes."""
        import torch
        import torch.distributed as dist

        from lockstep.observe.memory import peak_rss_bytes

        assert self.ranks is not None
        cuda = self.device.type == "cuda"
        own = torch.cuda.max_memory_allocated(self.device) if cuda else peak_rss_bytes()
        peak = torch.tensor([own], dtype=torch.int64)
        dist.all_reduce(peak, op=dist.ReduceOp.MAX, group=self.ranks.control)
        return int(peak[0])

    # --- the end --------------------------------------------------------------------------------------------

    @property
    def _first(self) -> bool:
        return self.ranks is not None and self.ranks.rank == 0

    def say(self, text: str) -> None:
        """Print a line on rank 0."""
        if self._first:
            echo(text, flush=True)

    def close(self) -> None:
        """Flush the rows to disk."""
        self.backend.close()
        if self._first:
            self._write_logprobs()
            self._outcome("ok").write(self.job.out)

    def give_up(self, status: str, error: Exception) -> None:
        """Write what there is, and why it is not more. Called on any rank."""
        self.say(f"{self.job.stack}: {status}: {error}")
        if says_it_already(self.job.out / RESULT, error, first=self._first):
            return
        outcome = self._outcome(status).model_copy(update=failure(status, error))
        if self._first:
            self._write_logprobs()
        outcome.write(self.job.out)

    def _outcome(self, status: Any) -> Outcome:
        from lockstep.lab.suite.machine import versions

        return Outcome(
            status=status,
            steps=len(self.rows),
            seconds=sum(row.seconds for row in self.rows),
            load_seconds=self.load_seconds,
            peak_memory_bytes=self.rows[-1].peak_memory_bytes if self.rows else 0,
            statement="" if self.ranks is None else self.ranks.description,
            attention=self.attention,
            dtype=self.dtype,
            versions=versions(),
        )

    def _write_logprobs(self) -> None:
        from safetensors.torch import save_file

        if self.logprobs:
            save_file(self.logprobs, self.job.out / LOGPROBS)
        if self.file is not None:
            self.file.close()


def trained_logprobs(batches: Sequence[PackedBatch], stats: StepStats) -> Tensor:
    """[trained tokens] float32 on the host, in the order of the micro-batches."""
    import torch

    per_batch = [
        logprobs.cpu()[batch.loss_mask] for batch, logprobs in zip(batches, stats.logprobs, strict=True)
    ]
    return torch.cat(per_batch).to(torch.float32)


if __name__ == "__main__":
    leave_with(main, "parity")
