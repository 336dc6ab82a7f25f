from types import SimpleNamespace

import pytest

from lockstep.loop.metrics import CompileMeter
from lockstep.ranks.context import RankContext
from lockstep.schema.contract import CompileReport


class TwoRanks:
    """This one and another that was slower and compiled more."""

    def gather(self, own, kind, *, what):
        return [own, {name: value + 1.0 for name, value in own.items()}]


def report(graphs, recompiles, seconds):
    return CompileReport(graphs=graphs, graph_breaks=0, recompiles=recompiles, seconds=seconds, reasons=())


@pytest.mark.parametrize(("ranks", "more"), [(RankContext.alone(), 0.0), (TwoRanks(), 1.0)])
def test_counts_are_of_the_step_and_of_the_rank_with_the_most(ranks, more):
    reports = iter([report(4, 0, 2.5), report(5, 1, 3.0), report(5, 1, 3.0)])
    meter = CompileMeter(SimpleNamespace(compile_report=lambda: next(reports)), ranks=ranks)
    for graphs, recompiles, seconds in ((4.0, 0.0, 2.5), (1.0, 1.0, 0.5), (0.0, 0.0, 0.0)):
        assert meter.metrics() == {
            "compile/graphs": graphs + more,
            "compile/recompiles": recompiles + more,
            "compile/graph_breaks": more,
            "compile/seconds": seconds + more,
        }


def test_nothing_is_said_without_compiled_parts():
    backend = SimpleNamespace(compile_report=lambda: None)
    assert CompileMeter(backend, ranks=RankContext.alone()).metrics() == {}
