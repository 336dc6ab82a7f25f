"""Runs of the command line as real processes, and what two runs are compared by."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from lockstep.observe.run_history import read_lines

TINY = """
kind = "grpo"
steps = 4
[model]
name = "shape:tiny-llama"
dtype = "float32"
[data]
source = "ids"
max_prompt_tokens = 32
[rollout]
prompts_per_step = 4
group_size = 4
[rollout.sampling]
max_tokens = 16
[[rewards]]
name = "ids"
[train]
lr = 1e-3
token_budget = 256
[eval]
num_prompts = 4
every = 2
before_max_tokens_factor = 1
[checkpoint]
every = 2
keep_last = 3
background = false
[log]
tensorboard = false
"""
"""Several micro-batches per step, an evaluation and a checkpoint after every second step. Saves are
written at once, so that it is known what a kill leaves (test_checkpoint_background.py tests the others)."""


OF_HEALING = ("restarts", "restored_from", "recovery_seconds", "checkpoints_read", "copies_left_out")
"""What the summary of a run that was healed says more."""


def healed_toml(reward: str) -> str:
    """TINY on ranks that can be healed to the bit: no checkpoint but the last."""
    train = '[train]\nbackend = "fsdp2"\ndevice = "cpu"\nbatch_invariant = true\ndeterministic = true'
    toml = TINY.replace('name = "ids"\n[train]', f'name = "{reward}"\n[train]').replace("[train]", train)
    return toml.replace("[checkpoint]\nevery = 2", "[checkpoint]\nevery = 0")


def on_pairs(sft: Path, folder: Path, kind: str, pairs: list[dict[str, Any]]) -> Path:
    """The config of an SFT run, made one of another kind on preference pairs, which are written beside it."""
    source = folder / "pairs.jsonl"
    source.write_text("\n".join(map(json.dumps, pairs)))
    lines = sft.read_text().replace('kind = "sft"', f'kind = "{kind}"').splitlines()
    lines = [f'source = "{source}"' if line.startswith("source") else line for line in lines]
    path = folder / f"{kind}.toml"
    path.write_text("\n".join(lines) + "\n")
    return path


@dataclass(frozen=True)
class Ended:
    """What a command left: exit status (-9: killed by SIGKILL), standard output and error."""

    code: int
    out: str
    err: str

    @property
    def verdict(self) -> str:
        return self.out.splitlines()[-1]


class Commands:
    """Runs `lockstep ARGV...` in a forked process (see fork_server.py)."""

    def __init__(self) -> None:
        self._server = subprocess.Popen(
            [sys.executable, str(Path(__file__).with_name("fork_server.py"))],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=os.environ | {"OMP_NUM_THREADS": "1"},
        )
        assert self._answer() == {"ready": True}

    def __call__(
        self,
        *argv: str | Path,
        cwd: Path,
        signals: Sequence[dict[str, Any]] = (),
        file_bytes: int | None = None,
        meanwhile: Callable[[int], None] | None = None,
        code: int | None = 0,
    ) -> Ended:
        """Args:
        signals: keyword arguments of fork_server.arm.
        file_bytes: the largest file that the process may write.
        meanwhile: called with its pid while it runs.
        code: the exit status that it must have; None: any.
        """
        assert self._server.stdin is not None
        with tempfile.TemporaryDirectory() as folder:
            out, err = Path(folder, "out"), Path(folder, "err")
            job = {
                "argv": [str(word) for word in argv],
                "cwd": str(cwd),
                "out": str(out),
                "err": str(err),
                "signals": list(signals),
                "file_bytes": file_bytes,
            }
            self._server.stdin.write(json.dumps(job) + "\n")
            self._server.stdin.flush()
            pid = self._answer()["pid"]
            if meanwhile is not None:
                meanwhile(pid)
            ended = Ended(code=self._answer()["code"], out=out.read_text(), err=err.read_text())
        assert code is None or ended.code == code, (job["argv"], signals, ended.code, ended.out, ended.err)
        return ended

    def broken_off(self, toml: Path, run: Path, orders: Sequence[dict[str, Any]], *flags: str) -> None:
        """Train into `run`: one process per order, each of which ends it, and a last one that ends in
        peace."""
        argv: tuple[str | Path, ...] = ("train", toml, "--run-dir", run, *flags)
        for order in orders:
            code = {"SIGKILL": -9, "SIGINT": 130}[order["send"]]
            self(*argv, cwd=run.parent, signals=[order], code=code)
            argv = ("train", "--resume", run)
        self(*argv, cwd=run.parent)
        assert not list((run / "checkpoints").glob(".*")), "leftovers of a killed save"

    def close(self) -> None:
        assert self._server.stdin is not None
        self._server.stdin.close()
        self._server.wait(timeout=60)

    def _answer(self) -> dict[str, Any]:
        assert self._server.stdout is not None
        answer: dict[str, Any] = json.loads(self._server.stdout.readline())
        return answer


FORWARD = "lockstep.train.loss_module:LossModule.forward"
OPTIMIZER = "lockstep.train.local:LocalBackend.optimizer_step"
FILE = "lockstep.train.state.files:_HashingFile.write"


def kill(target: str, **order: Any) -> dict[str, Any]:
    """The signal that kills a process at this call of `target`."""
    return {"target": target, "call": 1, "send": "SIGKILL"} | order


VOLATILE = ("timestamp", "time/", "throughput/", "memory/", "engine/", "world/")
"""Metrics that may differ between two runs of the same config."""


def metrics_of(run_dir: Path) -> list[dict[str, Any]]:
    return [
        {name: value for name, value in row.items() if not name.startswith(VOLATILE)}
        for row in read_lines(run_dir / "metrics.jsonl")
    ]


def assert_ranks_train_as_one(
    lockstep: Commands, toml: Path, folder: Path, *flags: str, keys: Sequence[str]
) -> None:
    """Two ranks of fsdp2 against one process: metrics of these names, of which there are some. The runs are
    left in `folder`: one, two."""
    flags = (*flags, "--steps", "3", "--train.static-capacity", "false")
    for name, spread in {"one": (), "two": ("--ranks", "2", "--train.backend", "fsdp2")}.items():
        lockstep("train", toml, *flags, *spread, "--run-dir", folder / name, cwd=folder)
    one, two = metrics_of(folder / "one"), metrics_of(folder / "two")
    assert len(one) == len(two)
    for key in keys:
        ours, theirs = ([row[key] for row in rows if key in row] for rows in (one, two))
        assert ours and theirs == pytest.approx(ours, rel=3e-6, abs=3e-6), key


def everything(run_dir: Path) -> dict[str, Any]:
    """What exact resume must reproduce: metrics, rollouts, evaluations, the summary, and the final weights,
    optimizer and generator states to the bit."""
    final = max((run_dir / "checkpoints").glob("step-*"))
    files = [*sorted(final.rglob("*.safetensors")), *sorted(run_dir.glob("export*/*.safetensors"))]
    summary = json.loads((run_dir / "summary.json").read_text())
    return {
        "metrics": metrics_of(run_dir),
        "rollouts": {file.name: file.read_text() for file in sorted((run_dir / "rollouts").iterdir())},
        "summary": {
            k: v
            for k, v in summary.items()
            if k not in ("wall_seconds", "evaluation_seconds", "run_dir", "export")
        },
        "weights": {
            f"{file.parent.name}/{file.name}": hashlib.sha256(file.read_bytes()).hexdigest() for file in files
        },
    }
