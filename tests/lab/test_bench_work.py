import json

import pytest
import torch
from raising import raises

from lockstep.errors import ConfigError
from lockstep_lab.step_bench.cells import BenchCell, parse_cell, parse_cells, product
from lockstep_lab.step_bench.job import (
    BenchOutcome,
    BenchWork,
    grant_turn,
    read_times,
    read_turn,
    requests,
    samples,
)
from lockstep_lab.step_bench.worker import PhaseClock
from lockstep_lab.suite.job_files import read_lines


def test_names_and_cells() -> None:
    cell = parse_cell("invariant+native+compile+fsdp2")
    assert cell == BenchCell(backend="fsdp2", execution="compile", engine="native", invariant=True)
    assert (cell.name, cell.slug) == ("fsdp2+compile+native+invariant", "fsdp2-compile-native-invariant")
    assert parse_cell("compile").name == "compile+hf"
    assert cell.settings() == {
        "train.backend": "fsdp2",
        "train.execution": "compile",
        "train.batch_invariant": True,
        "engine.name": "native",
    }
    lists = {"execution": "eager,compile", "invariant": "off,on", "backend": None, "engine": "native"}
    assert [cell.name for cell in product(lists)] == [
        "eager+native",
        "eager+native+invariant",
        "compile+native",
        "compile+native+invariant",
    ]


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("eager+hff", "unknown-name: --cells, hff"),
        ("eager+compile", "duplicate: --cells, execution"),
        ("invariant+invariant", "duplicate: --cells, invariant"),
        ("on", "unknown-name: --cells, on"),
        (",", "empty: --cells"),
        ("eager,eager+hf", "duplicate: --cells, eager+hf"),
    ],
)
def test_cells_that_cannot_be_right(text: str, problem: str) -> None:
    with raises(ConfigError, problem):
        parse_cells(text)


def test_lists_that_cannot_be_right() -> None:
    with raises(ConfigError, "unknown-name: --execution, fast"):
        product({"execution": "fast"})
    with raises(ConfigError, "duplicate: --cells", names=["eager+hf"]):
        product({"engine": "hf,hf"})


def test_the_work_of_a_step() -> None:
    work = BenchWork(prompts=6, group=3, prompt_tokens=10, longest=100)
    lengths = work.lengths()
    assert len(lengths) == 18 and lengths == work.lengths()
    assert all(lengths[3 * i] == lengths[3 * i + 1] == lengths[3 * i + 2] for i in range(6))
    assert min(lengths) >= 11 and max(lengths) <= 100 and len(set(lengths)) > 3
    assert work.completion_tokens == sum(lengths) - 180
    made = requests(work, vocab_size=50)
    assert [len(r.seeds) for r in made] == [3] * 6 and len({s for r in made for s in r.seeds}) == 18
    assert [10 + r.sampling.max_tokens for r in made] == lengths[::3]
    parts = [requests(work, vocab_size=50, part=i, parts=2) for i in range(2)]
    assert sorted(parts[0] + parts[1], key=lambda r: r.seeds) == sorted(made, key=lambda r: r.seeds)
    documents = samples(work, vocab_size=50)
    assert [len(sample) for sample in documents] == lengths
    # every completion token is trained on, each from the slot before it
    assert sum(int(sample.loss_mask.sum()) for sample in documents) == work.completion_tokens
    assert not documents[0].loss_mask[:9].any() and not documents[0].loss_mask[-1]
    with raises(ValueError, "wrong-format"):
        BenchWork(prompt_tokens=10, longest=10)


def test_lengths_are_spread_like_those_of_rollouts() -> None:
    drawn = torch.tensor(BenchWork(prompts=4000, group=1, longest=4096, prompt_tokens=8).lengths()).float()
    # median 0.2 x longest, sigma of the logarithm 0.8
    assert drawn.median() == pytest.approx(0.2 * 4096, rel=0.05)
    assert drawn.log().std() == pytest.approx(0.8, rel=0.07)


def test_turns_and_rows(tmp_path) -> None:
    assert read_turn(tmp_path) == 0
    grant_turn(tmp_path, 2)
    assert read_turn(tmp_path) == 2
    grant_turn(tmp_path, "end")
    assert read_turn(tmp_path) is None
    row = (
        '{"step": 1, "generate": 1, "train": 1, "forward": 1, "backward": 1, "optimizer": 1, "weights": 0}\n'
    )
    (tmp_path / "rows.jsonl").write_text(row + row[:20])
    assert len(read_times(tmp_path)) == 1, "a line that is not written to its end does not count"


def test_a_line_ends_where_json_says_so(tmp_path) -> None:
    said = [BenchOutcome(status="failed", reason=f"a\u2028b {index}") for index in range(2)]
    lines = [json.dumps(row.model_dump(), ensure_ascii=False) + "\n" for row in said]
    (tmp_path / "rows").write_text("".join(lines), encoding="utf-8")
    assert read_lines(tmp_path / "rows", BenchOutcome) == said


def test_the_clock_adds_up_and_starts_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    times = iter([0.0, 1.0, 10.0, 13.0, 20.0, 20.5])
    monkeypatch.setattr("lockstep_lab.step_bench.worker.time.perf_counter", lambda: next(times))
    clock = PhaseClock(torch.device("cpu"))
    for name in ("forward", "backward", "forward"):
        with clock(name):
            pass
    assert clock.take() == {"forward": 1.5, "backward": 3.0}
    assert clock.take() == {}
