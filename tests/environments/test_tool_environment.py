"""A run whose policy calls the tools of a class: tokens, rewards, counts and limits."""

import asyncio
import contextlib
import json
import sys

import pytest
from classifiers import save_classifier
from raising import raises
from scripted import save_scripted
from transformers import AutoTokenizer

from lockstep import load_run, train_online
from lockstep.errors import ConfigError, DataError, RewardError
from lockstep.loop.data_check import check_data
from lockstep.loops.online import OnlineTrainer, build_online

CALL = '<tool_call>{"name":"ping","arguments":{"n": 3}}</tool_call>'
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
PINGS = '''
class Pings:
    def reset(self, word):
        self.pings = 0
        return word

    def ping(self, n: int) -> str:
        """Ping.

        Args:
            n: How often.
        """
        self.pings += n
        return f"pong {self.pings}"

    def get_reward(self):
        return {"pings": self.pings, "half": 0.5}
'''

GAME = """
class Pings:
    def reset(self, word):
        self.steps = 0
        return word

    def step(self, action):
        self.steps += 1
        return action[:3], 0.25 * self.steps, self.steps == 2
"""


@pytest.fixture
def run(tiny_folder, tmp_path, monkeypatch):
    """A run of two prompts whose policy calls `ping` in every turn (at this temperature)."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path, str(tmp_path)])
    (tmp_path / "pings.py").write_text(PINGS)
    (tmp_path / "template.jinja").write_text(TEMPLATE)
    rows = [{"prompt": "Go.", "word": word} for word in ("a", "b")]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))

    def load(call=CALL, **changes):
        script = (*([call] if isinstance(call, str) else call), "<|end|>")
        model = save_scripted(tiny_folder, tmp_path / "model", script, special=False)
        settings = {
            "steps": 1,
            "environment": {"name": "pings:Pings", "weight": 2.0},
            "model.name": str(model),
            "model.dtype": "float32",
            "data": {"source": "rows.jsonl", "chat_template": "template.jinja", "max_prompt_tokens": 100},
            "rollout": {"prompts_per_step": 2, "group_size": 2, "max_turns": 3, "max_trajectory_tokens": 120},
            "rollout.sampling": {"max_tokens": 8, "temperature": 0.05},
            "eval": {"before": False, "after": False},
            "log": {"tensorboard": False, "display": "off"},
        }
        return load_run(kind="grpo", overrides=settings | changes)

    return load


def trained(run, tmp_path):
    """Train, and return the metrics of the step and its rollouts."""
    train_online(run.model_copy(update={"run_dir": tmp_path / "run"}))
    (metrics,) = (json.loads(line) for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines())
    rollouts = (tmp_path / "run/rollouts/step-000000.jsonl").read_text().splitlines()
    return metrics, [json.loads(line) for line in rollouts]


def test_tokens_are_those_of_the_whole_conversation(run, tmp_path):
    _, rollouts = trained(run(), tmp_path)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "model")
    row = rollouts[0]
    text = "<|system|>ping<|end|><|user|>Go.\n\na<|end|><|assistant|>"
    turns = "".join(f"{CALL}<|end|><|tool|>pong {n}<|end|><|assistant|>" for n in (3, 6))
    whole = tokenizer.encode(text + turns + f"{CALL}<|end|>", add_special_tokens=False)
    assert row["prompt_token_ids"] + row["token_ids"] == whole
    assert [author for author, _ in row["spans"]] == ["policy", "tool"] * 2 + ["policy"]


def test_rewards_of_the_class_are_named_and_weighted(run, tmp_path):
    _, rollouts = trained(run(), tmp_path)
    # Three turns; the call of the last one is run, too, though nobody reads its result.
    assert rollouts[0]["rewards"] == {"environment/pings": 9.0, "environment/half": 0.5}
    assert [row["reward"] for row in rollouts] == [19.0] * 4


def test_counts_are_metrics(run, tmp_path):
    metrics, _ = trained(run(), tmp_path)
    names = ("tool_calls", "tool_errors", "branches", "template_mismatches", "noncanonical_turns")
    assert [metrics[f"rollout/{name}"] for name in names] == [12.0, 0.0, 0.0, 0.0, 0.0]
    assert metrics["logprob_gap_max"] < 1e-5


def test_a_call_that_does_not_parse_is_answered(run, tmp_path):
    metrics, rollouts = trained(
        run(call="<tool_call>{ping}</tool_call>", **{"rollout.max_trajectory_tokens": 400}), tmp_path
    )
    assert metrics["rollout/tool_errors"] == metrics["rollout/tool_errors/not-parsed"] == 12.0
    assert rollouts[0]["rewards"]["environment/pings"] == 0.0
    assert [author for author, _ in rollouts[0]["spans"]] == ["policy", "tool"] * 2 + ["policy"]


def test_a_game_is_played_to_its_end(run, tmp_path):
    (tmp_path / "pings.py").write_text(GAME)
    metrics, rollouts = trained(run(), tmp_path)
    assert rollouts[0]["rewards"] == {"environment": 0.75}  # 0.25 and 0.5
    assert [author for author, _ in rollouts[0]["spans"]] == ["policy", "tool", "policy"]
    assert metrics["rollout/turns"] == 2.0


def test_a_class_that_fails_for_a_row_is_refused_before_the_first_step(run, tmp_path):
    (tmp_path / "pings.py").write_text(PINGS.replace("return word", "return word + 1"))

    async def cell():
        """As in a notebook, whose thread has an event loop."""
        trained(run(), tmp_path)

    with pytest.raises(ConfigError, match=r"rows\.jsonl.*pings:Pings"):
        asyncio.run(cell())


def test_a_resumed_run_renders_the_date_on_which_it_began(run, tmp_path):
    (tmp_path / "template.jinja").write_text("{{ strftime_now('%Y') }}" + TEMPLATE)
    folder = tmp_path / "run"
    train_online(run(run_dir=str(folder)))
    manifest = json.loads((folder / "manifest.json").read_text())
    (folder / "manifest.json").write_text(json.dumps(manifest | {"started": "2001-02-03T04:05:06+00:00"}))
    with raises(DataError, "values-differ: the training data changed"):  # the prompts are of 2001 now
        train_online(run(steps=2), resume=folder)


def test_without_a_reward_the_run_is_refused(run, tmp_path):
    (tmp_path / "pings.py").write_text(PINGS.replace("get_reward", "_other"))
    with pytest.raises(ConfigError, match="no reward"):
        trained(run(), tmp_path)


def test_a_reward_model_is_a_reward_too(run, tmp_path):
    (tmp_path / "pings.py").write_text(PINGS.replace("get_reward", "_other"))
    made = run(**{"reward_model.name": str(tmp_path / "reward"), "reward_model.overlong": "truncate_left"})
    save_classifier(tmp_path / "reward", AutoTokenizer.from_pretrained(tmp_path / "model"))
    _, rollouts = trained(made, tmp_path)
    assert {name for row in rollouts for name in row["rewards"]} == {"model"}
    assert all(row["reward"] == row["rewards"]["model"] != 0.0 for row in rollouts)


def test_a_trainer_of_ones_own_loop_samples_turns(run):
    with contextlib.closing(build_online(run())) as parts:
        trainer = OnlineTrainer(parts)
        trainer.push(policy_version=0)
        sampled = trainer.sample(0)
    turns = [rollout.trajectory.turns for group in sampled.groups for rollout in group.rollouts]
    assert turns == [3] * 4


def test_a_sample_whose_reward_fails_is_dropped(run, tmp_path):
    (tmp_path / "pings.py").write_text(PINGS.replace('{"pings"', '{"pings": 1 / 0} or {"pings"'))
    with pytest.raises(RewardError, match=r"all 2 groups.*line [12]: .* the reward: .*division by zero"):
        trained(run(**{"environment.on_error": "drop"}), tmp_path)


def test_a_tool_that_ends_its_process_costs_only_its_sample(run, tmp_path):
    dies = "self.pings += n; self.word == 'b' and __import__('os')._exit(3)"
    pings = PINGS.replace("self.pings = 0", "self.pings, self.word = 0, word").replace(
        "self.pings += n", dies
    )
    (tmp_path / "pings.py").write_text(pings)
    metrics, rollouts = trained(run(), tmp_path)
    assert [row["reward"] for row in rollouts] == [19.0] * 2
    assert [metrics[f"rollout/tool_errors/{kind}"] for kind in ("died", "dropped")] == [2.0, 2.0]


def test_a_game_whose_process_ends_is_over(run, tmp_path):
    (tmp_path / "pings.py").write_text(GAME.replace("self.steps += 1", "self.steps += 1; self.steps[0]"))
    _, rollouts = trained(run(), tmp_path)
    (tmp_path / "pings.py").write_text(GAME.replace("self.steps += 1", "__import__('os')._exit(3)"))
    _, of_dead = trained(run(**{"seed": 1}), tmp_path / "other")
    assert [row["rewards"] for row in (*rollouts, *of_dead)] == [{"environment": 0.0}] * 8


def test_the_data_check_reads_prompts_with_the_tools(run, tmp_path):
    (report,) = check_data(run(), workers=1, progress=lambda *_: None)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "model")
    text = "<|system|>ping<|end|><|user|>Go.<|end|><|assistant|>"
    assert report.tokens == 2 * len(tokenizer.encode(text, add_special_tokens=False))


def test_a_reply_that_the_template_refuses_costs_its_sample(run, tmp_path):
    with (tmp_path / "template.jinja").open("a") as template:
        template.write("{% for m in messages %}{% if 'pong' in m.content %}{{ raise_exception('no') }}")
        template.write("{% endif %}{% endfor %}")
    with pytest.raises(RewardError, match="all 2 groups"):
        trained(run(), tmp_path)


def test_a_text_names_the_class():
    one = load_run(kind="grpo", overrides={"environment": "m:C"})
    assert (one.environment.name, one.rewards) == ("m:C", ())


def rows_of(tmp_path, *names):
    rows = [{"prompt": "Go.", "word": f"w{n}", "kind": name} for n, name in enumerate(names)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "games.py").write_text(GAME)
    return {"classes": {"tools": "pings:Pings", "game": "games:Pings"}, "column": "kind"}


def test_each_row_chooses_its_class(run, tmp_path):
    made = run(environment=rows_of(tmp_path, "tools", "game"))
    _, rollouts = trained(made, tmp_path)
    rewards = {row["prompt_index"]: row["rewards"] for row in rollouts}
    assert rewards == {0: {"environment/pings": 9.0, "environment/half": 0.5}, 1: {"environment": 0.75}}
    assert {row["prompt_index"]: "<|system|>ping" in row["prompt"] for row in rollouts} == {0: True, 1: False}


def test_a_row_can_name_no_other_class(run, tmp_path):
    made = run(environment=rows_of(tmp_path, "tools", "games:Pings"))
    with raises(DataError, "unknown-name: line 2, unknown environment 'games:Pings'"):
        trained(made, tmp_path)
    made = run(environment={**rows_of(tmp_path, "tools", "game"), "column": "name"})
    with raises(DataError, "missing-column: line 1, there is no column 'name'"):
        trained(made, tmp_path)


def test_what_fails_for_a_row_and_what_is_too_much_costs_only_that(run, tmp_path):
    pings = PINGS.replace("return word", "self.word = word; return word")
    (tmp_path / "pings.py").write_text(pings.replace("return {", "self.word == 'b' and 1 / 0; return {"))
    twice = CALL.replace("3", "4")
    made = run(call=(CALL, twice), **{"environment.max_calls": 1, "rollout.max_trajectory_tokens": 400})
    metrics, rollouts = trained(made, tmp_path)
    assert [row["rewards"]["environment/pings"] for row in rollouts] == [9.0, 9.0]
    names = ("tool_calls", "tool_errors/too-many", "tool_errors/dropped")
    assert [metrics[f"rollout/{name}"] for name in names] == [24.0, 12.0, 2.0]
    assert rollouts[0]["prompt"] == "<|system|>ping<|end|><|user|>Go.\n\na<|end|><|assistant|>"
