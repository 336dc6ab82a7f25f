"""Which inputs a matrix compares by default: some of which have a gradient."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence

from lockstep.recording import Recording
from lockstep.schema.batch import PackedBatch, PolicyBatch

_GRADIENT_INPUTS = 8
"""The default of `lockstep replay --gradient-inputs`."""


def with_signal(recording: Recording, flags: Sequence[str]) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return flags of `lockstep replay` under which one of the inputs whose gradients are compared has a
    signal, and notes of what was done for that: in an input whose advantages are all 0 every gradient is
    0, and two that are 0 compare nothing.

    Args:
        flags: those given; inputs that they name are left as they are.
    """
    given = dict(itertools.pairwise(flags))
    if "--inputs" in given or "--no-backward" in flags or given.get("--loss", "recorded") != "recorded":
        return tuple(flags), ()
    candidates = list(_candidates(recording, given.get("--steps")))
    chosen = candidates[: int(given.get("--max-inputs", len(candidates)))]
    counted = min(len(chosen), int(given.get("--gradient-inputs", _GRADIENT_INPUTS)))
    if not counted:
        return tuple(flags), ()
    first = next((index for index in candidates if _has_signal(recording[index].batch)), None)
    if first is None or first in chosen[:counted]:
        return tuple(flags), ()
    before = chosen[:counted]
    chosen = [first, *(index for index in chosen if index != first)][: len(chosen)]
    kept = _without(flags, ("--max-inputs", "--steps"))
    note = f"input {first} comes first: the advantages of inputs {ranges(before)} are all 0"
    return (*kept, "--inputs", ranges(chosen)), (note,)


def ranges(indices: Iterable[int]) -> str:
    """Write indices as --inputs reads them, in their order: [5, 0, 1, 2] is "5,0-2"."""
    spans: list[list[int]] = []
    for index in indices:
        if spans and index == spans[-1][1] + 1:
            spans[-1][1] = index
        else:
            spans.append([index, index])
    return ",".join(f"{low}-{high}" if high > low else str(low) for low, high in spans)


def _candidates(recording: Recording, steps: str | None) -> Iterator[int]:
    first, _, last = (steps or ":").partition(":")
    for index, meta in enumerate(recording.metas):
        if (not first or meta.step >= int(first)) and (not last or meta.step < int(last)):
            yield index


def _has_signal(batch: PackedBatch) -> bool:
    trained = batch.loss_mask
    if isinstance(batch, PolicyBatch):
        trained = trained & (batch.advantages != 0)
    return bool(trained.any())


def _without(flags: Sequence[str], names: Sequence[str]) -> Iterator[str]:
    """The flags but those of these names, with their values."""
    skip = False
    for flag in flags:
        if not skip and flag not in names:
            yield flag
        skip = not skip and flag in names
