"""Task sets of verifiers, with its own environments, harness, runtime and servers: a step of each."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from raising import raises
from scripted import save_scripted
from transformers import AutoTokenizer

from lockstep import load_run, train_online
from lockstep.environments.verifiers_tasks import VerifiersTasks
from lockstep.errors import ConfigError, RewardError

pytest.importorskip("verifiers.v1", reason="verifiers is missing: pip install 'lockstep-rl[verifiers]'")
if shutil.which("uv") is None:
    pytest.skip("uv is not on PATH, which prepares the programs of verifiers", allow_module_level=True)
pytestmark = pytest.mark.slow

SETS = Path(__file__).parents[1] / "common" / "verifiers_sets"
CALL = '<tool_call>{"name":"ping_ping","arguments":{"n": 3}}</tool_call>'
TEMPLATE = """\
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

Trained = Callable[..., tuple[dict[str, Any], list[dict[str, Any]], Any]]


@pytest.fixture
def trained(tiny_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Trained:
    """Train a step of two prompts and two samples each, with a policy that writes `script` in each turn."""
    monkeypatch.syspath_prepend(str(SETS))
    monkeypatch.setenv("PYTHONPATH", str(SETS))  # of tool servers
    (tmp_path / "rows.jsonl").write_text('{"prompt": "Unused."}\n')

    def train(taskset: str, script: tuple[str, ...], on_error: Any = "raise", **settings: Any) -> Any:
        folder = tmp_path / f"run-{on_error}"
        model = save_scripted(tiny_folder, tmp_path / "model", script, special=False)
        run = {
            "steps": 1,
            "model": {"name": str(model), "dtype": "float32"},
            "data": {"source": str(tmp_path / "rows.jsonl"), "max_prompt_tokens": 100},
            "rewards": [{"name": "format", "kwargs": {"pattern": "."}}],
            "rollout": {"prompts_per_step": 2, "group_size": 2, "max_turns": 3, "max_trajectory_tokens": 200},
            "rollout.sampling": {"max_tokens": 8, "temperature": 0.05},
            "eval": {"before": False, "after": False},
            "log": {"tensorboard": False, "display": "off"},
            "run_dir": folder,
        }
        tokenizer = AutoTokenizer.from_pretrained(model)
        environment = VerifiersTasks(
            taskset, tokenizer, chat_template=TEMPLATE, settings=settings, on_error=on_error
        )
        train_online(load_run(kind="grpo", overrides=run), environment=environment)
        (metrics,) = (json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines())
        rows = (folder / "rollouts/step-000000.jsonl").read_text().splitlines()
        return metrics, [json.loads(row) for row in rows], tokenizer

    return train


def test_a_task_set_of_one_turn(trained: Trained) -> None:
    metrics, rows, tokenizer = trained("word_tasks", ("a", "b", "c", "<|end|>"), num_tasks=2)
    said = {}
    for row in rows:
        text = tokenizer.decode(row["prompt_token_ids"] + row["token_ids"])
        word = text.partition("<|user|>Say ")[2].partition(".")[0]
        assert text == f"<|system|>Be short.<|end|><|user|>Say {word}.<|end|><|assistant|>abc<|end|>"
        assert row["rewards"] == {"says": float(word == "abc"), "one_turn": 1.0}
        said[word] = row["reward"]
    assert said == {"abc": 2.5, "word0": 0.5}
    assert metrics["rollout/template_mismatches"] == metrics["rollout/failed_episodes"] == 0.0
    assert metrics["logprob_gap_max"] < 1e-5


def test_a_task_set_with_a_tool(trained: Trained) -> None:
    metrics, rows, tokenizer = trained("ping_tasks", (CALL, "<|end|>"))
    for row in rows:
        text = tokenizer.decode(row["prompt_token_ids"] + row["token_ids"])
        prompt = text.partition("<|assistant|>")[0]
        assert prompt.startswith("<|system|>ping_ping<|end|><|user|>Ping ")
        turn = f"<|assistant|>{CALL}<|end|>"
        assert text == prompt + f"{turn}<|tool|>pong 3<|end|>" * 2 + turn
        # The third call is run, too, but nobody is left to read its result.
        assert row["rewards"] == {"pongs": 3.0}
        assert [author for author, _ in row["spans"]] == ["policy", "tool"] * 2 + ["policy"]
    assert metrics["rollout/turns"] == 3.0 and metrics["rollout/template_mismatches"] == 0.0


def test_a_task_set_that_answers_in_an_environment_of_its_own(trained: Trained) -> None:
    metrics, rows, tokenizer = trained("guess_tasks", ("a", "b", "<|end|>"))
    for row in rows:
        text = tokenizer.decode(row["prompt_token_ids"] + row["token_ids"])
        prompt = text.partition("<|assistant|>")[0]
        assert prompt.startswith("<|user|>Guess ")
        assert text == f"{prompt}<|assistant|>ab<|end|><|user|>Not ab.<|end|><|assistant|>ab<|end|>"
        assert row["rewards"] == {"guesses": 2.0}
        assert [author for author, _ in row["spans"]] == ["policy", "tool", "policy"]
    assert metrics["rollout/template_mismatches"] == 0.0


def test_an_episode_that_fails_is_dropped_and_counted_or_ends_the_run(trained: Trained) -> None:
    script, broken = ("a", "b", "c", "<|end|>"), {"num_tasks": 2, "task": {"broken": True}}
    metrics, rows, _ = trained("word_tasks", script, on_error="drop", **broken)
    assert [row["reward"] for row in rows] == [2.5, 2.5]
    assert metrics["rollout/failed_episodes"] == 2.0
    with raises(RewardError, "reward-failed: by design, the episode failed"):
        trained("word_tasks", script, **broken)


def test_what_is_refused(tiny_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(SETS))
    tokenizer = AutoTokenizer.from_pretrained(tiny_folder)
    with raises(ConfigError, "not-enough: word_tasks"):
        VerifiersTasks("word_tasks", tokenizer, most_tasks=0)
