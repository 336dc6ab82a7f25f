"""What batch-invariant ops and deterministic runs cost on a CPU, against the ordinary ones.

    OMP_NUM_THREADS=1 python benchmarks/invariant_cpu.py --out benchmarks/results/invariant-cpu.json

linear         lockstep::linear with the tiles that the self-test chooses, against F.linear; SmolLM2 135M
decode         one layer's attention of a decode step, engine native's op over its KV pool, against
               scaled_dot_product_attention over a padded cache: 64 samples, 9 query and 3 kv heads of 64, 256
               keys each, float32
deterministic  forward, backward and AdamW of bundled:smollm2-135m in float32, 8 documents of 64 tokens, with
               and without train.deterministic; and the hash of its weights

CPU seconds of this process, both sides in turns, medians. A ratio is the invariant (deterministic) side's
time divided by the ordinary one's.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

SHAPES = ((1536, 576), (49152, 576))
ROWS = (512, 8, 1)
DTYPES = (torch.float32, torch.bfloat16)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--pairs", type=int, default=9)
    parser.add_argument("--parts", nargs="*", default=["linear", "decode", "deterministic"])
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    found: dict[str, Any] = {"command": " ".join(["python", *sys.argv]), "machine": machine()}
    parts = {"linear": linears, "decode": decode, "deterministic": deterministic}
    for name in args.parts:
        found[name] = parts[name](args.pairs)
        for row in found[name]:
            print(json.dumps(row), flush=True)
    if args.out is not None:
        args.out.write_text(json.dumps(found, indent=1) + "\n")
    return 0


def machine() -> dict[str, Any]:
    cpu = [line for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("model name")]
    return {
        "cpu": cpu[0].partition(":")[2].strip(),
        "capability": torch.backends.cpu.get_cpu_capability(),
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "python": sys.version.split()[0],
    }


def pairs(number: int, invariant: Callable[[], Any], ordinary: Callable[[], Any]) -> dict[str, Any]:
    """Each side is repeated until it takes 20 ms, and both take turns."""
    sides = {"invariant": invariant, "ordinary": ordinary}
    repeats = {name: max(1, int(0.02 / seconds(side, 2))) for name, side in sides.items()}
    times: dict[str, list[float]] = {name: [] for name in sides}
    for _ in range(number):
        for name, side in sides.items():
            times[name].append(seconds(side, repeats[name]))
    ratios = [a / b for a, b in zip(times["invariant"], times["ordinary"], strict=True)]
    return {
        **{f"{name}_ms": round(1e3 * statistics.median(found), 4) for name, found in times.items()},
        "ratio": round(statistics.median(ratios), 3),
        "least": round(min(ratios), 3),
        "largest": round(max(ratios), 3),
    }


def seconds(side: Callable[[], Any], repeats: int) -> float:
    started = time.process_time()
    for _ in range(repeats):
        side()
    return (time.process_time() - started) / repeats


def linears(number: int) -> list[dict[str, Any]]:
    from lockstep.invariant.row_ops import linear
    from lockstep.invariant.selftest import equal_tiles

    rows = []
    for out, width in SHAPES:
        for dtype in DTYPES:
            weight = torch.randn(out, width).to(dtype) * width**-0.5
            tiles = equal_tiles(torch.randn(251, width).to(dtype), weight, None)
            for count in ROWS:
                x = torch.randn(count, width).to(dtype)
                found = pairs(
                    number,
                    lambda x=x, w=weight, t=tiles: linear(x, w, None, t),
                    lambda x=x, w=weight: F.linear(x, w),
                )
                rows.append({"weight": f"{width} to {out}", "rows": count, "dtype": str(dtype), **found})
    return rows


def decode(number: int) -> list[dict[str, Any]]:
    from lockstep.attention.cached import cached_attention

    samples, heads, kv_heads, width, keys = 64, 9, 3, 64, 256
    k, v = torch.randn(2, samples, keys, kv_heads, width)
    q = torch.randn(samples, heads, width)
    k_pool, v_pool = (x.flatten(0, 1).contiguous() for x in (k, v))
    starts = torch.arange(samples + 1, dtype=torch.int32) * keys
    used = torch.full((samples,), keys, dtype=torch.int32)

    def invariant() -> torch.Tensor:
        return cached_attention(
            q,
            k_pool,
            v_pool,
            cu_q=torch.arange(samples + 1, dtype=torch.int32),
            starts=starts,
            used=used,
            max_q=1,
            max_k=keys,
            scale=width**-0.5,
            window=None,
            decode=True,
        )

    padded = [x.transpose(1, 2).contiguous() for x in (k, v)]

    def ordinary() -> torch.Tensor:
        return F.scaled_dot_product_attention(q[:, :, None], *padded, enable_gqa=True)[:, :, 0]

    torch.testing.assert_close(invariant(), ordinary(), rtol=1e-4, atol=1e-4)
    return [{"samples": samples, "keys": keys, **pairs(number, invariant, ordinary)}]


def deterministic(number: int) -> list[dict[str, Any]]:
    from lockstep.config.model import ModelConfig
    from lockstep.config.train import TrainConfig
    from lockstep.loop.determinism import deterministic as deterministically
    from lockstep.models.load import load_model
    from lockstep.recording.files import fingerprint, module_tensors

    config = ModelConfig(name="bundled:smollm2-135m", dtype="float32")
    module = load_model(config, attention="hf:sdpa", device=torch.device("cpu")).module
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-6)
    ids = torch.randint(0, 49152, (8, 64))

    def ordinary() -> None:
        module(input_ids=ids, labels=ids).loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    def invariant() -> None:
        with deterministically(TrainConfig(deterministic=True)):
            ordinary()

    found = pairs(min(number, 6), invariant, ordinary)
    hashing = 1e3 * seconds(lambda: fingerprint(module_tensors(module).items()), 5)
    return [{"documents": 8, "tokens": 64, "hash_ms": round(hashing, 1), **found}]


if __name__ == "__main__":
    sys.exit(main())
