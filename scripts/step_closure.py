"""How much code one GRPO step is: the functions of lockstep that it calls, and the files they stand in.

    python scripts/step_closure.py              # the installed tree
    PYTHONPATH=OTHER/src python scripts/step_closure.py --list

One step (sample, update, push) of the recipe `tiny` with a KL to the reference, backend local, engine hf,
is run under Python's profiler, after a first one that imports and compiles what only the first step does.
Counted is each function, method or async function of src/lockstep that is entered, in whichever thread, once;
lambdas, comprehensions, generated
methods of dataclasses, what runs at import and what runs in other processes are not.
"""

from __future__ import annotations

import argparse
import sys
import threading
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import lockstep
from lockstep import Builder, GRPORun, load_run
from lockstep.loop.metrics import rollout_metrics
from lockstep.loop.policy import estimate
from lockstep.schema.batch import rollout_samples

OVERRIDES = {
    "algorithm.kl.coef": 0.01,
    "algorithm.kl.place": "loss",
    "engine.name": "hf",
    "train.device": "cpu",
}


def main(argv: list[str]) -> int:
    """Print the counts."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--list", action="store_true", help="every function too")
    given = parser.parse_args(argv)
    root = Path(lockstep.__file__).parent
    called = sorted(
        (str(Path(code.co_filename).relative_to(root)), code.co_firstlineno, code.co_qualname)
        for code in step_functions(root)
    )
    files = Counter(file for file, _, _ in called)
    for file, count in sorted(files.items()):
        print(f"{count:4} {file}")
        if given.list:
            print("".join(f"       {line}: {name}\n" for f, line, name in called if f == file), end="")
    print(f"one GRPO step: {len(called)} functions in {len(files)} files")
    return 0


def step_functions(root: Path) -> set[CodeType]:
    """The functions below `root` that the second step of a run enters."""
    run = load_run("tiny", overrides=OVERRIDES)
    assert isinstance(run, GRPORun)
    entered = Entered(root)
    with Builder(run) as build:
        environment, algorithm = build.environment(), build.algorithm()
        policy = build.policy(algorithm)
        reference, _ = build.roles(policy, environment, algorithm)
        engine = build.engine(policy)
        rollouts = build.rollouts(engine, environment, algorithm)
        assert reference is not None

        def take_step(step: int) -> None:
            """The lines of lockstep.loops.rl that take a step."""
            groups = rollouts.sample(step).groups
            samples = rollout_samples(r.trajectory for group in groups for r in group.rollouts)
            ref_logprobs = reference.logprobs(samples)
            estimates = estimate(algorithm, groups, samples, ref_logprobs=ref_logprobs)
            batches = policy.pack(step, samples, estimates, algorithm, ref_logprobs=ref_logprobs)
            updates = [policy.update(micro_batches, batches.loss) for micro_batches in batches]
            rollout_metrics(estimates.groups)
            policy.metrics(batches, updates)
            engine.load(policy, version=step + 1)

        engine.load(policy, version=0)
        take_step(0)
        return entered.by(lambda: take_step(1))


class Entered:
    """Notes the functions below `root` that a piece of work enters: in this thread, and in those that were
    begun after the instance was made."""

    def __init__(self, root: Path) -> None:
        self._inside = f"{root}/"
        self._codes: set[CodeType] | None = None
        threading.setprofile(self._note)

    def by(self, work: Callable[[], object]) -> set[CodeType]:
        """Do the work; the code objects of what it entered."""
        self._codes = codes = set()
        sys.setprofile(self._note)
        try:
            work()
        finally:
            sys.setprofile(None)
            threading.setprofile(None)
            self._codes = None
        return {c for c in codes if c.co_filename.startswith(self._inside) and not c.co_name.startswith("<")}

    def _note(self, frame: FrameType, event: str, _: Any) -> None:
        codes = self._codes
        if codes is not None and event == "call":
            codes.add(frame.f_code)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
