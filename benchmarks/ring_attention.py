"""How much of one GPU's attention throughput does each GPU of a ring keep?

    torchrun --nproc-per-node 4 benchmarks/ring_attention.py --out benchmarks/results/ring_attention-h200.json
    torchrun --nproc-per-node 2 benchmarks/ring_attention.py --device cpu --tokens 512

Forward and backward of causal attention, 32 query heads and 8 kv heads of 128 in bfloat16, over 131,072
tokens. Rings of 1, 2, 4, ... ranks, up to as many as there are; a ring of one is varlen attention on one GPU.

one document               divided among all ranks: keys and values go round
16 documents               of 8,192: whole, 16 / R on each rank, which is even, so nothing travels
16 documents, all divided  the same, each divided among all ranks: what `ring_shard` avoids, and why
ragged                     15 documents of 472 to 40,000 tokens: the longest are divided

per_gpu_throughput   seconds on one GPU / (ranks x seconds on the ring). 1 would be perfect.
seconds              median over the repetitions of the slowest rank's time (CUDA events, all ranks starting
                     together); [fastest, slowest] repetition in `spread`.
still_seconds        the same with nothing sent: every rank attends to its own keys in every step. What the
                     ring takes longer than this is communication that was not hidden.
peak_gib             the most memory that torch held on any rank: inputs, results and gradients of its rows
                     included.
divided              of all rows, the share that is of divided documents.
error                largest ||ring - one GPU|| / ||one GPU|| of the output and the three gradients, over all
                     rows; both round to bfloat16. A run in which it exceeds 2 % fails.
"""

from __future__ import annotations

import argparse
import importlib
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor

from lockstep.attention import ring as ring_module
from lockstep.attention import ring_attention
from lockstep.packing import RingShard, ring_shard
from lockstep.ranks.context import RankContext, init_ranks

CASES = {
    "one document": (131_072,),
    "16 documents": (8192,) * 16,
    "16 documents, all divided": (8192,) * 16,
    "ragged": (5700, 1200, 40000, 2600, 700, 14500, 3900, 8600, 472, 21000, 7000, 3200, 11000, 4700, 6500),
}
"""Tokens of the documents, in pack order; `--tokens` other than 131,072 scales them."""
ALL_DIVIDED = "16 documents, all divided"
MAX_ERROR = 0.02
Step = Callable[[], None]


@dataclass(frozen=True, kw_only=True)
class Case:
    """The inputs, the same on every rank, and what one GPU makes of them."""

    lengths: tuple[int, ...]
    inputs: tuple[Tensor, ...]
    """q, k, v and the gradient of the output, of all T rows, on the host."""
    expected: tuple[Tensor, ...]
    """Output and gradients of q, k and v, of all T rows, on the host."""

    @property
    def flops(self) -> float:
        """Of forward and backward: two products and five, over the visible half."""
        q = self.inputs[0]
        return 7 * 2 * sum(n * n / 2 for n in self.lengths) * q.shape[1] * q.shape[2]


def make_case(lengths: tuple[int, ...], args: argparse.Namespace, ranks: RankContext) -> Case:
    """Random on the device: equal seeds give equal numbers on equal devices."""
    generator = torch.Generator(ranks.device).manual_seed(0)
    heads = (args.heads, args.kv_heads, args.kv_heads, args.heads)
    dtype = torch.bfloat16 if ranks.device.type == "cuda" else torch.float32
    shapes = [(sum(lengths), n, args.head_dim) for n in heads]
    options = {"generator": generator, "device": ranks.device, "dtype": dtype}
    inputs = tuple(torch.randn(shape, **options).cpu() for shape in shapes)
    shard = ring_shard(lengths, rank=0, size=1)
    group, _ = dist.new_subgroups(1)  # each rank alone
    step, results = make_step(inputs, shard, group, ranks.device)
    step()
    return Case(lengths=lengths, inputs=inputs, expected=tuple(x.cpu() for x in results()))


def make_step(
    inputs: tuple[Tensor, ...], shard: RingShard, group: dist.ProcessGroup, device: torch.device
) -> tuple[Step, Callable[[], list[Tensor]]]:
    """Forward and backward of this rank's rows, and what they gave."""
    q, k, v, grad = (x[shard.index].to(device) for x in inputs)
    leaves = [x.requires_grad_() for x in (q, k, v)]
    shard = shard.to(device)
    found: list[Tensor] = []

    def step() -> None:
        found.clear()
        out = ring_attention(*leaves, shard=shard, group=group)
        found.extend((out.detach(), *torch.autograd.grad(out, leaves, grad)))

    return step, lambda: found


def time_step(
    step: Step, args: argparse.Namespace, ranks: RankContext, group: dist.ProcessGroup
) -> list[float]:
    """Seconds of each repetition, of the slowest rank. Starts are a collective of `group`: no rank's clock
    runs while another is still on its way."""
    cuda = ranks.device.type == "cuda"
    ready = torch.zeros(1, device=ranks.device)
    mine = []
    for repetition in range(args.warm_up + args.repetitions):
        dist.all_reduce(ready, group=group)
        if cuda:
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            torch.cuda.synchronize()
            begin.record()
            step()
            end.record()
            end.synchronize()
            seconds = begin.elapsed_time(end) / 1e3
        else:
            start = time.perf_counter()
            step()
            seconds = time.perf_counter() - start
        if repetition >= args.warm_up:
            mine.append(seconds)
    slowest = torch.tensor(mine, device=ranks.device)
    dist.all_reduce(slowest, dist.ReduceOp.MAX, group=group)
    return [float(x) for x in slowest.tolist()]


def make_shard(name: str, lengths: tuple[int, ...], *, rank: int, size: int) -> RingShard:
    if name != ALL_DIVIDED:
        return ring_shard(lengths, rank=rank, size=size)
    with mock.patch.object(
        importlib.import_module("lockstep.packing.balance"), "_SLACK", Fraction(-1)
    ):  # nothing is even enough
        return ring_shard(lengths, rank=rank, size=size)


class StillRound(ring_module._Round):
    """A ring in which nothing moves: what the same kernels cost without communication."""

    def send_on(self, tensors: tuple[Tensor, Tensor], *, step: int, tag: int) -> ring_module._Coming:
        return ring_module._Coming(tensors, [], None)


def measure(
    case: Case, shard: RingShard, group: dist.ProcessGroup, args: argparse.Namespace, ranks: RankContext
) -> dict[str, object]:
    """One row of the result, on the ranks of `group`."""
    cuda, size = ranks.device.type == "cuda", shard.size
    if cuda:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    step, results = make_step(case.inputs, shard, group, ranks.device)
    times = time_step(step, args, ranks, group)
    peak = torch.tensor([torch.cuda.max_memory_allocated() / 2**30 if cuda else 0.0], device=ranks.device)
    dist.all_reduce(peak, dist.ReduceOp.MAX, group=group)
    squares = torch.zeros(2, 4, dtype=torch.float64, device=ranks.device)
    for i, (mine, theirs) in enumerate(zip(results(), case.expected, strict=True)):
        right = theirs[shard.index].to(ranks.device).float()
        squares[0, i] = (mine.float() - right).square().sum(dtype=torch.float64)
        squares[1, i] = right.square().sum(dtype=torch.float64)
        del right
    dist.all_reduce(squares, group=group)
    row: dict[str, object] = {
        "ranks": size,
        "seconds": statistics.median(times),
        "spread": [min(times), max(times)],
        "tflops_per_gpu": case.flops / size / statistics.median(times) / 1e12,
        "tokens_per_second_per_gpu": sum(case.lengths) / size / statistics.median(times),
        "peak_gib": float(peak) if cuda else None,
        "error": float((squares[0] / squares[1]).sqrt().max()),
        "rows": shard.sizes,
        "divided": sum(shard.divided) / sum(shard.sizes),
    }
    if size > 1:
        real, ring_module._Round = ring_module._Round, StillRound  # type: ignore[misc]
        try:
            row["still_seconds"] = statistics.median(time_step(step, args, ranks, group))
        finally:
            ring_module._Round = real  # type: ignore[misc]
    if args.profile:
        row["kernels"] = profile(step)
    return row


def profile(step: Step) -> str:
    """What ran on this rank's device for how long, one repetition."""
    activities = [torch.profiler.ProfilerActivity.CPU]
    if torch.cuda.is_available():
        activities.append(torch.profiler.ProfilerActivity.CUDA)
    with torch.profiler.profile(activities=activities) as profiler:
        step()
        if torch.cuda.is_available():
            torch.cuda.synchronize()
    key = "self_cuda_time_total" if torch.cuda.is_available() else "self_cpu_time_total"
    return str(profiler.key_averages().table(sort_by=key, row_limit=14, max_name_column_width=60))


def run(args: argparse.Namespace, ranks: RankContext) -> dict[str, object]:
    sizes = [size for size in (1, 2, 4, 8, 16) if size <= ranks.world_size]
    groups = {size: dist.new_group(list(range(size))) for size in sizes}
    rows = []
    case: Case | None = None
    for name in args.cases:
        lengths = tuple(max(1, n * args.tokens // sum(CASES[name])) for n in CASES[name])
        if case is None or case.lengths != lengths:
            case = make_case(lengths, args, ranks)
        alone = 0.0
        for size in sizes:
            group = groups[size]
            if ranks.rank < size:
                assert isinstance(group, dist.ProcessGroup)
                shard = make_shard(name, lengths, rank=ranks.rank, size=size)
                row = {"case": name, "tokens": sum(lengths)} | measure(case, shard, group, args, ranks)
                seconds = float(str(row["seconds"]))
                alone = alone or seconds
                row["per_gpu_throughput"] = alone / (size * seconds)
                rows.append(row)
                if ranks.rank == 0:
                    print(json.dumps({k: v for k, v in row.items() if k != "kernels"}), flush=True)
                    print(row.get("kernels", ""), flush=True)
            dist.barrier(ranks.control)
    return {
        "command": " ".join([f"torchrun --nproc-per-node {ranks.world_size}", *sys.argv]),
        "machine": torch.cuda.get_device_name() if ranks.device.type == "cuda" else "cpu",
        "torch": torch.__version__,
        "nccl": ".".join(map(str, torch.cuda.nccl.version())) if ranks.device.type == "cuda" else None,
        "commit": subprocess.run(
            ["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True
        ).stdout.strip(),
        "heads": [args.heads, args.kv_heads, args.head_dim],
        "results": [{k: v for k, v in row.items() if k != "kernels"} for row in rows],
    }


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument(
        "--cases", nargs="+", default=list(CASES), choices=CASES, metavar="CASE", help="as named above"
    )
    parser.add_argument("--tokens", type=int, default=131_072, help="of each case")
    parser.add_argument("--heads", type=int, default=32)
    parser.add_argument("--kv-heads", type=int, default=8)
    parser.add_argument("--head-dim", type=int, default=128)
    parser.add_argument("--warm-up", type=int, default=3)
    parser.add_argument("--repetitions", type=int, default=7)
    parser.add_argument("--profile", action="store_true", help="print rank 0's kernels, one repetition each")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    with init_ranks(device=args.device, seconds=300.0) as ranks:
        report = run(args, ranks)
        if ranks.rank == 0 and args.out:
            args.out.write_text(json.dumps(report, indent=2) + "\n")
    errors = [float(str(row["error"])) for row in report["results"]]  # type: ignore[attr-defined]
    if not all(error <= MAX_ERROR for error in errors):
        print(f"rank {ranks.rank}: the ring is wrong: errors {errors}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
