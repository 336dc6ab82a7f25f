"""One side of benchmarks/native.py: trainer and engine as `lockstep train grpo` builds them, in a process of
its own (how cuBLAS adds up is decided once per process).

    python benchmarks/native_side.py JOB.json

JOB: model, num_layers, invariant, execution, engine {...}, train {...}, prompt_tokens, tokens. For each line
of JSON on standard input it does that and prints one line of JSON:

    {"do": "generate", "samples", "prompt_tokens", "tokens", "ragged", "group"}  seconds, tokens, host seconds
    {"do": "profile", ... the same ..., "steps"}                         kernels of one decode step
    {"do": "train"}                                                      seconds of forward and backward
    {"do": "equal", ... as generate ...}                                 engine against trainer, to the bit
    {"do": "chunks", ... as generate ..., "variants": {name: settings}}  engines against trainer, to the bit
"""

from __future__ import annotations

import json
import os
import random
import re
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lockstep.config.engine import EngineConfig
from lockstep.config.load import load_run
from lockstep.engine.build import make_engine
from lockstep.loops.online import OnlineParts, build_online
from lockstep.models.architectures import text_config
from lockstep.models.shapes import peak_flops, training_flops
from lockstep.packing import PackLimits, plan_micro_batches
from lockstep.schema.batch import PolicySample, policy_samples, rollout_samples
from lockstep.schema.rollout import Completion, GenerationRequest, SamplingParams, Trajectory

LENGTHS = json.loads(Path(__file__).with_name("lengths.json").read_text())["rl_32"]
KINDS = {
    "attention": r"flash|fmha|store_and_attend|attend_one",
    "GEMM": r"gemm|nvjet|cutlass|xmma|splitk|cublas|aten::(mm|addmm|linear|bmm)|lockstep::linear",
    "copies": r"memcpy|memset|copy|index_(put|copy)|aten::(cat|fill_)",
    "compiled and custom kernels": r"triton|lockstep::",
}
"""Part of a step -> names of its kernels; the first that fits counts."""


def run_of(job: dict[str, Any]) -> Any:
    """The run of `lockstep train grpo` that this side is."""
    longest = job["prompt_tokens"] + job["tokens"]
    settings: dict[str, Any] = {
        "steps": 1000,
        "model.name": job["model"],
        "model.dtype": "bfloat16" if torch.cuda.is_available() else "float32",
        "data.source": "ids",
        "data.max_prompt_tokens": job["prompt_tokens"],
        "rewards": [{"name": "ids"}],
        "rollout.prompts_per_step": 16,
        "rollout.group_size": 16,
        "rollout.sampling.max_tokens": job["tokens"],
        "rollout.sampling.ignore_eos": True,
        "rollout.sampling.temperature": job.get("temperature", 1.0),
        "train.attention": "varlen",
        "train.execution": job.get("execution", "compile"),
        "train.batch_invariant": job["invariant"],
        "train.token_budget": max(longest, 10112),
        "engine.name": "native",
    }
    if job.get("num_layers"):
        settings["model.num_layers"] = job["num_layers"]
    for part in ("train", "engine"):
        settings |= {f"{part}.{name}": value for name, value in job.get(part, {}).items()}
    return load_run(kind="grpo", overrides=settings)


class Side:
    """The parts, and what is asked of them."""

    def __init__(self, job: dict[str, Any]) -> None:
        started = time.perf_counter()
        self.job, self.run = job, run_of(job)
        self.parts: OnlineParts = build_online(self.run)
        self.device = torch.device(self.parts.resolved.device)
        self.config = text_config(self.parts.model.module)
        self.vocab_size = int(self.config.vocab_size)
        self.batches: list[Any] = []
        self.parts.transfer.push(self.parts.backend, self.parts.engine, policy_version=0)
        self.started = time.perf_counter() - started

    def ready(self) -> dict[str, Any]:
        """What it is."""
        contract = getattr(self.parts.engine, "contract", None)
        return {
            "start_seconds": self.started,
            "batch_invariant": self.parts.resolved.batch_invariant,
            "execution": self.parts.resolved.execution,
            "contract": None if contract is None else contract.as_json(),
        }

    # --- generation -----------------------------------------------------------------------------------------

    def requests(self, ask: dict[str, Any]) -> list[GenerationRequest]:
        """`samples` samples in groups of `group`; ragged: prompts and completions of an eighth of the length
        and more."""
        draw = random.Random(ask.get("seed", 0))
        group, made = ask.get("group", 1), []
        for index in range(-(-ask["samples"] // group)):
            prompt, tokens = ask["prompt_tokens"], ask["tokens"]
            if ask.get("ragged"):
                prompt, tokens = (
                    draw.randint(max(1, prompt // 8), prompt),
                    draw.randint(max(1, tokens // 8), tokens),
                )
            made.append(
                GenerationRequest(
                    prompt_token_ids=tuple(draw.randrange(self.vocab_size) for _ in range(prompt)),
                    sampling=SamplingParams(
                        max_tokens=tokens, ignore_eos=True, temperature=self.job.get("temperature", 1.0)
                    ),
                    seeds=tuple(range(1 + index * group, 1 + (index + 1) * group)),
                )
            )
        return made

    def generate(self, ask: dict[str, Any]) -> dict[str, Any]:
        """Once, timed; where the host's time went, if the engine says so."""
        engine: Any = self.parts.engine
        spans = getattr(getattr(engine, "counts", None), "spans", None)
        requests = self.requests(ask)
        if spans is not None:
            spans.start()
        self.synchronize()
        cpu, started = time.process_time(), time.perf_counter()
        done = engine.generate(requests)
        self.synchronize()
        seconds = time.perf_counter() - started
        host = {} if spans is None else {k: v for k, v in spans.flush().items() if k.startswith("time/")}
        completions = [c for row in done for c in row]
        return {
            "seconds": seconds,
            "tokens": sum(len(c.token_ids) for c in completions),
            "host_seconds": host,
            "cpu_seconds": time.process_time() - cpu,
            "counts": self.counts(),
            "kv_cache_gib": engine.stats().kv_cache_bytes / 2**30,
        }

    def counts(self) -> dict[str, int]:
        """Totals since the engine was made."""
        counts = getattr(self.parts.engine, "counts", None)
        names = ("steps", "step_rows", "wasted_rows", "prefill_forwards", "prefill_tokens", "preemptions")
        return {name: getattr(counts, name) for name in names if hasattr(counts, name)}

    def profile(self, ask: dict[str, Any]) -> dict[str, Any]:
        """Kernels of one decode step: of a run of 2 + steps tokens less those of a run of 2."""
        steps = ask["steps"]
        long, short = (self._kernels({**ask, "tokens": n, "ragged": False}) for n in (2 + steps, 2))
        rows = []
        for name, (microseconds, count) in long.items():
            before, times = short.get(name, (0.0, 0))
            rows.append((max(0.0, microseconds - before) / steps, (count - times) / steps, name))
        rows.sort(reverse=True)
        total = sum(row[0] for row in rows)
        kinds: dict[str, float] = {}
        for microseconds, _, name in rows:
            kind = next((k for k, words in KINDS.items() if re.search(words, name, re.I)), "other")
            kinds[kind] = kinds.get(kind, 0.0) + microseconds
        table = [
            {"us": us, "share": us / total if total else 0.0, "calls": calls, "kernel": name[:120]}
            for us, calls, name in rows[:24]
        ]
        return {"us_per_step": total, "kinds": kinds, "kernels": table, "what": self.device.type}

    def _kernels(self, ask: dict[str, Any]) -> dict[str, tuple[float, int]]:
        from torch.profiler import ProfilerActivity, profile

        cuda = self.device.type == "cuda"
        requests = self.requests(ask)
        self.parts.engine.generate(requests)
        with profile(activities=[ProfilerActivity.CUDA if cuda else ProfilerActivity.CPU]) as seen:
            self.parts.engine.generate(requests)
            self.synchronize()
        time_of = "self_device_time_total" if cuda else "self_cpu_time_total"
        return {event.key: (getattr(event, time_of), event.count) for event in seen.key_averages()}

    # --- training -------------------------------------------------------------------------------------------

    def train(self, ask: dict[str, Any]) -> dict[str, Any]:
        """Forward and backward of one optimizer step over `rl_32`, once."""
        backend: Any = self.parts.backend
        if not self.batches:
            self.batches = self._packs(ask)
        loss = self.parts.algorithm.loss()
        self.synchronize()
        started = time.perf_counter()
        stats = backend.forward_backward(self.batches, loss)
        float(sum(e.sum() for e in stats.entropy))
        self.synchronize()
        seconds = time.perf_counter() - started
        backend.drop_gradients()
        flops = training_flops(self.config, parameters=self._matmul_parameters(), lengths=self._lengths(ask))
        cuda = self.device.type == "cuda"
        peak = peak_flops(torch.cuda.get_device_name(self.device)) if cuda else None
        return {
            "seconds": seconds,
            "mfu": None if peak is None else flops / seconds / peak,
            "slots": [batch.num_slots for batch in self.batches],
            "peak_gib": torch.cuda.max_memory_allocated(self.device) / 2**30 if cuda else None,
        }

    def _lengths(self, ask: dict[str, Any]) -> list[int]:
        scale = ask.get("scale", 1)
        return [max(2, length // scale) for length in LENGTHS]

    def _packs(self, ask: dict[str, Any]) -> list[Any]:
        generator = torch.Generator().manual_seed(0)
        samples = []
        for index, length in enumerate(self._lengths(ask)):
            mask = torch.ones(length, dtype=torch.bool)
            mask[-1] = False
            samples.append(
                PolicySample(
                    token_ids=torch.randint(self.vocab_size, (length,), generator=generator),
                    loss_mask=mask,
                    sample_id=index,
                    rollout_logprobs=torch.where(mask, -10.0, 0.0),
                    advantages=torch.where(mask, 1.0 if index % 2 else -1.0, 0.0),
                )
            )
        return self.parts.plan(samples, self.parts.algorithm.loss_weights(samples))

    def _matmul_parameters(self) -> int:
        module: Any = self.parts.model.module
        count = sum(p.numel() for p in module.parameters())
        return count - (
            0 if self.config.tie_word_embeddings else module.get_input_embeddings().weight.numel()
        )

    # --- to the bit -----------------------------------------------------------------------------------------

    def equal(self, ask: dict[str, Any]) -> dict[str, Any]:
        """What the engine said of its samples against the trainer's forward, packed and in other packs."""
        started = time.perf_counter()
        done = flat(self.parts.engine.generate(self.requests(ask)))
        seconds = time.perf_counter() - started
        said = [torch.tensor(c.logprobs, dtype=torch.float32) for c in done]
        found = {
            "trainer, packed as it trains": compare(said, self._scored(done)),
            "trainer, the other way round": compare(said, self._scored(done, backwards=True)),
            "trainer, 4 alone": compare(said[:4], [self._scored([c])[0] for c in done[:4]]),
        }
        return {"seconds": seconds, "samples": len(done), "counts": self.counts(), "against": found}

    def chunks(self, ask: dict[str, Any]) -> dict[str, Any]:
        """The same requests to engines with other settings, in other company, and to the trainer."""
        requests = self.requests(ask)
        first = flat(self.parts.engine.generate(requests))
        said = [torch.tensor(c.logprobs, dtype=torch.float32) for c in first]
        found = {"trainer, packed as it trains": compare(said, self._scored(first))}
        found["engine, the other way round"] = against(
            first, flat(self.parts.engine.generate(requests[::-1]))
        )
        found["engine, 3 alone"] = against(
            flat([self.parts.engine.generate([r])[0] for r in requests[:3]]), first
        )
        for name, settings in ask["variants"].items():
            config = EngineConfig.model_validate(self.run.engine.model_dump() | settings)
            engine: Any = make_engine(config, model=self.parts.model)
            self.parts.transfer.push(self.parts.backend, engine, policy_version=0)
            found[f"engine, {name}"] = against(first, flat(engine.generate(requests)))
            preemptions = getattr(getattr(engine, "counts", None), "preemptions", None)
            found[f"engine, {name}"]["preemptions"] = preemptions
            engine.close()
        return {"samples": len(first), "against": found}

    def _scored(self, completions: Sequence[Completion], *, backwards: bool = False) -> list[Tensor]:
        """The trainer's logprobs of each completion's tokens."""
        samples = policy_samples(rollout_samples(map(Trajectory.of, completions)), None)
        order = samples[::-1] if backwards else samples
        weights = [sample.loss_mask.float() for sample in order]
        if backwards:  # packs of another size, too
            run = self.run.train
            longest = self.parts.plan.max_seqlen
            limits = PackLimits(
                token_budget=max(longest, run.token_budget // 2),
                static_capacity=True,
                max_seqlen=longest,
                layout="shared" if run.layout == "shared" else "packed",
            )
            batches = plan_micro_batches(order, weights, limits)
        else:
            batches = self.parts.plan(order, weights)
        by_id: dict[int, Tensor] = {}
        for batch, scored in zip(batches, self.parts.backend.logprobs(batches), strict=True):
            by_id |= dict(zip(batch.sample_ids, batch.split(scored.cpu()), strict=True))
        return [by_id[s.sample_id][s.loss_mask] for s in samples]

    def synchronize(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)


def flat(rows: Sequence[Sequence[Completion]]) -> list[Completion]:
    return [completion for row in rows for completion in row]


def compare(ours: Sequence[Tensor], theirs: Sequence[Tensor]) -> dict[str, Any]:
    """Values, how many differ, and how far."""
    a, b = torch.cat(list(ours)), torch.cat(list(theirs))
    far = (a.double() - b.double()).abs()
    return {
        "values": len(a),
        "differ": int((a != b).sum()),
        "max": float(far.max()) if len(far) else 0.0,
        "mean": statistics.fmean(far.tolist()) if len(far) else 0.0,
        "equal": torch.equal(a, b),
    }


def against(first: Sequence[Completion], other: Sequence[Completion]) -> dict[str, Any]:
    """By seed: logprobs up to the first token that differs, and how many tokens come from there on."""
    by_seed = {c.seed: c for c in other}
    ours, theirs, tokens = [], [], 0
    for completion in first:
        twin = by_seed.get(completion.seed)
        if twin is None:
            continue
        pairs = list(zip(completion.token_ids, twin.token_ids, strict=False))
        same = next((i for i, (a, b) in enumerate(pairs) if a != b), len(pairs))
        tokens += len(pairs) - same
        ours.append(torch.tensor(completion.logprobs[:same], dtype=torch.float32))
        theirs.append(torch.tensor(twin.logprobs[:same], dtype=torch.float32))
    found = compare(ours, theirs)
    return found | {"tokens_from_the_first_other_one": tokens, "equal": found["equal"] and not tokens}


def main() -> int:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what libraries print is no answer
    side = Side(json.loads(Path(sys.argv[1]).read_text()))
    print(json.dumps(side.ready()), file=answers, flush=True)
    known = {
        "generate": side.generate,
        "profile": side.profile,
        "train": side.train,
        "equal": side.equal,
        "chunks": side.chunks,
    }
    for line in sys.stdin:
        ask = json.loads(line)
        print(json.dumps(known[ask["do"]](ask)), file=answers, flush=True)
    side.parts.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
