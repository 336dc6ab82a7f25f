"""Settings that would do nothing, or nothing good, are refused with what to set instead."""

import math

import pytest
from raising import raises

from lockstep.config.run import GRPORun, SFTRun

FILE = {"source": "rows.jsonl"}


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ({"rollout": {"sampling": {"temperature": 0}}}, "nothing-to-do: rollout.sampling.temperature"),
        ({"data": {"split": "test"}}, "no-effect: data.split"),
        ({"data": {"subset": "main"}}, "no-effect: data.subset"),
        ({"data": {"source": "rows.jsonl", "task": {"size": 3}}}, "no-effect: data.task"),
        (
            {"checkpoint": {"keep_best": 1, "metric": "eval/loss"}},
            "unsupported-combination: checkpoint.metric",
        ),
        (
            {"checkpoint": {"keep_best": 1, "every": 10}, "eval": {"every": 4}},
            "contradiction: checkpoint.keep_best",
        ),
        ({"eval": {"samples_per_prompt": 4}}, "unsupported-combination: eval.samples_per_prompt"),
        ({"train": {"betas": (0.9, 1.0)}}, "out-of-range: train.betas"),
        ({"train": {"lr": math.inf}}, "out-of-range: train.lr"),
        (
            # prompts of 1024, and 128 tokens
            {"engine": {"name": "native", "kv_cache_tokens": 1150}},
            "contradiction: engine.kv_cache_tokens",
        ),
        (
            {"train": {"execution": "joint", "static_capacity": False}},
            "unsupported-combination: train.static_capacity",
        ),
        ({"train": {"cuda_graph": True}}, "no-effect: train.cuda_graph"),
        (
            {"algorithm": {"rollout_correction": {"kind": "icepop", "low": 3.0}}},
            "contradiction: algorithm.rollout_correction.low",
        ),
        (
            {"algorithm": {"mask_truncated": True}, "rollout": {"sampling": {"ignore_eos": True}}},
            "nothing-to-do: algorithm.mask_truncated",
        ),
        ({"model": {"dtype": "float16"}}, "unsupported-combination: float16"),
    ],
)
def test_an_rl_run_refuses(setting, message):
    with raises(ValueError, message):
        GRPORun(**setting)


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ({"data": {**FILE, "exclude": "other.jsonl"}}, "no-effect: data.exclude"),
        (
            {"data": FILE, "eval_data": {**FILE, "max_length": 9000}, "train": {"token_budget": 4096}},
            "contradiction: eval_data.max_length",
        ),
        ({"data": FILE, "eval_every": 5}, "missing-setting: eval_data"),
        (
            {"data": FILE, "train": {"batch_invariant": True, "reuse_rollout_logprobs": True}},
            "no-effect: train.reuse_rollout_logprobs",
        ),
        (
            {"data": FILE, "checkpoint": {"keep_best": 1, "metric": "eval/loss"}},
            "missing-setting: eval_data",
        ),
        ({"data": FILE, "checkpoint": {"keep_best": 1}}, "unsupported-combination: checkpoint.metric"),
    ],
)
def test_an_sft_run_refuses(setting, message):
    with raises(ValueError, message):
        SFTRun(**setting)


def test_what_is_read_is_allowed():
    GRPORun(data={"source": "openai/gsm8k", "subset": "main", "split": "test", "columns": {"a": "b"}})
    GRPORun(checkpoint={"keep_best": 1, "every": 10}, eval={"every": 5})
    best = {"keep_best": 1, "metric": "eval/loss", "every": 5}
    SFTRun(data=FILE, eval_data=FILE, checkpoint=best, eval_every=5)
