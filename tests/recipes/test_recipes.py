"""Every recipe is a checked config; those that need a network run as far as they can without one."""

from __future__ import annotations

import importlib.util
import json
import re
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from chats import smollm2
from transformers import AutoTokenizer

from lockstep import loops
from lockstep.cli.main import main
from lockstep.config.load import dump_toml, load_run, recipes
from lockstep.config.run import GRPORun
from lockstep.data.held_out import load_train_and_held_out
from lockstep.data.rows import reasoning_gym_dataset
from lockstep.environments.checks import Checks
from lockstep.environments.delta import ConversationTokens
from lockstep.observe.chat_template import ChatTemplate
from lockstep.protocols.reward import RewardInput
from lockstep.recipes.tools_demo import transcripts
from lockstep.rollout.rewards import RewardSet

ROOT = Path(__file__).resolve().parents[2]

# In GSM8K's form, and not from it.
ROWS = [
    {
        "question": "A shelf has 3 rows of 14 jars. 5 jars break. How many are left?",
        "answer": "There are 3 * 14 = <<3*14=42>>42 jars.\n42 - 5 = <<42-5=37>>37 are left.\n#### 37",
    },
    {
        "question": "Tiles cost $2.50 each. What do 500 tiles cost in dollars?",
        "answer": "500 * 2.50 = <<500*2.5=1250>>1250 dollars.\n#### 1,250",
    },
    {
        "question": "Omar reads 12 pages a day from Monday to Friday. How many pages?",
        "answer": "Five days: 5 * 12 = <<5*12=60>>60.\n#### 60",
    },
]

QWEN3_1_7B = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "num_hidden_layers": 28,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 151936,
    "max_position_embeddings": 40960,
    "tie_word_embeddings": True,
    "attention_dropout": 0.0,
    "torch_dtype": "bfloat16",
}
"""config.json of Qwen/Qwen3-1.7B, what decides shapes and memory."""


def example(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, ROOT / "examples" / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Qwen3's architecture, tiny, with a tokenizer whose chat template knows enable_thinking."""
    return Path(example("tiny_text_model").save(tmp_path_factory.mktemp("model"), shape="tiny-qwen3"))


def gsm8k(folder: Path, **overrides: Any) -> GRPORun:
    """The recipe on local rows: two to train on, one held out."""
    for name, rows in (("train", ROWS[:2]), ("test", ROWS[2:])):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    local = {"data.source": str(folder / "train.jsonl"), "eval_data.source": str(folder / "test.jsonl")}
    run = load_run("gsm8k-1gpu", overrides=local | overrides)
    assert isinstance(run, GRPORun)
    return run


@pytest.mark.parametrize("name", sorted(recipes()))
def test_a_recipe_is_a_checked_config_that_survives_being_written(name: str, tmp_path: Path) -> None:
    run = load_run(name)
    assert run.name == name
    (tmp_path / "run.toml").write_text(dump_toml(run))
    assert load_run(tmp_path / "run.toml") == run


def test_gsm8k_settings_mean_what_the_recipe_says() -> None:
    run = load_run("gsm8k-1gpu")
    assert isinstance(run, GRPORun) and run.eval_data is not None
    shared = run.data.model_dump(exclude={"split", "size", "shuffle"})
    assert shared == run.eval_data.model_dump(exclude={"split", "size", "shuffle"})
    assert (run.data.split, run.eval_data.split) == ("train", "test")
    options = run.algorithm.resolved()
    assert (options.advantage, options.clip_low, options.clip_high) == ("group_mean_std", 0.2, 0.28)


def test_gsm8k_prompts_are_rendered_and_the_held_out_stay_out(tmp_path: Path, model_folder: Path) -> None:
    run = gsm8k(tmp_path, **{"rollout.prompts_per_step": 2})
    tokenizer = AutoTokenizer.from_pretrained(model_folder)
    train, held_out = load_train_and_held_out(run, tokenizer=tokenizer)
    assert (train.size, len(held_out)) == (2, 1)
    prompt = held_out[0]
    assert prompt.text == (
        f"<|user|>{ROWS[2]['question']}\nReason step by step and put the final answer within \\boxed{{}}."
        "<|end|><|assistant|><think></think>"
    )
    assert tokenizer.decode(prompt.token_ids) == prompt.text
    assert prompt.row["answer"] == ROWS[2]["answer"]


def test_gsm8k_rewards_the_boxed_answer_and_nothing_else(tmp_path: Path) -> None:
    rewards = RewardSet(gsm8k(tmp_path).rewards)
    cases = [
        (0, r"42 - 5 is 37, so \boxed{37}.", 1.0),
        (0, r"\boxed{42}, no: \boxed{37}", 1.0),
        (0, r"37 jars", 0.0),
        (0, r"\boxed{36}", 0.0),
        (1, r"\boxed{1250}", 1.0),
        (1, r"\boxed{1,250}", 1.0),
        (1, r"\boxed{\$1250.00}", 1.0),
        (2, r"\boxed{\frac{120}{2}}", 1.0),
    ]
    inputs = [
        RewardInput(
            prompt="",
            completion=text,
            row=ROWS[row],
            prompt_token_ids=(),
            completion_token_ids=(1,),
            finish_reason="stop",
        )
        for row, text, _ in cases
    ]
    try:
        scored = rewards.score(inputs)
    finally:
        rewards.close()
    assert [score and score.total for score in scored] == [wanted for _, _, wanted in cases]


def test_gsm8k_fits_one_gpu_of_80_gb(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "config.json").write_text(json.dumps(QWEN3_1_7B))
    arguments = ["plan", "--recipe", "gsm8k-1gpu", "--model.name", str(tmp_path), "--memory-gib", "79"]
    # Planned here as on a CPU; on a GPU the copy for saves lies in host memory, not in these 80 GB.
    status = main([*arguments, "--checkpoint.background", "false"])
    output = capsys.readouterr().out
    assert "parameters: 1,720,574,976 in bfloat16" in output
    assert (status, output.splitlines()[-1].startswith("plan: fits")) == (0, True), output


@pytest.mark.slow
def test_gsm8k_runs_with_a_tiny_model_of_the_same_architecture(tmp_path: Path, model_folder: Path) -> None:
    small = {
        "model.name": str(model_folder),
        "model.dtype": "float32",
        "train.execution": "eager",
        "rollout.prompts_per_step": 2,
        "rollout.sampling.max_tokens": 12,
        "checkpoint.every": 1,
        "eval.every": 1,
        "steps": 2,
        "run_dir": str(tmp_path / "run"),
    }
    # Random weights never box an answer: a second reward gives the groups something to compare.
    rewards = [{"name": "math", "answer": "boxed"}, {"name": "length", "kwargs": {"target": 6}}]
    summary = loops.train(gsm8k(tmp_path, rewards=rewards, **small))
    assert (summary["outcome"], summary["eval_after"]["num_prompts"]) == ("finished", 1)
    assert summary["eval_after"]["strict_accuracy"] == 0.0
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    steps = [line for line in lines if "evaluation" not in line]
    assert all(line["reward/math"] == 0.0 and line["reward/length"] < 0 for line in steps)
    manifest = json.loads((tmp_path / "run" / "manifest.json").read_text())
    assert manifest["axes"]["attention"] == "varlen"


def test_the_template_of_tools_demo_has_a_short_place_for_tools() -> None:
    run = load_run("tools-demo")
    tokenizer, rows = smollm2(), transcripts()
    template = ChatTemplate(tokenizer, run.data.chat_template)
    tokens = ConversationTokens(template, tools=rows[0]["tools"])  # its own checks, as at the start of a run
    bare = ConversationTokens(template)
    for row in rows[:4]:
        user, called, result, answer = row["messages"]
        ledger = tokens.start([user])
        assert 0 < len(ledger.ids) - len(bare.start([user]).ids) <= 60
        assert len(ledger.ids) <= run.data.max_prompt_tokens
        (call,) = called["tool_calls"]
        a, b = call["function"]["arguments"].values()
        written = tokenizer.encode(f"Call: [multiply(a={a}, b={b})]<|im_end|>")
        (made,) = ledger.add_policy(written).made
        assert (made.name, made.arguments, result["content"]) == ("multiply", {"a": a, "b": b}, str(a * b))
        assert len(written) <= run.sampling.max_tokens
        tokens.reply(ledger, [made.result(result["content"])])
        ledger.add_policy(tokenizer.encode(f"{answer['content']}<|im_end|>"))
        (whole,) = tokens.turns.render([(row["messages"], False)], where="a transcript")
        assert tokenizer.decode(ledger.ids) + "\n" == whole.text
        checks = Checks()
        checks.add(tokens.turns, ledger)
        assert not checks.mismatches and checks.noncanonical_turns == 0


def test_transcripts_are_the_same_each_time_and_of_three_digits() -> None:
    rows = transcripts()
    assert rows == transcripts() != transcripts(seed=1)
    texts = [row["messages"][0]["content"] for row in rows]
    assert all(re.search(r": \d{3} \* \d{3}\.", text) for text in texts) and len(set(texts)) == len(rows)
    asked = products_of_the_task()
    assert asked.split()[:4] == texts[0].split()[:4] and asked.endswith(texts[0].partition(". ")[2])


def products_of_the_task() -> str:
    """A question of the data that tools-demo trains on."""
    data = load_run("tools-demo").data
    task = reasoning_gym_dataset("products", data.task, seed=1, size=1)
    return str(task[0]["question"])
