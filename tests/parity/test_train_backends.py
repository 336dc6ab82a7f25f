"""Every train stack against `local`: 20 optimizer steps on the same micro-batches, SFT and GRPO, over gloo.
The worker runs many stacks in one launch of processes; each test looks at one of its results."""

from __future__ import annotations

import json
import math
import shutil
import statistics
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
from selected import selected
from starting import run_ranks
from train_backends_worker import SCALAR, STEPS, Run, make, reference

from lockstep.config.support import cells_tested_by

CELLS = list(cells_tested_by("ci-cpu:tests/parity/test_train_backends.py"))
WORKER = Path(__file__).with_name("train_backends_worker.py")
TIMEOUT = 480

SFT_SGD, SFT_ADAMW = Run(algorithm="sft", optimizer="sgd"), Run(algorithm="sft", optimizer="adamw")
GRPO_SGD, GRPO_ADAMW = Run(algorithm="grpo", optimizer="sgd"), Run(algorithm="grpo", optimizer="adamw")
FLOAT32 = (SFT_SGD, SFT_ADAMW, GRPO_SGD, GRPO_ADAMW)
BF16 = Run(algorithm="sft", optimizer="adamw", dtype="bfloat16")
PADDED = Run(algorithm="sft", optimizer="sgd", layout="padded", steps=5)
PADDED_BF16 = Run(algorithm="sft", optimizer="adamw", layout="padded", dtype="bfloat16", steps=5)
SHARED = Run(algorithm="grpo", optimizer="sgd", layout="shared", steps=5)
SHARED_BF16 = Run(algorithm="grpo", optimizer="adamw", layout="shared", dtype="bfloat16", steps=5)
SHARED_COMPILED = Run(algorithm="grpo", optimizer="sgd", layout="shared", execution="compile", steps=5)
SHARED_JOINT = Run(algorithm="grpo", optimizer="sgd", layout="shared", execution="joint", steps=5)
SHARED_JOINT_BF16 = Run(
    algorithm="grpo", optimizer="adamw", layout="shared", dtype="bfloat16", execution="joint", steps=5
)
COMPILED = Run(algorithm="sft", optimizer="sgd", execution="compile", steps=5)
JOINT = Run(algorithm="sft", optimizer="sgd", execution="joint", steps=5)
JOINT_BF16 = Run(algorithm="sft", optimizer="adamw", dtype="bfloat16", execution="joint", steps=5)
LORA = Run(algorithm="grpo", optimizer="sgd", lora=True, steps=5)
VALUE, RM = (Run(algorithm=name, optimizer="sgd") for name in SCALAR)
VALUE_PADDED, VALUE_SHARED, RM_SHARED = (
    Run(algorithm=name, optimizer="sgd", layout=layout, steps=3)
    for name, layout in (("value", "padded"), ("value", "shared"), ("rm", "shared"))
)
EVERY = (*FLOAT32, BF16)
SHARED_ALL = (SHARED, SHARED_BF16, SHARED_JOINT, SHARED_JOINT_BF16)
COMPILED_ALL = (COMPILED, SHARED_COMPILED)
BOTH = (SFT_SGD, GRPO_ADAMW, BF16)
"""Each loss and each optimizer once, where another stack of the launch is trained on every pair."""
LAUNCHES: dict[str, tuple[int, list[tuple[str, tuple[Run, ...]]]]] = {
    "fsdp2 on 2": (
        2,
        [
            ("fsdp2", (*EVERY, PADDED, PADDED_BF16, *SHARED_ALL, *COMPILED_ALL, JOINT, JOINT_BF16, LORA)),
            ("fsdp2:tp2", (*BOTH, JOINT, LORA)),
            ("fsdp2:ring2", (*BOTH, LORA)),
        ],
    ),
    "fsdp2 on 4": (
        4,
        [
            ("fsdp2:tp2+ring2", (*EVERY, LORA)),
            ("fsdp2:tp2", (SFT_SGD, GRPO_ADAMW)),
            ("fsdp2:ring2", (SFT_SGD, GRPO_ADAMW)),
        ],
    ),
    "deepspeed on 2": (
        2,
        [
            ("deepspeed:zero1", (*BOTH, JOINT)),
            ("deepspeed:zero2", (*EVERY, PADDED, PADDED_BF16, *SHARED_ALL, JOINT, JOINT_BF16)),
            ("deepspeed:zero3", (*BOTH, LORA)),
        ],
    ),
    "scores, fsdp2 on 2": (
        2,
        [
            ("fsdp2", (VALUE, RM, VALUE_PADDED, VALUE_SHARED, RM_SHARED)),
            ("fsdp2:tp2", (VALUE, RM)),
            ("fsdp2:ring2", (VALUE, RM)),
        ],
    ),
    "scores, fsdp2 on 4": (4, [("fsdp2:tp2+ring2", (VALUE, RM)), ("fsdp2", (VALUE, RM))]),
    "scores, deepspeed on 2": (
        2,
        [
            ("deepspeed:zero0", (VALUE,)),
            ("deepspeed:zero1", (VALUE,)),
            ("deepspeed:zero2", (VALUE, RM, VALUE_PADDED, VALUE_SHARED)),
            ("deepspeed:zero3", (VALUE, RM)),
        ],
    ),
}
"""Ranks, and what each stack is trained on."""
QUICK = {
    "fsdp2 on 2": {"fsdp2": (GRPO_ADAMW, SHARED, LORA)},
    "fsdp2 on 4": {"fsdp2:tp2+ring2": (BF16,)},
    "deepspeed on 2": {"deepspeed:zero2": (SFT_SGD,), "deepspeed:zero3": (GRPO_ADAMW,)},
    "scores, fsdp2 on 2": {"fsdp2:tp2": (VALUE, RM)},
    "scores, deepspeed on 2": {"deepspeed:zero2": (VALUE,)},
}
"""What `make test` trains; `make test-all` trains everything."""
CASES = [
    pytest.param(
        launch,
        stack,
        run,
        id=f"{launch}: {stack}, {run.name}",
        marks=[] if run in QUICK.get(launch, {}).get(stack, ()) else [pytest.mark.exhaustive],
    )
    for launch, (_, stacks) in LAUNCHES.items()
    for stack, runs in stacks
    for run in runs
]
BOUNDS = {"sgd": 1e-5, "adamw": 1e-4}
"""float32, relative, of losses and gradient norms at every step."""


@pytest.fixture(scope="module")
def cases(request: pytest.FixtureRequest) -> list[dict[str, Any]]:
    return selected(request, "test_a_stack_trains_as_local_does")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, cases: list[dict[str, Any]]) -> Iterator[Path]:
    """Inputs, and what LocalBackend makes of them."""
    place = tmp_path_factory.mktemp("train_backends")
    make(place)
    for run in {case["run"].name: case["run"] for case in cases}.values():
        reference(run, place)
    yield place
    shutil.rmtree(place)


@pytest.fixture(scope="module")
def results(folder: Path, cases: list[dict[str, Any]]) -> Any:
    """launch name -> {(stack, run): what each rank saw}; each launch at its first use."""
    done: dict[str, dict[tuple[str, str], list[dict[str, Any]]]] = {}

    def of(name: str) -> dict[tuple[str, str], list[dict[str, Any]]]:
        if name not in done:
            jobs = [(case["stack"], case["run"]) for case in cases if case["name"] == name]
            done[name] = launch(folder, LAUNCHES[name][0], jobs)
        return done[name]

    return of


def launch(
    folder: Path, ranks: int, stacks: list[tuple[str, Run]]
) -> dict[tuple[str, str], list[dict[str, Any]]]:
    """What each rank says of each stack and run."""
    jobs = json.dumps([(stack, asdict(run)) for stack, run in stacks])
    found: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for printed in run_ranks(WORKER, str(folder), jobs, ranks=ranks, seconds=TIMEOUT):
        for result in printed:
            found.setdefault((result["stack"], result["run"]), []).append(result)
    return found


@pytest.mark.slow
@pytest.mark.parametrize(("name", "stack", "run"), CASES)
def test_a_stack_trains_as_local_does(results: Any, name: str, stack: str, run: Run) -> None:
    if stack.startswith("deepspeed"):
        pytest.importorskip("deepspeed")
    ranks = LAUNCHES[name][0]
    found = results(name)[stack, run.name]
    assert len(found) == ranks
    for rank, result in enumerate(found):
        assert "error" not in result, f"rank {rank}: {result['error']}"
        seen = result["seen"]
        print(rank, {key: value for key, value in seen.items() if key != "losses"})
        assert seen["losses"] == found[0]["seen"]["losses"], "ranks say different losses"
        if run.dtype == "bfloat16":
            assert seen["loss"] < 1e-2 and seen["logprobs"] < 1e-2, seen
            continue
        if run.algorithm in SCALAR:
            assert max(seen["loss"], seen["norm"], seen["logprobs"]) < 3e-6, seen
            assert seen["first whole gradient"] < 3e-6 and seen["last whole gradient"] < 3e-6, seen
        assert run.steps < STEPS or run.algorithm == "value" or falls(seen["losses"]), seen["losses"]
        bound = 3e-6 if run.lora else BOUNDS[run.optimizer]
        assert seen["loss"] < bound and seen["norm"] < bound and seen["logprobs"] < bound, seen
        of_gradients = 3e-6 if run.lora else 1e-4
        assert seen["first gradients"] < of_gradients and seen["last gradients"] < of_gradients, seen


def falls(losses: list[float]) -> bool:
    """By more than 3 standard errors, from the first 5 steps to the last 5."""
    first, last = losses[:5], losses[-5:]
    error = math.sqrt((statistics.variance(first) + statistics.variance(last)) / 5)
    return statistics.mean(first) - statistics.mean(last) > 3 * error


def test_every_cell_of_the_support_table_is_run() -> None:
    run = [
        {"backend": stack.partition(":")[0], **one.cell}
        for _, stacks in LAUNCHES.values()
        for stack, runs in stacks
        for one in runs
    ]
    assert CELLS and all(cell in run for cell in CELLS)
