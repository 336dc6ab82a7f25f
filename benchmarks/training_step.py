"""How fast is one policy-gradient training step (forward + backward) against a hand-written one?

    python benchmarks/training_step.py --shape llama-3.2-3b --token-budget 10112 --out results/NAME.json

Both sides train on `rl_32` of lengths.json with every token but a document's last sampled. They run in one
process, in alternation, on one GPU.

ours      LocalBackend.forward_backward: clipped token-level GRPO loss at temperature 0.7 with stored old
          logprobs, entropy as a metric, varlen attention, per-block compile, static capacity.
baseline  About 60 lines of plain PyTorch over the same transformers model: balanced packs, varlen attention,
          per-block compile, a linear-logprob that makes its gradients in forward (a plain weighted logprob
          sum at temperature 1, no clipping, no entropy).

MFU = (6 N sum(L) + 3 A) / seconds / 989e12, with A and N as lengths.json says. Padding does not count as
work.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
import transformers
from torch import Tensor
from torch.nn.attention.varlen import varlen_attn
from transformers import AttentionInterface

from lockstep.algorithms import ALGORITHMS
from lockstep.config.algorithm import GRPOConfig
from lockstep.config.model import ModelConfig
from lockstep.config.train import TrainConfig
from lockstep.execution import CompileWatch
from lockstep.models.load import load_model, share_parameters
from lockstep.packing import PackLimits, balance, plan_micro_batches
from lockstep.schema.batch import PolicySample
from lockstep.train.local import LocalBackend

LENGTHS = json.loads(Path(__file__).with_name("lengths.json").read_text())["rl_32"]
PEAK = 989e12
MAX_SEQLEN = 2048


# --- baseline ---------------------------------------------------------------------------------------------


def _varlen(  # signature: transformers' AttentionInterface
    module, query, key, value, attention_mask, scaling=None, cu=None, longest=None, **_
):
    q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))
    return varlen_attn(q, k, v, cu, cu, longest, longest, scale=scaling, window_size=(-1, 0))[None], None


@torch.compile(dynamic=False)
def _core(logits: Tensor, labels: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
    x = logits.float()
    peak = x.amax(-1, keepdim=True)
    e = (x - peak).exp()
    total = e.sum(-1, keepdim=True)
    logprobs = x.gather(1, labels[:, None]) - peak - total.log()
    grad = (e / total) * weights[:, None]
    here = torch.arange(x.shape[1], device=x.device)[None, :] == labels[:, None]
    return -(logprobs[:, 0] * weights).sum(), torch.where(here, grad - weights[:, None], grad).to(
        logits.dtype
    )


class _LinearLogprob(torch.autograd.Function):
    @staticmethod
    def forward(ctx, hidden, weight, labels, weights, chunk):
        dhidden, dweight = torch.empty_like(hidden), torch.zeros_like(weight)
        loss = hidden.new_zeros((), dtype=torch.float32)
        for start in range(0, hidden.shape[0], chunk):
            part = slice(start, start + chunk)
            value, grad = _core(hidden[part] @ weight.t(), labels[part], weights[part])
            loss += value
            dhidden[part] = grad @ weight
            dweight.addmm_(grad.t(), hidden[part])
        ctx.save_for_backward(dhidden, dweight)
        return loss

    @staticmethod
    def backward(ctx, dloss):
        dhidden, dweight = ctx.saved_tensors
        return dhidden * dloss, dweight * dloss, None, None, None


def baseline_step(module: torch.nn.Module, capacity: int, device: str) -> Callable[[], None]:
    AttentionInterface.register("baseline_varlen", _varlen)
    twin = share_parameters(module, attention="hf:baseline_varlen").train()
    for layer in twin.model.layers:
        layer.compile(fullgraph=True, dynamic=False)
    packs = []
    for group in balance(LENGTHS, token_budget=capacity):
        lengths = [LENGTHS[i] for i in group]
        used = sum(lengths)
        bounds = [0, *torch.tensor(lengths).cumsum(0).tolist()]
        bounds += [capacity] * (len(LENGTHS) + 2 - len(bounds))
        positions = torch.cat([torch.arange(n) for n in [*lengths, capacity - used]])
        packs.append(
            (
                torch.randint(0, 32000, (1, capacity), device=device),
                positions[None].to(device),
                torch.tensor(bounds, dtype=torch.int32, device=device),
                torch.cat([torch.ones(used), torch.zeros(capacity - used)]).to(device),
            )
        )
    weight = twin.get_output_embeddings().weight

    def step() -> None:
        for ids, positions, bounds, weights in packs:
            hidden = twin.model(
                input_ids=ids, position_ids=positions, use_cache=False, cu=bounds, longest=MAX_SEQLEN
            ).last_hidden_state[0]
            _LinearLogprob.apply(hidden, weight, ids[0].roll(-1), weights, capacity // 2).backward()
        for parameter in module.parameters():
            parameter.grad = None

    return step


# --- ours -------------------------------------------------------------------------------------------------


def our_step(model, config: TrainConfig) -> tuple[Callable[[], None], LocalBackend, list]:
    generator = torch.Generator().manual_seed(0)
    samples = []
    for index, length in enumerate(LENGTHS):
        mask = torch.ones(length, dtype=torch.bool)
        mask[-1] = False
        noise = torch.randn(length, generator=generator)
        samples.append(
            PolicySample(
                token_ids=torch.randint(0, 32000, (length,), generator=generator),
                loss_mask=mask,
                sample_id=index,
                rollout_logprobs=torch.where(mask, -10 + noise, 0.0),
                advantages=torch.where(mask, noise.mean().sign() + noise * 0, 0.0),
            )
        )
    options = GRPOConfig(name="grpo", aggregation="token_mean").resolved()
    algorithm = ALGORITHMS.load("grpo")(options, max_tokens=MAX_SEQLEN)
    backend = LocalBackend(config, model=model, total_steps=1, temperature=0.7)
    limits = PackLimits(
        token_budget=config.token_budget,
        static_capacity=True,
        max_seqlen=MAX_SEQLEN,
        max_documents=len(LENGTHS),
    )
    batches = plan_micro_batches(samples, algorithm.loss_weights(samples), limits)
    return _with_old_logprobs(backend, algorithm, batches)


def _with_old_logprobs(backend, algorithm, batches):
    old = backend.logprobs(batches)
    noise = torch.Generator(device=old[0].device).manual_seed(1)
    batches = [
        dataclasses.replace(
            b.to(o.device), old_logprobs=o + 0.1 * torch.randn(o.shape, generator=noise, device=o.device)
        )
        for b, o in zip(batches, old, strict=True)
    ]
    loss = algorithm.loss()

    def step() -> None:
        stats = backend.forward_backward(batches, loss)
        sum(e.sum() for e in stats.entropy)
        backend.drop_gradients()

    return step, backend, batches


# --- measuring --------------------------------------------------------------------------------------------


def flops(module: torch.nn.Module) -> float:
    config = module.config
    parameters = sum(p.numel() for p in module.parameters())  # tied embeddings: all take part in a matmul
    attention = sum(2.0 * n * n for n in LENGTHS) * config.num_hidden_layers
    return 6 * parameters * sum(LENGTHS) + 3 * attention * config.num_attention_heads * config.head_dim


def seconds(step: Callable[[], None], synchronize: Callable[[], None]) -> float:
    synchronize()
    start = time.perf_counter()
    step()
    synchronize()
    return time.perf_counter() - start


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shape", default="llama-3.2-3b")
    parser.add_argument("--token-budget", type=int, nargs="+", default=[10112])
    parser.add_argument("--baseline-capacity", type=int, default=10112)
    parser.add_argument("--pairs", type=int, default=9)
    parser.add_argument("--grad-accum-dtype", default="float32")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    synchronize = torch.cuda.synchronize if device == "cuda" else (lambda: None)
    config = ModelConfig(name=f"shape:{args.shape}", dtype="bfloat16" if device == "cuda" else "float32")
    model = load_model(config, attention="varlen", device=torch.device(device))
    theirs = baseline_step(model.module, args.baseline_capacity, device)
    results = []
    for budget in args.token_budget:
        train = TrainConfig(
            attention="varlen",
            execution="compile",
            device=device,
            token_budget=budget,
            grad_accum_dtype=args.grad_accum_dtype,
        )
        ours, backend, batches = our_step(model, train)
        first = {"ours": seconds(ours, synchronize), "baseline": seconds(theirs, synchronize)}
        for step in (ours, theirs, ours, theirs):
            step()
        watch = CompileWatch()
        watch.mark_warm()
        times: dict[str, list[float]] = {"ours": [], "baseline": []}
        for _ in range(args.pairs):
            times["ours"].append(seconds(ours, synchronize))
            times["baseline"].append(seconds(theirs, synchronize))
        work = flops(model.module)
        row = {
            "shape": args.shape,
            "token_budget": budget,
            "micro_batches": [b.num_slots for b in batches],
            "baseline_capacity": args.baseline_capacity,
            "grad_accum_dtype": args.grad_accum_dtype,
            "ratio": statistics.median(b / o for o, b in zip(times["ours"], times["baseline"], strict=True)),
            "first_call_seconds": first,
            "recompiles_after_warm_up": watch.report().recompiles,
            "peak_gib": torch.cuda.max_memory_allocated() / 2**30 if device == "cuda" else None,
        }
        for side, values in times.items():
            row[side] = {
                "median_ms": statistics.median(values) * 1e3,
                "min_ms": min(values) * 1e3,
                "max_ms": max(values) * 1e3,
                "mfu": work / statistics.median(values) / PEAK,
            }
        print(json.dumps(row), flush=True)
        results.append(row)
        del ours, backend, batches
        if device == "cuda":
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
    report = {
        "command": " ".join(["python", *sys.argv]),
        "machine": torch.cuda.get_device_name() if device == "cuda" else "cpu",
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "commit": subprocess.run(
            ["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True
        ).stdout.strip(),
        "results": results,
    }
    if args.out:
        args.out.write_text(json.dumps(report, indent=2) + "\n")


if __name__ == "__main__":
    main()
