"""Compiled blocks: the eager numbers, one graph per bucket and kind of layer, the same parameter names."""

import dataclasses

import pytest
import torch
from parity_models import largest_gap, measure, packs_of, relative_error, tiny_model
from raising import raises

from lockstep.config.support import cells_tested_by
from lockstep.errors import TrainError
from lockstep.execution import compile_blocks, is_compiled
from lockstep.packing import Bucket

CELLS = [(c["attention"], c["layout"]) for c in cells_tested_by("ci-cpu:tests/parity/test_compiled.py")]
# 4 rows of 16: as many documents as a padded batch of this bucket may hold.
BUCKET = Bucket(tokens=64, documents=8, max_seqlen=16)
GROUPS = [[0, 1, 2], [3, 4]]
OTHER_GROUPS = [[4, 3, 1, 2], [0]]


@pytest.fixture(autouse=True)
def _fresh_compiler():
    torch._dynamo.reset()


@pytest.mark.slow
@pytest.mark.parametrize("architecture", ["qwen3", pytest.param("gemma3", marks=pytest.mark.exhaustive)])
@pytest.mark.parametrize(("kernel", "layout"), CELLS)
def test_compiled_equals_eager_with_one_graph_per_kind_of_layer(kernel, layout, architecture):
    module = tiny_model(architecture, kernel)
    eager, eager_grads = measure(module, packs_of(GROUPS, layout=layout), layout=layout)
    names = [name for name, _ in module.named_parameters()]
    watch = compile_blocks(module, max_recompiles=0)
    assert is_compiled(module) and [name for name, _ in module.named_parameters()] == names
    measure(module, packs_of(GROUPS, bucket=BUCKET, layout=layout), layout=layout)
    watch.mark_warm()
    compiled, grads = measure(module, packs_of(OTHER_GROUPS, bucket=BUCKET, layout=layout), layout=layout)
    watch.check()
    report = watch.report()
    kinds = {"qwen3": 1, "gemma3": 2}[architecture]  # gemma3: with and without a sliding window
    assert (report.graphs, report.graph_breaks, report.recompiles) == (kinds, 0, 0)
    assert largest_gap(eager, compiled) <= 2e-6
    assert relative_error(eager_grads, grads) <= 1e-5


@pytest.mark.slow
def test_a_run_that_keeps_recompiling_stops_and_says_why():
    module = tiny_model("llama", "varlen")
    watch = compile_blocks(module, max_recompiles=1, backend="aot_eager")
    measure(module, packs_of([[0]]))
    watch.mark_warm()
    measure(module, packs_of([[1]]))
    watch.check()
    measure(module, packs_of([[3]]))
    assert watch.report().recompiles == 2
    with raises(TrainError, "too-many-recompiles: train.max_recompiles", recompiles=2):
        watch.check()
    assert all("size mismatch" in reason or "==" in reason for reason in watch.report().reasons)


def test_lengths_do_not_reach_a_compiled_graph():
    """Two packs of one bucket with other documents, through a backend that needs no C++ compiler."""
    module = tiny_model("mistral", "sdpa")
    eager, _ = measure(module, packs_of(GROUPS))
    watch = compile_blocks(module, backend="aot_eager")
    first, _ = measure(module, packs_of(GROUPS, bucket=BUCKET))
    measure(module, packs_of(OTHER_GROUPS, bucket=BUCKET))
    assert watch.report().graphs == 1
    assert largest_gap(eager, first) <= 2e-6
    assert dataclasses.asdict(watch.report())["recompiles"] == 0
