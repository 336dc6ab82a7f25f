import dataclasses
import re
import struct
import sys
import zlib
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from raising import raises
from rich.console import Console

from lockstep.errors import ConfigError
from lockstep_lab.loss_curves.differences import Spread, falls
from lockstep_lab.loss_curves.draw import Curve, Panel, svg, write_png
from lockstep_lab.suite.report import markdown, page, show
from lockstep_lab.train_parity.compare import Comparison
from lockstep_lab.train_parity.job import StepRow
from lockstep_lab.train_parity.report import panels, problems, progress_line, report, write_reports
from lockstep_lab.train_parity.result import ParityResult, StackResult, judge, learning

HOSTILE = "<script>alert(1)</script>\"'><img src=x onerror=alert(2)>\x1b[31m|`${x}`\n| a | b |"


def rows(losses: list[float]) -> tuple[StepRow, ...]:
    return tuple(
        StepRow(
            step=i,
            loss=loss,
            grad_norm=1.0,
            lr=1e-3,
            tokens=100,
            seconds=0.5 if i > 1 else 9.0,
            tokens_per_second=200.0 if i > 1 else 11.0,
            peak_memory_bytes=2**30 + i,
        )
        for i, loss in enumerate(losses, start=1)
    )


def stack(name: str, losses: list[float], **changes: Any) -> StackResult:
    found = falls(losses)
    given = {"status": "ok", "ranks": 2, "rows": rows(losses), "falls": found, "seconds": 12.0}
    made = StackResult(name=name, **(given | changes))
    return dataclasses.replace(made, learning=learning(made, made))


def comparison(loss: float) -> Comparison:
    far = Spread(max=loss, mean=loss / 2, at=3)
    return Comparison(
        steps=4, loss=far, loss_floor=0.0, grad_norm=far, logprob=far, gradients={"1": 2e-6, "4": 1e-6}
    )


def result(*stacks: StackResult, **changes: Any) -> ParityResult:
    given: dict[str, Any] = {
        "stacks": stacks,
        "reference": "local",
        "threshold": 0.05,
        "algorithm": "sft",
        "settings": {"model": "shape:tiny-llama", "steps": 4},
        "command": "lockstep parity train",
        "machine": {"torch": "2.13.0"},
    }
    return ParityResult(**(given | changes))


def usual() -> ParityResult:
    return result(
        stack("local", [4.0, 3.9, 2.0, 1.9], is_reference=True, ranks=1),
        stack("fsdp2", [4.0, 3.9, 2.0, 1.919], comparison=comparison(0.01)),
        StackResult(
            name="fsdp2:tp2", status="refused", reason="tp = 2: why not", problems=("tp = 2: why not",)
        ),
        StackResult(name="deepspeed:zero2", status="skipped", reason="skipped: deepspeed"),
    )


def hostile() -> ParityResult:
    return result(
        stack("local", [4.0, float("nan"), 2.0, 1.0], is_reference=True),
        stack(
            HOSTILE, [4.0, 3.0, 2.0, 1.0], comparison=comparison(0.01), reason=HOSTILE, problems=(HOSTILE,)
        ),
        settings={"model": HOSTILE, HOSTILE: HOSTILE},
        notes=(HOSTILE,),
        command=HOSTILE,
        machine={HOSTILE: HOSTILE},
    )


class Tags(HTMLParser):
    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))


def test_verdict_and_measures() -> None:
    found = usual()
    assert found.verdict == (
        "parity: 1 of 2 stacks agree with local (largest relative loss difference 0.01); fsdp2:tp2 refused; "
        "learning: every loss falls"
    )
    assert not found.ok
    assert result(*found.stacks[:2], found.stacks[3]).ok
    fsdp2 = found.stacks[1]
    assert (fsdp2.step_seconds, fsdp2.tokens_per_second) == (0.5, 200.0), "without the first step"
    assert fsdp2.peak_memory_bytes == 2**30 + 4


def test_what_does_not_pass() -> None:
    flat = stack("fsdp2", [1.0] * 4, comparison=comparison(float("nan")))
    told = judge(flat, threshold=0.05, steps=6, reference_ran=True)
    assert told == (
        "4 of 6 steps were done",
        "losses differ by NaN at step 3, more than the threshold of 0.05",
    )
    assert judge(flat, threshold=1, steps=4, reference_ran=True) == (
        "losses differ by NaN at step 3, more than the threshold of 1",
    )
    alone = stack("fsdp2", [3.0, 2.0])
    assert judge(alone, threshold=1, steps=2, reference_ran=True) == ("it did no step",)


FALLING, FLAT = [4.0, 3.9, 2.0, 1.9], [4.0, 4.1, 4.0, 4.1]


@pytest.mark.parametrize(
    ("reference", "losses", "words", "learns", "ok"),
    [
        (FALLING, FALLING, ("falls", "falls"), True, True),
        (FLAT, FLAT, ("not shown", "not shown"), None, True),
        (FALLING, FLAT, ("falls", "does not fall"), False, False),
        (FLAT, FALLING, ("not shown", "falls"), None, True),
        (FLAT * 3, FLAT * 3, ("does not fall", "does not fall"), False, False),
        ([4.0, 3.0], [4.0, 3.0], ("not shown", "not shown"), None, True),
        ([4.0, 3.0, 2.0, float("nan")], FALLING, ("does not fall", "falls"), False, False),
    ],
)
def test_agreement_and_learning_are_two_verdicts(
    reference: list[float], losses: list[float], words: tuple[str, str], learns: bool | None, ok: bool
) -> None:
    """Losses within 1e-7 agree, whether they fall or not."""
    local = stack("local", reference, is_reference=True, ranks=1)
    other = stack("fsdp2", losses, comparison=comparison(1.1e-7))
    other = dataclasses.replace(other, learning=learning(other, local))
    found = result(local, other)
    assert (local.learning, other.learning) == words
    assert found.agrees and (found.learns, found.ok) == (learns, ok)
    agreement = "1 of 1 stacks agree with local (largest relative loss difference 1.1e-07)"
    assert found.verdict == f"parity: {agreement}; {found.learning}"
    assert result(local, other, must_fall=False).ok
    values = found.as_dict()
    assert values["agreement"] == {"ok": True, "verdict": agreement}
    assert values["learning"]["ok"] is learns and values["stacks"][1]["learning"] == words[1]
    shown = [name for name, _ in problems(found)]
    flat = [s.name for s in (local, other) if s.learning == "does not fall"]
    assert shown == flat and (other.learning_problem in progress_line(other, 2, 2))


def test_the_terminal_shows_every_stack() -> None:
    console = Console(width=110, record=True, file=sys.stderr)
    show(report(usual()), console)
    text = console.export_text()
    line = next(line for line in text.splitlines() if line.startswith("fsdp2 "))
    assert line.split() == [
        "fsdp2",
        "agrees",
        "falls",
        "0.01",
        "0.005",
        "0.01",
        "0.005",
        "1.0e-02",
        "5.0e-03",
        "2.0e-06",
    ]
    assert "fsdp2:tp2: tp = 2: why not" in text and "…" not in text
    assert progress_line(usual().stacks[1], 2, 4) == "[2/4] fsdp2: agrees, losses within 0.01, 12.0 s"
    assert "\x1b" not in progress_line(hostile().stacks[1], 1, 1)


def test_the_page_is_self_contained_and_escapes_everything() -> None:
    for found in (usual(), hostile()):
        text = page(report(found))
        tags = Tags(text).tags
        assert not {"script", "img", "link", "iframe", "object", "a"} & {tag for tag, _ in tags}
        assert not any(name.startswith("on") for _, attrs in tags for name in attrs)
        assert "default-src 'none'" in text and "\x1b" not in text
        assert "http" not in re.sub(r'http-equiv="[^"]*"', "", text)
    assert drawn_in(page(report(usual()))) == ["#000000", "#0072b2", "#0072b2"], "two losses, one difference"


def test_markdown_keeps_its_table() -> None:
    for found in (usual(), hostile()):
        text = markdown(report(found))
        table = [line for line in text.splitlines() if re.match(r"\| (local|fsdp2|deepspeed|stack)", line)]
        assert len({len(re.findall(r"(?<!\\)\|", line)) for line in table}) == 1
        assert "<script" not in text.partition("```text")[0] and "\x1b" not in text
        assert text.count("```") == 2, "nothing ends the block of the command early"
    assert "| fsdp2 | agrees | 2 | 4 | falls | 0.01 |" in markdown(report(usual()))
    assert "- **fsdp2:tp2**: tp = 2: why not" in markdown(report(usual()))


def test_every_report_is_written(tmp_path: Path) -> None:
    write_reports(hostile(), tmp_path)
    assert {p.name for p in tmp_path.iterdir()} == {"parity.json", "parity.md", "parity.html", "parity.png"}
    nothing = result(
        StackResult(name="local", status="failed", reason="x", problems=("x",), is_reference=True)
    )
    (tmp_path / "2").mkdir()
    write_reports(nothing, tmp_path / "2")
    assert not (tmp_path / "2" / "parity.png").exists()
    assert "parity.png" not in (tmp_path / "2" / "parity.md").read_text()


# --- drawing ------------------------------------------------------------------------------------------------


def curve(values: list[float], **changes: Any) -> Curve:
    given = {"name": "x", "steps": list(range(1, len(values) + 1)), "values": values, "colour": "#0072b2"}
    return Curve(**(given | changes))


def drawn_in(text: str) -> list[str]:
    """The colours of the curves of a picture, in order; a lone point is no curve."""
    lines = re.findall(r'<path d="[^"]*L [^"]*" clip-path="[^"]*" style="(fill: none; [^"]*)"', text)
    return [line.partition("stroke: ")[2][:7] for line in lines if "stroke-width: 1.5" in line]


def test_a_curve_has_gaps_where_it_is_not_finite() -> None:
    text = svg([Panel(title="t", curves=[curve([1.0, 2.0, float("nan"), 3.0, 4.0, float("inf"), 1.0, 1.0])])])
    (path,) = re.findall(r'<path d="(M [^"]*)" clip-path="[^"]*" style="fill: none; stroke: #0072b2', text)
    assert path.count("M ") == 3
    assert "nan" not in path and "inf" not in path


@pytest.mark.parametrize("values", [[], [1.0], [float("nan")], [0.0, 0.0], [5.0, 5.0, 5.0], [1e-300, 1e300]])
@pytest.mark.parametrize("log", [False, True])
def test_curves_that_are_hard_to_draw(tmp_path: Path, values: list[float], log: bool) -> None:
    panel = Panel(title="t", curves=[curve(values)], log=log)
    assert svg([panel]).startswith("<svg")
    write_png([panel], tmp_path / "x.png", title="title")
    assert png_size(tmp_path / "x.png")[0] > 300


def test_names_are_text_in_a_picture(tmp_path: Path) -> None:
    """Neither markup nor mathematics."""
    text = svg([Panel(title=HOSTILE, curves=[curve([1.0, 2.0], name="$a_b$ <b>")])])
    assert "&lt;script&gt;" in text and "<script" not in text and "$a_b$ &lt;b&gt;" in text
    assert "http" not in text and 'href="' not in re.sub(r'href="#[^"]*"', "", text)
    with raises(ConfigError, "cannot-write: c.png"):
        write_png(panels(usual()), tmp_path / "no" / "c.png")


def png_size(path: Path) -> tuple[int, int]:
    """Of a PNG whose chunks are sound."""
    data = path.read_bytes()
    assert data[:8] == b"\x89PNG\r\n\x1a\n"
    length = struct.unpack(">I", data[8:12])[0]
    assert zlib.crc32(data[12 : 16 + length]) == struct.unpack(">I", data[16 + length : 20 + length])[0]
    width, height = struct.unpack(">II", data[16:24])
    return width, height
