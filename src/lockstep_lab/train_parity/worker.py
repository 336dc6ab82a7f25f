"""One stack of a parity run: `python -m lockstep_lab.train_parity.worker JOB.json` (see job.py).

Started once it starts the ranks; each rank runs the same loop over TrainBackend and nothing else. Exit
status 0: all steps are done; 2: refused before the first; 1: anything else; 124: out of time.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from lockstep_lab.suite.worker import Worker, append_rows, clock, leave_with, watched
from lockstep_lab.train_parity.job import LOGPROBS, METRICS, Outcome, ParityJob, StepRow

if TYPE_CHECKING:
    from torch import Tensor

    from lockstep.protocols import TrainBackend
    from lockstep.protocols.train import StepStats, TokenLoss
    from lockstep.schema.batch import PackedBatch


class Stack(Worker[ParityJob]):
    """A rank's state."""

    MODULE = "lockstep_lab.train_parity.worker"
    OUTCOME = Outcome

    def __init__(self, job: ParityJob) -> None:
        super().__init__(job)
        self.rows: list[StepRow] = []
        self.load_seconds = 0.0
        self.attention = self.dtype = ""
        self.logprobs: dict[str, Tensor] = {}

    @property
    def name(self) -> str:
        return self.job.stack

    def launch(self) -> tuple[int, float | None]:
        return self.job.ranks, self.job.timeout

    def work(self) -> None:
        """Load the model, take every step, write what there is."""
        from lockstep.ranks.context import init_ranks

        job = self.job
        with watched(job.timeout), init_ranks(device=job.device, seconds=job.wait) as self.ranks:
            self.load()
            self.train()
            self.backend.close()
            if self.is_first:
                self.end("ok")

    # --- loading --------------------------------------------------------------------------------------------

    def load(self) -> None:
        """Load the model, its backend, the recording and its loss."""
        import torch

        from lockstep.recording import Recording
        from lockstep.train import BACKENDS
        from lockstep_lab.replay.losses import token_loss
        from lockstep_lab.replay.policy import model_head
        from lockstep_lab.suite.model import load_policy

        started, job = time.perf_counter(), self.job
        if job.threads is not None:
            torch.set_num_threads(job.threads)
        torch.manual_seed(job.model.seed)
        kind = BACKENDS.load(job.train.backend)
        self.device = self.ranks.device
        self.recording = Recording.open(job.inputs)
        options: dict[str, Any] = {"materialize": False} if kind.shards_weights else {}
        head = model_head(self.recording.header)
        model, self.attention = load_policy(
            job.model, job.train.attention, device=self.device, head=head, **options
        )
        self.dtype = str(model.dtype).removeprefix("torch.")
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
        if self.is_first:
            (job.out / METRICS).unlink(missing_ok=True)
        self.load_seconds = time.perf_counter() - started
        self.say(f"{job.stack}: {self.ranks.description}; {self.attention}, {self.dtype}")

    # --- training -------------------------------------------------------------------------------------------

    def train(self) -> None:
        """Take every step; rank 0 writes the rows."""
        for step, indices in enumerate(self.job.steps):
            batches = [self.recording[index].batch for index in indices]
            tokens = sum(batch.num_tokens for batch in batches)
            started = clock(self.device)
            stats = self.backend.forward_backward(batches, self.loss)
            if step in self.job.gradients_at:
                self._keep_gradients(step)
            update = self.backend.optimizer_step()
            seconds = clock(self.device) - started
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
        self.begun = True
        if not self.is_first:
            return
        append_rows(self.job.out / METRICS, [row])
        if self.job.keep_logprobs:
            self.logprobs[f"step-{row.step - 1:06d}"] = trained_logprobs(batches, stats)
        self.say(
            f"step {row.step}/{len(self.job.steps)} loss: {row.loss:.8g} grad_norm: {row.grad_norm:.8g} "
            f"lr: {row.lr:.4g} tokens/s: {row.tokens_per_second:,.0f} ms: {1000 * row.seconds:.1f}"
        )

    def _keep_gradients(self, step: int) -> None:
        """Gather the gradients (collective); rank 0 writes the file."""
        from lockstep.observe.tensor_file import save_tensors

        gradients: dict[str, Tensor] = self.backend.gradients()  # type: ignore[attr-defined]
        if self.is_first:
            save_tensors(
                {name: g.contiguous() for name, g in gradients.items()},
                self.job.out / f"gradients-{step:06d}.safetensors",
            )

    def _peak_memory(self) -> int:
        """The largest peak of all ranks, bytes."""
        import torch

        from lockstep.observe.memory import peak_rss_bytes

        cuda = self.device.type == "cuda"
        own = torch.cuda.max_memory_allocated(self.device) if cuda else peak_rss_bytes()
        return max(self.ranks.gather(own, int, what="memory"))

    # --- the end --------------------------------------------------------------------------------------------

    def end(self, status: str, reason: str = "", **facts: Any) -> None:
        """Write the outcome and the logprobs."""
        if self.logprobs:
            from lockstep.observe.tensor_file import save_tensors

            save_tensors(self.logprobs, self.job.out / LOGPROBS)
        super().end(status, reason, **facts)

    def facts(self) -> dict[str, Any]:
        return {
            "steps": len(self.rows),
            "seconds": sum(row.seconds for row in self.rows),
            "load_seconds": self.load_seconds,
            "peak_memory_bytes": self.rows[-1].peak_memory_bytes if self.rows else 0,
            "statement": self.ranks.description if hasattr(self, "ranks") else "",
            "attention": self.attention,
            "dtype": self.dtype,
        }


def trained_logprobs(batches: Sequence[PackedBatch], stats: StepStats) -> Tensor:
    """[trained tokens] float32 on the host, in the order of the micro-batches."""
    import torch

    per_batch = [
        logprobs.cpu()[batch.loss_mask] for batch, logprobs in zip(batches, stats.logprobs, strict=True)
    ]
    return torch.cat(per_batch).to(torch.float32)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the job; return the exit status."""
    return Stack.main(ParityJob, argv)


if __name__ == "__main__":
    leave_with(main, "parity")
