"""A run that begins with SFT: the two runs that one would start by hand, in one folder."""

import json

import pytest
from raising import raises

from lockstep import load_run, train_offline, train_online
from lockstep.config.load import load_restarted, load_resumed
from lockstep.errors import ConfigError
from lockstep.loop.warm_start import after_warm_start, warm_start_of


@pytest.fixture
def run(tiny_folder, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    conversation = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "aaaa"}]
    (tmp_path / "rows.jsonl").write_text(json.dumps({"messages": conversation}) + "\n")
    (tmp_path / "prompts.jsonl").write_text(json.dumps({"prompt": "Hi"}) + "\n")
    (tmp_path / "sft.toml").write_text(
        'kind = "sft"\nsteps = 2\nbatch_size = 1\ndata.source = "rows.jsonl"\ntrain.lr = 1e-2\n'
        'log = { tensorboard = false, display = "off" }\n'
    )

    def load(**changes):
        settings = {
            "steps": 1,
            "warm_start": "sft.toml",
            "run_dir": "run",
            "seed": 3,
            "model.name": str(tiny_folder),
            "model.dtype": "float32",
            "data.source": "prompts.jsonl",
            "rollout": {"prompts_per_step": 1, "group_size": 4},
            "rollout.sampling.max_tokens": 8,
            "rewards": [{"name": "length", "kwargs": {"target": 4}}],
            "eval": {"before": False, "after": False},
            "log": {"tensorboard": False, "display": "off"},
        }
        return load_run(kind="grpo", overrides=settings | changes)

    return load


def metrics(folder):
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    kept = ("reward", "loss", "grad_norm", "logprob", "rollout")
    return [{k: v for k, v in json.loads(line).items() if k.startswith(kept)} for line in lines]


def test_both_runs_are_those_that_are_started_by_hand(run, tmp_path):
    summary = train_online(run())
    assert (summary["outcome"], summary["warm_start"]["steps"]) == ("finished", 2)
    assert summary["warm_start_seconds"] == summary["warm_start"]["wall_seconds"]
    assert summary["evaluation_seconds"] == 0.0 < summary["wall_seconds"]
    train_offline(warm_start_of(run(), tmp_path / "hand"))
    train_online(after_warm_start(run(), tmp_path / "hand"))
    warm, by_hand = (metrics(tmp_path / folder / "warm_start") for folder in ("run", "hand"))
    assert len(warm) == 2 and warm == by_hand
    assert metrics(tmp_path / "run") == metrics(tmp_path / "hand")
    saved = load_run(tmp_path / "run/config.toml")
    assert (saved.model.name, saved.warm_start) == ("run/warm_start/export", None)
    sft = load_run(tmp_path / "run/warm_start/config.toml")
    assert (sft.model, sft.seed) == (run().model, 3)


def test_a_warm_start_in_the_folder_is_not_trained_again(run, tmp_path):
    train_offline(warm_start_of(run(), tmp_path / "run"))
    weights = tmp_path / "run/warm_start/export/model.safetensors"
    before = weights.stat().st_mtime_ns
    with raises(ConfigError, "not-resumable"):
        train_online(run(seed=4, run_dir=str(tmp_path / "run")))
    assert train_online(run(run_dir=str(tmp_path / "run")))["outcome"] == "finished"
    assert weights.stat().st_mtime_ns == before


def test_resume_and_restart_keep_the_weights_that_the_run_began_with(run, tmp_path):
    train_online(run())
    first = metrics(tmp_path / "run")
    train_online(load_resumed("run", {"steps": 2}), resume=tmp_path / "run")
    assert len(metrics(tmp_path / "run")) == 2
    train_online(load_restarted("run", {"steps": 1}), restart=True)
    assert metrics(tmp_path / "run") == first
    assert (tmp_path / "run/before-restart-1").is_dir()


@pytest.mark.parametrize(
    ("text", "what"),
    [
        ('kind = "dpo"', "contradiction: sft.toml"),
        ('kind = "sft"\ndata.source = "rosw.jsonl"', "no-such-file: rosw.jsonl"),
    ],
)
def test_a_warm_start_that_cannot_run_is_refused_first(run, tmp_path, text, what):
    (tmp_path / "sft.toml").write_text(text)
    with raises(Exception, what):
        train_online(run())
    assert not (tmp_path / "run").exists()


def test_a_template_without_tools_is_refused_before_the_warm_start(run, tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "echoes.py").write_text(
        "class Echo:\n    def say(self, word: str) -> str:\n"
        '        """Say it.\n\n        Args:\n            word: What.\n        """\n        return word\n\n'
        "    def get_reward(self):\n        return 1.0\n"
    )
    plain = "{% for m in messages %}{{ m.content }}{% endfor %}"
    with raises(ConfigError, "unsupported-chat-template"):
        train_online(run(environment="echoes:Echo", **{"data.chat_template": plain}))
    assert not (tmp_path / "run").exists()
