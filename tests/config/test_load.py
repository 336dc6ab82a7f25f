import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any, get_args

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import BaseModel
from raising import raises

from lockstep.config.engine import EngineConfig
from lockstep.config.load import (
    build,
    dump_toml,
    load_resumed,
    load_run,
    override,
    parse_value,
    recipes,
    to_values,
)
from lockstep.config.problems import model_of
from lockstep.config.run import GRPORun, RunConfig, SFTRun
from lockstep.config.train import TrainConfig
from lockstep.errors import ConfigError


def problems(overrides: dict[str, Any], kind: str = "grpo") -> list[str]:
    with pytest.raises(ConfigError) as caught:
        load_run(kind=kind, overrides=overrides)
    first, *lines = str(caught.value).splitlines()
    count = f"{len(lines)} problem{'s' if len(lines) > 1 else ''}"
    assert first == f"{kind} run: {count}"
    return [line.strip() for line in lines]


def test_every_problem_is_told_at_once() -> None:
    told = problems(
        {
            "lr": 1e-6,
            "train.schedule": "cosin",
            "train.token_budget": "many",
            "steps": 2.5,
            "checkpoint.evry": 3,
            "rewards": [{"weight": 1.0}, {"wieght": 2.0}],
        }
    )
    assert told == [
        "lr = 1e-06: unknown key in this table; lr belongs to train.lr",
        "checkpoint.evry = 3: unknown key; did you mean checkpoint.every?",
        "rewards[1].wieght = 2.0: unknown key; did you mean rewards[1].weight?",
        "steps = 2.5: expected a whole number",
        "train.token_budget = 'many': expected a whole number or one of 'auto'",
        "train.schedule = 'cosin': expected one of 'constant', 'linear' or 'cosine' (did you mean 'cosine'?)",
    ]


def test_none_and_auto_mean_the_same_where_one_of_them_is_the_default() -> None:
    assert TrainConfig(token_budget=None) == TrainConfig() == TrainConfig(token_budget="auto")
    assert EngineConfig(kv_cache_tokens=None, offload=None) == EngineConfig()
    assert load_run(kind="sft", overrides={"train.token_budget": None}).train.token_budget == "auto"
    (told,) = problems({"train.batch_invariant": "auto"})
    assert told == "train.batch_invariant = 'auto': expected true or false; leave it out for the default"


REWARD = {"name": "mine:f", "url": "http://x", "secrets": {"key": "env:KEY"}, "kwargs": {"key": 1}}


@pytest.mark.parametrize(
    ("overrides", "told"),
    [
        (
            {"train.min_lr_ratio": 0.1, "rollout.group_size": 1, "data.size": 2},
            [
                ("no-effect", "train.min_lr_ratio"),  # of RunConfig; the others of GRPORun
                ("nothing-to-do", "rollout.group_size"),
                ("contradiction", "data.size"),
            ],
        ),
        ({"rewards": [REWARD]}, [("duplicate", "rewards[0].secrets"), ("no-effect", "rewards[0].url")]),
    ],
)
def test_all_checks_of_one_table_are_told(overrides: dict[str, Any], told: list[tuple[str, str]]) -> None:
    with pytest.raises(ConfigError) as caught:
        load_run(kind="grpo", overrides=overrides)
    assert [(each["code"], each["setting"]) for each in caught.value.fields["problems"]] == told


@pytest.mark.parametrize(
    ("path", "value", "told"),
    [
        ("steps", "100", "steps = '100': expected a whole number"),
        ("steps", True, "steps = True: expected a whole number"),
        ("steps", 0, "steps = 0: expected a number greater than 0"),
        ("train.activation_checkpointing", 1, "expected true or false"),
        ("train.betas", [0.9], "train.betas[1] is required; set it"),
        ("model.lora", 16, "model.lora = 16: expected a table of settings"),
        ("data.chat_template", 4, "data.chat_template = 4: expected one of 'auto' or 'none' or a string"),
        ("model.dtype", "bf16", "did you mean 'bfloat16'?"),
        ("run_dir", 3, "run_dir = 3: expected a string"),
        ("rollout.sampling.stop", "x", "rollout.sampling.stop = 'x': expected a list"),
        ("train", 3, "train = 3: expected a table of settings"),
        ("eval_data.size", -1, "eval_data.size = -1: expected a number greater than 0"),
        ("train.steps", 3, "train.steps = 3: unknown key in this table; steps belongs to steps"),
        ("data.learning_rate", 3, "data.learning_rate = 3: unknown key; did you mean train.lr?"),
        ("num_generations", 3, "num_generations = 3: unknown key; did you mean rollout.group_size?"),
        ("data.xyzzy", 3, "data.xyzzy = 3: unknown key; known keys: answer_column, chat_template"),
        (
            "rollout.tmperature",
            3,
            "rollout.tmperature = 3: unknown key; did you mean rollout.sampling.temperature",
        ),
    ],
)
def test_a_wrong_value_says_what_it_was_and_what_is_expected(path: str, value: Any, told: str) -> None:
    (line,) = problems({path: value})
    assert told in line


@pytest.mark.parametrize(
    ("kind", "overrides", "told"),
    [
        (
            "grpo",
            {"data.size": 4},
            "data.size = 4 is less than one rollout batch of rollout.prompts_per_step = 8",
        ),
        ("grpo", {"rollout.group_size": 1}, "set rollout.group_size >= 2 or algorithm.name = 'reinforce++'"),
        ("grpo", {"train.minibatches": 7}, "train.minibatches = 7 does not divide the 64 rollouts"),
        ("grpo", {"rewards": []}, "rewards is empty"),
        (
            "grpo",
            {"rollout.sampling.min_tokens": 999},
            "rollout.sampling: min_tokens = 999 exceeds max_tokens",
        ),
        (
            "sft",
            {"data.max_length": 9999, "train.token_budget": 4096},
            "does not fit into one micro-batch of train.token_budget = 4096",
        ),
    ],
)
def test_an_impossible_combination_says_what_to_set(kind: str, overrides: dict[str, Any], told: str) -> None:
    (line,) = problems(overrides, kind)
    assert told in line


def test_a_value_that_no_setting_takes_is_refused() -> None:
    with raises(ConfigError, "wrong-type: function"):
        load_run(kind="grpo", overrides={"rewards": lambda sample: 1.0})
    with raises(ConfigError, "wrong-type: steps.x"):
        load_run(kind="grpo", overrides={"steps": 3, "steps.x": 3})


def test_files_are_found_by_path_and_recipes_by_name(tmp_path: Path) -> None:
    file = tmp_path / "run.toml"
    file.write_text('kind = "sft"\nsteps = 7\n[train]\nlr = 3e-4\n')
    run = load_run(file, overrides={"train.lr": 1e-5, "model.lora.rank": 4})
    assert isinstance(run, SFTRun)
    assert (run.steps, run.train.lr, run.model.lora and run.model.lora.rank) == (7, 1e-5, 4)
    with raises(ConfigError, "contradiction: kind"):
        load_run(file, kind="grpo")
    with raises(ConfigError, "no-such-file: missing.toml"):
        load_run("missing.toml")
    with raises(ConfigError, "unknown-name: dmo"):
        load_run("dmo")
    file.write_text("steps = = 3")
    with raises(ConfigError, "not-toml"):
        load_run(file)
    file.write_text("steps = 3")
    with raises(ConfigError, "unknown-name: kind"):
        load_run(file)
    file.write_text("kind = 'gropo'")
    with raises(ConfigError, "unknown-name: kind"):
        load_run(file)


def test_rows_that_count_as_slots_of_logical_time_may_not_change(tmp_path: Path) -> None:
    values = {
        "rollout.max_lag": 1,
        "rollout.schedule": "fixed",
        "engine": {"name": "native", "process": "separate"},
        "train.batch_invariant": True,
        "algorithm.rollout_correction.kind": "tis",
    }
    for slots, allowed in ((None, False), (8, True)):
        run = load_run(kind="grpo", overrides=values | {"rollout.slots": slots})
        (tmp_path / "config.toml").write_text(dump_toml(run))
        if allowed:
            assert load_resumed(tmp_path, {"engine.max_batch": 8}).engine.max_batch == 8
        else:
            with raises(ConfigError, "not-resumable: engine.max_batch"):
                load_resumed(tmp_path, {"engine.max_batch": 8})


def test_a_file_without_a_kind_takes_that_of_the_command(tmp_path: Path) -> None:
    (tmp_path / "run.toml").write_text("steps = 3")
    assert isinstance(load_run(tmp_path / "run.toml", kind="sft"), SFTRun)


@pytest.mark.parametrize("name", recipes())
def test_every_recipe_is_valid(name: str) -> None:
    assert load_run(name).steps > 0


def test_resume_takes_the_saved_config_and_only_harmless_changes(tmp_path: Path) -> None:
    run = load_run(kind="grpo", overrides={"seed": 5, "run_dir": "somewhere/else", "data.task.a": 1})
    (tmp_path / "config.toml").write_text(dump_toml(run))
    assert load_resumed(tmp_path) == override(run, {"run_dir": str(tmp_path)})
    smaller = load_resumed(tmp_path, {"engine.max_batch": 8, "engine.memory_fraction": None})
    assert smaller.engine.max_batch == 8  # what did not fit must be changed
    changed = load_resumed(
        tmp_path, {"steps": 999, "checkpoint.every": 5, "log.tensorboard": False, "eval.every": 2}
    )
    assert (changed.steps, changed.checkpoint.every, changed.log.tensorboard) == (999, 5, False)
    with pytest.raises(ConfigError) as caught:
        load_resumed(tmp_path, {"steps": 5, "train.lr": 0.1, "data.task": {"a": 2}, "model.lora.rank": 3})
    _, *lines = str(caught.value).splitlines()
    assert (
        lines[0] == "  data.task.a: 1 in the run, now 2" or "  train.lr: 1e-06 in the run, now 0.1" in lines
    )
    assert sorted(line.split(":")[0].strip() for line in lines) == ["data.task.a", "model.lora", "train.lr"]


def test_resume_refuses_other_steps_where_they_bend_the_schedule(tmp_path: Path) -> None:
    run = load_run(kind="grpo", overrides={"train.schedule": "cosine"})
    (tmp_path / "config.toml").write_text(dump_toml(run))
    with raises(ConfigError, "not-resumable", settings=["steps"]):
        load_resumed(tmp_path, {"steps": 200})
    with raises(ConfigError, "no-such-file: config.toml, nowhere"):
        load_resumed(tmp_path / "nowhere")


def test_override_checks_again() -> None:
    run = load_run(kind="grpo")
    assert override(run, {"train.lr": 1e-3}).train.lr == 1e-3
    assert override(override(run, {"model.num_layers": 2}), {"model.num_layers": None}) == run
    with raises(ConfigError, "out-of-range: train.lr"):
        override(run, {"train.lr": -1.0})


# Every setting, with values of every kind that its annotation allows, must survive the file.

TEXT = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), max_size=12)
NAMES = st.text(st.characters(categories=["L", "N", "P"], exclude_characters="/"), min_size=1, max_size=12)
INTEGERS = st.integers(-(2**63), 2**63 - 1)
NUMBERS = st.floats(allow_nan=False, width=64)
WEIGHTS = st.floats(1e-30, 1e30) | st.floats(-1e30, -1e-30) | st.just(0.0)
PLAIN = st.recursive(
    st.booleans() | INTEGERS | NUMBERS | TEXT,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXT, inner, max_size=3),
    max_leaves=6,
)


@settings(max_examples=60)
@given(
    task=st.dictionaries(TEXT, PLAIN, max_size=4),
    name=NAMES,
    lr=st.floats(min_value=1e-30, max_value=1e30),
    stop=st.lists(TEXT, max_size=3),
    template=st.none() | TEXT,
    rank=st.none() | st.integers(1, 2**16),
    rewards=st.lists(
        st.tuples(NAMES, st.floats(1e-30, 1e30) | st.floats(-1e30, -1e-30) | st.just(0.0)),
        min_size=1,
        max_size=3,
    ),
    columns=st.dictionaries(TEXT, TEXT, max_size=2),
)
def test_the_resolved_config_round_trips_exactly(
    **v: Any,
) -> None:
    overrides = {
        "data.task": v["task"],
        "name": v["name"],
        "train.lr": v["lr"],
        "rollout.sampling.stop": v["stop"],
        "data.system_prompt": v["template"],
        "model.lora.rank": v["rank"],
        "rewards": [{"name": name, "weight": weight} for name, weight in v["rewards"]],
        "eval_data.source": "rows.jsonl",
        "eval_data.columns": v["columns"],
        "run_dir": "runs/x y",
    }
    run = load_run(kind="grpo", overrides=overrides)
    assert run.data.task == v["task"]
    again = build(tomllib.loads(dump_toml(run)), origin="file")
    assert again == run
    assert dump_toml(again) == dump_toml(run)
    assert to_values(again) == to_values(run)


def test_what_toml_cannot_hold_is_named() -> None:
    run = load_run(kind="grpo", overrides={"data.task": {"a": {"b": None}}})
    with raises(ConfigError, "wrong-type"):
        dump_toml(run)


def fields(model: type[BaseModel], path: str) -> list[tuple[str, Any]]:
    found = []
    for name, field in model.model_fields.items():
        nested, _ = model_of(field.annotation)
        found.append((f"{path}{name}", field))
        if nested is not None:
            found += fields(nested, f"{path}{name}.")
    return found


@pytest.mark.parametrize("kind", [GRPORun, SFTRun])
def test_none_is_always_the_default_because_toml_cannot_say_it(kind: type[RunConfig]) -> None:
    for path, field in fields(kind, ""):
        if type(None) in get_args(field.annotation):
            assert field.get_default(call_default_factory=True) is None, path


def test_loading_a_config_loads_no_torch() -> None:
    code = (
        "import sys; from lockstep.config.load import load_run; load_run(kind='grpo'); "
        "print(*sorted({'torch', 'transformers', 'numpy', 'ray', 'vllm'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == ""


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("3", 3),
        ("-0.5", -0.5),
        ("1_000", 1000),
        ("0x10", 16),
        ("true", True),
        ("True", "True"),  # Python's, not TOML's
        ("none", "none"),
        ("", ""),
        ("   ", "   "),
        ("cosine", "cosine"),
        ("two words", "two words"),
        ('"3"', "3"),
        ("'a # b'", "a # b"),
        ('"open', '"open'),
        ("[1, 2.5, 'x']", [1, 2.5, "x"]),
        ("[1,", "[1,"),
        ("{a = 1, b.c = true}", {"a": 1, "b": {"c": True}}),
        ("{a = 1", "{a = 1"),
        ("openai/gsm8k", "openai/gsm8k"),
        ("reasoning_gym:chain_sum", "reasoning_gym:chain_sum"),
        ("a=b", "a=b"),
        ("05", "05"),  # no TOML number has a zero in front
        ("2024-05-01", "2024-05-01"),
        ("07:32:00", "07:32:00"),
        ("2024-05-01T07:32:00Z", "2024-05-01T07:32:00Z"),
        ("1 # one", "1 # one"),
        ("1 #", "1 #"),
        ("1 # one\n", "1 # one\n"),
        ("[1, # one\n2]", [1, 2]),
        ("1\nother = 2", "1\nother = 2"),  # one value, not a second setting
        ("1\n[table]", "1\n[table]"),
        ("1\nvalue = 2", "1\nvalue = 2"),
        ("\u00e9", "\u00e9"),
    ],
)
def test_a_word_of_the_command_line_is_a_toml_value_or_itself(text: str, value: Any) -> None:
    found = parse_value(text, origin="--set x")
    assert found == value and type(found) is type(value)


@pytest.mark.parametrize("text", ["inf", "-inf", "nan", "1e400"])
def test_numbers_that_are_none_are_left_to_the_setting(text: str) -> None:
    assert isinstance(parse_value(text, origin="--set x"), float)
    with raises(ConfigError, "out-of-range: train.lr"):
        load_run(kind="grpo", overrides={"train.lr": parse_value(text, origin="--set train.lr")})


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("[" * 5000 + "]" * 5000, "out-of-range"),
        ("9" * 5000, "out-of-range"),
        ("1\n" + ".".join("a" * 100) + " = 1", "out-of-range"),
    ],
    ids=["deep", "out-of-range", "a long key"],
)
def test_a_word_that_no_setting_can_have_is_refused_by_name(text: str, reason: str) -> None:
    with raises(ConfigError, reason) as caught:
        parse_value(text, origin="--set x")
    assert str(caught.value).startswith("--set x: ") and len(str(caught.value)) < 300
