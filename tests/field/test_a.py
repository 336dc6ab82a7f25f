"""Wrong results that nothing reported: inputs of users, what should happen, and who says so.

Each case is a row: input, expected value, and the source of the expected value.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
from answers import answer_logprobs, cross_entropy, orpo, rendered, simpo

from lockstep.cli.main import main
from lockstep.observe.flight import FlightRecorder
from lockstep.observe.run_history import read_lines
from lockstep.processes.jobs import JobProcess
from lockstep.ranks import second_look
from lockstep.ranks.hang import children_of

# 1. The tools and chat_template_kwargs of a row

# end of 1


# 2. Nulls that Arrow adds

# end of 2


# 3. Special tokens in the text that rewards and stops see

# end of 3


# 4. The end-of-sequence token after a special token

# end of 4


# 5. Adapter_config.json beside a model's weights

# end of 5


# 6. Assistant turns of the prompt

EARLIER = [
    {"role": "user", "content": "1 + 1?"},
    {"role": "assistant", "content": "That is two, I think."},
    {"role": "user", "content": "And 3 + 4?"},
]
CHOSEN, REJECTED = "7", "it may be 8"


def said(text):
    return {"role": "assistant", "content": text}


APART = {"prompt": EARLIER, "chosen": [said(CHOSEN)], "rejected": [said(REJECTED)]}
WHOLE = {"chosen": [*EARLIER, said(CHOSEN)], "rejected": [*EARLIER, said(REJECTED)]}
GENERATION = (
    "{% for m in messages %}{{ '<|' + m.role + '|>' }}{% if m.role == 'assistant' %}{% generation %}"
    "{{ m.content + '<|end|>' }}{% endgeneration %}{% else %}{{ m.content + '<|end|>' }}{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)


def loss_of_first_step(folder, row, place, *settings):
    """The loss of one step on this row alone, in training and on the same row held out."""
    place.mkdir()
    data, run = place / "rows.jsonl", place / "run"
    data.write_text(json.dumps(row))
    kind, *more = settings
    words = ["--model.name", str(folder), "--data.source", str(data), "--eval-data.source", str(data), *more]
    shared = ["--batch-size", "1", "--steps", "1", "--model.dtype", "float32", "--run-dir", str(run)]
    assert main(["train", kind, *words, *shared]) == 0
    lines = read_lines(run / "metrics.jsonl")
    (step,) = [line for line in lines if "evaluation" not in line]
    (before,) = [line for line in lines if line.get("evaluation") == "before"]
    return step["loss"], before["eval/loss"]


LAST = ("--data.train-on", "last", "--eval-data.train-on", "last")
# (run, row, loss of the answers' tokens alone: lockstep's tests/common/answers.py, float64)
ANSWERS = [
    (("dpo", "--algorithm.name", "simpo"), APART, simpo),
    (("dpo", "--algorithm.name", "simpo"), WHOLE, simpo),
    (("dpo", "--algorithm.name", "simpo"), WHOLE | {"prompt": EARLIER}, simpo),
    (("dpo", "--algorithm.name", "simpo", "--data.chat-template", GENERATION), APART, simpo),
    (("dpo", "--algorithm.name", "orpo"), APART, orpo),
    (("sft",), {"prompt": EARLIER, "completion": CHOSEN}, lambda a, b: cross_entropy([a])),
    (("sft", *LAST), {"messages": WHOLE["chosen"]}, lambda a, b: cross_entropy([a])),
]


@pytest.mark.parametrize(("run", "row", "loss"), ANSWERS)
def test_the_answer_is_what_comes_after_the_prompt(tiny_folder, tmp_path, run, row, loss):
    answers = [answer_logprobs(tiny_folder, rendered(EARLIER), text) for text in (CHOSEN, REJECTED)]
    found = loss_of_first_step(tiny_folder, row, tmp_path / "one", *run)
    assert found == pytest.approx((loss(*answers),) * 2, rel=1e-5)


def test_messages_train_on_every_assistant_turn(tiny_folder, tmp_path):
    every = [
        answer_logprobs(tiny_folder, rendered(EARLIER[:1]), EARLIER[1]["content"]),
        answer_logprobs(tiny_folder, rendered(EARLIER), CHOSEN),
    ]
    found = loss_of_first_step(tiny_folder, {"messages": WHOLE["chosen"]}, tmp_path / "one", "sft")
    assert found == pytest.approx((cross_entropy(every),) * 2, rel=1e-5)


# end of 6


# 7. The BOS token after truncation

# end of 7


# 8. A token across the border of prompt and completion

# end of 8


# 9. Columns that a setting names

# end of 9


# 10. Pairs with different prompts

# end of 10


# 11. The token budget of evaluations

# end of 11


# 12. Lockstep hang on a living run


class TwoRanks:
    """Two records of this process; rank 0 has left a gather to which rank 1 has not come."""

    def __init__(self, folder: Path) -> None:
        self.recorders = [FlightRecorder(folder, rank=rank, world_size=2) for rank in (0, 1)]
        self.labels = []
        for each in self.recorders:
            each.note(step=1, phase="metrics")
            each.introduce("0", [0, 1])
            self.labels.append(each.label("gather", group="0", shapes="[2] int64"))
            each.leave(each.enter(self.labels[-1]))
        self.enter(0)

    def enter(self, rank: int) -> None:
        self.recorders[rank].enter(self.labels[rank])

    def beat(self, rank: int) -> None:
        self.recorders[rank].note(completions=[1, 2])

    def close(self) -> None:
        for each in self.recorders:
            each.close()


@pytest.mark.parametrize(
    ("meanwhile", "expected"),
    [
        # what moved between the looks, and the last line: by hand
        (lambda ranks: ranks.enter(1), "hang: none, the run makes progress"),
        (lambda ranks: ranks.beat(1), "hang: none, the run makes progress"),
        (lambda ranks: ranks.enter(0), "hang: none, the run makes progress"),
        (lambda ranks: None, "hang: unknown, rank 1"),
    ],
    ids=["it came", "it beats", "the other goes on", "nothing"],
)
def test_hang_accuses_no_rank_that_moves(
    meanwhile: Callable[[TwoRanks], None],
    expected: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    ranks = TwoRanks(tmp_path / "logs/flight")
    clock = iter((0.0, 5.0))
    fake = SimpleNamespace(sleep=lambda _: meanwhile(ranks), monotonic=lambda: next(clock))
    monkeypatch.setattr(second_look, "time", fake)
    try:
        assert main(["hang", str(tmp_path), "--no-stacks"]) == 0
    finally:
        ranks.close()
    assert capsys.readouterr().out.splitlines()[-1] == expected


def test_a_slow_step_is_no_hang(tmp_path: Path) -> None:
    """Expected: CPU time above a twentieth of a core is progress, but not inside a collective; by hand."""
    signs = {"rank": 0, "counts": (1, 1, 1.0)}
    for inside, used, moves in ((False, 1.0, True), (False, 0.1, False), (True, 4.9, False)):
        before = second_look.Signs(**signs, inside=inside, cpu=10.0)
        now = second_look.Signs(**signs, inside=inside, cpu=10.0 + used)
        assert bool(second_look.progress(before, now, 5.0)) == moves


def test_children_have_names_that_a_person_can_read() -> None:
    """Expected: the role that the child was given, not the program on its command line."""
    job = JobProcess("lockstep.observe.template_child", role="render")
    try:
        until = time.monotonic() + 60
        while not (mine := [each for each in children_of(os.getpid()) if "(lockstep:render)" in each]):
            assert time.monotonic() < until, children_of(os.getpid())
            time.sleep(0.05)
        assert not any("guard" in each for each in mine)
    finally:
        job.end()


# end of 12


# 13. Mismatched answers of KTO

# end of 13
