"""Decode steps as recorded graphs, without a GPU: the operations of a step are traced once and played again.

As in a CUDA graph, what the host computed while it was traced is fixed, and tensors are fixed places. What is
still right then reads nothing but static buffers.
"""

import sys
from pathlib import Path

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

sys.path.insert(0, str(Path(__file__).parent))

from native_parts import TIGHT, generated, policy, requests

from lockstep.config.engine import EngineConfig
from lockstep.engine.build import make_engine
from lockstep.engine.native import runner as native


class Recorded:
    """Stands in for torch.cuda.CUDAGraph."""

    def __init__(self, work):
        work()
        self.graph = make_fx(lambda _: work())(torch.zeros(1))
        self.replays = 0

    def replay(self):
        self.graph(torch.zeros(1))
        self.replays += 1


@pytest.fixture
def recorded(monkeypatch):
    """The graphs of every engine that is made now, in order."""
    graphs = []

    def record(runner, work):
        graphs.append(Recorded(work))
        return graphs[-1]

    make = native.Runner.__init__
    monkeypatch.setattr(native.Runner, "_captured_graph", record)
    monkeypatch.setattr(
        native.Runner, "__init__", lambda self, *args, **kw: make(self, *args, **(kw | {"graphs": True}))
    )
    return graphs


def test_replayed_steps_give_the_tokens_and_bits_of_eager_ones(recorded, monkeypatch):
    model = policy("tiny-qwen3", "float32")
    replayed, engine = generated(model, requests(), ahead=1, **TIGHT)
    monkeypatch.undo()
    eager, _ = generated(model, requests(), **TIGHT)
    assert engine.counts.preemptions > 0
    counts = engine.counts
    assert sum(graph.replays for graph in recorded) == 2 * counts.steps + counts.prefill_forwards > 200
    # 1, 2, 3 and 5 rows, tokens to logits and logits to tokens; prefill of 2, 8 and 32 tokens
    assert len(recorded) <= 8 + 3
    assert [c.token_ids for c in replayed] == [c.token_ids for c in eager]
    assert [c.logprobs for c in replayed] == [c.logprobs for c in eager]


def test_graphs_are_kept_for_the_last_few_temperatures_only(recorded):
    model = policy("tiny-llama", "float32")
    engine = make_engine(EngineConfig(name="native", **TIGHT), model=model)
    asked = {t: requests(t)[:1] for t in (0.5, 0.6, 0.7, 0.8, 0.9, 1.1)}
    first = {t: engine.generate(asked[t]) for t in asked}

    def kept():
        return [key[2] for key in engine._runner._captured if key[0] == "draw"]

    assert kept() == [0.7, 0.8, 0.9, 1.1]
    made = len(recorded)
    assert engine.generate(asked[0.7]) == first[0.7] and len(recorded) == made, "it was kept"
    assert engine.generate(asked[0.5]) == first[0.5] and len(recorded) == made + 1, "it had gone"
    assert sorted(kept()) == [0.5, 0.7, 0.9, 1.1], "0.7 was used after 0.8"
    engine.close()


def test_prefill_takes_the_size_that_is_mostly_filled(recorded):
    """Sizes of 2, 8 and 32 tokens: a part of what is left, where more than half would be padding."""
    model = policy("tiny-llama", "float32")
    _, engine = generated(model, requests(), **(TIGHT | {"prefill_chunk": 32}))
    runner = native.Runner(engine._layers, max_rows=4, chunk=32, max_keys=64, compiled=False, graphs=False)
    assert runner.chunk_sizes == (2, 8, 32)
    taken = {left: runner.chunk_for(left) for left in (1, 2, 3, 4, 5, 8, 9, 16, 17, 31, 32, 500)}
    assert taken == {1: 2, 2: 2, 3: 2, 4: 2, 5: 8, 8: 8, 9: 8, 16: 8, 17: 32, 31: 32, 32: 32, 500: 32}
