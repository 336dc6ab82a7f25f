"""The first tensor that differs between two sides, on one input."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from lockstep.execution import decoder_layers
from lockstep.lab.bisect.arms import NOISE_FACTOR, Outcome, Side, floors, gradient_parts, largest_gap, run
from lockstep.lab.bisect.capture import KERNEL, Capture, Key, Seen
from lockstep.lab.bisect.documents import reversed_order
from lockstep.models.causal_lm import causal_lm
from lockstep.schema.batch import PackedBatch

HEAD = "lm_head (logprobs)"
_AROUND = 8


@dataclass(frozen=True, kw_only=True, slots=True)
class Difference:
    """One tensor of two sides."""

    key: Key
    kind: str
    shape: tuple[int, ...]
    """[tokens, ...]; of a parameter: its own."""
    relative: float
    """Frobenius norm of the difference over that of the larger one. Estimated from a sketch unless max_abs is
    known."""
    max_abs: float | None
    """None: only sketches were kept."""
    allowed: float
    """What `relative` (of the head: max_abs, nats) may be."""
    noise: float
    """`relative` (of the head: max_abs) of two orders of documents in cell A."""
    where: tuple[int, int] | None = None
    """(document, position) of the largest difference."""

    @property
    def beyond(self) -> bool:
        value = self.max_abs if self.key.path == HEAD else self.relative
        return value is None or not value <= self.allowed


@dataclass(frozen=True, kw_only=True)
class Finding:
    """Where two sides part on one input."""

    sides: tuple[Side, Side]
    first: Difference
    statement: str
    gradual: bool
    """No tensor is beyond its tolerance, only the result is: `first` is the largest step towards it."""
    around: Sequence[Difference]
    """Tensors before and behind `first`, in the order of execution."""
    growth: Sequence[Difference]
    """The output of every decoder layer, in the direction of `first`."""
    weights: str
    """Whether the module's parameters agree, in words; empty where it has none."""
    consumers: Sequence[str] = ()
    """Modules that were called with the very tensor of `first`."""


class Yardstick:
    """What a tensor may differ by: measured in cell A, with floors."""

    def __init__(self, a: Side, b: Side, batch: PackedBatch, *, tolerance: float | None) -> None:
        self._tolerance = tolerance
        self._nats, self._floor, self._gradient = floors(a, b, tolerance)
        ones = run(a, batch, capture=True)
        turned = run(a, reversed_order(batch), capture=True, backwards=True)
        self.noise = {
            key: relative_difference(one, turned.seen[key])
            for key, one in ones.seen.items()
            if key in turned.seen
        }
        self.parameters = gradient_parts(ones.gradients, turned.gradients)
        self.head = largest_gap(ones.logprobs.double() - turned.logprobs.double())
        self._worst = {"forward": 0.0, "backward": 0.0}

    def tensor(self, key: Key, *, depth: int) -> float:
        """Relative. `depth` layers were computed before; noise does not get less on the way."""
        if self._tolerance is not None:
            return self._tolerance
        self._worst[key.direction] = max(self._worst[key.direction], self.noise.get(key, 0.0))
        return max(self._floor * math.sqrt(1 + depth), NOISE_FACTOR * self._worst[key.direction])

    def parameter(self, name: str) -> float:
        """Relative."""
        if self._tolerance is not None:
            return self._tolerance
        return max(self._gradient, NOISE_FACTOR * self.parameters.get(name, 0.0))

    def logprobs(self) -> float:
        """Nats."""
        return self._nats if self._tolerance is not None else max(self._nats, NOISE_FACTOR * self.head)


def locate(a: Side, b: Side, batch: PackedBatch, *, tolerance: float | None) -> Finding:
    """The first tensor that differs: once over sketches, then with the tensors around it as they are."""
    yardstick = Yardstick(a, b, batch, tolerance=tolerance)
    rough = _differences(run(a, batch, capture=True), run(b, batch, capture=True), yardstick, batch.lengths)
    position, _ = _first(rough)
    window = {d.key for d in rough[max(0, position - _AROUND) : position + _AROUND + 1]}
    whole = window.__contains__
    ones, others = (run(side, batch, capture=True, whole=whole) for side in (a, b))
    fine = _differences(ones, others, yardstick, batch.lengths)
    position, gradual = _first(fine)
    first = fine[position]
    layers = _layer_paths(a.module)
    assert ones.capture is not None
    return Finding(
        sides=(a, b),
        first=first,
        statement=describe(first, fine, ones.capture),
        gradual=gradual,
        around=fine[max(0, position - 6) : position + 5],
        growth=[d for d in fine if d.key.path in layers and d.key.direction == first.key.direction],
        weights=_weights_statement(a, b, first.key),
        consumers=tuple(ones.capture.consumers.get(first.key.path, ())),
    )


def _layer_paths(module: nn.Module) -> set[str]:
    layers = {id(layer) for layer in decoder_layers(module)}
    return {path for path, m in module.named_modules() if id(m) in layers}


def _differences(
    ones: Outcome, others: Outcome, yardstick: Yardstick, lengths: Sequence[int]
) -> list[Difference]:
    """Every tensor that both sides have, in A's order: forward, head, backward with parameters."""
    assert ones.capture is not None
    layers, depth = _layer_paths(ones.capture.module), 0
    forward: list[Difference] = []
    backward: list[Difference] = []
    parameters = _parameter_differences(ones.gradients, others.gradients, yardstick)
    for key, one in ones.seen.items():
        other = others.seen.get(key)
        if other is None or other.shape != one.shape:
            continue
        found = forward if key.direction == "forward" else backward
        found.append(
            _difference(key, one, other, allowed=yardstick.tensor(key, depth=depth), lengths=lengths)
        )
        found[-1] = replace(found[-1], noise=yardstick.noise.get(key, 0.0))
        depth += key.path in layers
        if key.direction == "backward" and key.tensor.startswith("output"):
            own = [n for n in parameters if n.rpartition(".")[0] == key.path]
            backward += [parameters.pop(name) for name in own]
    return [*forward, _head_difference(ones, others, yardstick), *backward, *parameters.values()]


def _parameter_differences(
    ones: Mapping[str, Tensor], others: Mapping[str, Tensor], yardstick: Yardstick
) -> dict[str, Difference]:
    found = {}
    for name, relative in gradient_parts(ones, others).items():
        path, _, last = name.rpartition(".")
        one, other = ones.get(name), others.get(name)
        gap = None
        if one is not None and other is not None:
            gap = largest_gap(one.float() - other.float().to(one.device))
        found[name] = Difference(
            key=Key("backward", path, f"parameter {last}"),
            kind="parameter",
            shape=tuple((ones.get(name) if other is None else other).shape),  # type: ignore[union-attr]
            relative=relative,
            max_abs=gap,
            allowed=yardstick.parameter(name),
            noise=yardstick.parameters.get(name, 0.0),
        )
    return found


def _head_difference(ones: Outcome, others: Outcome, yardstick: Yardstick) -> Difference:
    gap = ones.logprobs.double() - others.logprobs.double()
    scale = float(ones.logprobs.double().norm())
    return Difference(
        key=Key("forward", HEAD, "output"),
        kind="head",
        shape=tuple(ones.logprobs.shape),
        relative=float(gap.norm()) / scale if scale else float(gap.norm()),
        max_abs=largest_gap(gap),
        allowed=yardstick.logprobs(),
        noise=yardstick.head,
    )


def _difference(key: Key, one: Seen, other: Seen, *, allowed: float, lengths: Sequence[int]) -> Difference:
    max_abs, where = None, None
    if one.whole and other.whole and one.values.numel():
        gap = (one.values.double() - other.values.to(one.values.device).double()).abs()
        gap = gap.nan_to_num(nan=torch.inf)
        max_abs = float(gap.max())
        row = int(gap.amax(1).argmax())
        document = 0
        while row >= lengths[document]:
            row -= lengths[document]
            document += 1
        where = (document, row)
    return Difference(
        key=key,
        kind=one.kind if one.kind == other.kind else f"{one.kind} / {other.kind}",
        shape=one.shape,
        relative=relative_difference(one, other),
        max_abs=max_abs,
        allowed=allowed,
        noise=0.0,
        where=where,
    )


def relative_difference(one: Seen, other: Seen) -> float:
    """Frobenius norm of the difference over the larger norm; infinite where a NaN is on one side only."""
    x, y = (s.values.double().nan_to_num(nan=0.0) for s in (one, other))
    if bool((one.values.isnan() != other.values.to(one.values.device).isnan()).any()):
        return float("inf")
    gap, scale = float((x - y.to(x.device)).norm()), max(float(x.norm()), float(y.norm()))
    return gap / scale if scale else gap


def _first(differences: Sequence[Difference]) -> tuple[int, bool]:
    """Where the first one beyond tolerance is; else the largest in proportion, and True."""
    for position, difference in enumerate(differences):
        if difference.beyond:
            return position, False
    ratios = [
        (d.relative if d.relative == d.relative else float("inf")) / max(d.allowed, 1e-300)
        for d in differences
    ]
    return max(range(len(ratios)), key=ratios.__getitem__), True


def describe(first: Difference, differences: Sequence[Difference], capture: Capture) -> str:
    """Where the difference begins, in words."""
    key = first.key
    if key.path == HEAD:
        return "it begins in the head: the last hidden states agree, the logprobs do not"
    if key.direction == "backward":
        return _describe_backward(first, differences, capture)
    parent = key.path.removesuffix(f".{KERNEL}")
    if not first.kind.startswith("attention kernel"):
        return f"it begins in {key.path} ({first.kind}): what ran before it agrees, its output does not"
    if key.tensor == "output":
        return f"it begins inside the attention kernel of {parent}: q, k and v agree, its output does not"
    return (
        f"it begins between the projections and the attention kernel of {parent} (rope): the projection "
        f"agrees, the kernel's {key.tensor} does not"
    )


def _describe_backward(first: Difference, differences: Sequence[Difference], capture: Capture) -> str:
    key = first.key
    parent = key.path.removesuffix(f".{KERNEL}")
    if key.tensor.startswith("parameter "):
        return (
            f"it begins in the backward of {key.path}: the gradient at its output agrees, that of its "
            f"{key.tensor} does not"
        )
    if first.kind.startswith("attention kernel") and key.tensor != "output":
        into = next((d for d in differences if d.key == Key("backward", key.path, "output")), None)
        if into is not None and not into.beyond:
            return (
                f"it begins inside the backward of the attention kernel of {parent}: the gradient at its "
                f"output agrees, that of {key.tensor} does not"
            )
    users = [p for p in capture.consumers.get(key.path, []) if not p.endswith("self_attn")]
    back = " and ".join(users) if users else "what uses it"
    return f"it begins in the backward of {back}: the gradient at {key.path} [{key.tensor}] does not agree"


def _weights_statement(a: Side, b: Side, key: Key) -> str:
    path = key.path
    if path == HEAD:
        path = next(
            n for n, m in a.module.named_modules() if m is causal_lm(a.module).get_output_embeddings()
        )
    path = path.removesuffix(f".{KERNEL}")
    modules = dict(a.module.named_modules()), dict(b.module.named_modules())
    if path not in modules[0] or path not in modules[1]:
        return ""
    own, theirs = (dict(m[path].named_parameters()) for m in modules)
    if not own:
        return ""
    unequal = [
        f"{name} (largest difference {largest_gap(p.float() - theirs[name].float().to(p.device)):.3g})"
        for name, p in own.items()
        if name in theirs and p.shape == theirs[name].shape and not torch.equal(p, theirs[name].to(p))
    ]
    return f"its weights differ: {', '.join(unequal)}" if unequal else "its weights are the same in both"
