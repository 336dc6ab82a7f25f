"""For how long does a save stop the loop, and how near to the disk's own rate is the last one?

    python benchmarks/checkpoint_saves.py --model shape:llama-3.2-1b --dtype bfloat16 --device cuda \
        --tokens 4096 --json results/checkpoint_saves-h200.json

LocalBackend with AdamW trains on one document. Per pair, in seconds: a save in the foreground; a save in the
background with the steps until it is a checkpoint ("stopped" is what the loop waits in all: the call, the
update that waits for the copy, polls, the commit; "slowed" is by how much those steps are slower than
others); and the end of a run, a save and an export, beside a plain write of as many bytes in the same minute:
one file, 16 MiB at a time, then fsync. "last_over_plain" is the share of the plain rate that the end of the
run has.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lockstep.config.model import ModelConfig
from lockstep.config.train import CheckpointConfig, TrainConfig
from lockstep.loop.checkpoint import CheckpointManager
from lockstep.models.load import load_model
from lockstep.packing import PackLimits, plan_micro_batches
from lockstep.protocols.train import LossOutput, StepStats
from lockstep.schema.batch import PackedBatch, TrainSample
from lockstep.train.local import LocalBackend

_BLOCK = 1 << 24


class MeanNegativeLogprob:
    """Cross entropy: loss_weights hold 1 / tokens."""

    separable = True
    entropy_grad = False
    terms: tuple[str, ...] = ()

    def __call__(
        self, logprobs: Tensor, entropy: Tensor, batch: PackedBatch, rows: Tensor | slice
    ) -> LossOutput:
        """See lockstep.protocols.TokenLoss."""
        return LossOutput(-(logprobs * batch.loss_weights.to(logprobs.device)[rows]).sum())

    def metrics(self, batches: Sequence[PackedBatch], stats: StepStats) -> dict[str, float]:
        """None."""
        return {}


def main(argv: Sequence[str] | None = None) -> None:
    """Measure, print, and write a file if one is named."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="bundled:smollm2-135m", help="(default: %(default)s)")
    parser.add_argument("--layers", type=int, help="of the model; default: all")
    parser.add_argument("--dtype", default="float32", help="compute dtype (default: %(default)s)")
    parser.add_argument("--device", default="cpu", help="cpu or cuda (default: %(default)s)")
    parser.add_argument("--tokens", type=int, default=256, help="of a step (default: %(default)s)")
    parser.add_argument("--pairs", type=int, default=3, help="of saves (default: %(default)s)")
    parser.add_argument("--folder", type=Path, help="where checkpoints go; default: a temporary folder")
    parser.add_argument("--json", type=Path, help="write the result to this file")
    args = parser.parse_args(argv)
    with tempfile.TemporaryDirectory(dir=args.folder) as folder:
        result = measure(args, Path(folder))
    text = json.dumps(result, indent=2)
    print(text)
    if args.json is not None:
        args.json.parent.mkdir(parents=True, exist_ok=True)
        args.json.write_text(text + "\n", encoding="utf-8")


def measure(args: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """All pairs, behind one that does not count: memory and files are new to it."""
    backend, step, waits = training(args)
    checkpoints = CheckpointManager(folder, CheckpointConfig(keep_last=1, background=True))
    pairs = []
    for _ in range(args.pairs + 1):
        pairs.append(
            pair_of_saves(checkpoints, backend, step, waits) | end_of_run(checkpoints, backend, folder)
        )
    latest = checkpoints.find()
    assert latest is not None
    return {
        "median": {name: round(statistics.median(pair[name] for pair in pairs[1:]), 4) for name in pairs[0]},
        "pairs": [{name: round(value, 4) for name, value in pair.items()} for pair in pairs],
        "parameters": sum(p.numel() for p in backend.module.parameters()),
        "checkpoint_bytes": sum(file.stat().st_size for file in latest.iterdir()),
        "settings": {
            name: str(value) for name, value in vars(args).items() if name not in ("json", "folder")
        },
        "machine": {
            "processor": platform.machine(),
            "cpu_count": os.cpu_count(),
            "gpu": torch.cuda.get_device_name() if args.device == "cuda" else None,
            "load_average": round(os.getloadavg()[0], 1),
        },
        "versions": {"torch": torch.__version__, "python": platform.python_version()},
    }


def training(args: argparse.Namespace) -> tuple[LocalBackend, Callable[[], float], list[float]]:
    """A backend, an optimizer step of it, which returns its seconds, and what each step waited for a copy."""
    config = TrainConfig(lr=1e-6, device=args.device, token_budget=args.tokens)
    model = load_model(
        ModelConfig(name=args.model, dtype=args.dtype, num_layers=args.layers),
        device=torch.device(args.device),
        attention="varlen" if args.device == "cuda" else "sdpa",
    )
    backend = LocalBackend(config, model=model, total_steps=10_000)
    ids = torch.randint(0, 250, (args.tokens,), generator=torch.Generator().manual_seed(0))
    mask = torch.arange(args.tokens) < args.tokens - 1
    sample = TrainSample(token_ids=ids, loss_mask=mask)
    batches = plan_micro_batches([sample], [mask / mask.sum()], PackLimits(token_budget=args.tokens))
    loss = MeanNegativeLogprob()
    waits: list[float] = []

    def step() -> float:
        began = time.perf_counter()
        backend.forward_backward(batches, loss)
        asked = time.perf_counter()
        backend._copies.wait()
        waits.append(time.perf_counter() - asked)
        backend.optimizer_step()  # reads the norm: the GPU is waited for
        return time.perf_counter() - began

    return backend, step, waits


def pair_of_saves(
    checkpoints: CheckpointManager, backend: LocalBackend, step: Callable[[], float], waits: list[float]
) -> dict[str, float]:
    """A foreground save and a background one, with steps before and in between."""
    quiet = statistics.median(step() for _ in range(5))
    began = time.perf_counter()
    checkpoints.save(backend.steps_done, backend, {}, wait=True)
    foreground = time.perf_counter() - began
    step()

    waits.clear()
    began = time.perf_counter()
    checkpoints.save(backend.steps_done, backend, {})
    stops = [time.perf_counter() - began]
    steps = []
    committed = None
    while committed is None:
        steps.append(step())
        asked = time.perf_counter()
        committed = checkpoints.poll()
        stops.append(time.perf_counter() - asked)
    stopped = sum(stops) + sum(waits)
    slowed = max(0.0, sum(steps) - sum(waits) - len(steps) * quiet)
    return {
        "foreground": foreground,
        "stopped": stopped,
        "slowed": slowed,
        "until_a_checkpoint": time.perf_counter() - began,
        "step": quiet,
        "steps_meanwhile": len(steps),
        "stopped_over_foreground": stopped / foreground,
    }


def end_of_run(checkpoints: CheckpointManager, backend: LocalBackend, folder: Path) -> dict[str, float]:
    """The last save and the export, then a plain write of as many bytes."""
    began = time.perf_counter()
    path = checkpoints.save(backend.steps_done, backend, {}, wait=True)
    saved = time.perf_counter() - began
    backend.export(folder / "export")
    seconds = time.perf_counter() - began
    files = [*path.iterdir(), *(folder / "export").iterdir()]
    size = sum(file.stat().st_size for file in files)
    plain = plain_write(folder / "plain", size)
    return {"last_save": saved, "last_save_and_export": seconds, "plain_write": plain} | {
        "last_over_plain": plain / seconds
    }


def plain_write(path: Path, size: int) -> float:
    """Seconds to write and sync a file of `size` bytes."""
    block = os.urandom(_BLOCK)
    began = time.perf_counter()
    with path.open("wb") as file:
        for start in range(0, size, _BLOCK):
            file.write(block[: size - start])
        file.flush()
        os.fsync(file.fileno())
    seconds = time.perf_counter() - began
    path.unlink()
    return seconds


if __name__ == "__main__":
    main()
