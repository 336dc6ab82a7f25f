"""`lockstep init`: a short run file for the user's own data, which trains."""

import json
from pathlib import Path
from typing import Any

import pytest

from lockstep.cli.init import TEMPLATES
from lockstep.cli.main import main
from lockstep.config.load import load_run

QUESTIONS = {"question": "What is 1 + 1?", "solution": "2", "level": 1}
DATA: dict[str, tuple[dict[str, Any], dict[str, str]]] = {
    "grpo": (QUESTIONS, {"prompt_column": "question", "answer_column": "solution"}),
    "ppo": (QUESTIONS, {"prompt_column": "question", "answer_column": "solution"}),
    "sft": (
        {"instruction": "What is 1 + 1?", "input": "Be brief.", "output": "2"},
        {
            "prompt_column": "instruction",
            "completion_column": "output",
            "prompt_template": "{prompt}\n\n{input}",
        },
    ),
    "dpo": (
        {"problem": "What is 1 + 1?", "chosen": "2", "rejected": "I do not know."},
        {"prompt_column": "problem", "chosen_column": "chosen"},
    ),
    "tools": (QUESTIONS, {"prompt_column": "question", "answer_column": "solution"}),
}

TOOLS_TEMPLATE = """\
{%- if tools %}<|system|>{% for tool in tools %}{{ tool.function.name }}{% endfor %}<|end|>{% endif %}
{%- for m in messages %}
{{- '<|' + m.role + '|>' + m.content }}
{%- for call in m.tool_calls or [] %}
{{- '<tool_call>{"name":"' + call.function.name + '","arguments":' + call.function.arguments | tojson }}
{{- '}</tool_call>' }}
{%- endfor %}
{{- '<|end|>' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def data(row: dict[str, Any], rows: int = 10) -> str:
    made = (json.dumps(row | {"n": n}).replace("1 + 1", f"{n} + 1") for n in range(rows))
    Path("my data.jsonl").write_text("\n".join(made))
    return "my data.jsonl"


@pytest.mark.parametrize("kind", TEMPLATES)
def test_a_written_file_is_short_and_trains(
    kind: str, folder: Path, tiny_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    row, columns = DATA[kind]
    assert main(["init", kind, data(row), "--model", str(tiny_folder), "--out", "mine.toml"]) == 0
    assert capsys.readouterr().out == "init: mine.toml; start it with: lockstep train mine.toml\n"
    lines = Path("mine.toml").read_text().splitlines()
    assert len(lines) <= 25 and sum("# " in line for line in lines) >= 5
    run = load_run("mine.toml")
    assert {name: getattr(run.data, name) for name in columns} == columns
    assert run.data.source == "my data.jsonl" and run.model.name == str(tiny_folder)
    assert main(["train", "mine.toml", "--print-config"]) == 0
    capsys.readouterr()
    flags = ["--steps", "3", "--run-dir", "run", "--log.no-tensorboard", "--checkpoint.no-export-at-end"]
    if kind == "tools":
        Path("template.jinja").write_text(TOOLS_TEMPLATE)
        flags += ["--data.chat-template", "template.jinja"]
    if run.online:
        flags += ["--rollout.sampling.max-tokens", "4", "--rollout.group-size", "2", "--eval.no-before"]
    assert main(["train", "mine.toml", *flags]) == 0
    assert "train: finished, 3 steps" in capsys.readouterr().out


def test_conversations_and_rows_without_an_answer(folder: Path) -> None:
    talk = [{"role": "user", "content": "Hi."}]
    assert main(["init", "sft", data({"messages": talk, "text": "x"})]) == 0
    run = load_run("run.toml")
    assert run.data.messages_column == "messages" and run.documents_per_update == 10
    assert "text" not in Path("run.toml").read_text()
    assert main(["init", "grpo", data({"messages": talk}, rows=3), "--out", "rl.toml"]) == 0
    run = load_run("rl.toml")
    assert run.data.prompt_column == "messages" and run.reward_functions[0].name == "length"
    assert run.documents_per_update == 8  # one prompt of three rows, as some are held out


def test_the_command_that_starts_the_run_is_quoted(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["init", "grpo", data({"question": "1 + 1?", "answer": "2"}), "--out", "my run.toml"]) == 0
    assert capsys.readouterr().out == "init: my run.toml; start it with: lockstep train 'my run.toml'\n"
    assert Path("my run.toml").read_text().startswith("# lockstep train 'my run.toml'    (--help")


def test_a_single_row_is_not_held_out(folder: Path) -> None:
    assert main(["init", "grpo", data(QUESTIONS, rows=1)]) == 0
    run = load_run("run.toml")
    assert not (run.eval.before or run.eval.after or run.eval.every) and run.documents_per_update == 8
    assert main(["init", "grpo", data(QUESTIONS, rows=2), "--out", "two.toml"]) == 0
    assert load_run("two.toml").eval.every == 20


def test_a_task_that_makes_its_rows(folder: Path) -> None:
    assert main(["init", "grpo", "reasoning_gym:leg_counting"]) == 0
    run = load_run("run.toml")
    assert run.data.source == "reasoning_gym:leg_counting" and run.reward_functions[0].name == "verifier"
    assert run.data.prompt_column == "prompt" and run.documents_per_update == 64


def test_tools_of_a_class_of_ones_own(folder: Path) -> None:
    file = data({"question": "What is 1 + 1?", "input": "Use it.", "a": 1})
    assert main(["init", "tools", file, "--environment", "my_tools:Adder", "--column", "input=a"]) == 0
    run = load_run("run.toml")
    assert run.environment is not None and run.environment.name == "my_tools:Adder"
    assert run.reward_functions == () and run.data.prompt_template == "{prompt}\n\n{a}"


def test_a_reward_is_one_by_name_or_a_function_of_a_file(folder: Path) -> None:
    Path("mine").mkdir()
    Path("mine/rewards.py").write_text("def score(prompt, completion, row):\n    return 1.0\n")
    for given, name in (
        ("length", "length"),
        ("mine/rewards.py:score", "mine.rewards:score"),
        ("anywhere:score", "anywhere:score"),
    ):
        assert main(["init", "grpo", data(QUESTIONS), "--reward", given]) == 0
        assert [reward.name for reward in load_run("run.toml").reward_functions] == [name]
        Path("run.toml").unlink()
    tools = ["--environment", "my_tools:Adder", "--reward", "math"]
    assert main(["init", "tools", data(QUESTIONS), *tools]) == 0
    assert [reward.name for reward in load_run("run.toml").reward_functions] == ["math"]


@pytest.mark.parametrize("context", [None, {"titles": ["a"]}, ["a"]])
def test_what_is_no_text_becomes_no_part_of_the_prompt(folder: Path, context: Any) -> None:
    file = data({"question": "What is 1 + 1?", "context": context, "the level": "1"})
    assert main(["init", "grpo", file]) == 0
    assert load_run("run.toml").data.prompt_template == "{prompt}"
    # Braces around a name with a space would be text.
    assert main(["init", "grpo", file, "--out", "2.toml", "--column", "input=the level"]) == 2


def test_what_init_refuses(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = data({"frage": "1 + 1?", "antwort": "2"})
    Path("empty.jsonl").touch()
    Path("own.py").write_text("def score(prompt, completion, row):\n    return 1.0\n")
    for argv, told in (
        (["grpo", file], "error[missing-column]: my data.jsonl has the columns frage, antwort, n"),
        (["sft", file, "--column", "completion=antwort"], "name it: --column prompt=NAME"),
        (["dpo", file, "--column", "chosen=nope"], "error[missing-column]"),
        (["dpo", file, "--column", "choosen=frage"], "did you mean 'chosen'?"),
        (["grpo", "nope.jsonl"], "error[no-such-file]"),
        (["grpo", "empty.jsonl"], "error[nothing-left]: data.source = 'empty.jsonl' is empty; give it rows"),
        (["grpo", "ids"], "error[unsupported-combination]: DATA = 'ids' is for models without a tokenizer"),
        (["sft", "reasoning_gym:leg_counting"], "reasoning_gym:leg_counting makes prompts only"),
        (["grpo", "reasoning_gym:leg_countin"], "did you mean 'leg_counting'?"),
        (["sft", file, "--reward", "math"], "error[no-effect]: --reward math: a sft run has no rewards"),
        (["grpo", file, "--reward", "lenth"], "did you mean 'length'?"),
        (["grpo", file, "--reward", "mine.py:score"], "error[no-such-file]: --reward mine.py:score"),
        (["grpo", file, "--reward", "own.py:scor"], "error[wrong-part]: --reward own.py:scor"),
        (["grpo", file, "--reward", f"{__file__}:x"], "error[leads-out-of-folder]: --reward"),
        (["grpo", file, "--environment", "a:B"], "error[no-effect]: --environment a:B is for lockstep init"),
        (
            ["grpo", file, "--column", "prompt=frage", "--column", "chosen=antwort"],
            "error[no-effect]: --column chosen=antwort would change nothing",
        ),
    ):
        assert main(["init", *argv]) == 2
        assert told in capsys.readouterr().err
    assert not Path("run.toml").exists()
    named = ["--column", "prompt=frage", "--column", "answer=antwort"]
    assert main(["init", "grpo", file, *named]) == 0
    assert load_run("run.toml").data.answer_column == "antwort"
    before = Path("run.toml").read_text()
    assert main(["init", "grpo", file, *named]) == 2
    assert "error[already-exists]: --out run.toml" in capsys.readouterr().err
    assert Path("run.toml").read_text() == before
