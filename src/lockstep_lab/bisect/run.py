"""Find where two cells diverge: the first input and, in it, the first tensor beyond a tolerance.

Both cells are fed the same inputs. For each, logprobs and the gradients of every parameter are compared;
at the first input that differs too much, captures of both cells (lockstep_lab.bisect.capture) are compared in
the order of execution: forward first, then the head, then backward.

The tolerance is measured: cell A runs the same documents in the opposite order, and a tensor may differ by
4 times what that explains, or by a floor for its dtype that grows with the square root of the layers behind
it. A tolerance that is given replaces all of this.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from lockstep.schema.batch import PackedBatch
from lockstep_lab.bisect.arms import Arm, ArmFailed, InputDifference, Outcome, compare, differs, exact, run
from lockstep_lab.bisect.divergence import Finding, find_first_divergence


@dataclass(frozen=True, kw_only=True)
class BisectResult:
    """The result of a bisection."""

    a: Arm
    b: Arm
    inputs: int
    """The number of inputs compared."""
    largest: InputDifference
    """The largest difference over all inputs compared."""
    index: int | None = None
    """Index of the first input beyond tolerance; None: there is none."""
    difference: InputDifference | None = None
    finding: Finding | None = None
    cause: str = ""
    """compiler, kernel or layout, or both; only if an arm is compiled."""
    three_way: Sequence[tuple[str, str, InputDifference]] = ()
    """Pairs of arms, by name, on the input that differs; only if an arm is compiled."""


def bisect(
    a: Arm,
    b: Arm,
    inputs: Iterable[tuple[int, PackedBatch]],
    *,
    tolerance: float | None = None,
    progress: Callable[[int, InputDifference], None] | None = None,
) -> BisectResult:
    """Find the first input at which `a` and `b` differ, and its first tensor that does.

    Args:
        inputs: (index, batch on the host); they end with the first that differs.
        tolerance: nats of a logprob and relative difference of a tensor. None: as the module says.
        progress: called with every input's index and difference.
    """
    backward = a.backward and b.backward
    a, b = replace(a, backward=backward), replace(b, backward=backward)
    largest = InputDifference(logprob=0.0, gradient=0.0, parameter="")
    count = 0
    for index, recorded in inputs:
        count += 1
        batch = exact(recorded)
        difference = compare(_whole(a, batch, index), _whole(b, batch, index))
        largest = max(largest, difference, key=lambda d: (d.logprob, d.gradient))
        if progress is not None:
            progress(index, difference)
        if differs(a, b, batch, difference, tolerance=tolerance):
            return BisectResult(
                a=a,
                b=b,
                inputs=count,
                largest=largest,
                index=index,
                difference=difference,
                **_located(a, b, batch, tolerance=tolerance),
            )
    return BisectResult(a=a, b=b, inputs=count, largest=largest)


def _whole(arm: Arm, batch: PackedBatch, index: int) -> Outcome:
    try:
        return run(arm, batch)
    except Exception as error:  # a cell that fails is a finding of its own
        raise ArmFailed(arm.name, index) from error


def _located(a: Arm, b: Arm, batch: PackedBatch, *, tolerance: float | None) -> dict[str, Any]:
    """Fields of BisectResult about an input beyond tolerance, with the compiler taken out if there is one."""
    plain_a, plain_b = (arm if arm.eager is None else arm.eager() for arm in (a, b))
    plain_a, plain_b = replace(plain_a, backward=a.backward), replace(plain_b, backward=b.backward)
    if a.eager is None and b.eager is None:
        return {"finding": find_first_divergence(a, b, batch, tolerance=tolerance)}
    differing, three_way = [], []
    for x, y in ((plain_a, plain_b), (plain_a, a), (plain_b, b)):
        if x.name == y.name:
            continue
        gap = compare(run(x, batch), run(y, batch))
        three_way.append((x.name, y.name, gap))
        if differs(x, y, batch, gap, tolerance=tolerance):
            differing.append((x, y))
    eager_parts = (plain_a, plain_b) in differing
    cause = {
        (True, True): "both the kernel or layout and the compiler",
        (True, False): "the kernel or layout, not the compiler",
        (False, True): "the compiler",
        (False, False): "the kernel or layout together with the compiler; neither alone is beyond tolerance",
    }[eager_parts, len(differing) > eager_parts]
    finding = find_first_divergence(*(differing[0] if differing else (a, b)), batch, tolerance=tolerance)
    return {"finding": finding, "cause": cause, "three_way": tuple(three_way)}
