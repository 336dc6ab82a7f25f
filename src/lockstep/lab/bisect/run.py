"""Where two cells part: the first input and, in it, the first tensor that differs beyond a tolerance.

Both cells see the same inputs. Of each input the logprobs are compared, and the gradients of every parameter;
at the first input that differs too much, captures of both cells (lockstep.lab.bisect.capture) are compared in
the order of execution: forward first, then the head, then backward.

What is too much is measured: cell A runs the same documents in the opposite order, and a tensor may differ by
4 times what that explains, or by a floor for its dtype that grows with the square root of the layers behind
it. A tolerance that is given replaces all of this.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from lockstep.lab.bisect.arms import InputDifference, Outcome, Side, SideFailed, compare, differs, run
from lockstep.lab.bisect.divergence import Finding, locate
from lockstep.lab.bisect.documents import exact
from lockstep.schema.batch import PackedBatch


@dataclass(frozen=True, kw_only=True)
class BisectResult:
    """The answer of a bisection."""

    a: Side
    b: Side
    inputs: int
    """How many were compared."""
    largest: InputDifference
    """Over all inputs that were compared."""
    index: int | None = None
    """Of the first input beyond tolerance; None: there is none."""
    difference: InputDifference | None = None
    finding: Finding | None = None
    cause: str = ""
    """compiler, kernel or layout, or both; only if a side is compiled."""
    three_way: Sequence[tuple[str, str, InputDifference]] = ()
    """Pairs of sides, by name, on the input that differs; only if a side is compiled."""


def bisect(
    a: Side,
    b: Side,
    inputs: Iterable[tuple[int, PackedBatch]],
    *,
    tolerance: float | None = None,
    progress: Callable[[int, InputDifference], None] | None = None,
) -> BisectResult:
    """The first input at which `a` and `b` differ, and the first tensor of it.

    Args:
        inputs: (index, batch on the host); they end with the first that differs.
        tolerance: nats of a logprob and relative difference of a tensor. None: as the module says.
        progress: told about every input.
    """
    backward = a.backward and b.backward
    a, b = replace(a, backward=backward), replace(b, backward=backward)
    largest = InputDifference(logprob=0.0, gradient=0.0, parameter="")
    count = 0
    for index, recorded in inputs:
        count += 1
        batch = exact(recorded)
        found = compare(_whole(a, batch, index), _whole(b, batch, index))
        largest = max(largest, found, key=lambda d: (d.logprob, d.gradient))
        if progress is not None:
            progress(index, found)
        if differs(a, b, batch, found, tolerance=tolerance):
            return BisectResult(
                a=a,
                b=b,
                inputs=count,
                largest=largest,
                index=index,
                difference=found,
                **_located(a, b, batch, tolerance=tolerance),
            )
    return BisectResult(a=a, b=b, inputs=count, largest=largest)


def _whole(side: Side, batch: PackedBatch, index: int) -> Outcome:
    try:
        return run(side, batch)
    except Exception as error:  # a cell that fails is a finding of its own
        raise SideFailed(side.name, index) from error


def _located(a: Side, b: Side, batch: PackedBatch, *, tolerance: float | None) -> dict[str, Any]:
    """Fields of BisectResult about an input beyond tolerance, with the compiler taken out if there is one."""
    plain_a, plain_b = (side if side.eager is None else side.eager() for side in (a, b))
    plain_a, plain_b = replace(plain_a, backward=a.backward), replace(plain_b, backward=b.backward)
    if a.eager is None and b.eager is None:
        return {"finding": locate(a, b, batch, tolerance=tolerance)}
    parted, three_way = [], []
    for x, y in ((plain_a, plain_b), (plain_a, a), (plain_b, b)):
        if x.name == y.name:
            continue
        gap = compare(run(x, batch), run(y, batch))
        three_way.append((x.name, y.name, gap))
        if differs(x, y, batch, gap, tolerance=tolerance):
            parted.append((x, y))
    eager_parts = (plain_a, plain_b) in parted
    cause = {
        (True, True): "both the kernel or layout and the compiler",
        (True, False): "the kernel or layout, not the compiler",
        (False, True): "the compiler",
        (False, False): "the kernel or layout together with the compiler; neither alone is beyond tolerance",
    }[eager_parts, len(parted) > eager_parts]
    finding = locate(*(parted[0] if parted else (a, b)), batch, tolerance=tolerance)
    return {"finding": finding, "cause": cause, "three_way": tuple(three_way)}
