"""benchmarks/train_stacks.py: what it does in which order, and what it makes of it."""

import argparse
import importlib.util
import json
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from lockstep_lab.train_parity.job import StepRow

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("train_stacks", ROOT / "benchmarks" / "train_stacks.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["train_stacks"] = module
    spec.loader.exec_module(module)
    return module


def arguments(script: ModuleType, out: Path, *argv: str) -> argparse.Namespace:
    args = script.parser().parse_args(["--out", str(out / "x.json"), *argv])
    args.work = out / "work"
    args.work.mkdir(exist_ok=True)
    found: argparse.Namespace = args
    return found


def test_the_most_important_come_first(script: ModuleType, tmp_path: Path) -> None:
    plan = script.plan(arguments(script, tmp_path))
    assert plan[:4] == [("deepspeed:zero2", 4), ("fsdp2", 4), ("local", 1), ("deepspeed:zero3", 4)]
    assert ("fsdp2:tp2+ring2", 4) in plan and ("fsdp2:tp2+ring2", 2) not in plan
    assert len(plan) == 1 + 6 + 5


def test_every_step_has_other_documents_of_the_same_lengths(script: ModuleType, tmp_path: Path) -> None:
    from lockstep.recording import Recording

    flags = "--model shape:tiny-llama --gpus 2 --documents 5 --max-length 100 --steps 3 --token-budget 256"
    args = arguments(script, tmp_path, *flags.split())
    steps = script.make_inputs(args)
    recording = Recording.open(args.work / "inputs")
    lengths = [min(100, n) for n in json.loads((ROOT / "benchmarks" / "lengths.json").read_text())["rl_512"]]
    for number, step in enumerate(steps):
        these = sorted(n for i in step for n in recording.lengths[i])
        assert these == sorted(lengths[5 * number : 5 * number + 5]) and len(step) >= 2
    assert script.make_inputs(args) == steps, "the inputs of an earlier part"


def row(stack: str, gpus: int, losses: list[float], speed: float) -> dict[str, Any]:
    rows = [
        StepRow(
            step=i,
            loss=loss,
            grad_norm=1.0,
            lr=0.1,
            tokens=10,
            seconds=10 / speed if i > 3 else 99.0,
            tokens_per_second=speed if i > 3 else 0.1,
            peak_memory_bytes=2**30,
        )
        for i, loss in enumerate(losses, start=1)
    ]
    return {
        "stack": stack,
        "gpus": gpus,
        "status": "ok",
        "seconds": 9.0,
        "folder": f"{stack}-{gpus}",
        "rows": rows,
    }


def test_measures_agreement_and_speed(script: ModuleType, tmp_path: Path) -> None:
    rows = {
        "local on 1": row("local", 1, [4.0, 3.0, 2.0, 2.0, 2.0], 50.0),
        "fsdp2 on 2": row("fsdp2", 2, [4.0, 3.0, 2.01, 2.0, 2.0], 100.0),
        "deepspeed:zero2 on 2": row("deepspeed:zero2", 2, [4.0, 3.0, 2.0, 2.0, 2.1], 80.0),
    }
    for value in rows.values():
        value |= script.measures(value["rows"])
    found = script.result(arguments(script, tmp_path, "--device", "cpu"), rows)
    assert rows["fsdp2 on 2"]["tokens_per_second"] == 100.0, "without the warm-up"
    assert rows["fsdp2 on 2"]["agrees"] is True and rows["deepspeed:zero2 on 2"]["agrees"] is False
    assert found["fsdp2_tokens_per_second_over_deepspeed"] == {"deepspeed:zero2 on 2": 1.25}
    assert not found["ok"] and found["verdict"].endswith("but: deepspeed:zero2 on 2")
    assert "| fsdp2 | 2 | 100 | 100.0 | 1.00 | 5.0e-03 | 0.0e+00 |" in script.table(rows)


def test_parts(script: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ran: list[tuple[str, int]] = []

    def run(args: Any, stack: str, gpus: int, steps: Any, *, logs: Path) -> dict[str, Any]:
        ran.append((stack, gpus))
        return {
            "stack": stack,
            "gpus": gpus,
            "status": "failed" if stack == "fsdp2" else "ok",
            "seconds": 1.0,
        }

    monkeypatch.setattr(script, "run", run)
    monkeypatch.setattr(script, "make_inputs", lambda args: [[0]])
    argv = [
        "x",
        "--out",
        str(tmp_path / "x.json"),
        "--device",
        "cpu",
        "--gpus",
        "2",
        "--stacks",
        "fsdp2,fsdp2:tp2",
    ]
    monkeypatch.setattr(sys, "argv", argv)
    assert script.main() == 1 and ran == [("fsdp2", 2), ("fsdp2:tp2", 2), ("local", 1)]
    ran.clear()
    assert script.main() == 1 and ran == [("fsdp2", 2)], "only what has not worked is run again"
    ran.clear()
    monkeypatch.setattr(sys, "argv", [*argv, "--budget", "0"])
    assert script.main() == 1 and ran == []
