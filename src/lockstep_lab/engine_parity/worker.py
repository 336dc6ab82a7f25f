"""One engine of `lockstep parity engines`: `python -m lockstep_lab.engine_parity.worker JOB.json`.

model ─► local backend (the trainer) ─► push ─► generate ─► change weights ─► push ─► generate
                    └──── logprobs of every completion ◄────────────────────┘

Exit status 0: done; 2: refused; 1: anything else. What was seen is in the folder that the job names
(lockstep_lab.engine_parity.job).
"""

from __future__ import annotations

import dataclasses
import hashlib
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from lockstep.config.train import TrainConfig
from lockstep.engine.spec import EngineSpec
from lockstep.models.architectures import text_config
from lockstep.models.load import LoadedModel
from lockstep.packing import PackLimits, plan_micro_batches
from lockstep.rollout.sampler import sample_seed
from lockstep.schema.batch import rollout_samples
from lockstep.schema.rollout import Completion, GenerationRequest, SamplingParams, Trajectory
from lockstep.train.local import LocalBackend
from lockstep_lab.engine_parity.job import PASSES, ROWS, EnginesJob, Kind, Outcome, Pass, Phase, Row
from lockstep_lab.suite.model import load_policy
from lockstep_lab.suite.worker import Worker, append_rows, leave_with, watched

if TYPE_CHECKING:
    from lockstep.protocols import InferenceEngine, WeightTransfer


# --- requests: pure functions of the job, so that every engine gets the same --------------------------------

SOME = 2
"""Prompts from the beginning and as many from the end (which has the long ones) of the smaller passes."""
_GREEDY, _SAMPLED, _OTHER = -3, -4, -5
"""Used in place of the step in seeds."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PromptRequest:
    """The generation request of one prompt."""

    prompt: int
    """Index into the job's prompts."""
    request: GenerationRequest
    first_sample: int = 0
    stop_id: int | None = None


Batch = list[PromptRequest]
"""One call of `generate`."""


def greedy(job: EnginesJob) -> Batch:
    """Request one completion of every prompt at temperature 0."""
    return [_request(job, prompt, step=_GREEDY, samples=[0]) for prompt in range(len(job.prompts))]


def stop(job: EnginesJob, completions: Iterable[tuple[PromptRequest, Completion]]) -> Batch:
    """Repeat some greedy requests, each with the id in the middle of its completion as a stop id."""
    selected = set(some(job))
    return [
        _request(job, source.prompt, step=_GREEDY, samples=[0], stop_id=ids[len(ids) // 2])
        for source, completion in completions
        if source.prompt in selected and len(ids := completion.token_ids) > 1
    ]


def sampled(job: EnginesJob) -> Batch:
    """Request n samples of every prompt."""
    samples = range(job.num_samples)
    return [_request(job, prompt, step=_SAMPLED, samples=samples) for prompt in range(len(job.prompts))]


def alone(job: EnginesJob) -> list[Batch]:
    """Request the last sample of some prompts, each in a call of its own."""
    last = [job.num_samples - 1]
    return [[_request(job, prompt, step=_SAMPLED, samples=last)] for prompt in some(job)]


def other(job: EnginesJob) -> Batch:
    """Request some prompts with seeds that no other pass has."""
    return [_request(job, prompt, step=_OTHER, samples=range(job.num_samples)) for prompt in some(job)]


def some(job: EnginesJob) -> list[int]:
    """Prompts of the smaller passes."""
    count = len(job.prompts)
    return sorted({*range(min(SOME, count)), *range(max(0, count - SOME), count)})


def _request(
    job: EnginesJob, prompt: int, *, step: int, samples: Sequence[int], stop_id: int | None = None
) -> PromptRequest:
    """Request these samples of a prompt; the step decides the seeds, and whether it is greedy."""
    params = SamplingParams(
        max_tokens=job.max_tokens,
        temperature=0.0 if step == _GREEDY else job.temperature,
        ignore_eos=job.ignore_eos,
        stop_token_ids=() if stop_id is None else (stop_id,),
    )
    return PromptRequest(
        prompt=prompt,
        request=GenerationRequest(
            prompt_token_ids=job.prompts[prompt],
            sampling=params,
            seeds=tuple(sample_seed(job.seed, step, prompt, sample) for sample in samples),
        ),
        first_sample=samples[0],
        stop_id=stop_id,
    )


# --- the trainer --------------------------------------------------------------------------------------------


class Trainer:
    """Loads the job's model into a local backend."""

    def __init__(self, job: EnginesJob) -> None:
        if job.threads is not None:
            torch.set_num_threads(job.threads)
        torch.manual_seed(job.model.seed)
        self.job, self.device = job, torch.device(job.device)
        self.model, self.attention = load_policy(job.model, job.attention, device=self.device)
        self.vocab_size = int(text_config(self.model.module).vocab_size)
        self.backend = self._backend(job.temperature)
        self._plain = self.backend if job.temperature == 1.0 else self._backend(1.0)

    def _backend(self, temperature: float) -> LocalBackend:
        settings = TrainConfig(device=self.device.type, attention=self.attention)
        return LocalBackend(settings, model=self.model, total_steps=0, temperature=temperature)

    def facts(self) -> dict[str, Any]:
        """The trainer's settings, as fields of an Outcome."""
        tokenizer = self.model.tokenizer
        return {
            "eos_token_ids": self.model.eos_token_ids,
            "special_ids": () if tokenizer is None else tuple(sorted(tokenizer.all_special_ids)),
            "vocab_size": self.vocab_size,
            "dtype": str(self.model.dtype).removeprefix("torch."),
            "attention": self.attention,
        }

    @staticmethod
    def _trajectory(source: PromptRequest, completion: Completion) -> Trajectory:
        """The completion after the requested prompt; its logprobs are not looked at."""
        prompt, unknown = source.request.prompt_token_ids, (0.0,) * len(completion.token_ids)
        return Trajectory.of(dataclasses.replace(completion, prompt_token_ids=prompt, logprobs=unknown))

    def logprobs(
        self, completions: Sequence[tuple[PromptRequest, Completion]], *, temperature: float
    ) -> list[tuple[float, ...]]:
        """Compute the logprob of every token of each completion, nats, after the requested prompt, whatever
        prompt the engine reports; () where there is nothing to score."""
        results: list[tuple[float, ...]] = [()] * len(completions)
        scored_ones = [i for i, (_, completion) in enumerate(completions) if self._can_score(completion)]
        if not scored_ones:
            return results
        samples = rollout_samples(self._trajectory(*completions[i]) for i in scored_ones)
        budget = max(self.job.token_budget, *(len(sample.token_ids) for sample in samples))
        weights = [sample.loss_mask.float() for sample in samples]
        batches = plan_micro_batches(samples, weights, PackLimits(token_budget=budget))
        backend = self._plain if temperature == 1.0 else self.backend
        counts = {sample.sample_id: int(sample.loss_mask.sum()) for sample in samples}
        for batch, scored in zip(batches, backend.logprobs(batches), strict=True):
            values = scored.cpu()[batch.loss_mask].tolist()
            start = 0
            for sample_id in batch.sample_ids:
                results[scored_ones[sample_id]] = tuple(values[start : start + counts[sample_id]])
                start += counts[sample_id]
        return results

    def _can_score(self, completion: Completion) -> bool:
        ids = completion.token_ids
        return bool(ids) and all(0 <= i < self.vocab_size for i in ids)

    def perturb(self, scale: float) -> None:
        """Add noise to every matrix, `scale` times its root mean square: a function of seed and name, so that
        every engine's trainer gets the same new weights."""
        with torch.no_grad():
            for name, parameter in self.model.module.named_parameters():
                if parameter.ndim < 2:
                    continue
                digest = hashlib.sha256(f"update {self.job.seed} {name}".encode()).digest()
                seed = int.from_bytes(digest[:8], "little") >> 1
                generator = torch.Generator(parameter.device).manual_seed(seed)
                noise = torch.randn(
                    parameter.shape, generator=generator, device=parameter.device, dtype=torch.float32
                )
                size = parameter.float().square().mean().sqrt()
                parameter.copy_(parameter.float().add_(noise, alpha=float(scale * size)))


def make_engine_spec(job: EnginesJob, model: LoadedModel, *, device: torch.device) -> EngineSpec:
    """A folder with the model's config and tokenizer; with its weights, where the engine is to load them
    itself."""
    from lockstep.loop.engines import write_model_folder
    from lockstep.models.export import export_hf

    work_dir = job.out / "engine"
    folder = work_dir / "model"
    work_dir.mkdir(parents=True, exist_ok=True)
    if job.weights == "folder":
        export_hf(model.module, model.tokenizer, folder)
    else:
        write_model_folder(model, folder)
    return EngineSpec(
        folder=folder,
        weights=job.weights,
        model_name=job.model.name,
        dtype=str(model.dtype).removeprefix("torch."),
        vocab_size=int(text_config(model.module).vocab_size),
        max_model_len=max(map(len, job.prompts)) + job.max_tokens,
        eos_token_ids=model.eos_token_ids,
        tokenizer=model.tokenizer,
        device="cpu" if device.type == "cpu" else f"{device.type}:{device.index or 0}",
        shares_device=device.type == "cuda",
        temperatures=frozenset({0.0, job.temperature}),
        work_dir=work_dir,
        seed=job.seed,
    )


# --- the worker ---------------------------------------------------------------------------------------------


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
