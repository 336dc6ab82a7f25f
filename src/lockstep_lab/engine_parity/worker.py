"""One engine of `lockstep parity engines`: `python -m lockstep_lab.engine_parity.worker JOB.json`.

model ─► local backend (the trainer) ─► push ─► generate ─► change weights ─► push ─► generate
                    └──── logprobs of every completion ◄────────────────────┘

Exit status 0: done; 2: refused; 1: anything else. What was seen is in the folder that the job names
(lockstep_lab.engine_parity.job).
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from lockstep_lab.engine_parity.job import PASSES, ROWS, EnginesJob, Kind, Outcome, Pass, Phase, Row
from lockstep_lab.suite.worker import Worker, append_rows, leave_with, watched

if TYPE_CHECKING:
    from lockstep.protocols import InferenceEngine, WeightTransfer
    from lockstep.schema.rollout import Completion
    from lockstep_lab.engine_parity.requests import Batch, PromptRequest
    from lockstep_lab.engine_parity.trainer import Trainer


class Engine(Worker[EnginesJob]):
    """The worker's state."""

    MODULE = "lockstep_lab.engine_parity.worker"
    OUTCOME = Outcome
    engine: InferenceEngine
    trainer: Trainer
    transfer: WeightTransfer

    def __init__(self, job: EnginesJob) -> None:
        super().__init__(job)
        self.known: dict[str, Any] = {}
        """Fields of the Outcome."""
        self.greedy: list[tuple[PromptRequest, Completion]] = []
        """Greedy completions of the first phase."""

    @property
    def name(self) -> str:
        return self.job.name

    def facts(self) -> dict[str, Any]:
        return self.known

    def work(self) -> None:
        """Load, generate, update the weights, generate again."""
        with watched(self.job.timeout):
            self.load()
            self.generate_all("before")
            if self.job.update:
                self.update()
                self.generate_all("after")
            self.end("ok")

    def run(self) -> int:
        """Do the job; stop a server that was started."""
        try:
            return super().run()
        finally:
            if hasattr(self, "engine"):
                self.engine.close()

    def say(self, text: str) -> None:
        """Print a line into the log."""
        super().say(f"{self.name}: {text}")

    # --- loading --------------------------------------------------------------------------------------------

    def load(self) -> None:
        """Load the trainer and the engine, and push the first weights."""
        from lockstep.engine.build import is_external, make_engine
        from lockstep.transfer import make_transfer
        from lockstep_lab.engine_parity.trainer import Trainer, make_engine_spec

        job = self.job
        self.trainer = Trainer(job)
        self.known |= self.trainer.facts()
        model, device = self.trainer.model, self.trainer.device
        self.say(f"trainer: {job.model.name}, {self.known['attention']}, {self.known['dtype']}, {device}")
        spec = make_engine_spec(job, model, device=device) if is_external(job.engine) else None
        started = time.perf_counter()
        self.engine = make_engine(job.engine, model=model, spec=spec)
        self.known["start_seconds"] = time.perf_counter() - started
        self.say(f"engine {job.engine.name}: started in {self.known['start_seconds']:.1f} s")
        self.transfer = make_transfer(job.engine, self.engine, device=device, work_dir=job.out / "engine")
        self._describe()
        if job.weights == "pushed":
            self.push(1)

    def push(self, policy_version: int) -> None:
        """Push the trainer's weights into the engine."""
        started = time.perf_counter()
        self.transfer.push(self.trainer.backend, self.engine, policy_version=policy_version)
        seconds = time.perf_counter() - started
        self.known["push_seconds"] = (*self.known.get("push_seconds", ()), seconds)
        self.say(f"weights: version {policy_version} pushed in {seconds:.2f} s")

    def update(self) -> None:
        """Change the weights in the trainer, measure the effect, and push them into the engine."""
        before = [c for _, c in self.greedy]
        old = self.trainer.logprobs(self.greedy, temperature=1.0)
        self.trainer.perturb(self.job.update_scale)
        new = self.trainer.logprobs(self.greedy, temperature=1.0)
        moved = [abs(a - b) for x, y in zip(old, new, strict=True) for a, b in zip(x, y, strict=True)]
        self.known["update_effect"] = sum(moved) / len(moved) if moved else None
        self.say(f"update: the trainer's logprobs of {len(before)} completions have moved")
        self.push(2 if self.job.weights == "pushed" else 1)

    # --- passes ---------------------------------------------------------------------------------------------

    def generate_all(self, phase: Phase) -> None:
        """Run every pass of one phase."""
        from lockstep_lab.engine_parity.requests import alone, greedy, other, sampled, stop

        job = self.job
        self.begun = True
        first = self.generate(phase, "greedy", [greedy(job)])
        if phase == "before":
            self.greedy = first
        if not job.ignore_eos:
            self.generate(phase, "stop", [stop(job, first)])
        self.generate(phase, "sampled", [sampled(job)])
        self.generate(phase, "again", [sampled(job)])
        self.generate(phase, "alone", alone(job))
        self.generate(phase, "other", [other(job)])

    def generate(
        self, phase: Phase, kind: Kind, batches: Sequence[Batch]
    ) -> list[tuple[PromptRequest, Completion]]:
        """Run one pass: generate, score, write the rows."""
        completions: list[tuple[PromptRequest, Completion]] = []
        seconds = 0.0
        for batch in batches:
            if not batch:
                continue
            started = time.perf_counter()
            groups = self.engine.generate([item.request for item in batch])
            seconds += time.perf_counter() - started
            completions += [(a, c) for a, group in zip(batch, groups, strict=True) for c in group]
        if not completions:
            return completions
        self._write(phase, kind, completions)
        summary = Pass(
            phase=phase,
            kind=kind,
            seconds=seconds,
            samples=len(completions),
            tokens=sum(len(c.token_ids) for _, c in completions),
            prompt_tokens=sum(len(c.prompt_token_ids) for _, c in completions),
            cached_tokens=sum(c.cached_tokens for _, c in completions),
        )
        append_rows(self.job.out / PASSES, [summary])
        self.say(f"{phase}, {kind}: {summary.samples} completions, {summary.tokens} tokens, {seconds:.2f} s")
        return completions

    def _write(
        self, phase: Phase, kind: Kind, completions: Sequence[tuple[PromptRequest, Completion]]
    ) -> None:
        greedily = kind in ("greedy", "stop")
        temperature = 1.0 if greedily else self.job.temperature
        scored = self.trainer.logprobs(completions, temperature=temperature)
        plain: Sequence[tuple[float, ...]] = [()] * len(completions)
        if kind == "sampled" and temperature != 1.0:
            plain = self.trainer.logprobs(completions, temperature=1.0)
        samples: dict[int, int] = {}
        rows = []
        for (source, completion), own, unscaled in zip(completions, scored, plain, strict=True):
            index = samples.get(source.prompt, 0)
            samples[source.prompt] = index + 1
            rows.append(
                Row(
                    phase=phase,
                    kind=kind,
                    prompt=source.prompt,
                    sample=source.first_sample + index,
                    seed=source.request.seeds[index] if index < len(source.request.seeds) else -1,
                    stop_id=source.stop_id,
                    prompt_ids=completion.prompt_token_ids,
                    token_ids=completion.token_ids,
                    logprobs=completion.logprobs,
                    trainer=own,
                    unscaled=unscaled,
                    finish_reason=completion.finish_reason,
                    stop_reason=completion.stop_reason,
                    text=completion.text,
                    policy_version=completion.policy_version,
                    told_seed=completion.seed,
                    cached_tokens=completion.cached_tokens,
                )
            )
        append_rows(self.job.out / ROWS, rows)

    def _describe(self) -> None:
        """Keep what an external engine reports about itself, without its environment."""
        from lockstep.protocols.engine import receives_weights

        description = self.engine.describe() if receives_weights(self.engine) else {}
        plain = {k: v for k, v in description.items() if isinstance(v, str | int | float | bool)}
        self.known["engine"] = {name: str(value) for name, value in plain.items()}


def main(argv: Sequence[str] | None = None) -> int:
    """Run the job; return the exit status."""
    return Engine.main(EnginesJob, argv)


if __name__ == "__main__":
    leave_with(main, "engines")
