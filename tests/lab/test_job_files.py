"""Times in jobs and options of suites: none that Python cannot wait for."""

import math
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError
from raising import raises

from lockstep.errors import ConfigError
from lockstep_lab.cli import bench, parity, parity_engines
from lockstep_lab.matrix.run import MatrixOptions
from lockstep_lab.step_bench.job import BenchJob
from lockstep_lab.suite.job_files import read_job_file
from lockstep_lab.train_parity.job import ParityJob


@pytest.mark.parametrize("value", [0.0, -1.0, math.nan, math.inf, 1e10, 1e300])
def test_a_time_that_nobody_can_wait_is_refused(value: float, tmp_path: Path) -> None:
    with raises(ConfigError, "out-of-range: timeout"):
        MatrixOptions(out=tmp_path, timeout=value)
    for kind in (BenchJob, ParityJob):
        for name in {"timeout", "patience", "wait"} & kind.model_fields.keys():
            with pytest.raises(ValidationError) as caught:
                kind.model_validate({name: value})
            assert (name,) in [error["loc"] for error in caught.value.errors()]


@pytest.mark.parametrize(
    ("read", "make", "flags"),
    [
        (bench.parser, bench.make_options, []),
        (parity.parser, lambda args: parity.make_options(args, {}), ["--stacks", "local"]),
        (
            parity_engines.parser,
            parity_engines.make_options,
            ["--engines", "hf", "--model", "shape:tiny-llama"],
        ),
    ],
)
def test_options_are_checked_without_a_command_line_too(read: Any, make: Any, flags: list[str]) -> None:
    args = read().parse_args(["--device", "cpu", *flags])
    assert make(args).timeout == args.timeout
    args.timeout = 1e300
    with raises(ConfigError, "out-of-range: timeout"):
        make(args)


def test_a_long_timeout_of_many_cells_is_a_job(tmp_path: Path) -> None:
    """Its patience is so many times as long, and has the same bound."""
    from lockstep_lab.step_bench.run import _job

    options = bench.make_options(bench.parser().parse_args(["--device", "cpu", "--timeout", "1e9"]))
    job = _job(options.cells[0], options)
    assert isinstance(job, BenchJob) and job.patience == 1e9
    file = tmp_path / "job.json"
    file.write_text(job.model_dump_json())
    assert read_job_file(file, BenchJob) == job
