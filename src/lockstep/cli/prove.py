"""`lockstep prove`: compare every way to run a model with transformers, on a small copy of its config.

lockstep prove Qwen/Qwen3-0.6B --all --json proof.json
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import tyro

from lockstep.errors import ModelError
from lockstep.observe.files import check_writable, write_json
from lockstep.observe.text import echo, printable
from lockstep.version import __version__

if TYPE_CHECKING:
    from lockstep.models.proof_rows import Gap

_STYLES = {"passed": "green", "failed": "bold red", "refused": "yellow"}


@dataclass(frozen=True, kw_only=True, slots=True)
class ProveOptions:
    """Check every way to run a model against transformers' eager attention: compare logprobs and all
    gradients of a small random copy, in float32 on the CPU.

    The exit status is 1 if the model cannot be trained. A row that is refused is a mode that this model does
    not have.
    """

    model: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="MODEL")]
    """A folder, a hub name, `shape:NAME` or `bundled:NAME`."""
    all: bool = False
    """Also prove compiled layers and bfloat16, which takes a minute."""
    trust_remote_code: bool = False
    """Run Python code that comes with the model."""
    json: Annotated[Path | None, tyro.conf.arg(metavar="FILE")] = None
    """Write the rows to this file."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """One way to run the model."""

    name: str
    result: Literal["passed", "failed", "refused"]
    logprobs: float | None = None
    """The largest difference, in nats."""
    gradients: float | None = None
    """The largest difference, relative to the gradient's norm."""
    why: str = ""
    """The reason of a refusal; the numbers of a failure."""


def main(argv: Sequence[str]) -> int:
    """Print a row for each way to run the model; 1 if a row fails."""
    options = tyro.cli(ProveOptions, args=list(argv), prog="lockstep prove")
    check_writable(options.json)
    from lockstep.config.model import ModelConfig
    from lockstep.models.architectures import architecture_of
    from lockstep.models.load import prepared_config

    model = ModelConfig(name=options.model, trust_remote_code=options.trust_remote_code)
    config = prepared_config(model)
    record = architecture_of(config)
    rows = list(prove(config, name=options.model, everything=options.all))
    failed = [row for row in rows if row.result == "failed"]
    if options.json is not None:
        report = {
            "model": options.model,
            "architecture": config.model_type,
            "has_record": record is not None,
            "passed": not failed,
            "rows": [asdict(row) for row in rows],
            "versions": {name: version(name) for name in ("torch", "transformers")}
            | {"lockstep": __version__},
        }
        write_json(options.json, report)
    show(rows)
    kind = config.model_type if record is not None else f"{config.model_type}, generic"
    refused = sum(row.result == "refused" for row in rows)
    if failed:
        outcome = f"fails: {failed[0].name}: {failed[0].why}"
    else:
        outcome = f"{len(rows) - refused} rows hold, {refused} refused"
    echo(printable(f"prove: {options.model} ({kind}): {outcome}"))
    return 1 if failed else 0


def prove(config: Any, *, name: str, everything: bool) -> Iterator[Row]:
    """Yield the rows of a proof, from the cache or run now.

    Args:
        config: the model's, checked.
        everything: slow rows, too.
    """
    from lockstep.engine.spec import EMBEDDED, decoding_gaps
    from lockstep.models.admission import measured_gaps
    from lockstep.models.proof_modes import MODES, SLOW_MODES
    from lockstep.models.proof_rows import forward_gaps

    yield from _rows("forward", lambda: measured_gaps(config, kind="forward", ways=forward_gaps, name=name))
    for engine in EMBEDDED:
        # A run can do without native, not without any engine.
        yield from _rows(
            f"decoded by engine {engine}",
            lambda engine=engine: decoding_gaps(engine, config, name=name),
            optional=engine != "hf",
        )
    for mode, ways in (MODES | (SLOW_MODES if everything else {})).items():
        yield from _rows(
            mode,
            lambda mode=mode, ways=ways: measured_gaps(config, kind=mode, ways=ways, name=name),
            optional=True,
        )


def _rows(part: str, measure: Any, *, optional: bool = False) -> Iterator[Row]:
    try:
        gaps: Sequence[Gap] = measure()
    except ModelError as error:
        yield Row(name=part, result="refused" if optional else "failed", why=str(error))
        return
    for way, some in itertools.groupby(gaps, key=lambda gap: gap.way):
        row = list(some)
        failed = next((gap for gap in row if not gap.passed), None)
        yield Row(
            name=way,
            result="passed" if failed is None else "failed",
            logprobs=max((gap.size for gap in row if not gap.of_gradient), default=None),
            gradients=max((gap.size for gap in row if gap.of_gradient), default=None),
            why="" if failed is None else failed.in_words(),
        )


def show(rows: Sequence[Row]) -> None:
    """Print the table."""
    from rich.table import Table
    from rich.text import Text

    from lockstep.observe.console import PlainConsole

    table = Table(title="lockstep prove")
    for heading in ("row", "result", "logprobs", "gradients", "why"):
        table.add_column(heading)
    for row in rows:
        numbers = ("" if size is None else f"{size:.1e}" for size in (row.logprobs, row.gradients))
        table.add_row(
            Text(row.name), Text(row.result, style=_STYLES[row.result]), *numbers, Text(printable(row.why))
        )
    PlainConsole(width=120, highlight=True).print(table)
