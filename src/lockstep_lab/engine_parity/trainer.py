"""The trainer that engines are compared with: a local backend that scores completions and changes weights."""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Sequence
from typing import Any

import torch

from lockstep.config.train import TrainConfig
from lockstep.engine.spec import EngineSpec
from lockstep.models.architectures import text_config
from lockstep.models.load import LoadedModel
from lockstep.packing import PackLimits, plan_micro_batches
from lockstep.schema.batch import rollout_samples
from lockstep.schema.rollout import Completion, Trajectory
from lockstep.train.local import LocalBackend
from lockstep_lab.engine_parity.job import EnginesJob
from lockstep_lab.engine_parity.requests import PromptRequest
from lockstep_lab.suite.model import load_policy


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
