"""What does the Tinker API cost on top of the step that it asks for?

    python benchmarks/serve_overhead.py --out FILE.json         # an 8B shape, one GPU
    python benchmarks/serve_overhead.py --model shape:tiny-qwen3 --samples 8 --tokens 8 --out FILE.json

A step samples `--samples` completions of `--tokens` tokens each (one prompt for every 8) with LoRA of rank
32, and takes one forward_backward (importance_sampling) over them and an optimizer step. Sides, each in a
process of its own:

- api: the unmodified `tinker` client against `lockstep serve`;
- direct: the same objects that serve the api, called in one process: the engine's `generate` and the train
  backend's `forward_backward` that `lockstep train` calls, with one document in a micro-batch;
- packed: as direct, with as many documents in a micro-batch as `lockstep train` packs (`--pack-tokens`).

`overhead` is the median api step over the median direct one, minus 1. The weights are random: bits and texts
mean nothing, lengths and times do. Times are of the parts of a step: weights (from trainer to sampler),
sample, train.
"""

from __future__ import annotations

import argparse
import json
import platform
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

SIDES = ("api", "direct", "packed")
GROUP, RANK, NAME = 8, 32, "model"
ADAM = {
    "learning_rate": 1e-5,
    "beta1": 0.9,
    "beta2": 0.95,
    "eps": 1e-8,
    "weight_decay": 0.0,
    "grad_clip_norm": 1.0,
}


def prompts(arguments: argparse.Namespace, step: int) -> list[list[int]]:
    """Ids, the same on every side."""
    count = -(-arguments.samples // GROUP)
    return [[3 + (7 * i + 13 * p + 29 * step) % 250 for i in range(arguments.prompt)] for p in range(count)]


def timed(parts: dict[str, float], name: str, call: Callable[[], Any]) -> Any:
    started = time.perf_counter()
    value = call()
    parts[name] = time.perf_counter() - started
    return value


def api(arguments: argparse.Namespace) -> list[dict[str, float]]:
    """Steps by the client."""
    import tinker
    from tinker import types

    with tempfile.TemporaryDirectory() as directory:
        command = [sys.executable, "-m", "lockstep", "serve", "--model", f"{NAME}={arguments.model}"]
        command += ["--dir", directory, "--port", str(arguments.port)]
        server = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        try:
            assert server.stdout is not None
            if not any(line.strip() == "serve: ready" for line in server.stdout):
                raise SystemExit("the server did not start")
            token = json.loads((Path(directory) / "tokens.json").read_text())["user"]
            service = tinker.ServiceClient(base_url=f"http://127.0.0.1:{arguments.port}", api_key=token)
            client = service.create_lora_training_client(NAME, rank=RANK, seed=1).result()
            params = types.SamplingParams(max_tokens=arguments.tokens, seed=1, stop=[])
            steps = []
            for step in range(arguments.steps):
                parts: dict[str, float] = {}
                sampler = timed(
                    parts, "weights", lambda: client.save_weights_and_get_sampling_client().result()
                )
                asked = prompts(arguments, step)

                def sample(sampler: Any = sampler, asked: Sequence[list[int]] = asked) -> list[Any]:
                    futures = [sampler.sample(types.ModelInput.from_ints(p), GROUP, params) for p in asked]
                    return [future.result(timeout=3600) for future in futures]

                answers = timed(parts, "sample", sample)
                data = [
                    _datum(types, prompt, sequence)
                    for prompt, answer in zip(asked, answers, strict=True)
                    for sequence in answer.sequences
                ]

                def train(data: list[Any] = data) -> None:
                    done = client.forward_backward(data, "importance_sampling")
                    adam = client.optim_step(types.AdamParams(**ADAM))
                    done.result(timeout=3600)
                    adam.result(timeout=3600)

                timed(parts, "train", train)
                steps.append(_counted(parts, step))
            return steps
        finally:
            server.send_signal(signal.SIGINT)
            server.wait(120)


def _datum(types: Any, prompt: list[int], sequence: Any) -> Any:
    length = len(prompt) + len(sequence.tokens) - 1
    before = [0.0] * (len(prompt) - 1)
    columns: dict[str, tuple[list[Any], str]] = {
        "target_tokens": ([*prompt[1:], *sequence.tokens], "int64"),
        "logprobs": ([*before, *sequence.logprobs], "float32"),
        "advantages": ([*before, *([0.5] * len(sequence.tokens))], "float32"),
    }
    inputs = {n: types.TensorData(data=v, dtype=d, shape=[length]) for n, (v, d) in columns.items()}
    tokens = [*prompt, *sequence.tokens[:-1]]
    return types.Datum(model_input=types.ModelInput.from_ints(tokens), loss_fn_inputs=inputs)


def direct(arguments: argparse.Namespace, *, packed: bool) -> list[dict[str, float]]:
    """Steps by the objects that serve the api."""
    import torch

    from lockstep.invariant import configure_cuda
    from lockstep.packing import pack
    from lockstep.schema.batch import RolloutSample, policy_samples
    from lockstep.schema.rollout import GenerationRequest, SamplingParams
    from lockstep.serve.losses import make_loss
    from lockstep.serve.models import AdamSettings, AdapterSpec, BaseModel, Sampler, TrainingModel

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if device.type == "cuda":
        configure_cuda()
    base = BaseModel(NAME, arguments.model, device=device)
    spec = AdapterSpec(rank=RANK, seed=1)
    trainer, sampler = TrainingModel(base, spec), Sampler(base, spec)
    sampling = SamplingParams(max_tokens=arguments.tokens, ignore_eos=True)
    steps = []
    with tempfile.TemporaryDirectory() as directory:
        for step in range(arguments.steps):
            parts: dict[str, float] = {}
            path = Path(directory) / f"{step}.safetensors"

            def weights(path: Path = path, step: int = step) -> None:
                trainer.save_weights(path)
                sampler.activate(path, written=float(step))

            timed(parts, "weights", weights)
            requests = [
                GenerationRequest(prompt_token_ids=tuple(p), sampling=sampling, seeds=tuple(range(GROUP)))
                for p in prompts(arguments, step)
            ]
            groups = timed(
                parts, "sample", lambda requests=requests: sampler.generate(requests, seconds=3600.0)
            )
            samples, advantages = [], []
            for completion in (completion for group in groups for completion in group):
                prompt = len(completion.prompt_token_ids)
                ids = torch.tensor([*completion.prompt_token_ids, *completion.token_ids])
                mask = torch.arange(len(ids)) >= prompt - 1
                mask[-1] = False
                old = torch.tensor([*[0.0] * (prompt - 1), *completion.logprobs, 0.0])
                samples.append(RolloutSample(token_ids=ids, loss_mask=mask, rollout_logprobs=old))
                advantages.append(0.5 * mask.float())
            ready = policy_samples(samples, advantages)
            size = max(1, arguments.pack_tokens // len(ready[0].token_ids)) if packed else 1
            cuts = [ready[at : at + size] for at in range(0, len(ready), size)]
            batches = [pack(cut, [torch.ones(len(one.token_ids)) for one in cut]) for cut in cuts]

            def train(batches: list[Any] = batches) -> None:
                trainer.backend.forward_backward(batches, make_loss("importance_sampling", {}))
                trainer.optim_step(AdamSettings(**ADAM))
                if device.type == "cuda":
                    torch.cuda.synchronize()

            timed(parts, "train", train)
            steps.append(_counted(parts, step))
    return steps


def _counted(parts: dict[str, float], step: int) -> dict[str, float]:
    whole = {**parts, "step": sum(parts.values())}
    print(
        f"  step {step}: " + ", ".join(f"{name} {value:.2f} s" for name, value in whole.items()), flush=True
    )
    return whole


def median(sides: Sequence[list[dict[str, float]]], name: str) -> float:
    """Of the steps past the first."""
    return statistics.median(step[name] for side in sides for step in side[1:])


def report(sides: list[tuple[str, list[dict[str, float]]]]) -> dict[str, Any]:
    """Medians of each side, and the overhead once there are both."""
    found: dict[str, Any] = {}
    for side in dict.fromkeys(name for name, _ in sides):
        runs = [steps for name, steps in sides if name == side]
        found[side] = {part: median(runs, part) for part in ("weights", "sample", "train", "step")}
    if "api" in found and "direct" in found:
        found["overhead"] = found["api"]["step"] / found["direct"]["step"] - 1
    return found


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="shape:llama-3.1-8b")
    parser.add_argument("--samples", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=512)
    parser.add_argument("--prompt", type=int, default=128)
    parser.add_argument("--steps", type=int, default=4, help="the first is not counted")
    parser.add_argument("--pack-tokens", type=int, default=4096)
    parser.add_argument("--port", type=int, default=8793)
    parser.add_argument("--sides", nargs="+", choices=SIDES, default=["direct", "api", "direct", "packed"])
    parser.add_argument("--side", help=argparse.SUPPRESS, choices=SIDES)
    parser.add_argument("--out", type=Path, required=True)
    arguments = parser.parse_args()
    if arguments.side is not None:
        steps = (
            api(arguments)
            if arguments.side == "api"
            else direct(arguments, packed=arguments.side == "packed")
        )
        arguments.out.write_text(json.dumps(steps))
        return 0
    sides: list[tuple[str, list[dict[str, float]]]] = []
    settings = {k: v for k, v in vars(arguments).items() if k not in ("out", "side", "sides", "port")}
    for side in arguments.sides:
        print(f"{side}:", flush=True)
        with tempfile.TemporaryDirectory() as folder:
            out = Path(folder) / "steps.json"
            given = [f"--{k.replace('_', '-')}={v}" for k, v in settings.items()]
            command = [sys.executable, __file__, *given, "--port", str(arguments.port), "--side", side]
            subprocess.run([*command, "--out", str(out)], check=True)
            sides.append((side, json.loads(out.read_text())))
        whole = {"settings": settings, "machine": _machine(), "medians": report(sides), "sides": sides}
        arguments.out.write_text(json.dumps(whole, indent=1) + "\n")
    print(json.dumps(report(sides), indent=1))
    return 0


def _machine() -> dict[str, str]:
    import torch
    import transformers

    device = torch.cuda.get_device_name() if torch.cuda.is_available() else platform.machine()
    return {"device": device, "torch": torch.__version__, "transformers": transformers.__version__}


if __name__ == "__main__":
    sys.exit(main())
