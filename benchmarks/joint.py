"""Forward and backward of one training step: eager, compiled blocks, joint graph, joint graph as CUDA graphs.

    python benchmarks/joint.py --shape llama-3.2-1b --out results/joint-1b.json
    python benchmarks/joint.py --shape tiny-llama --token-budget 512 --documents 3 --rounds 1     (on a CPU)

start   Every compiled mode in a process of its own, twice, with a compile cache that is empty the first time:
        seconds from the start of the interpreter to the end of the first step, by part.
step    LocalBackend.forward_backward of `rl_32` of lengths.json with a clipped GRPO loss at temperature 0.7.
        All modes in one process, each over its own copy of the same weights, taking turns; medians.
gap     Each mode's logprobs and gradients against eager ones, of the same step.

--samples adds joint with train.accumulate = "sample". --invariant converts the modules (lockstep.invariant).
MFU as benchmarks/training_step.py counts it.
"""

from __future__ import annotations

import time

START = time.time()

import argparse  # noqa: E402
import gc  # noqa: E402
import json  # noqa: E402
import os  # noqa: E402
import statistics  # noqa: E402
import subprocess  # noqa: E402
import sys  # noqa: E402
import tempfile  # noqa: E402
import traceback  # noqa: E402
from pathlib import Path  # noqa: E402
from typing import Any  # noqa: E402

LENGTHS = json.loads(Path(__file__).with_name("lengths.json").read_text())["rl_32"]
PEAK = 989e12
MAX_SEQLEN = 2048
MODES: dict[str, dict[str, Any]] = {
    "eager": {"execution": "eager", "static_capacity": True},
    "compile": {"execution": "compile"},
    "joint": {"execution": "joint"},
    "joint+cuda_graph": {"execution": "joint", "cuda_graph": True},
    "joint+samples": {"execution": "joint", "accumulate": "sample"},
}


class Side:
    """One mode: its own backend over its own copy of the weights."""

    def __init__(self, mode: str, args: argparse.Namespace) -> None:
        import torch

        from lockstep import invariant
        from lockstep.config.model import ModelConfig
        from lockstep.config.train import TrainConfig
        from lockstep.models.load import load_model
        from lockstep.train.local import LocalBackend

        self.mode, self.seconds = mode, []
        device = "cuda" if torch.cuda.is_available() else "cpu"
        dtype = args.dtype or ("bfloat16" if device == "cuda" else "float32")
        model = load_model(
            ModelConfig(name=f"shape:{args.shape}", dtype=dtype),
            attention="varlen",
            device=torch.device(device),
        )
        if args.invariant:
            invariant.convert(model.module)
        train = TrainConfig(attention="varlen", device=device, token_budget=args.token_budget, **MODES[mode])
        self.backend = LocalBackend(train, model=model, total_steps=0, temperature=0.7)
        self.lengths = [min(length, args.token_budget) for length in LENGTHS[: args.documents]]
        self.batches, self.loss = _batches(self.lengths, args.token_budget)

    def step(self) -> Any:
        return self.backend.forward_backward(self.batches, self.loss)

    def timed_step(self) -> float:
        _synchronize()
        start = time.perf_counter()
        self.step()
        self.backend.drop_gradients()
        _synchronize()
        return time.perf_counter() - start


def _batches(lengths: list[int], token_budget: int) -> tuple[list[Any], Any]:
    import dataclasses

    import torch

    from lockstep.algorithms import ALGORITHMS
    from lockstep.config.algorithm import GRPOConfig
    from lockstep.packing import PackLimits, plan_micro_batches
    from lockstep.schema.batch import PolicySample

    generator = torch.Generator().manual_seed(0)
    samples = []
    for index, length in enumerate(lengths):
        mask = torch.ones(length, dtype=torch.bool)
        mask[-1] = False
        noise = torch.randn(length, generator=generator)
        samples.append(
            PolicySample(
                token_ids=torch.randint(0, 250, (length,), generator=generator),
                loss_mask=mask,
                sample_id=index,
                rollout_logprobs=torch.where(mask, -6 + noise, 0.0),
                advantages=torch.where(mask, noise.mean().sign(), 0.0),
            )
        )
    options = GRPOConfig(name="grpo", aggregation="token_mean").resolved()
    algorithm = ALGORITHMS.load("grpo")(options, max_tokens=MAX_SEQLEN)
    limits = PackLimits(
        token_budget=token_budget,
        static_capacity=True,
        max_seqlen=min(MAX_SEQLEN, token_budget),
        max_documents=len(lengths),
    )
    batches = plan_micro_batches(samples, algorithm.loss_weights(samples), limits)
    return [dataclasses.replace(b, old_logprobs=b.rollout_logprobs) for b in batches], algorithm.loss()


def _synchronize() -> None:
    import torch

    if torch.cuda.is_available():
        torch.cuda.synchronize()


# --- start --------------------------------------------------------------------------------------------------


def start_once(args: argparse.Namespace) -> None:
    """In a process of its own: seconds of every part of a start, as JSON on the last line of stdout."""
    from lockstep.processes.child import gc_paused

    with gc_paused():  # as `lockstep train` does
        import torch
        import transformers  # noqa: F401

        import lockstep.train.local  # noqa: F401
    gc.freeze()
    imported = time.time()
    side = Side(args.start, args)
    _synchronize()
    loaded = time.time()
    first = side.timed_step()
    report = side.backend.compile_report()
    found = {
        "import": imported - START,
        "load": loaded - imported,
        "first_step": first,
        "total": time.time() - START,
        "graphs": report.graphs if report else 0,
        "compiling": report.seconds if report else 0.0,
        "second_step": side.timed_step(),
        "threads": torch.get_num_threads(),
    }
    print(json.dumps(found), flush=True)


def starts(modes: list[str], cache: str, argv: list[str]) -> dict[str, Any]:
    environment = os.environ | {"TORCHINDUCTOR_CACHE_DIR": cache}
    found: dict[str, Any] = {}
    for mode in modes:
        for when in ("cold", "warm"):
            command = [sys.executable, __file__, *argv, "--start", mode]
            done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=False)
            if done.returncode:
                found[f"{mode} {when}"] = {"failed": done.returncode}
                break
            found[f"{mode} {when}"] = json.loads(done.stdout.strip().splitlines()[-1])
            print(mode, when, found[f"{mode} {when}"], flush=True)
    return found


# --- step ---------------------------------------------------------------------------------------------------


def gap(side: Side, expected: tuple[Any, dict[str, Any]]) -> dict[str, float]:
    """Of one step, against the eager one: logprobs in nats, gradients relative."""
    stats = side.step()
    _synchronize()
    grads = side.backend.live_gradients()
    apart = max(float((a - b).abs().max()) for a, b in zip(stats.logprobs, expected[0].logprobs, strict=True))
    square = sum(float((grads[n].float() - g.float()).square().sum()) for n, g in expected[1].items())
    norm = sum(float(g.float().square().sum()) for g in expected[1].values())
    side.backend.drop_gradients()
    return {"logprobs_max": apart, "gradients_relative": (square / norm) ** 0.5}


def flops(module: Any, lengths: list[int]) -> float:
    config = module.config
    parameters = sum(p.numel() for p in module.parameters())  # tied embeddings: all take part in a matmul
    attention = sum(2.0 * n * n for n in lengths) * config.num_hidden_layers
    return 6 * parameters * sum(lengths) + 3 * attention * config.num_attention_heads * config.head_dim


def compare(modes: list[str], args: argparse.Namespace) -> dict[str, Any]:
    import torch

    sides, found = [], {}
    expected: tuple[Any, dict[str, Any]] | None = None
    for mode in modes:
        try:
            side = Side(mode, args)
            first = side.timed_step()
            if expected is None:
                stats = side.step()
                expected = stats, {n: g.clone() for n, g in side.backend.live_gradients().items()}
                side.backend.drop_gradients()
            found[mode] = {"first_step_ms": 1e3 * first, "against_eager": gap(side, expected)}
        except Exception as error:  # the others are still worth their time on the machine
            found[mode] = {"failed": f"{type(error).__name__}: {error}"}
            traceback.print_exc()
            continue
        side.timed_step()
        sides.append(side)
    del expected
    gc.collect()
    for _ in range(args.rounds):
        for side in sides:
            side.seconds.append(side.timed_step())
    for side in sides:
        found[side.mode] |= measured(side, torch)
        print(side.mode, found[side.mode], flush=True)
    return found


def measured(side: Side, torch: Any) -> dict[str, Any]:
    report, times = side.backend.compile_report(), side.seconds
    row = {
        "median_ms": 1e3 * statistics.median(times),
        "min_ms": 1e3 * min(times),
        "max_ms": 1e3 * max(times),
        "graphs": report.graphs if report else 0,
        "graph_breaks": report.graph_breaks if report else 0,
        "micro_batches": [b.num_slots for b in side.batches],
    }
    if torch.cuda.is_available():
        row["mfu"] = flops(side.backend.module, side.lengths) / statistics.median(times) / PEAK
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        side.timed_step()
        row["peak_gib_above_rest"] = (torch.cuda.max_memory_allocated() - before) / 2**30
    return row


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shape", default="llama-3.2-1b")
    parser.add_argument("--dtype")
    parser.add_argument("--token-budget", type=int, default=10112)
    parser.add_argument("--documents", type=int, default=len(LENGTHS), help="the first so many")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--modes", nargs="+", choices=MODES)
    parser.add_argument("--samples", action="store_true")
    parser.add_argument("--invariant", action="store_true")
    parser.add_argument(
        "--no-starts", action="store_true", help="leave out what is measured in new processes"
    )
    parser.add_argument("--cache", help="compile cache; without it a new, empty folder")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--start", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.start:
        start_once(args)
        return
    import torch
    import transformers

    left_out = {"joint+samples"} if not args.samples else set()
    left_out |= set() if torch.cuda.is_available() else {"joint+cuda_graph"}
    modes = args.modes or [mode for mode in MODES if mode not in left_out]
    with tempfile.TemporaryDirectory() as new:
        cache = args.cache or new
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = cache
        started = [m for m in modes if m in ("compile", "joint")]
        report = {
            "command": " ".join(["python", *sys.argv]),
            "machine": torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu",
            "torch": torch.__version__,
            "transformers": transformers.__version__,
            "shape": args.shape,
            "token_budget": args.token_budget,
            "invariant": args.invariant,
            "start_seconds": {} if args.no_starts else starts(started, cache, sys.argv[1:]),
            "step": compare(modes, args),
        }
    print(json.dumps(report))
    if args.out:
        args.out.write_text(json.dumps(report, indent=2) + "\n")


if __name__ == "__main__":
    main()
