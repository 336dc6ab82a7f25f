"""The start-up self-test: every weight shape and op of a module, a row alone against the row among many.

A stock op that passes is used; one that does not is replaced by the op of this package, which is tested as
well. Verdicts are cached in the cache of Lockstep by hardware, torch version, threads, settings
and this package's source.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import os
import platform
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lockstep.errors import ModelError
from lockstep.invariant import experts, few_rows
from lockstep.invariant import modules as parts
from lockstep.invariant import row_ops as linear_ops
from lockstep.invariant.cases import (
    Case,
    Inputs,
    RowOp,
    apply_tiles,
    cases,
    linear_name,
    product_name,
    router_name,
    tiles_of,
)
from lockstep.observe.files import cache_root

# Settings under which stock GEMMs and compiled elementwise code are row-invariant.


def configure_cuda() -> Callable[[], None]:
    """Make cuBLASLt add over K in one order for any number of rows: no split-K, no sums in low precision.

    It may be called at any time, and affects products that are launched, or captured, after it. The self-test
    checks that it works on this GPU. CUBLAS_WORKSPACE_CONFIG is not set: with it a product costs the host
    about 150 us instead of 16, in code outside of CUDA graphs.

    Returns:
        A function that restores the earlier settings.
    """
    matmul = torch.backends.cuda.matmul
    library = torch.backends.cuda.preferred_blas_library()
    before = {kind: _reduced_precision(kind) for kind in ("bf16", "fp16")}
    tf32 = matmul.allow_tf32

    def restore() -> None:
        torch.backends.cuda.preferred_blas_library(library)
        for kind, value in before.items():
            setattr(matmul, f"allow_{kind}_reduced_precision_reduction", value)
        matmul.allow_tf32 = tf32

    torch.backends.cuda.preferred_blas_library("cublaslt")
    # The second False forbids split-K, for which torch has a switch since 2.10. By default some weight shapes
    # of a 1B and an 8B Llama had other bits for few rows (at most 32, 128 or 256, by shape; one H200, torch
    # 2.11); with these settings none had.
    matmul.allow_bf16_reduced_precision_reduction = (False, False)
    matmul.allow_fp16_reduced_precision_reduction = (False, False)
    matmul.allow_tf32 = False
    return restore


@contextlib.contextmanager
def configured(on: bool) -> Iterator[None]:
    """Apply `configure_cuda` inside; with on = False nothing is changed."""
    restore = configure_cuda() if on else None
    try:
        yield
    finally:
        if restore is not None:
            restore()


def _reduced_precision(kind: str) -> tuple[bool, bool]:
    """(sums in low precision, split-K), as the setter takes them."""
    matmul, name = torch.backends.cuda.matmul, f"allow_{kind}_reduced_precision_reduction"
    return bool(getattr(matmul, name)), bool(getattr(matmul, f"{name}_split_k", True))


def cuda_settings() -> tuple[str, ...]:
    """Return the settings of this process that decide the bits of a CUDA matrix product."""
    matmul = torch.backends.cuda.matmul
    return (
        str(torch.backends.cuda.preferred_blas_library()),
        f"bf16 {matmul.allow_bf16_reduced_precision_reduction}",
        f"split-k {getattr(matmul, 'allow_bf16_reduced_precision_reduction_split_k', None)}",
        f"tf32 {matmul.allow_tf32}",
        os.environ.get("CUBLAS_WORKSPACE_CONFIG", ""),
        os.environ.get("CUBLASLT_WORKSPACE_SIZE", ""),
    )


def inductor_options() -> dict[str, Any]:
    """Return options for torch.compile: fused code rounds where eager code rounds, and no choice is made by
    timing. Only those that this torch has.
    """
    from torch._inductor import config

    options = {
        # Without it a bfloat16 layer compiled with gradients and one without differ in two thirds of their
        # values: inductor fuses, and so rounds, in other places.
        "emulate_precision_casts": True,
        "max_autotune": False,
        "max_autotune_pointwise": False,
        "max_autotune_gemm": False,
        "coordinate_descent_tuning": False,
        "deterministic": True,
        # torch 2.13 and later; it covers the choice of a reduction's layout only, so reductions are ops of
        # our own all the same.
        "batch_invariant": True,
        "eager_numerics.division_rounding": True,
    }
    return {name: value for name, value in options.items() if _has(config, name)}


def _has(config: Any, name: str) -> bool:
    for part in name.split("."):
        if not hasattr(config, part):
            return False
        config = getattr(config, part)
    return True


# Test whether a row's result depends on the other rows, or on its position among them.


COUNTS = {
    "cpu": (1, 2, 3, 5, 8, 17, 64, 130),
    "cuda": (1, 2, 3, 4, 8, 16, 17, 32, 64, 100, 128, 256, 512, 1000, 1024, 2048, 4096),
}
"""Numbers of rows that are compared with all rows together."""


def dependence(op: RowOp, *inputs: Tensor, counts: Iterable[int] | None = None) -> str | None:
    """Describe how the result of a row depends on other rows or its position; None: no dependence was found.

    Compares bitwise with the result of all rows together: the first n rows, a row alone, the rows shifted and
    reversed, and one row in every position.

    Example:
        >>> dependence(lambda x: x + x.shape[0], torch.zeros(4, 2), counts=(2,))
        'the first 2 of 4 rows alone: 4 of 4 values differ'
    """
    num_rows = inputs[0].shape[0]
    counts = COUNTS[inputs[0].device.type] if counts is None else counts
    whole = _outputs(op(*inputs))

    def differs(index: Tensor | slice) -> str | None:
        """Result of those rows alone against those rows of the whole result."""
        part = _outputs(op(*(x[index].contiguous() for x in inputs)))
        return _difference(part, [y[index] for y in whole])

    for count in counts:
        if count < num_rows and (difference := differs(slice(0, count))):
            return f"the first {count} of {num_rows} rows alone: {difference}"
    for row in sorted({1, num_rows // 2, num_rows - 1} & set(range(num_rows))):
        if difference := differs(slice(row, row + 1)):
            return f"row {row} of {num_rows} alone: {difference}"
    places = torch.arange(num_rows, device=inputs[0].device)
    for name, order in (
        ("rows shifted by 1", places.roll(1)),
        ("rows shifted by 5", places.roll(5)),
        ("rows reversed", places.flip(0)),
        ("one row in every place", places * 0),
    ):
        if difference := differs(order):
            return f"{name}: {difference}"
    return None


def _outputs(result: Tensor | Sequence[Tensor]) -> list[Tensor]:
    return [result] if isinstance(result, Tensor) else list(result)


def _difference(part: Sequence[Tensor], whole: Sequence[Tensor]) -> str | None:
    for left, right in zip(part, whole, strict=True):
        if not torch.equal(left, right):
            return f"{int((left != right).sum())} of {left.numel()} values differ"
    return None


log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True, slots=True)
class Verdict:
    """The result of the test of one op at one shape."""

    choice: str
    """"stock", "triton", "cpu-row", or the tiles as "tiles 128 64 32 16 8"; of few rows "few-rows" or
    "padded"."""
    rejected: tuple[str, ...] = ()
    """The choices that failed before it, and how."""


def self_test(
    module: nn.Module,
    *,
    device: torch.device | None = None,
    dtype: torch.dtype | None = None,
    cache: bool = True,
    split: bool = False,
) -> dict[str, Verdict]:
    """Test the ops of a converted module, and let its linears use what passed.

    Args:
        module: converted. Only its shapes are read, so it may be on the meta device.
        device: where it will run; None: where its parameters are.
        dtype: of weights and activations; None: that of its parameters.
        cache: whether verdicts are kept on disk, and read from there.
        split: the module is one rank's part of a model (tensor parallel), the head's vocabulary included.

    Returns:
        Verdicts by op and shape, such as "linear 1536x576".

    Raises:
        ModelError: an op of this package failed: it names the op.
    """
    first = next(module.parameters())
    device, dtype = device or first.device, dtype or first.dtype
    if device.type == "meta":
        raise ModelError(
            "missing-device: the module's weights are on the meta device: pass a device to self_test"
        )
    store = _Store(device, dtype, enabled=cache)
    verdicts = {}
    for case in cases(module, Inputs(device, dtype), split=split):
        if case.name not in verdicts:
            verdicts[case.name] = store.get(case.name) or store.put(case.name, _verdict(case, device))
    for _, part in parts.linears(module):
        apply_tiles(part, verdicts[linear_name(part)].choice)
    for other in module.modules():
        if isinstance(other, experts.InvariantRouter):
            apply_tiles(other, verdicts[router_name(other)].choice)
        elif isinstance(other, experts.InvariantExperts):
            products = other.products.items()
            other.tiles = {k: tiles_of(verdicts[product_name(product)].choice) for k, product in products}
    store.save()
    return verdicts


def _verdict(case: Case, device: torch.device) -> Verdict:
    inputs = case.inputs()
    rejected: list[str] = []
    with torch.no_grad():
        for choice, op in case.choices(inputs):
            difference = dependence(op, *inputs)
            if difference is None:
                if rejected:
                    log.info("%s: %s is not row-invariant here; using %s", case.name, rejected[0], choice)
                return Verdict(choice=choice, rejected=tuple(rejected))
            rejected.append(f"{choice} ({difference})")
    raise ModelError(
        f"not-batch-invariant: no form of {case.name} is row-invariant on this {_hardware(device)}: "
        f"{'; '.join(rejected)}. Set train.batch_invariant = false"
    )


def few_rows_test(module: nn.Module, *, cache: bool = True) -> dict[str, Verdict]:
    """Test whether products of few rows by `lockstep.invariant.few_rows` equal those that the linears of a
    converted and tested module use for many, for each of its weight shapes, and let an engine's linears use
    it where they do; the others pad their rows. On CUDA; elsewhere nothing is tested or changed.

    Returns:
        Verdicts by shape, such as "few rows 1536x576".
    """
    first = next(module.parameters())
    if first.device.type != "cuda":
        return {}
    store, make = _Store(first.device, first.dtype, enabled=cache), Inputs(first.device, first.dtype)
    verdicts: dict[str, Verdict] = {}
    for _, part in parts.linears(module):
        name = linear_name(part).replace("linear", "few rows")
        if name not in verdicts:
            verdicts[name] = store.get(name) or store.put(name, _few_rows_verdict(part, make))
            if verdicts[name].rejected:
                log.warning(
                    "decoding pads rows for weights of this shape, which is slower: %s: %s",
                    name,
                    verdicts[name].rejected[0],
                )
        choice = verdicts[name].choice
        part.few_rows = choice if choice == parts.FEW_ROWS or part.stock else None
    store.save()
    return verdicts


@torch.no_grad()
def _few_rows_verdict(part: parts.InvariantLinear, make: Inputs) -> Verdict:
    """Alone, thrice in one launch (other blocks), and with a residual, against rows among many."""
    from triton.runtime.errors import OutOfResources

    wide, narrow = part.out_features, part.in_features
    weight, x = make.normal(wide, narrow, std=narrow**-0.5), make.normal(make.rows(wide), narrow)
    bias, residual = (
        None if part.product_bias is None else make.normal(wide),
        make.normal(few_rows.MOST_ROWS, wide),
    )
    biases = [] if bias is None else [bias]
    tiles = linear_ops.TILES
    whole = F.linear(x, weight, bias) if part.stock else linear_ops.linear(x, weight, bias, tiles)
    for count in (1, 8, 16, 17, 32, 33, 64):
        rows, expected = x[-count:].contiguous(), whole[-count:]
        added = residual[:count]
        try:
            outs = [
                *few_rows.few_rows(rows, [weight], biases, None),
                *few_rows.few_rows(rows, [weight] * 3, biases * 3, None),
                *few_rows.few_rows(rows, [weight], biases, added),
            ]
        except OutOfResources as error:
            return Verdict(choice=parts.PADDED, rejected=(f"{parts.FEW_ROWS} ({error})",))
        difference = _difference(outs, [*[expected] * 4, added + expected])
        if difference is not None:
            return Verdict(choice=parts.PADDED, rejected=(f"{parts.FEW_ROWS} ({count} rows: {difference})",))
    return Verdict(choice=parts.FEW_ROWS)


# --- the cache of verdicts ---


class _Store:
    """Verdicts in a JSON file, whose name is a hash of the conditions that they hold under."""

    def __init__(self, device: torch.device, dtype: torch.dtype, *, enabled: bool) -> None:
        self._path = cache_file(device, dtype) if enabled else None
        self._verdicts: dict[str, Verdict] = {}
        self._changed = False
        if self._path is not None and self._path.exists():
            try:
                kept = json.loads(self._path.read_text())
                self._verdicts = {
                    name: Verdict(choice=_known(v["choice"]), rejected=tuple(v["rejected"]))
                    for name, v in kept.items()
                }
            except (ValueError, KeyError, TypeError, AttributeError) as error:
                log.warning("%s cannot be read (%s): testing again", self._path, error)

    def get(self, name: str) -> Verdict | None:
        return self._verdicts.get(name)

    def put(self, name: str, verdict: Verdict) -> Verdict:
        self._verdicts[name], self._changed = verdict, True
        return verdict

    def save(self) -> None:
        """Write the file atomically: other processes may read or write it."""
        if self._path is None or not self._changed:
            return
        text = json.dumps(
            {name: asdict(verdict) for name, verdict in sorted(self._verdicts.items())}, indent=1
        )
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            part = self._path.with_suffix(f".{os.getpid()}")
            part.write_text(text)
            part.replace(self._path)
        except OSError as error:
            log.warning("the self-test's verdicts are not kept: %s", error)


def _known(choice: Any) -> str:
    """Return a choice that `self_test` can make. Raises ValueError: others, such as other tiles, were never
    tested."""
    if choice in (parts.STOCK, "triton", "cpu-row", parts.FEW_ROWS, parts.PADDED):
        return str(choice)
    name, _, tiles = str(choice).partition(" ")
    if name == "tiles" and tiles and set(tiles.split()) <= {"1", *map(str, linear_ops.TILES)}:
        return str(choice)
    raise ValueError(f"unknown choice {choice!r}")


def cache_file(device: torch.device, dtype: torch.dtype) -> Path:
    """Return the file of verdicts for this machine, torch and package."""
    # What a verdict depends on. Threads, because ATen splits sums over them; the source, because a changed op
    # must be tested anew.
    conditions = [
        _hardware(device),
        str(dtype),
        torch.__version__,
        str(torch.get_num_threads()),
        *(cuda_settings() if device.type == "cuda" else ()),
        _source_hash(),
    ]
    digest = hashlib.sha256("\n".join(conditions).encode()).hexdigest()[:16]
    return cache_root() / f"invariant-{digest}.json"


def _hardware(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"{cpu_name()} {torch.backends.cpu.get_cpu_capability()}"


def cpu_name() -> str:
    """The processor's name; where it is not known, its architecture."""
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        for line in cpuinfo.read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def _source_hash() -> str:
    files = sorted(Path(__file__).parent.glob("*.py"))
    return hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()
