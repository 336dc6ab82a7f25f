"""Results of matrices made by hand."""

from typing import Any

from lockstep_lab.matrix.compare import Comparison
from lockstep_lab.matrix.result import CellResult, MatrixResult, Measures


def comparison(**changes: Any) -> Comparison:
    return Comparison(
        **{
            "inputs": 3,
            "left_out": 0,
            "tokens": 30,
            "logprob_max": 2e-6,
            "logprob_mean": 1e-7,
            "logprob_rms": 2e-7,
            "worst_input": 1,
            "gradient_relative_error": 3e-7,
            "gradient_cosine": 1.0,
            "gradient_entries": 100,
            "worst_parameter": "model.w",
            **changes,
        }
    )


def cell(name: str = "packed", **changes: Any) -> CellResult:
    given: dict[str, Any] = {
        "name": name,
        "values": {"packing": name},
        "flags": ("--dtype", "float32"),
        "command": f"lockstep replay --{name}",
        "status": "ok",
        "folder": f"cells/{name}",
        "log": f"cells/{name}/log.txt",
        "reference": "padded",
        "measures": Measures(tokens_per_second=1500.0, peak_memory_bytes=2.0**30, forward_ms=3.0, graphs=4),
        "comparison": comparison(),
        "agrees": True,
    }
    return CellResult(**(given | changes))


def reference(**changes: Any) -> CellResult:
    measures = Measures(tokens_per_second=1000.0, peak_memory_bytes=2.0**30)
    own = {"name": "padded", "reference": None, "comparison": None, "agrees": None, "measures": measures}
    return cell(**(own | changes))


def result(*cells: CellResult, **changes: Any) -> MatrixResult:
    given: dict[str, Any] = {
        "command": "lockstep matrix",
        "created": "2026-01-01T00:00:00+00:00",
        "recording": {"path": "runs/demo", "inputs": 3, "model": "shape:tiny-llama"},
        "environment": {"machine": "cpu", "torch": "2.11.0"},
        "axes": {"packing": ["padded", "packed"]},
        "shared": (),
        "limits": {"logprob": None, "gradient": None},
        "cells": cells or (reference(), cell()),
        "complete": True,
    }
    return MatrixResult(**(given | changes))
