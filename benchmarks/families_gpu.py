"""Sinks, caps and the batch-invariant forms of families on a GPU, against float64 and bit for bit.

    python benchmarks/families_gpu.py --out families.json

Sinks by varlen and flex and caps by flex in bfloat16, forward and gradients, beside float64; cached decode
with sinks against a packed forward, bit for bit; three GRPO steps of each small model, whose largest gap
between trainer and engine must be 0.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lockstep import attention
from lockstep.attention import sdpa
from lockstep.attention.cached import store_and_attend

LENGTHS = (130, 1, 64, 65, 1000, 17)
STEPS = 3
FAMILIES = "gpt-oss phi3 glm glm4 seed-oss olmo2 olmo3 helium cohere cohere2"
MODELS = tuple(f"tiny-{name}" for name in FAMILIES.split())


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--models", nargs="*", default=MODELS)
    options = parser.parse_args()
    device = torch.device(options.device)
    name = torch.cuda.get_device_name() if device.type == "cuda" else "cpu"
    report: dict[str, Any] = {"device": name, "torch": torch.__version__}

    def keep(key: str, value: Any) -> None:
        report[key] = value
        options.out.write_text(json.dumps(report, indent=1))
        print(key, json.dumps(value), flush=True)

    for window in (None, 128):
        for kernel, more in (("varlen", "sinks"), ("flex", "sinks"), ("flex", "softcap")):
            if device.type == "cpu" and kernel == "flex":
                continue  # it has no backward there
            keep(f"{kernel}, {more}, window {window}", errors(kernel, more, window, device))
        keep(f"decode = packed, window {window}", decoded(window, device))
    for model in options.models:
        keep(model, steps(model, options.device))


def inputs(device: torch.device) -> list[Tensor]:
    """Queries, keys, values and sinks of 8 heads of 64, two of them for keys."""
    generator = torch.Generator().manual_seed(0)
    shapes = [(sum(LENGTHS), 8, 64), (sum(LENGTHS), 2, 64), (sum(LENGTHS), 2, 64), (8,)]
    return [torch.randn(s, generator=generator).to(device, torch.bfloat16) for s in shapes]


def ends(device: torch.device) -> Tensor:
    return torch.tensor([0, *torch.tensor(LENGTHS).cumsum(0)], dtype=torch.int32, device=device)


def errors(kernel: str, more: str, window: int | None, device: torch.device) -> dict[str, float]:
    """Relative error of the output and of each gradient; beside it that of bfloat16's own rounding."""
    given = inputs(device)
    direction = torch.randn(given[0].shape, generator=torch.Generator().manual_seed(1)).to(device)

    def run(name: str, dtype: torch.dtype) -> list[Tensor]:
        leaves = [x.to(dtype).requires_grad_() for x in given]
        extra = {"sinks": leaves[3]} if more == "sinks" else {"softcap": 2.0}
        options: dict[str, Any] = {"cu_seqlens": ends(device), "max_seqlen": max(LENGTHS), "scale": None}
        function = sdpa.attention if name == "sdpa" else attention.KERNELS[name]
        lengths = LENGTHS if name == "sdpa" else None
        out = function(*leaves[:3], lengths=lengths, window=window, **options, **extra)
        used = leaves if more == "sinks" else leaves[:3]
        grads = torch.autograd.grad((out * direction.to(dtype)).sum(), used)
        return [out.detach(), *grads]

    truth = run("sdpa", torch.float64)
    labels = ("out", "dq", "dk", "dv", "dsinks")
    found = {}
    for side, (name, dtype) in (("", (kernel, torch.bfloat16)), ("eager ", ("sdpa", torch.bfloat16))):
        for label, ours, theirs in zip(labels, run(name, dtype), truth, strict=False):
            found[side + label] = float((ours.double() - theirs).norm() / theirs.norm())
    return found


def decoded(window: int | None, device: torch.device) -> dict[str, int]:
    """Elements that differ between a packed forward and tokens decoded one by one, all documents in a batch,
    after a prefill of all but their last 16."""
    q, k, v, sinks = inputs(device)
    where = {"cu_seqlens": ends(device), "max_seqlen": max(LENGTHS), "lengths": None, "scale": None}
    pack = attention.KERNELS["varlen"](q, k, v, **where, window=window, sinks=sinks)
    firsts = ends(device)[:-1].tolist()
    caches = [torch.full_like(x, float("nan")) for x in (k, v)]
    out = torch.empty_like(q)

    def step(rows: list[range], decode: bool) -> None:
        index = torch.tensor([i for some in rows for i in some], device=device)
        counts = torch.tensor([0, *(len(some) for some in rows)]).cumsum(0)
        int32 = {"dtype": torch.int32, "device": device}
        kept = [d for d, some in enumerate(rows) if len(some)]
        cu_q = torch.tensor([0, *counts[1:][kept].tolist()], **int32)
        starts = torch.tensor([*(firsts[d] for d in kept), 0], **int32)
        used = torch.tensor([rows[d].stop - firsts[d] for d in kept], **int32)
        most = max(len(some) for some in rows)
        args = (q[index], k[index], v[index], *caches, index, cu_q, starts, used, most, 2048, 64**-0.5)
        out[index] = store_and_attend(*args, window, decode, sinks)

    begun = [max(0, length - 16) for length in LENGTHS]
    step([range(f, f + n) for f, n in zip(firsts, begun, strict=True)], decode=False)
    for more in range(16):
        nexts = [f + n + more for f, n in zip(firsts, begun, strict=True)]
        limits = [f + length for f, length in zip(firsts, LENGTHS, strict=True)]
        step([range(t, min(t + 1, end)) for t, end in zip(nexts, limits, strict=True)], decode=True)
    return {"differ": int((out != pack).sum()), "of": out.numel()}


def steps(model: str, device: str) -> dict[str, Any]:
    """GRPO steps, trainer and engine batch-invariant."""
    with tempfile.TemporaryDirectory() as folder:
        flags = f"--recipe tiny --steps {STEPS} --model.name shape:{model} --model.dtype bfloat16"
        flags += f" --train.device {device} --train.batch-invariant True --engine.name native"
        flags += f" --eval.no-before --eval.no-after --run-dir {folder}/run"
        start = time.perf_counter()
        command = [sys.executable, "-m", "lockstep", "train", "grpo", *flags.split()]
        done = subprocess.run(command, capture_output=True, text=True, timeout=600)
        if done.returncode:
            return {"failed": done.stderr[-2000:]}
        lines = (Path(folder) / "run/metrics.jsonl").read_text().splitlines()
        rows = [row for row in map(json.loads, lines) if "grad_norm" in row]
        return {
            "gap_max": [row["logprob_gap_max"] for row in rows],
            "grad_norm": [row["grad_norm"] for row in rows],
            "seconds": round(time.perf_counter() - start, 1),
        }


if __name__ == "__main__":
    main()
