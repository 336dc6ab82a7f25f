"""The processes that benchmarks/native.py compares: they start together, share a GPU and take turns."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from lockstep.config.model import ModelConfig
from lockstep.models.export import export_hf
from lockstep.models.load import load_model

FOLDER = Path(__file__).parent


class Side:
    """A process that answers."""

    def __init__(self, command: Sequence[str], log: Path, environment: dict[str, str] | None = None) -> None:
        self._log = log.open("w")
        self._process = subprocess.Popen(
            list(command),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            text=True,
            env=os.environ | (environment or {}),
        )

    def say(self, line: str) -> None:
        """Ask; the answer comes later."""
        assert self._process.stdin is not None
        self._process.stdin.write(line + "\n")
        self._process.stdin.flush()

    def answer(self) -> dict[str, Any]:
        """The next line of JSON."""
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith("{"):
                found: dict[str, Any] = json.loads(line)
                return found
        tail = Path(self._log.name).read_text().splitlines()[-12:]
        raise RuntimeError("\n".join([f"a side ended; {self._log.name}:", *tail]))

    def ask(self, **what: Any) -> dict[str, Any]:
        """Ask and wait."""
        self.say(json.dumps(what))
        return self.answer()

    def close(self) -> None:
        """End it."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            self._process.wait(60)
        except subprocess.TimeoutExpired:
            self._process.kill()
        self._log.close()


class Sides:
    """Several sides by name: they start together and take turns."""

    def __init__(self, args: argparse.Namespace, jobs: dict[str, dict[str, Any]]) -> None:
        self.sides: dict[str, Side] = {}
        self.ready: dict[str, Any] = {}
        for name, job in jobs.items():
            path = args.work / f"{name}-{time.time_ns()}.json"
            path.write_text(json.dumps(job))
            command = [sys.executable, str(FOLDER / "native_side.py"), str(path)]
            self.sides[name] = Side(command, path.with_suffix(".log"))
        try:
            self.ready = {name: side.answer() for name, side in self.sides.items()}
        except BaseException:
            self.close()
            raise
        say(f"ready: { {name: round(found['start_seconds'], 1) for name, found in self.ready.items()} }")

    def __enter__(self) -> Sides:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        for side in self.sides.values():
            side.close()

    def pairs(self, count: int, **what: Any) -> dict[str, list[dict[str, Any]]]:
        """`count` answers of each, in turns; each side answers once before, to warm up."""
        for side in self.sides.values():
            side.ask(**what)
        found: dict[str, list[dict[str, Any]]] = {name: [] for name in self.sides}
        for _ in range(count):
            for name, side in self.sides.items():
                found[name].append(side.ask(**what))
        return found


class Raw:
    """vLLM or SGLang as it comes (benchmarks/engines_raw.py), on the same GPU with the same weights."""

    def __init__(self, args: argparse.Namespace, engine: str) -> None:
        cuda = torch.cuda.is_available()
        config = ModelConfig(
            name=args.model, dtype="bfloat16" if cuda else "float32", num_layers=args.num_layers
        )
        model = load_model(config, attention="sdpa", device=torch.device("cuda:0" if cuda else "cpu"))
        folder = args.work / f"weights-{time.time_ns()}"
        export_hf(model.module, model.tokenizer, folder)
        vocab = int(model.module.config.vocab_size)  # type: ignore[union-attr]
        prompts = torch.randint(vocab, (args.samples, args.prompt_tokens)).tolist()
        del model
        if cuda:
            torch.cuda.empty_cache()
        path = args.work / f"raw-{engine}.json"
        settings = {
            "memory_fraction": 0.3,
            "options": {},
            "env": {},
            "python": sys.executable,
        } | args.beside_settings.get(engine, {})
        path.write_text(
            json.dumps(
                {
                    "model": str(folder),
                    "prompts": prompts,
                    "seeds": list(range(1, args.samples + 1)),
                    "max_tokens": args.tokens,
                    "max_model_len": args.prompt_tokens + args.tokens,
                    "memory_fraction": settings["memory_fraction"],
                    "options": settings["options"],
                }
            )
        )
        environment = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"} | settings["env"]
        command = [settings["python"], str(FOLDER / "engines_raw.py"), engine, str(path)]
        self.side = Side(command, path.with_suffix(".log"), environment)
        self.side.answer()

    def go(self) -> float:
        """Tokens per second of one run."""
        self.side.say("go")
        answer = self.side.answer()
        return float(answer["tokens"]) / float(answer["seconds"])


def say(text: str) -> None:
    """With the time."""
    print(f"[{time.strftime('%H:%M:%S')}] {text}", flush=True)
