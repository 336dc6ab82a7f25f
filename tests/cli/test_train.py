import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from raising import raises

from lockstep.cli import train
from lockstep.cli.main import main
from lockstep.config.load import RUN_KINDS, dump_toml, load_run, recipes
from lockstep.config.show import shown_config
from lockstep.errors import ConfigError

BASE = load_run(kind="grpo")


def values(*argv: str) -> dict[str, Any]:
    """What the command line changes in the defaults, by dotted path."""
    run = train.parse(list(argv)).run
    return dict(_changed(load_run(kind=run.kind).model_dump(), run.model_dump()))


def _changed(old: Any, new: Any, path: str = "") -> Any:
    if isinstance(old, dict) and isinstance(new, dict):
        for key in new:
            yield from _changed(old.get(key), new[key], f"{path}.{key}".lstrip("."))
    elif old != new:
        yield path, new


def test_flags_change_what_they_name_and_nothing_else():
    assert values("grpo") == {}
    assert values("grpo", "--train.lr", "1e-5", "--seed=3") == {"train.lr": 1e-5, "seed": 3}
    assert values("sft", "--batch-size", "8", "--batch_size", "9") == {"batch_size": 9}
    assert values("grpo", "--train.activation-checkpointing", "--log.no-tensorboard") == {
        "train.activation_checkpointing": True,
        "log.tensorboard": False,
    }
    assert values("grpo", "--rollout.sampling.stop", "</a>", "END") == {
        "rollout.sampling.stop": ("</a>", "END")
    }
    assert values("grpo", "--model.num-layers", "2", "--train.static-capacity", "True") == {
        "model.num_layers": 2,
        "train.static_capacity": True,
    }
    assert values("grpo", "--run-dir", "x/y") == {"run_dir": Path("x/y")}
    assert values("grpo", "--algorithm.rollout-correction.kind", "tis") == {
        "algorithm.rollout_correction.kind": "tis"
    }


def test_a_table_that_is_off_comes_on_with_its_first_flag():
    assert values("grpo", "--model.lora.rank", "4")["model.lora"] | {"target_modules": ()} == {
        "rank": 4,
        "alpha": 32.0,
        "dropout": 0.0,
        "target_modules": (),
        "target_parameters": (),
    }
    assert values("grpo", "--eval-data.no-shuffle")["eval_data"]["shuffle"] is False
    assert values("grpo", "--eval-data.size", "64", "--eval-data.task", "n=2")["eval_data"]["task"] == {
        "n": 2
    }


def test_free_tables_take_key_value_and_keep_the_rest(tmp_path):
    file = tmp_path / "run.toml"
    file.write_text('kind = "grpo"\n[data.task]\nmin_terms = 2\nmax_terms = 2\n')
    run = train.parse([str(file), "--data.task", "max_terms=3", "name=a b", 'x=[1, "y"]', "ok=true"]).run
    assert run.model_dump()["data"]["task"] == {
        "min_terms": 2,
        "max_terms": 3,
        "name": "a b",
        "x": [1, "y"],
        "ok": True,
    }
    with raises(ConfigError, "wrong-format: --data.task"):
        train.parse(["grpo", "--data.task", "max_terms"])


def test_rewards_are_names_with_weights_or_tables():
    run = train.parse(["grpo", "--rewards", "math", "m:f=0.5", '{name = "g:h", kwargs = {a = 1}}']).run
    rewards = run.model_dump()["rewards"]
    assert [(r["name"], r["weight"], r["kwargs"]) for r in rewards] == [
        ("math", 1.0, {}),
        ("m:f", 0.5, {}),
        ("g:h", 1.0, {"a": 1}),
    ]
    with raises(ConfigError, "wrong-type: rewards[0].weight"):
        train.parse(["grpo", "--rewards", "math=x"])


def test_flags_and_files_fail_with_the_same_words(capsys):
    assert main(["train", "grpo", "--steps", "0", "--train.lr", "-1"]) == 2
    told = capsys.readouterr().err.splitlines()
    assert told[0] == "lockstep train: error[out-of-range]: lockstep train grpo: 2 problems"
    assert "  steps = 0: expected a number greater than 0" in told


@pytest.mark.parametrize(
    ("argv", "told"),
    [
        (["grpo", "--train.schedule", "cosin"], "constant"),
        (["grpo", "--steps", "many"], "--steps"),
    ],
)
def test_what_tyro_refuses_names_the_flag(argv, told, capsys):
    with pytest.raises(SystemExit) as caught:
        main(["train", *argv])
    assert caught.value.code == 2
    assert told in capsys.readouterr().err


@pytest.mark.parametrize(
    ("argv", "told"),
    [
        (["--train.lr", "1"], "nothing to train"),
        (["--print-config=short", "run.toml"], "begin with grpo, ppo, sft, dpo, rm or a TOML file"),
        (["grpo", "--print-config=long"], "error[wrong-type]: --print-config 'long'"),
        (["grpo", "--print-config", "long"], "error[wrong-type]: --print-config 'long'"),
        (["gropo"], "unknown kind of run or recipe 'gropo'; did you mean 'grpo'?"),
        (["grpo", "--lr", "1"], "--lr: unknown flag; did you mean --train.lr?"),
        (["run.toml", "--recipe", "demo"], "both name a config"),
        (["grpo", "--resume", "x"], "leave the recipe, file or kind out"),
        (["grpo", "--checkpoint", "3"], "needs --resume"),
    ],
)
def test_a_command_that_makes_no_sense_exits_with_2(argv, told, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main(["train", *argv]) == 2
    assert told in capsys.readouterr().err


@pytest.mark.parametrize("kind", RUN_KINDS)
def test_help_shows_the_settings_that_most_runs_change(kind, tmp_path, capsys):
    (tmp_path / "run.toml").write_text(f'kind = "{kind}"\nsteps = 123\n[train]\nlr = 3e-5')
    for name in ("--help", "-h"):
        with pytest.raises(SystemExit) as caught:
            main(["train", str(tmp_path / "run.toml"), name])
        assert caught.value.code == 0
        shown = capsys.readouterr().out
    settings, own = shown.split("the command's own flags:")
    flags = re.findall(r"(?m)^  --(\S+)", settings)
    assert len(flags) == len(set(flags)) == 25
    text = " ".join(settings.split())
    assert "--train.lr Learning rate after warm-up. [3e-05]" in text
    assert "optimizer steps (sft, dpo, rm). [123]" in text
    assert "--recipe" in own and "--help-all" in own and "--print-config" in own
    assert len(shown.splitlines()) < 80  # a long path of a run file takes more lines


def test_help_all_shows_the_docs_and_the_loaded_defaults(tmp_path, capsys):
    (tmp_path / "run.toml").write_text('kind = "grpo"\nsteps = 123\n')
    with pytest.raises(SystemExit) as caught:
        main(["train", str(tmp_path / "run.toml"), "--help-all"])
    assert caught.value.code == 0
    shown = " ".join(capsys.readouterr().out.replace("│", " ").split())
    steps = "--steps INT Number of rollout batches (grpo, ppo) or optimizer steps (sft, dpo, rm)."
    assert f"{steps} (default: 123)" in shown
    assert "--checkpoint STEP" in shown and "--checkpoint.every INT" in shown
    assert "--model.lora.rank INT Rank of the adapter matrices. (off; then 16)" in shown
    assert "--train.schedule {constant,linear,cosine}" in shown
    assert main(["train", "--help"]) == 0
    assert "lockstep train --resume RUN_DIR" in capsys.readouterr().out


def test_print_config_prints_what_would_run(capsys, tmp_path):
    assert main(["train", "grpo", "--train.lr", "1e-5", "--print-config"]) == 0
    file = tmp_path / "printed.toml"
    file.write_text(capsys.readouterr().out)
    assert load_run(file) == load_run(kind="grpo", overrides={"train.lr": 1e-5})


def test_print_config_shows_what_a_name_resolves_to(capsys):
    flags = ["--algorithm.name", "dapo", "--algorithm.clip-low", "0.1"]
    assert main(["train", "grpo", *flags, "--print-config"]) == 0
    text = capsys.readouterr().out
    comments = re.findall("(?m)^# (.*)$", text)
    # arXiv 2503.14476; clip_low is set
    assert comments == [
        '"dapo" resolves what is not set to:',
        'advantage = "group_mean_std"',
        'aggregation = "token_mean"',
        "clip_high = 0.28",
        'ratio = "token"',
        'objective = "ppo_clip"',
        "dynamic_sampling = true",
        "overlong.penalty = 1.0",
        'kl.estimator = "k3"',
    ]
    algorithm = text.partition("[algorithm]\n")[2].partition("\n\n")[0]
    assert algorithm.endswith("# " + comments[-1])
    assert main(["train", "dpo", "--print-config=short"]) == 0
    assert capsys.readouterr().out.splitlines() == [
        'kind = "dpo"',
        "",
        "[algorithm]",
        '# "dpo" resolves what is not set to:',
        "# beta = 0.1",
        "# label_smoothing = 0.0",
        "# average = false",
    ]


def test_print_config_takes_short_as_its_next_word(capsys):
    shown = []
    flags = ["--algorithm.name", "dr_grpo"]
    for words in (["--print-config=short"], ["--print-config", "short"], ["--print_config=short"]):
        assert main(["train", "grpo", *words, *flags]) == 0
        shown.append(capsys.readouterr().out)
    assert shown[0] == shown[1] == shown[2] and len(shown[0].splitlines()) < 20
    assert main(["train", "grpo", "--print-config", "true", *flags]) == 0
    assert len(capsys.readouterr().out.splitlines()) > 100


def test_print_config_short_prints_what_differs(capsys):
    flags = ["--model.lora.rank", "8", "--rewards", "math", "format=0.2", "--eval-data.source", "x.jsonl"]
    assert main(["train", "grpo", "--algorithm.name", "dr_grpo", *flags, "--print-config=short"]) == 0
    lines = [line for line in capsys.readouterr().out.splitlines() if not line.startswith("#")]
    assert lines == [
        'kind = "grpo"',
        'rewards = [{name = "math"}, {name = "format", weight = 0.2}]',
        "",
        "[model.lora]",
        "rank = 8",
        "",
        "[algorithm]",
        'name = "dr_grpo"',
        "",
        "[eval_data]",
        'source = "x.jsonl"',
    ]


@pytest.mark.parametrize("name", recipes())
def test_both_forms_of_print_config_are_the_same_run(name, tmp_path):
    for more in ({}, {"epochs": 2, "model.lora": {}}):
        run = load_run(name, overrides=more)
        for short in (False, True):
            (tmp_path / "run.toml").write_text(shown_config(run, short=short))
            assert load_run(tmp_path / "run.toml") == run, (short, more)


SUMMARY = {
    "outcome": "finished",
    "run_dir": "runs/demo",
    "wall_seconds": 583.7,
    "steps": 60,
    "eval_before": {"strict_accuracy": None, "lenient_accuracy": 0.25, "num_prompts": 256},
    "eval_after": {"strict_accuracy": None, "lenient_accuracy": 0.5, "num_prompts": 256},
}


@pytest.mark.parametrize(
    ("changes", "status", "verdict"),
    [
        ({}, 0, "train: finished, 60 steps, 584 s, lenient accuracy 0.250 -> 0.500, runs/demo"),
        (
            {
                "outcome": "interrupted",
                "steps": 3,
                "eval_after": None,
                "resume": "lockstep train --resume runs/demo",
            },
            130,
            "train: interrupted, 3 steps, 584 s, runs/demo, resume with: lockstep train --resume runs/demo",
        ),
        (
            {"evaluation_seconds": 41.0, "warm_start_seconds": 12.3},
            0,
            "train: finished, 60 steps, 584 s, 41 s of them for evaluations, after 12 s of warm start, "
            "lenient accuracy 0.250 -> 0.500, runs/demo",
        ),
    ],
)
def test_the_verdict_is_the_last_line_and_the_exit_status(
    changes, status, verdict, tmp_path, monkeypatch, capsys
):
    started: list[train.TrainCommand] = []

    def start(command: train.TrainCommand) -> Mapping[str, Any]:
        started.append(command)
        return SUMMARY | changes

    monkeypatch.setattr(train, "start", start)
    (tmp_path / "config.toml").write_text(dump_toml(load_run(kind="grpo")))
    argv = [
        "--resume",
        str(tmp_path),
        "--checkpoint",
        "20",
        "--steps",
        "200",
        "--json",
        str(tmp_path / "s.json"),
    ]
    assert main(["train", *argv]) == status
    assert capsys.readouterr().out.splitlines()[-1] == verdict
    assert json.loads((tmp_path / "s.json").read_text()) == SUMMARY | changes
    (command,) = started
    assert (command.resume, command.checkpoint, command.run.steps) == (tmp_path, 20, 200)
    assert command.run.run_dir == tmp_path


def test_resume_with_another_setting_is_refused(tmp_path, capsys):
    (tmp_path / "config.toml").write_text(dump_toml(load_run(kind="grpo")))
    assert main(["train", "--resume", str(tmp_path), "--train.lr", "0.1"]) == 2
    assert "train.lr: 1e-06 in the run, now 0.1" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("flags", "changed"),
    [
        (("--eval.before", "false"), {"eval.before": False}),
        (("--eval.before=False", "--eval.after", "true"), {"eval.before": False}),
        (("--train.activation-checkpointing", "true"), {"train.activation_checkpointing": True}),
        (("--train.activation_checkpointing=true",), {"train.activation_checkpointing": True}),
        (("--train.static-capacity", "false"), {"train.static_capacity": False}),
        (("--model.lora.rank", "16", "--eval.before", "false", "--log.tensorboard", "FALSE"), None),
    ],
)
def test_booleans_may_be_spelt_out(flags, changed):
    found = values("grpo", *flags)
    if changed is None:
        assert found.pop("model.lora")["rank"] == 16
        changed = {"eval.before": False, "log.tensorboard": False}
    assert found == changed


def test_a_boolean_takes_no_other_word(capsys):
    assert main(["train", "grpo", "--eval.before", "maybe"]) == 2
    assert "--eval.before 'maybe': expected true or false" in capsys.readouterr().err


def test_cluster_none_reads_nothing_of_the_table(tmp_path):
    file = tmp_path / "run.toml"
    file.write_text('kind = "ppo"\n[cluster]\nslots = 2\ncolocate = [["policy"], ["value"]]\n')
    assert train.parse([str(file)]).run.remote_groups == (("value",),)
    command = train.parse([str(file), "--cluster", "none"])
    assert command.run.cluster is None and command.run.remote_groups == () and command.cluster is None


def test_a_list_of_lists_is_one_value():
    groups = '[["policy"], ["value"], ["ref"]]'
    command = train.parse(["ppo", "--algorithm.kl.coef", "0.1", "--cluster.colocate", groups])
    assert command.run.remote_groups == (("value",), ("ref",))
    with raises(ConfigError, "wrong-type: cluster.colocate"):
        train.parse(["ppo", "--cluster.colocate", "policy"])
