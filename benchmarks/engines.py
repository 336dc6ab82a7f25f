"""What do Lockstep's engines cost on top of the raw ones, how well do they agree with the trainer, how long
does a weight update take?

    python benchmarks/engines.py vllm speed update --out engines-vllm-h200.json
    python benchmarks/engines.py vllm invariant --out engines-vllm-h200.json
    python benchmarks/engines.py sglang speed --settings sglang.json --out engines-sglang-h200.json

The settings file is a JSON object of EngineConfig fields ("python", "env", "options", ...). Everything works
on random weights (`shape:` models), without a network. `invariant` needs a process of its own. Parts:

speed      256 prompts of 64 tokens, 512 new ones each, with the logprobs of the sampled tokens. Pairs of
           ours and the raw engine (benchmarks/engines_raw.py, a process of its own, both awake on the GPU, in
           turns); host time: what generate spends outside of vLLM's calls (vllm in process), the CPU time of
           this process (servers; most of it passes while the server works). logprob_gap of both against the
           trainer. Weight updates while the engine is up, by the best way and through files, and whether a
           check finds them there.
invariant  engine.batch_invariant: tokens/s, and each of 8 samples alone against in the batch, to the bit.
update     the same updates with --large-model.
grpo       `lockstep train grpo`, 20 steps on random weights: rewards must rise.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lockstep.config.engine import EngineConfig
from lockstep.config.model import ModelConfig
from lockstep.config.train import TrainConfig
from lockstep.engine.build import make_engine
from lockstep.engine.spec import EngineSpec
from lockstep.loop.engines import write_model_folder
from lockstep.models.architectures import text_config
from lockstep.models.load import LoadedModel, load_model
from lockstep.observe.files import write_json
from lockstep.packing import PackLimits, plan_micro_batches
from lockstep.schema.batch import policy_samples, rollout_samples
from lockstep.schema.rollout import Completion, GenerationRequest, SamplingParams, Trajectory
from lockstep.train.local import LocalBackend
from lockstep.transfer import make_transfer
from lockstep_lab.suite.machine import machine

UPDATES = 5


class Bench:
    """A policy in a local backend, and engines for it."""

    def __init__(self, args: argparse.Namespace, name: str) -> None:
        self.args, self.device = args, torch.device("cuda:0" if torch.cuda.is_available() else "cpu")
        self.attention = "varlen" if self.device.type == "cuda" else "sdpa"
        dtype = "bfloat16" if self.device.type == "cuda" else "float32"
        config = ModelConfig(name=name, dtype=dtype)
        self.model: LoadedModel = load_model(config, attention=self.attention, device=self.device)
        settings = TrainConfig(device=str(self.device), attention=self.attention)
        self.backend = LocalBackend(settings, model=self.model, total_steps=0, temperature=1.0)
        self.vocab_size = int(text_config(self.model.module).vocab_size)
        self.work = args.work / name.replace(":", "-")
        generator = torch.Generator().manual_seed(0)
        shape = (args.samples, args.prompt_tokens)
        self.prompts = torch.randint(self.vocab_size, shape, generator=generator).tolist()

    def requests(self) -> list[GenerationRequest]:
        """One sample of each prompt."""
        params = SamplingParams(max_tokens=self.args.tokens, ignore_eos=True)
        return [
            GenerationRequest(prompt_token_ids=tuple(ids), sampling=params, seeds=(i + 1,))
            for i, ids in enumerate(self.prompts)
        ]

    def engine(self, **changes: Any) -> tuple[EngineConfig, Any, float]:
        """The engine, without weights yet, and the seconds of its start."""
        config = EngineConfig(**({"name": self.args.engine} | self.args.settings | changes))
        spec = EngineSpec(
            folder=write_model_folder(self.model, self.work / "config"),
            weights="pushed",
            model_name=self.model.name,
            dtype=str(self.model.dtype).removeprefix("torch."),
            vocab_size=self.vocab_size,
            max_model_len=self.args.prompt_tokens + self.args.tokens,
            eos_token_ids=self.model.eos_token_ids,
            tokenizer=self.model.tokenizer,
            device=str(self.device),
            shares_device=self.device.type == "cuda",
            temperatures=frozenset({0.0, 1.0}),
            work_dir=self.work / f"engine-{time.time_ns()}",
        )
        started = time.perf_counter()
        return config, make_engine(config, spec=spec), time.perf_counter() - started

    def gap(self, ids: Sequence[Sequence[int]], logprobs: Sequence[Sequence[float]]) -> dict[str, float]:
        """trainer - engine, per token."""
        completions = [
            Completion(
                prompt_token_ids=tuple(prompt),
                token_ids=tuple(i),
                logprobs=tuple(p),
                finish_reason="length",
                stop_reason=None,
                text=None,
                seed=0,
                engine=self.args.engine,
                policy_version=0,
            )
            for prompt, i, p in zip(self.prompts, ids, logprobs, strict=True)
        ]
        samples = policy_samples(rollout_samples(map(Trajectory.of, completions)), None)
        weights = [sample.loss_mask.float() for sample in samples]
        batches = plan_micro_batches(samples, weights, PackLimits(token_budget=32768))
        parts: list[Tensor] = []
        for batch, scored in zip(batches, self.backend.logprobs(batches), strict=True):
            mask = batch.loss_mask
            parts.append(scored.cpu()[mask] - batch.rollout_logprobs[mask])
        gap = torch.cat(parts).double()
        size = gap.abs()
        return {
            "mean": float(size.mean()),
            "p99": float(size.kthvalue(max(1, int(0.99 * len(size)))).values),
            "max": float(size.max()),
            "k3": float((gap.exp() - 1 - gap).mean()),
            "tokens": len(size),
        }

    def updates(self, config: EngineConfig, engine: Any, *, transport: str) -> dict[str, Any]:
        """Whole updates of a running engine, one after the other; then what a check says."""
        settings = config.model_copy(update={"transfer": transport, "verify": "always"})
        transfer = make_transfer(settings, engine, device=self.device, work_dir=self.work)
        seconds = []
        for version in range(1, UPDATES + 1):
            self._synchronize()
            started = time.perf_counter()
            transfer.push(self.backend, engine, policy_version=version)
            self._synchronize()
            seconds.append(time.perf_counter() - started)
        started = time.perf_counter()
        checked = transfer.check(engine)  # type: ignore[attr-defined]
        found = {"seconds": seconds, "median": statistics.median(seconds), "checked": checked}
        found |= {"check_seconds": time.perf_counter() - started, "transport": str(transfer.transport)}  # type: ignore[attr-defined]
        transfer.close()  # type: ignore[attr-defined]
        return found

    def _synchronize(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize()


class Raw:
    """The raw engine in a process of its own."""

    def __init__(self, bench: Bench) -> None:
        args = bench.args
        folder = bench.work / "weights"
        bench.backend.export(folder)
        job = {
            "model": str(folder),
            "prompts": bench.prompts,
            "seeds": [i + 1 for i in range(len(bench.prompts))],
            "max_tokens": args.tokens,
            "max_model_len": args.prompt_tokens + args.tokens,
            "memory_fraction": args.settings.get("memory_fraction", 0.35),
            "options": args.raw_options | args.settings.get("options", {}),
        }
        path = bench.work / "raw.json"
        path.write_text(json.dumps(job))
        environment = os.environ | {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"} | args.settings.get("env", {})
        python = args.settings.get("python", sys.executable)
        self._log = (bench.work / "raw.log").open("w")
        self._process = subprocess.Popen(
            [python, str(Path(__file__).with_name("engines_raw.py")), args.engine, str(path)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            text=True,
            env=environment,
        )
        self._answer()

    def ask(self, word: str) -> dict[str, Any]:
        """One line to it, and its answer."""
        assert self._process.stdin is not None
        self._process.stdin.write(word + "\n")
        self._process.stdin.flush()
        return self._answer()

    def _answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        for line in self._process.stdout:  # engines print there too
            if line.startswith("{"):
                answer: dict[str, Any] = json.loads(line)
                return answer
        raise RuntimeError(f"the raw engine ended; see {self._log.name}")

    def close(self) -> None:
        """End it."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            self._process.wait(60)
        except subprocess.TimeoutExpired:
            self._process.kill()
        self._log.close()


def speed(args: argparse.Namespace) -> dict[str, Any]:
    """Pairs of ours and raw, the gaps, the updates."""
    bench = Bench(args, args.model)
    config, engine, start = bench.engine()
    found: dict[str, Any] = {"start_seconds": start, "describe": version_of(engine)}
    try:
        found["update"] = {args.model: bench.updates(config, engine, transport="auto")}
        say(f"updates {found['update']}")
        requests = bench.requests()
        engine.generate(requests[:8])
        raw = None if args.no_raw else Raw(bench)
        ours, raws, hosts = [], [], []
        done: list[list[Completion]] = []
        for _ in range(args.pairs):
            seconds, host, done = timed(engine, requests)
            ours.append(args.samples * args.tokens / seconds)
            hosts.append(host)
            if raw is not None:
                answer = raw.ask("go")
                raws.append(answer["tokens"] / answer["seconds"])
            say(f"ours {ours[-1]:,.0f} tok/s, host {hosts[-1]}, raw {raws[-1:]}")
        found |= {"tokens_per_second": spread(ours), "raw_tokens_per_second": spread(raws), "host": hosts}
        found["pair_ratio"] = spread([a / b for a, b in zip(ours, raws, strict=False)])
        found["gap"] = bench.gap([c.token_ids for (c,) in done], [c.logprobs for (c,) in done])
        say(f"gap {found['gap']}")
        if raw is not None:
            kept = bench.work / "raw-kept.json"
            raw.ask(f"keep {kept}")
            samples = json.loads(kept.read_text())
            found["raw_gap"] = bench.gap(samples["ids"], samples["logprobs"])
            say(f"raw gap {found['raw_gap']}")
            raw.close()
        found["update"][f"{args.model} through files"] = bench.updates(config, engine, transport="disk")
        say(f"through files {found['update']}")
    finally:
        engine.close()
    return found


def timed(
    engine: Any, requests: Sequence[GenerationRequest]
) -> tuple[float, dict[str, float], list[list[Completion]]]:
    """Seconds, shares of them that are the host's, and the completions."""
    core = getattr(engine, "_core", None)
    inside, cpu, started = core.seconds if core else 0.0, time.process_time(), time.perf_counter()
    done = engine.generate(requests)
    seconds = time.perf_counter() - started
    host = {"cpu_share": (time.process_time() - cpu) / seconds}
    if core:  # in process: CPU time is mostly the engine's own
        host = {"outside_engine_share": 1.0 - (core.seconds - inside) / seconds}
    return seconds, host, done


def invariant(args: argparse.Namespace) -> dict[str, Any]:
    """The batch-invariant mode, through one switch."""
    bench = Bench(args, args.model)
    config, engine, start = bench.engine(batch_invariant=True, unseeded=False)
    try:
        transfer = make_transfer(config, engine, device=bench.device, work_dir=bench.work)
        transfer.push(bench.backend, engine, policy_version=1)
        requests = bench.requests()
        engine.generate(requests[:8])
        speeds: list[float] = []
        done: list[list[Completion]] = []
        for _ in range(3):
            seconds, _, done = timed(engine, requests)
            speeds.append(args.samples * args.tokens / seconds)
        alone = [engine.generate([request])[0][0] for request in requests[:8]]
        same = [
            a.logprobs == c.logprobs and a.token_ids == c.token_ids
            for a, (c,) in zip(alone, done[:8], strict=True)
        ]
        found = {"start_seconds": start, "tokens_per_second": spread(speeds), "alone_equals_batch": sum(same)}
        found |= {
            "of": len(same),
            "gap": bench.gap([c.token_ids for (c,) in done], [c.logprobs for (c,) in done]),
        }
        say(f"invariant {found}")
        return found
    finally:
        engine.close()


def update(args: argparse.Namespace) -> dict[str, Any]:
    """Updates of the large model; a few tokens to see that it has them."""
    bench = Bench(args, args.large_model)
    config, engine, start = bench.engine()
    try:
        found = {"start_seconds": start, args.large_model: bench.updates(config, engine, transport="auto")}
        bench.prompts = bench.prompts[:16]
        done = engine.generate(bench.requests())
        found["gap"] = bench.gap([c.token_ids for (c,) in done], [c.logprobs for (c,) in done])
        say(f"update {found}")
        return found
    finally:
        engine.close()


def grpo(args: argparse.Namespace) -> dict[str, Any]:
    """20 steps through the command line."""
    run = args.work / f"grpo-{time.time_ns()}"
    settings = {"engine": {"name": args.engine} | args.settings | {"verify": "always"}}
    recipe = args.work / "grpo.toml"
    recipe.write_text(grpo_recipe(args, settings))
    command = [
        sys.executable,
        "-m",
        "lockstep",
        "train",
        "grpo",
        "--recipe",
        str(recipe),
        "--run-dir",
        str(run),
    ]
    started = time.perf_counter()
    ended = subprocess.run(command, capture_output=True, text=True, timeout=400)
    found: dict[str, Any] = {"rc": ended.returncode, "seconds": time.perf_counter() - started}
    say(ended.stdout[-600:] + ended.stderr[-1500:])
    path = run / "metrics.jsonl"
    rows = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    rows = [row for row in rows if "reward/mean" in row]
    rewards = [row["reward/mean"] for row in rows]
    if len(rewards) >= 10:
        found |= {"first_5": statistics.fmean(rewards[:5]), "last_5": statistics.fmean(rewards[-5:])}
    names = ("grad_norm", "logprob_gap_mean", "logprob_gap_max", "time/weights", "time/generate", "time/step")
    found |= {"reward_mean": rewards, "metrics": [{k: row.get(k) for k in names} for row in rows]}
    say(f"grpo {found.get('first_5')} -> {found.get('last_5')}")
    return found


def grpo_recipe(args: argparse.Namespace, settings: dict[str, Any]) -> str:
    """TOML: the recipe `tiny` with another model; values as JSON, which TOML reads alike where used here."""

    def table(name: str, values: dict[str, Any]) -> str:
        flat = {k: v for k, v in values.items() if not isinstance(v, dict)}
        lines = [f"[{name}]"] + [f"{k} = {json.dumps(v)}" for k, v in flat.items()]
        nested = [table(f"{name}.{k}", v) for k, v in values.items() if isinstance(v, dict)]
        return "\n".join(lines + nested)

    dtype = "bfloat16" if torch.cuda.is_available() else "float32"
    parts = [
        f'kind = "grpo"\nname = "engines"\nsteps = {args.steps}',
        table("model", {"name": args.model, "dtype": dtype}),
        table("data", {"source": "ids", "max_prompt_tokens": 16}),
        table(
            "rollout",
            {
                "prompts_per_step": 16,
                "group_size": 16,
                "sampling": {"max_tokens": args.grpo_tokens, "ignore_eos": True},
            },
        ),
        '[[rewards]]\nname = "ids"',
        table("train", {"lr": args.lr, "token_budget": 16384}),
        table("eval", {"before": False, "after": False}),
        table("checkpoint", {"save_at_end": False, "export_at_end": False}),
        table("engine", settings["engine"]),
    ]
    return "\n\n".join(parts) + "\n"


def spread(values: Sequence[float]) -> dict[str, Any]:
    """Median, least and largest."""
    if not values:
        return {}
    return {"median": statistics.median(values), "min": min(values), "max": max(values), "all": list(values)}


def version_of(engine: Any) -> dict[str, Any]:
    """Name, version and arguments."""
    described = engine.describe() if hasattr(engine, "describe") else {}
    return {k: described[k] for k in ("engine", "version", "arguments", "command") if k in described}


def say(text: str) -> None:
    print(f"[{time.strftime('%H:%M:%S')}] {text}", flush=True)


PARTS = {"speed": speed, "invariant": invariant, "update": update, "grpo": grpo}


def main() -> int:
    made = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("engine", choices=["vllm", "sglang"])
    made.add_argument("parts", nargs="+", choices=list(PARTS))
    made.add_argument("--model", default="shape:llama-3.2-1b")
    made.add_argument("--large-model", default="shape:llama-3.1-8b")
    made.add_argument("--samples", type=int, default=256)
    made.add_argument("--prompt-tokens", type=int, default=64)
    made.add_argument("--tokens", type=int, default=512)
    made.add_argument("--pairs", type=int, default=5)
    made.add_argument("--no-raw", action="store_true")
    made.add_argument("--steps", type=int, default=20, help="of grpo")
    made.add_argument("--grpo-tokens", type=int, default=64)
    made.add_argument("--lr", type=float, default=2e-4, help="of grpo")
    made.add_argument("--settings", type=Path, help="JSON of EngineConfig fields")
    made.add_argument("--raw-options", type=json.loads, default={}, help="JSON of the raw engine's arguments")
    made.add_argument("--out", type=Path, required=True)
    made.add_argument("--work", type=Path, help="models and logs (a folder beside --out)")
    args = made.parse_args()
    args.work = (args.work or args.out.with_suffix(".work")).resolve()
    args.work.mkdir(parents=True, exist_ok=True)
    args.settings = json.loads(args.settings.read_text()) if args.settings else {}
    found: dict[str, Any] = json.loads(args.out.read_text()) if args.out.exists() else {}
    for part in args.parts:
        found[part] = PARTS[part](args)
        found["machine"] = machine("cuda" if torch.cuda.is_available() else "cpu")
        found["command"] = " ".join(["python", "benchmarks/engines.py", *sys.argv[1:]])
        write_json(args.out, found)
    return 0


if __name__ == "__main__":
    sys.exit(main())
