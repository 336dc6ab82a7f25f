"""Experts on a GPU: grouped products, the decoder blocks alone, GRPO steps, and ranks.

    python benchmarks/experts_gpu.py products blocks steps --out benchmarks/results/experts-h100.json
    python benchmarks/experts_gpu.py ranks --gpus 2 --out FILE
    python benchmarks/experts_gpu.py products blocks steps ranks --cpu --out FILE     # tiny, as a trial

Every part works alone; a part or case that fails is a result with its error, and the others go on. --out is
written after every case.

products  The two products of Qwen3-30B-A3B's experts by rows an expert, forward, and the whole layer of
          experts, ours beside transformers' `grouped_mm` experts. TFLOP/s count the products alone.
blocks    Forward and backward of the decoder's blocks on one pack, without embedding, head and optimizer. MFU
          = (6 N T + 3 A) / seconds / peak: N the parameters that a token uses (of its own experts only), A of
          causal attention (lockstep.models.shapes.training_flops).
steps     `lockstep train grpo`, eager and compiled, with and without batch invariance, in processes of their
          own: 128 documents of 512 tokens, packed into micro-batches of 32,768. Medians over the steps past
          the first. The optimizer is SGD, with whose states everything fits without checkpoints.
ranks     The same on several GPUs under fsdp2: the gap of every step.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import json
import statistics
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from several_gpus import Job, machine, run
from torch import Tensor, nn
from transformers.integrations.moe import grouped_mm_experts_forward

from lockstep import invariant
from lockstep.config.model import ModelConfig
from lockstep.execution import compile_blocks, decoder
from lockstep.invariant import expert_ops
from lockstep.models.forward import hidden_states
from lockstep.models.load import load_model
from lockstep.models.shapes import peak_flops, training_flops
from lockstep.packing import pack
from lockstep.schema.batch import TrainSample

BIG, TINY = "shape:qwen3-30b-a3b", "shape:tiny-qwen3-moe"
ROWS = (1, 8, 64, 1024, 4096)
DOCUMENT = 2048
"""Tokens of a document of `blocks`."""
TARGETS = {"mfu": 0.32, "step": 1.05, "generate": 1.10}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Place:
    """What is measured where."""

    device: torch.device
    model: str
    layers: int
    tokens: int
    """Of a micro-batch."""
    rows: tuple[int, ...]
    document: int
    repeats: int

    def load(self) -> nn.Module:
        """The model with random weights."""
        config = ModelConfig(
            name=self.model,
            num_layers=self.layers,
            dtype="bfloat16" if self.device.type == "cuda" else "float32",
        )
        return load_model(config, attention="varlen", device=self.device).module

    def seconds(self, work: Callable[[], Any]) -> float:
        """The median of some calls, each by itself, after two."""
        times = []
        for number in range(self.repeats + 2):
            self.wait()
            started = time.perf_counter()
            work()
            self.wait()
            if number >= 2:
                times.append(time.perf_counter() - started)
        return statistics.median(times)

    def wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize()


# --- products ---------------------------------------------------------------------------------------------


def products(place: Place) -> Iterator[Callable[[], dict[str, Any]]]:
    """A case for each number of rows."""
    part = decoder(place.load()).layers[0].mlp.experts
    for count in place.rows:
        yield functools.partial(_product, place, part, count)


@torch.no_grad()
def _product(place: Place, part: Any, count: int) -> dict[str, Any]:
    num_experts, k = part.num_experts, part.config.num_experts_per_tok
    tokens = max(1, count * num_experts // k)
    # Every expert has `count` rows: token t takes k experts in a row, from the (t k)th on.
    chosen = (torch.arange(tokens * k, device=place.device) % num_experts).view(tokens, k)
    weights = torch.full((tokens, k), 1 / k, device=place.device, dtype=part.down_proj.dtype)
    x = torch.randn(tokens, part.gate_up_proj.shape[2], device=place.device, dtype=weights.dtype)
    order, inverse, ends = expert_ops.by_expert(chosen, num_experts)
    found: dict[str, Any] = {"case": f"products {count}", "rows_an_expert": count}
    rows = expert_ops.gather_slots(x, order, inverse, k)
    flops = 0
    for name in ("gate_up_proj", "down_proj"):
        weight = getattr(part, name)
        given = rows if name == "gate_up_proj" else rows.new_zeros(len(rows), weight.shape[2])
        work = 2 * given.numel() * weight.shape[1]
        flops += work
        took = place.seconds(
            lambda given=given, weight=weight: expert_ops.grouped_linear(
                given, weight, None, ends, False, (64,)
            )
        )
        found[name] = {"ms": took * 1e3, "tflops": work / took / 1e12}
    del rows, given
    for name, forward in (
        ("ours", lambda: part(x, chosen, weights)),
        ("transformers", lambda: grouped_mm_experts_forward(part, x, chosen, weights)),
    ):
        took = place.seconds(forward)
        found[name] = {"ms": took * 1e3, "tflops": flops / took / 1e12}
    # transformers' forward reads these of the module; a difference would mean that it computed something else
    ours, theirs = part(x, chosen, weights), grouped_mm_experts_forward(part, x, chosen, weights)
    found["largest_difference"] = float((ours - theirs).abs().max() / theirs.abs().max())
    return found


# --- blocks -----------------------------------------------------------------------------------------------


def blocks(place: Place, executions: Sequence[str]) -> Iterator[Callable[[], dict[str, Any]]]:
    """A case for each mode."""
    for execution in executions:
        for on in (True, False):
            yield functools.partial(_blocks, place, execution, invariant_rows=on)


def _blocks(place: Place, execution: str, *, invariant_rows: bool) -> dict[str, Any]:
    restore = invariant.configure_cuda() if place.device.type == "cuda" and invariant_rows else None
    try:
        module = place.load().train()
        if invariant_rows:
            invariant.convert(module)
        if execution == "compile":
            compile_blocks(module, options=invariant.inductor_options() if invariant_rows else None)
        return {
            "case": f"blocks {execution}{', batch-invariant' * invariant_rows}",
            "execution": execution,
            "batch_invariant": invariant_rows,
            **_measured(place, module),
        }
    finally:
        torch._dynamo.reset()
        if restore is not None:
            restore()


def _measured(place: Place, module: nn.Module) -> dict[str, Any]:
    lengths = [place.document] * (place.tokens // place.document)
    vocab = module.config.vocab_size
    samples = [
        TrainSample(
            token_ids=torch.randint(0, vocab, (n,)), loss_mask=torch.arange(n) < n - 1, sample_id=number
        )
        for number, n in enumerate(lengths)
    ]
    batch = pack(samples, [torch.ones(n) for n in lengths]).to(place.device)
    of_blocks = [p for layer in decoder(module).layers for p in layer.parameters()]
    for parameter in module.parameters():
        parameter.requires_grad_(False)
    for parameter in of_blocks:
        parameter.requires_grad_(True)
    # The blocks' gradient begins at the last hidden states; embedding and final norm are a thousandth.
    gradient: Tensor | None = None
    started = time.perf_counter()

    def forward() -> Tensor:
        return hidden_states(module, batch)

    def step() -> None:
        nonlocal gradient
        hidden = forward()
        if gradient is None:
            gradient = torch.randn_like(hidden)
        hidden.backward(gradient)
        for parameter in of_blocks:
            parameter.grad = None

    step()
    place.wait()
    first = time.perf_counter() - started
    took = place.seconds(step)
    with torch.no_grad():
        alone = place.seconds(forward)
    active = active_parameters(module)
    flops = training_flops(module.config, parameters=active, lengths=lengths)
    peak = peak_flops(torch.cuda.get_device_name()) if place.device.type == "cuda" else None
    return {
        "tokens": sum(lengths),
        "document": place.document,
        "active_parameters": active,
        "first_ms": first * 1e3,
        "ms": took * 1e3,
        "forward_ms": alone * 1e3,
        "tflops": flops / took / 1e12,
        "mfu": flops / took / peak if peak else None,
        "peak_gib": torch.cuda.max_memory_allocated() / 2**30 if peak else None,
        "kernels": _kernels(place, step),
    }


def active_parameters(module: nn.Module) -> int:
    """Parameters of the blocks that a token is multiplied with."""
    config: Any = module.config
    share = config.num_experts_per_tok / config.num_experts
    return round(
        sum(
            p.numel() * (share if ".experts." in name else 1.0)
            for name, p in decoder(module).layers.named_parameters()
        )
    )


def _kernels(place: Place, step: Callable[[], None]) -> dict[str, float]:
    """Milliseconds of one step by kernel, the longest first."""
    if place.device.type != "cuda":
        return {}
    activities = [torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as profile:
        step()
        place.wait()
    events = sorted(profile.key_averages(), key=lambda e: -e.self_device_time_total)[:24]
    # Templates differ at either end of their names.
    names = [f"{e.key[:60]} ... {e.key[-90:]}" if len(e.key) > 150 else e.key for e in events]
    pairs = zip(names, events, strict=True)
    return {f"{name} x {e.count}": round(e.self_device_time_total / 1e3, 3) for name, e in pairs}


# --- steps and ranks --------------------------------------------------------------------------------------


def flags(place: Place, *, cpu: bool) -> tuple[str, ...]:
    """Of every run."""
    prompts, tokens = ("2", "16") if cpu else ("16", "372")
    small = () if cpu else ("--train.optimizer", "sgd", "--train.activation-checkpointing", "false")
    return (
        *("--model.name", place.model, "--model.num-layers", str(place.layers)),
        *("--rollout.prompts-per-step", prompts, "--rollout.sampling.max-tokens", tokens),
        *("--train.token-budget", str(place.tokens), "--train.layout", "packed", *small),
        *("--engine.name", "native", "--train.attention", "varlen"),
    )


def grpo(
    place: Place, part: str, executions: Sequence[str], *, gpus: int, cpu: bool
) -> Iterator[Callable[[], dict[str, Any]]]:
    """A run for each mode."""
    for execution in executions:
        for on in ("true", "false") if part == "steps" else ("true",):
            name = f"{part} {execution}{', batch-invariant' if on == 'true' else ''}"
            modes = ("--train.execution", execution, "--train.batch-invariant", on)
            ranks = ("--ranks", str(gpus), "--train.backend", "fsdp2" if gpus > 1 else "local")
            job = Job(
                name=name,
                gpus=gpus,
                flags=(*flags(place, cpu=cpu), *modes, *ranks),
                steps=4,
                cell={"execution": execution, "batch_invariant": on},
            )
            yield functools.partial(_grpo, job, cpu=cpu)


def _grpo(job: Job, *, cpu: bool) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        found = run(job, folder=Path(folder), devices=range(job.gpus), cpu=cpu)
    found["case"] = found.pop("name")
    if job.cell["batch_invariant"] == "true":
        found["passed"] = found["status"] == 0 and all(gap == 0 for gap in found.get("gap_max", [None]))
    return found


def ratios(cases: list[dict[str, Any]]) -> dict[str, Any]:
    """Step and generation with invariance, as a multiple of those without."""
    found: dict[str, Any] = {}
    for execution in ("eager", "compile"):
        rows = {row["batch_invariant"]: row for row in cases if row.get("execution") == execution}
        if {"true", "false"} <= rows.keys():
            for name in ("time/step", "time/generate", "time/forward_backward"):
                pair = [rows[on].get(name) for on in ("true", "false")]
                if None not in pair:
                    found[f"{execution} {name}"] = round(pair[0] / pair[1], 4)
    return found


# --- all --------------------------------------------------------------------------------------------------


def about() -> dict[str, Any]:
    """Versions, device, commit and targets."""
    head = ["git", "rev-parse", "--short", "HEAD"]
    commit = subprocess.run(head, capture_output=True, text=True, check=False).stdout.strip()
    return {**machine(), "commit": commit, "targets": TARGETS}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("parts", nargs="+", choices=("products", "blocks", "steps", "ranks"))
    parser.add_argument("--gpus", type=int, default=2, help="of `ranks`")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--execution", nargs="+", default=["eager", "compile"], choices=("eager", "compile"))
    parser.add_argument("--cpu", action="store_true")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    if args.cpu:
        place = Place(
            device=torch.device("cpu"),
            model=TINY,
            layers=2,
            tokens=256,
            rows=(1, 8),
            document=64,
            repeats=1,
        )
    else:
        place = Place(
            device=torch.device("cuda"),
            model=BIG,
            layers=args.layers,
            tokens=32768,
            rows=ROWS,
            document=DOCUMENT,
            repeats=5,
        )
    result: dict[str, Any] = about() | {"command": " ".join(["python", *sys.argv])}
    for part in args.parts:
        cases = result[part] = []
        try:
            for case in _cases(part, place, args):
                started = time.monotonic()
                cases.append(_attempt(case))
                cases[-1]["wall_s"] = round(time.monotonic() - started, 1)
                print(json.dumps({k: v for k, v in cases[-1].items() if k != "kernels"}), flush=True)
                _write(args.out, result)
        except (RuntimeError, ValueError) as error:  # before the first case: the model did not load
            cases.append({"error": f"{type(error).__name__}: {error}"[:500]})
        if part == "steps":
            result["ratios"] = ratios(cases)
            print(json.dumps(result["ratios"]), flush=True)
        _write(args.out, result)


def _cases(part: str, place: Place, args: argparse.Namespace) -> Iterator[Callable[[], dict[str, Any]]]:
    if part == "products":
        return products(place)
    if part == "blocks":
        return blocks(place, args.execution)
    return grpo(place, part, args.execution, gpus=1 if part == "steps" else args.gpus, cpu=args.cpu)


def _attempt(case: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """The figures of a case, or its error: a benchmark reports what failed and goes on."""
    try:
        return case()
    except (RuntimeError, ValueError, TypeError, AttributeError) as error:
        traceback.print_exc()
        return {"case": repr(case), "error": f"{type(error).__name__}: {error}"[:1000]}
    finally:
        if torch.cuda.is_available():
            torch.cuda.empty_cache()


def _write(path: Path | None, result: dict[str, Any]) -> None:
    if path is not None:
        path.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
