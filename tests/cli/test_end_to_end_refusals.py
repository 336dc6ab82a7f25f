"""What cannot run is refused before torch is imported, with what to set instead."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

ASK = """
import json, sys
from lockstep.cli.main import main
told = []
for argv in json.load(sys.stdin):
    print("====", file=sys.stderr)
    try:
        code = main(argv)
    except SystemExit as stop:
        code = stop.code
    told.append([code, "torch" in sys.modules])
print(json.dumps(told))
"""

GRPO = ("train", "grpo", "--run-dir", "never")
IDS = ("--model.name", "shape:tiny-llama", "--data.source", "ids", "--rewards", "ids")

REFUSED = {
    "unknown flag": ((*GRPO, "--train.lrr", "1"), ["--train.lrr", "did you mean --train.lr?"]),
    "wrong type": ((*GRPO, "--steps", "1.5"), ["--steps", "'1.5'"]),
    "not a boolean": ((*GRPO, "--eval.before", "maybe"), ["maybe"]),
    "unknown key in a file": (
        ("train", "unknown.toml"),
        ["train.warmup = 1", "did you mean train.warmup_steps?"],
    ),
    "key of another table": (("train", "elsewhere.toml"), ["lr = 1", "lr belongs to train.lr"]),
    "wrong type in a file": (
        ("train", "type.toml"),
        ["steps = 'many': expected a whole number"],
    ),
    "two problems at once": (("train", "two.toml"), ["2 problems", "steps = 0", "train.lr = -1"]),
    "not TOML": (("train", "broken.toml"), ["broken.toml: not a TOML file"]),
    "missing file": (("train", "missing.toml"), ["no such file: 'missing.toml'"]),
    "unknown recipe": (("train", "grpo", "--recipe", "dmo"), ["unknown recipe 'dmo'; did you mean 'demo'?"]),
    "unknown command": (("trian",), ["unknown command 'trian'; did you mean 'train'"]),
    "unknown shape": (
        (*GRPO, *IDS, "--model.name", "shape:tiny-lama"),
        ["model.name = 'shape:tiny-lama'", "did you mean 'tiny-llama'"],
    ),
    "missing model folder": ((*GRPO, "--model.name", "/no/where"), ["'/no/where'", "does not exist"]),
    "folder without a model": ((*GRPO, "--model.name", "./empty"), ["'./empty'", "contains no config.json"]),
    "unknown reward": ((*GRPO, *IDS, "--rewards", "idz"), ["unknown reward 'idz'; did you mean 'ids'?"]),
    "unknown engine": ((*GRPO, *IDS, "--engine.name", "vlm"), ["engine", "'vlm'; did you mean 'vllm'?"]),
    "unknown task": (
        (*GRPO, "--data.source", "reasoning_gym:chain_summ"),
        ["data: unknown reasoning_gym task 'chain_summ'; did you mean 'chain_sum'"],
    ),
    "unknown task setting": (
        (*GRPO, "--data.task", "min_termz=2"),
        ["unknown data.task setting of chain_sum 'min_termz'; did you mean 'min_terms'"],
    ),
    "impossible task setting": (
        (*GRPO, "--data.task", "min_terms=9", "max_terms=2"),
        ["reasoning_gym refuses"],
    ),
    "missing data": ((*GRPO, "--data.source", "rows.jsonl"), ["'rows.jsonl'", "did you mean 'row.jsonl'?"]),
    "missing held-out data": ((*GRPO, "--eval-data.source", "no.jsonl"), ["eval_data: ", "'no.jsonl'"]),
    "text for a model without a tokenizer": (
        (*GRPO, "--model.name", "shape:tiny-llama"),
        ["has no tokenizer", "data.source = 'ids'"],
    ),
    "prompts for SFT": (("train", "sft", "--data.source", "reasoning_gym:chain_sum"), ["SFT needs a file"]),
    "groups of one": (
        (*GRPO, *IDS, "--rollout.group-size", "1"),
        ["rollout.group_size = 1", "set rollout.group_size >= 2 or algorithm.name = 'reinforce++'"],
    ),
    "too few prompts": (
        (*GRPO, *IDS, "--data.size", "4", "--rollout.prompts-per-step", "8"),
        ["data.size = 4 is less than one rollout batch", "raise data.size or lower rollout.prompts_per_step"],
    ),
    "a sample longer than the budget": (
        (*GRPO, *IDS, "--train.token-budget", "64"),
        ["train.token_budget = 64", "raise train.token_budget, or lower"],
    ),
    "minibatches that do not divide": (
        (*GRPO, *IDS, "--train.minibatches", "3"),
        ["train.minibatches = 3 does not divide the 64 rollouts"],
    ),
    "more tokens at least than at most": (
        (*GRPO, *IDS, "--rollout.sampling.min-tokens", "999"),
        ["min_tokens = 999 exceeds max_tokens", "lower min_tokens"],
    ),
    "a metric that is never measured": (
        (*GRPO, *IDS, "--checkpoint.keep-best", "1", "--checkpoint.metric", "eval/loss"),
        ["checkpoint.metric = 'eval/loss'", "eval/mean_reward"],
    ),
    "a document longer than the budget": (
        ("train", "sft", "--data.source", "row.jsonl", "--train.token-budget", "64"),
        ["data.max_length", "train.token_budget = 64"],
    ),
    "fewer documents than a batch": (
        ("train", "sft", "--data.source", "row.jsonl", "--data.size", "2"),
        ["data.size = 2 is less than batch_size"],
    ),
    "a run directory that is a file": ((*GRPO, *IDS, "--run-dir", "row.jsonl"), ["'row.jsonl' is a file"]),
    "a run directory that is taken": (
        (*GRPO, *IDS, "--run-dir", "taken"),
        ["'taken' already contains a run", "lockstep train --restart taken"],
    ),
    "resume without a run": (("train", "--resume", "empty"), ["has no config.toml"]),
    "resume of a folder that is not there": (("train", "--resume", "absent"), ["has no config.toml"]),
    "resume of a file": (("train", "--resume", "row.jsonl"), ["has no config.toml"]),
    "nowhere to put the JSON": ((*GRPO, *IDS, "--json", "no/x.json"), ["no such folder"]),
}


@pytest.fixture(scope="module")
def answers(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[int, bool, str]]:
    """Exit status, whether torch was imported, and what was said, of every command in REFUSED."""
    folder = tmp_path_factory.mktemp("refused")
    for name, text in {
        "unknown.toml": 'kind = "grpo"\n[train]\nwarmup = 1\n',
        "elsewhere.toml": 'kind = "grpo"\nlr = 1\n',
        "type.toml": 'kind = "grpo"\nsteps = "many"\n',
        "two.toml": 'kind = "grpo"\nsteps = 0\n[train]\nlr = -1\n',
        "broken.toml": "kind = grpo\n",
        "row.jsonl": '{"prompt": "1 + 1", "completion": "2"}\n',
        "taken/config.toml": 'kind = "grpo"\n',
        "taken/metrics.jsonl": '{"step": 0}\n',
        "empty/readme": "",
    }.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(text)
    done = subprocess.run(
        [sys.executable, "-c", ASK],
        input=json.dumps([argv for argv, _ in REFUSED.values()]),
        capture_output=True,
        text=True,
        cwd=folder,
        check=True,
    )
    assert not (folder / "never").exists() and not (folder / "runs").exists()
    said = [" ".join(part.replace("│", " ").split()) for part in done.stderr.split("====\n")[1:]]
    numbers = json.loads(done.stdout.splitlines()[-1])
    return {name: (*row, text) for name, row, text in zip(REFUSED, numbers, said, strict=True)}


@pytest.mark.parametrize("name", REFUSED)
def test_it_is_refused_at_once_with_the_way_out(name: str, answers: dict[str, tuple[int, bool, str]]) -> None:
    code, torch_imported, said = answers[name]
    told = REFUSED[name][1]
    assert [word for word in told if word not in said] == [], said
    assert code == 2
    assert not torch_imported
