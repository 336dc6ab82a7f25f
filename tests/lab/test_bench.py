"""The suite around its workers: turns, medians, and what becomes of cells that crash, hang or are refused.
What a real worker measures is at the end."""

import dataclasses
import io
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from raising import raises
from rich.console import Console

from lockstep.errors import ConfigError
from lockstep_lab.cli import bench as command
from lockstep_lab.step_bench import run as lab
from lockstep_lab.step_bench.job import BenchOutcome
from lockstep_lab.step_bench.report import report
from lockstep_lab.step_bench.result import BenchResult
from lockstep_lab.step_bench.run import BenchOptions, run_bench
from lockstep_lab.suite.report import markdown, show, write_report

WORKER = Path(__file__).parent / "fake_bench_worker.py"
SMALL = ["--prompts", "2", "--group", "2", "--longest", "24", "--prompt-tokens", "4", "--dtype", "float32"]


def options(out: Path, cells: str, *argv: str) -> BenchOptions:
    words = ["--cells", cells, "--out", str(out), "--device", "cpu", "--repeats", "3", *SMALL, *argv]
    return command.make_options(command.parser().parse_args(words))


@pytest.fixture
def faked(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """Workers only pretend; behaviour.json says how."""
    monkeypatch.setattr(lab, "WORKER", (str(WORKER),))
    behave(tmp_path / "out")
    return tmp_path / "out"


def behave(out: Path, cells: dict[str, Any] | None = None) -> None:
    (out.parent / "behaviour.json").write_text(json.dumps(cells or {}))


def statuses(result: BenchResult) -> dict[str, str]:
    return {cell.name: cell.status for cell in result.cells}


def test_cells_take_turns_and_are_compared_turn_by_turn(faked: Path) -> None:
    behave(faked, {"compile+hf": {"scale": 0.5, "recompiles": 2, "gap": 0.25}, "eager+hf": {"scale": 1.0}})
    result = run_bench(options(faked, "eager+hf,compile+hf"))
    first, second = result.cells
    turns = [f"{cell} {turn}" for turn in (1, 2, 3) for cell in ("eager+hf", "compile+hf")]
    assert (faked / "order.txt").read_text().splitlines() == turns
    # seconds of a turn: 9.5, 19, 28.5 and half of that
    assert first.spread("step").median == 19.0 and first.spread("step").largest == 28.5
    assert first.spread("step").share == 1.0
    assert second.median("generate") == 6.0
    assert [second.ratio(first, phase) for phase in ("step", "backward")] == [0.5, 0.5]
    assert second.ratio(first, "weights") is None, "nothing is a share of nothing"
    assert first.generated_per_second == 600 / 12 and first.trained_per_second == 1200 / 6
    assert first.mfu == pytest.approx(3e12 / 6 / 4e12)
    assert result.ok and result.verdict == (
        "bench: 2 of 2 cells measured; fastest step compile+hf, 9.5 s, 0.50 of eager+hf"
    )
    write_report(report(result), result.as_dict(), faked, "bench")
    found = json.loads((faked / "bench.json").read_text())["cells"][1]
    assert found["ratios"]["train"] == 0.5 and found["outcome"]["recompiles"] == 2
    console = Console(width=110, file=io.StringIO(), record=True)
    outcome = BenchOutcome(status="ok", logprob_gap=0.25)
    cells = tuple(dataclasses.replace(cell, name="x" * 22, outcome=outcome) for cell in result.cells)
    show(report(dataclasses.replace(result, cells=cells)), console)
    lines = console.export_text().splitlines()
    assert lines[5].split()[-2:] == ["recomp", "gap"] and lines[8].endswith("2.5e-01"), "nothing is cut off"
    text = markdown(report(result))
    assert "| compile+hf | ok | 1 | 9,500 ±50% |" in text
    assert "| 0.500 | 0.500 | 0.500 | 100 | 400 | 0.250 | 1.00 | 0.5 | 2.0 | 2 | 2.5e-01 |" in markdown(
        report(result)
    )


def test_a_gap_that_is_no_number_is_shown(faked: Path) -> None:
    behave(faked, {"compile+hf": {"scale": 1.0, "gap": "NaN"}})
    result = run_bench(options(faked, "eager+hf,compile+hf"))
    write_report(report(result), result.as_dict(), faked, "bench")
    first, second = json.loads((faked / "bench.json").read_text())["cells"]
    assert (first["outcome"]["logprob_gap"], second["outcome"]["logprob_gap"]) == (0.0, "NaN")
    assert "| nan |" in (faked / "bench.md").read_text()


def test_one_at_a_time(faked: Path) -> None:
    result = run_bench(options(faked, "eager+hf,compile+hf", "--one-at-a-time"))
    turns = [f"{cell} {turn}" for cell in ("eager+hf", "compile+hf") for turn in (1, 2, 3)]
    assert (faked / "order.txt").read_text().splitlines() == turns and result.ok


def test_every_ending_is_a_row(faked: Path) -> None:
    behave(
        faked,
        {
            "eager+hf": {"scale": 1.0},
            "compile+hf": {"scale": 1.0, "how": "crash"},
            "eager+native": {"scale": 1.0, "how": "hang"},
            "compile+native": {"how": "refuse"},
            "fsdp2+eager+hf": {"how": "oom"},
            "fsdp2+compile+hf": {"how": "slow start"},
            "fsdp2+eager+native": {"scale": 1.0, "how": "no end"},
        },
    )
    cells = "eager+hf,compile+hf,eager+native,compile+native,fsdp2+eager+hf,fsdp2+compile+hf,"
    cells += "fsdp2+eager+native"
    said: list[str] = []
    result = run_bench(
        options(faked, cells, "--timeout", "3", "--set", "train.lr=1e-5"), progress=said.append
    )
    assert statuses(result) == {
        "eager+hf": "ok",
        "compile+hf": "failed",
        "eager+native": "hung",
        "compile+native": "refused",
        "fsdp2+eager+hf": "oom",
        "fsdp2+compile+hf": "hung",
        "fsdp2+eager+native": "hung",
    }
    by_name = {cell.name: cell for cell in result.cells}
    assert by_name["compile+hf"].reason == "ValueError: the second step broke"
    assert len(by_name["compile+hf"].times) == 1 and len(by_name["eager+hf"].times) == 3
    assert by_name["eager+native"].reason == "step 2 took more than 3 s (--timeout)"
    assert by_name["fsdp2+compile+hf"].reason == "loading and warming up took more than 3 s (--timeout)"
    assert by_name["compile+native"].reason == "the kernel contracts differ in gemm"
    assert by_name["fsdp2+eager+hf"].reason.endswith("give --one-at-a-time)")
    assert not result.ok and "; eager+native hung" in result.verdict
    assert any(line == "compile+native: refused: the kernel contracts differ in gemm" for line in said)
    pid = int(Path(by_name["eager+native"].log).read_text().partition("pid ")[2].split()[0])
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)
    job = json.loads((faked / "eager-hf" / "job.json").read_text())
    assert (job["timeout"], job["patience"]) == (3.0, 24.0), "one turn; one of each of 7 cells, and one more"
    assert job["run"]["train"]["lr"] == 1e-5 and job["ranks"] == 1


def test_what_the_support_table_refuses_starts_no_process(faked: Path) -> None:
    result = run_bench(options(faked, "eager+hf,compile+hf+invariant"))
    assert statuses(result) == {"eager+hf": "ok", "compile+hf+invariant": "refused"}
    assert result.cells[1].log == "" and "train.batch_invariant" in result.cells[1].reason
    assert result.ok, "what is refused was not asked to be fast"
    other, said = faked.parent / "other", []
    with raises(ConfigError, "nothing-to-do: --cells"):
        run_bench(options(other, "compile+hf+invariant"), progress=said.append)
    assert not other.exists() and not said, "the error says it"
    cells = "compile+hf+invariant,deepspeed+eager+native+invariant"
    with raises(ConfigError, "nothing-to-do: --cells") as refused:
        run_bench(options(other, cells, "--set", "train.lrr=1", "--set", "train.attention_x=1"))
    assert all(name in str(refused.value) for name in cells.split(","))


def test_what_a_cell_is_named_by_is_above_the_settings_of_all(faked: Path) -> None:
    given = options(faked, "eager+native").model_copy(update={"overrides": {"engine.name": "hf"}})
    assert run_bench(given).ok
    assert json.loads((faked / "eager-native" / "job.json").read_text())["run"]["engine"]["name"] == "native"


@pytest.fixture
def interrupted(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Ctrl-C before the second turn of compile+hf."""

    def turn(self: Any, cell: Any, repeat: int) -> None:
        if (cell.name, repeat) == ("compile+hf", 2):
            raise KeyboardInterrupt
        original(self, cell, repeat)

    original = lab._Suite._turn
    monkeypatch.setattr(lab._Suite, "_turn", turn)
    yield


def test_ctrl_c_keeps_what_there_is(faked: Path, interrupted: None) -> None:
    behave(faked, {"eager+native": {"how": "refuse"}})
    given = options(faked, "eager+hf,compile+hf,eager+native,compile+hf+invariant")
    result = run_bench(given)
    assert statuses(result) == {
        "eager+hf": "interrupted",
        "compile+hf": "interrupted",
        "eager+native": "refused",
        "compile+hf+invariant": "refused",
    }
    first, second, *_ = result.cells
    assert [len(cell.times) for cell in (first, second)] == [2, 1]
    assert (first.reason, second.reason) == ("after 2 of 3 steps", "after 1 of 3 steps")
    # what a step samples and trains on is known beforehand; its FLOPs are not
    assert first.generated_per_second == given.work.completion_tokens / 9
    assert second.trained_per_second == sum(given.work.lengths()) / 3
    assert first.mfu is None and second.ratio(first, "step") == 1.0
    assert not result.complete and result.verdict == (
        "bench: 0 of 4 cells measured; eager+native refused; compile+hf+invariant refused; interrupted"
    )
    assert "| compile+hf | interrupted | 1 |" in markdown(report(result))


def test_ctrl_c_counts_cells_that_were_not_started(faked: Path, interrupted: None) -> None:
    result = run_bench(options(faked, "eager+hf,compile+hf,eager+native", "--one-at-a-time"))
    assert statuses(result) == {"eager+hf": "ok", "compile+hf": "interrupted", "eager+native": "interrupted"}
    last = result.cells[-1]
    assert (last.reason, last.log, last.generated_per_second) == ("it was not started", "", None)
    assert result.verdict == "bench: 1 of 3 cells measured; fastest step eager+hf, 19 s; interrupted"
    found = json.loads((faked / "bench.json").read_text())
    assert len(found["cells"]) == 3 and not found["complete"], "also while it was under way"


def test_ctrl_c_while_a_cell_warms_up_or_ends(faked: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def wait(self: Any, arrived: Any, seconds: float, what: str) -> bool:
        if self.job.cell == "compile+hf":
            raise KeyboardInterrupt
        return waited(self, arrived, seconds, what)

    waited = lab._Running.wait
    behave(faked, {"compile+hf": {"how": "slow start"}})
    with monkeypatch.context() as patched:
        patched.setattr(lab._Running, "wait", wait)
        result = run_bench(options(faked, "eager+hf,compile+hf"))
    assert [cell.reason for cell in result.cells] == ["after 0 of 3 steps", "before it was warm"]

    def write_json(path: Path, value: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(lab, "write_json", write_json)  # the row is there already
    result = run_bench(options(faked.parent / "other", "eager+hf", "--repeats", "1"))
    assert statuses(result) == {"eager+hf": "ok"} and len(result.cells) == 1


def test_a_folder_with_something_in_it(faked: Path) -> None:
    faked.mkdir()
    (faked / "x").write_text("")
    with raises(ConfigError, "already-exists: --out, out"):
        run_bench(options(faked, "eager+hf"))


@pytest.mark.slow
def test_real_steps_in_one_process_and_on_two_ranks(tmp_path: Path) -> None:
    out = tmp_path / "out"
    result = run_bench(options(out, "eager+hf,fsdp2+eager+native", "--warmup", "1", "--repeats", "2"))
    assert statuses(result) == {"eager+hf": "ok", "fsdp2+eager+native": "ok"}, [
        cell.reason for cell in result.cells
    ]
    for cell in result.cells:
        assert cell.outcome is not None and cell.ready is not None and len(cell.times) == 2
        assert (cell.outcome.sampled_tokens, cell.outcome.tokens) == result_tokens(out, cell.name)
        assert 0 <= cell.outcome.logprob_gap < 1e-4, "trainer and engine have the same weights"
        for row in cell.times:
            assert 0 < row.forward + row.backward <= row.train
            assert row.generate + row.train + row.optimizer + row.weights == pytest.approx(row.step)
    assert [cell.ranks for cell in result.cells] == [1, 2]
    flops = [cell.outcome.training_flops for cell in result.cells if cell.outcome is not None]
    assert flops[0] == flops[1] > 0, "parameters that are cut up count as a whole"
    rows = (out / "fsdp2-eager-native" / "ranks").glob("rank-*.log")
    assert sorted(path.name for path in rows)[-1].startswith("rank-1")


def result_tokens(out: Path, name: str) -> tuple[int, int]:
    work = json.loads((out / name.replace("+", "-") / "job.json").read_text())["work"]
    from lockstep_lab.step_bench.job import BenchWork

    made = BenchWork.model_validate(work)
    return made.completion_tokens, sum(made.lengths())
