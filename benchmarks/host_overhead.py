"""How much of a step the loop itself takes: everything that is not generation, reward, forward, backward or
optimizer, by the spans of a run's metrics.jsonl.

    python benchmarks/host_overhead.py --json results/host_overhead.json      a GRPO run of SmolLM2-135M, then
    python benchmarks/host_overhead.py --metrics runs/demo/metrics.jsonl      a run that is there already
    python benchmarks/host_overhead.py --parts [--prompts 128 --ranks 4]      each part, of made-up samples

--parts times what every rank does on the host in a step, on one thread: of 8 samples a prompt, each of 140
and 512 tokens (--prompt-tokens 4 16: prompts of 4 to 16, as several_gpus.py has). Otherwise the last line
says whether the median share is below the target (3 %); the exit status is 0 when it is.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

TARGET = 0.03
"""Largest median share of a step's wall time that the loop may take."""

GROUP, COMPLETION = 8, 512
"""Of --parts: samples of a prompt, and their tokens."""

WARM_UP = 1
"""First steps that are left out: caches are cold."""


def main(argv: Sequence[str] | None = None) -> int:
    """Exit status 0 when the target is met."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--metrics", type=Path, help="metrics.jsonl of a finished run; default: make one")
    parser.add_argument("--steps", type=int, default=8, help="of the run that is made (default: %(default)s)")
    parser.add_argument("--threads", type=int, default=2, help="torch threads of it (default: %(default)s)")
    parser.add_argument("--json", type=Path, help="write the result to this file")
    parser.add_argument("--parts", action="store_true", help="time the parts of made-up samples")
    parser.add_argument("--prompts", type=int, default=128, help="of --parts (default: %(default)s)")
    parser.add_argument("--ranks", type=int, default=4, help="of --parts (default: %(default)s)")
    parser.add_argument(
        "--prompt-tokens", type=int, nargs=2, default=(140, 140), metavar=("MIN", "MAX"), help="of --parts"
    )
    args = parser.parse_args(argv)
    if args.parts:
        found = parts(args.prompts, ranks=args.ranks, prompt_tokens=args.prompt_tokens)
        result = {"milliseconds": found, "versions": versions()}
        if args.json is not None:
            args.json.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
        return 0
    if args.metrics is not None:
        result = measure(args.metrics)
    else:
        if args.steps <= WARM_UP:
            parser.error(f"--steps {args.steps}: the first {WARM_UP} are left out; ask for more")
        with tempfile.TemporaryDirectory() as folder:
            result = measure(make_run(Path(folder) / "run", steps=args.steps, threads=args.threads))
    if args.json is not None:
        args.json.parent.mkdir(parents=True, exist_ok=True)
        args.json.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
    report(result)
    return 0 if result["met"] else 1


def make_run(run_dir: Path, *, steps: int, threads: int) -> Path:
    """The demo recipe for a few steps, logging what it logs by default; its metrics.jsonl."""
    from lockstep import load_run, train_online

    run = load_run(
        "demo",
        overrides={
            "run_dir": str(run_dir),
            "steps": steps,
            "train.num_threads": threads,
            "eval.before": False,
            "eval.after": False,
            "eval.every": 0,
            "checkpoint.every": 0,
            "checkpoint.save_at_end": False,
            "checkpoint.export_at_end": False,
        },
    )
    train_online(run)  # type: ignore[arg-type]
    return run_dir / "metrics.jsonl"


def measure(metrics: Path) -> dict[str, Any]:
    """Shares of the steps after the first, and where the host's time went (seconds per step, medians)."""
    rows = [json.loads(line) for line in metrics.read_text(encoding="utf-8").splitlines()]
    steps = [row for row in rows if "evaluation" not in row][WARM_UP:]
    if not steps:
        sys.exit(f"{metrics}: fewer than {WARM_UP + 1} steps; nothing to measure")
    shares = sorted(row["time/host_share"] for row in steps)
    names = sorted({name for row in steps for name in row if name.startswith("time/")} - {"time/host_share"})
    median = statistics.median(shares)
    return {
        "target": TARGET,
        "met": median < TARGET,
        "steps": len(steps),
        "host_share": {"median": median, "min": shares[0], "max": shares[-1]},
        "seconds": {n.removeprefix("time/"): statistics.median(r.get(n, 0.0) for r in steps) for n in names},
        "versions": versions(),
    }


def parts(prompts: int, *, ranks: int, prompt_tokens: Sequence[int]) -> dict[str, float]:
    """Milliseconds of each part, the median of five; printed as they come."""
    import torch

    from lockstep.algorithms.grpo import PolicyAlgorithm
    from lockstep.config.algorithm import GRPOConfig
    from lockstep.loop.metrics import rollout_metrics
    from lockstep.loop.policy import estimate
    from lockstep.loop.rollout_rows import rollout_rows
    from lockstep.observe.files import json_lines
    from lockstep.packing import Planner
    from lockstep.ranks.process_group import decode_object, encode_object
    from lockstep.rollout.shares import SentShare, Share
    from lockstep.schema.batch import policy_samples, rollout_samples
    from lockstep.train.assignment import assigned_indices

    torch.set_num_threads(1)
    found: dict[str, float] = {}

    def timed(name: str, call: Callable[[], Any]) -> Any:
        times = []
        for _ in range(5):
            started = time.process_time()
            result = call()
            times.append(1000 * (time.process_time() - started))
        found[name] = statistics.median(times)
        print(f"{name:32} {found[name]:9.1f} ms")
        return result

    groups = made_groups(prompts, prompt_tokens=prompt_tokens)
    shares = [
        Share(numbers=tuple(range(prompts)[r::ranks]), rollouts=tuple(g.rollouts for g in groups[r::ranks]))
        for r in range(ranks)
    ]
    tasks = [group.prompt for group in groups]
    timed("send a rank's share", lambda: encode_object(SentShare.of(shares[0], tasks), SentShare))
    sent = [encode_object(SentShare.of(share, tasks), SentShare) for share in shares]
    timed("receive all", lambda: [decode_object(s, SentShare, sender=0).received(tasks) for s in sent])
    samples = timed("documents", lambda: rollout_samples(r.trajectory for g in groups for r in g.rollouts))
    algorithm = PolicyAlgorithm(GRPOConfig(), max_tokens=COMPLETION)
    estimates = timed("advantages", lambda: estimate(algorithm, groups, samples))
    trained = timed("policy samples", lambda: policy_samples(samples, estimates.advantages))
    weights = timed("loss weights", lambda: algorithm.loss_weights(trained))
    for layout in ("packed", "shared"):
        for static in (False, True):
            plan = Planner(
                token_budget=32_768,
                static_capacity=static,
                layout=layout,
                max_seqlen=prompt_tokens[1] + COMPLETION,
                max_documents=len(samples),
                parts=ranks,
            )
            name = f"{layout}{', static' if static else ''}"
            packs = timed(f"pack, {name}", lambda plan=plan: plan(trained, weights))
            if layout == "shared":  # while the GPU computes the pack before
                own = [packs[i] for i in assigned_indices(len(packs), parts=ranks)[0] if i is not None]
                timed(f"a rank's rows, {name}", lambda own=own: [batch.with_rows() for batch in own])
    timed("metrics of rollouts", lambda: rollout_metrics(groups))
    rows = timed("rows (rank 0, in a thread)", lambda: rollout_rows(0, groups, skip_special_tokens=False))
    timed("JSON of rows (the same)", lambda: json_lines(rows))
    return found


def made_groups(prompts: int, *, prompt_tokens: Sequence[int]) -> list[Any]:
    """Groups of 8 random samples."""
    from lockstep.schema.rollout import Prompt, Rollout, RolloutGroup, Span, Trajectory

    rng, groups = random.Random(0), []
    for index in range(prompts):
        ids = tuple(rng.choices(range(128_000), k=rng.randint(*prompt_tokens)))
        rollouts = []
        for sample in range(GROUP):
            answer = Span(
                author="policy",
                token_ids=tuple(rng.choices(range(128_000), k=COMPLETION)),
                logprobs=tuple(-rng.random() for _ in range(COMPLETION)),
                policy_version=0,
            )
            trajectory = Trajectory(
                spans=(Span(author="prompt", token_ids=ids), answer),
                finish_reason="length",
                stop_reason=None,
                text=None,
                seed=rng.getrandbits(63),
                engine="native",
            )
            reward = rng.random()
            rollouts.append(
                Rollout(trajectory=trajectory, reward=reward, rewards={"ids": reward}, sample=sample)
            )
        groups.append(
            RolloutGroup(prompt=Prompt(index=index, token_ids=ids, text=""), rollouts=tuple(rollouts))
        )
    return groups


def versions() -> dict[str, Any]:
    """What the numbers depend on."""
    import torch

    import lockstep

    return {
        "lockstep": lockstep.__version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "cpu_count": os.cpu_count(),
    }


def report(result: dict[str, Any]) -> None:
    """A line per span, then the verdict."""
    step = result["seconds"]["step"]
    for name, seconds in sorted(result["seconds"].items(), key=lambda item: -item[1]):
        print(f"{name:18} {seconds:9.4f} s  {seconds / step:7.2%}")
    share = result["host_share"]
    print(
        f"host overhead: {'met' if result['met'] else 'NOT met'}, median {share['median']:.2%} of a step "
        f"(min {share['min']:.2%}, max {share['max']:.2%}, {result['steps']} steps), target < {TARGET:.0%}"
    )


if __name__ == "__main__":
    sys.exit(main())
