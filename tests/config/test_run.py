"""Settings that would do nothing, or nothing good, are refused with what to set instead."""

import math

import pytest

from lockstep.config.run import GRPORun, SFTRun

FILE = {"source": "rows.jsonl"}


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ({"rollout": {"sampling": {"temperature": 0}}}, "every advantage is 0"),
        ({"data": {"split": "test"}}, r"data.split = 'test' means nothing for source = 'reasoning_gym"),
        ({"data": {"subset": "main"}}, r"data.subset = 'main' means nothing"),
        ({"data": {"source": "rows.jsonl", "task": {"size": 3}}}, r"data.task = .* means nothing"),
        ({"checkpoint": {"keep_best": 1, "metric": "eval/loss"}}, "set one of eval/strict_accuracy"),
        ({"checkpoint": {"keep_best": 1, "every": 10}, "eval": {"every": 4}}, "set both to the same number"),
        ({"eval": {"samples_per_prompt": 4}}, "same completion every time"),
        ({"train": {"betas": (0.9, 1.0)}}, "below 1"),
        ({"train": {"lr": math.inf}}, "finite"),
        (
            # prompts of 1024, and 2 * 128 tokens of the evaluation before training
            {"engine": {"name": "native", "kv_cache_tokens": 1278}},
            "engine.kv_cache_tokens = 1278 is below the 1279 tokens",
        ),
        (
            {"train": {"execution": "joint", "static_capacity": False}},
            "one graph of the whole decoder for every length",
        ),
        ({"train": {"cuda_graph": True}}, r"no effect with train.execution = 'auto'.*set .*= 'joint'"),
        (
            {"algorithm": {"rollout_correction": {"kind": "icepop", "low": 3.0}}},
            "would be masked",
        ),
        (
            {"algorithm": {"mask_truncated": True}, "rollout": {"sampling": {"ignore_eos": True}}},
            "mask_truncated = true .* every completion is cut off",
        ),
        ({"model": {"dtype": "float16"}}, "no train backend scales the loss"),
    ],
)
def test_an_rl_run_refuses(setting, message):
    with pytest.raises(ValueError, match=message):
        GRPORun(**setting)


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ({"data": {**FILE, "exclude": "other.jsonl"}}, "is for prompts of RL runs"),
        (
            {"data": FILE, "eval_data": {**FILE, "max_length": 9000}, "train": {"token_budget": 4096}},
            "eval_data.max_length = 9000",
        ),
        ({"data": FILE, "eval_every": 5}, "eval_every = 5 needs documents"),
        (
            {"data": FILE, "train": {"batch_invariant": True, "reuse_rollout_logprobs": True}},
            "reuse_rollout_logprobs = True has no effect with kind = 'sft'",
        ),
        (
            {"data": FILE, "checkpoint": {"keep_best": 1, "metric": "eval/loss"}},
            "keep_best = 1 needs documents",
        ),
        ({"data": FILE, "checkpoint": {"keep_best": 1}}, "set one of eval/loss, eval/perplexity"),
    ],
)
def test_an_sft_run_refuses(setting, message):
    with pytest.raises(ValueError, match=message):
        SFTRun(**setting)


def test_what_is_read_is_allowed():
    GRPORun(data={"source": "openai/gsm8k", "subset": "main", "split": "test", "columns": {"a": "b"}})
    GRPORun(checkpoint={"keep_best": 1, "every": 10}, eval={"every": 5})
    best = {"keep_best": 1, "metric": "eval/loss", "every": 5}
    SFTRun(data=FILE, eval_data=FILE, checkpoint=best, eval_every=5)
