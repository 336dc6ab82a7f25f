import io
import sys
from pathlib import Path

from rich.console import Console

sys.path.insert(0, str(Path(__file__).parent))
import matrix_results as made

from lockstep_lab.matrix.report import progress_line, report
from lockstep_lab.suite.report import markdown, show


def shown(*cells: object) -> str:
    stream = io.StringIO()
    show(report(made.result(*cells)), Console(file=stream, width=100))  # type: ignore[arg-type]
    return stream.getvalue()


def test_the_eight_cells_fit_100_columns_unfolded() -> None:
    values = made.Measures(
        first_call_ms=123_456.0,
        forward_ms=1234.0,
        backward_ms=2345.0,
        tokens_per_second=123_456.0,
        peak_memory_bytes=139 * 2.0**30,
        graphs=12,
        recompiles=0,
        graph_breaks=0,
        computed_slots=12_345_678,
    )
    name = "varlen + compile + packed"
    text = shown(made.reference(), made.cell(name=name, measures=values))
    lines = [line for line in text.splitlines() if name in line]
    assert len(lines) == 2 and max(map(len, text.splitlines()[:10])) <= 100
    for word in ("123,456", "1,234", "2,345", "139.00", "12,345,678", "123.46"):
        assert word in lines[0]
    for word in ("agrees", "12", "2e-06", "1e-07", "3e-07", "1.000000"):
        assert word in lines[1]


def test_what_did_not_work_is_told_with_its_log() -> None:
    bad = made.cell(status="failed", reason="[red]RuntimeError[/red]: \x1b[31mno\x1b[0m", agrees=None)
    text = shown(made.reference(), bad)
    assert "[red]RuntimeError[/red]" in text and "\x1b" not in text
    assert "log: cells/packed/log.txt" in text


def test_markdown_has_the_axes_and_what_it_was_made_with() -> None:
    text = markdown(report(made.result()))
    assert "| packing | result |" in text
    assert "| packed | works, agrees |" in text and "[log](cells/packed/log.txt)" in text
    assert "| torch | 2.11.0 |" in text and "| command | lockstep matrix |" in text
    assert "A cell agrees within 0.0001 nats (largest) and 0.0001 (gradient) in float32." in text
    assert "lockstep replay --packed" in text


def test_a_line_per_cell() -> None:
    assert (
        progress_line(made.cell(seconds=3.21), 2, 8)
        == "[2/8] packed: ok, 2e-06 nats from the reference, 3.2 s"
    )
    bad = made.cell(status="failed", reason="E: x", comparison=None)
    assert progress_line(bad, 1, 8) == "[1/8] packed: failed: E: x"
