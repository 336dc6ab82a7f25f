"""Combinations of settings that are refused, one row each.

A check of a table of settings (`lockstep.config.base.check`) calls `refuse(self, "algorithm.kl")`: the first
row whose `when` is true raises its error. docs/reference/rules.md lists all rows, and a test trips each one.
"""

from __future__ import annotations

import re
from string import Formatter
from typing import Any

from lockstep.config.rule import Rule
from lockstep.config.train_rules import TRAIN_RULES
from lockstep.errors import ConfigError


def refuse(table: Any, name: str) -> None:
    """Raise ConfigError for the first rule that a table of settings breaks.

    Args:
        name: which rules, a key of RULES.
    """
    for rule in RULES[name]:
        if rule.when(table):
            raise ConfigError(_TOML.format(rule.text, table), code=rule.code, setting=rule.setting)


class _Toml(Formatter):
    def format_field(self, value: Any, format_spec: str) -> str:
        """Write lists and truth values as a TOML file has them."""
        value = list(value) if isinstance(value, tuple) else value
        return (
            str(value).lower() if isinstance(value, bool) else str(super().format_field(value, format_spec))
        )


_TOML = _Toml()

RULES: dict[str, tuple[Rule, ...]] = {
    "algorithm (dpo)": (
        Rule(
            lambda c: c.desirable_weight == 0 == c.undesirable_weight,
            "nothing-to-do: desirable_weight = 0 and undesirable_weight = 0, so nothing would be trained; "
            "raise one of them",
        ),
        Rule(
            lambda c: c.average and c.name == "kto",
            "no-effect: average = true has no effect with name = 'kto'; leave it out",
        ),
        Rule(
            lambda c: c.average is False and c.name == "orpo",
            "unsupported-combination: average = false with name = 'orpo': the odds of a whole answer "
            "underflow to 0 in every float type; leave it out",
        ),
    ),
    "algorithm (ppo)": (
        Rule(
            lambda c: c.reward_clip is not None and c.reward_clip[0] >= c.reward_clip[1],
            "contradiction: reward_clip = {0.reward_clip}: the first bound is not below the second, so "
            "every reward would be the same; swap them",
        ),
        Rule(
            lambda c: c.lam_length_alpha is not None and c.lam != 1.0,
            "no-effect: lam = {0.lam} has no effect with lam_length_alpha = {0.lam_length_alpha}, which "
            "replaces it; leave one of them out (lam_value sets the lambda of the returns)",
        ),
    ),
    "algorithm.kl (ppo)": (
        Rule(
            lambda c: c.target is not None and c.coef == 0,
            "no-effect: target = {0.target} has no effect, because kl.coef = 0 stays 0; set kl.coef above "
            "0 and kl.place = 'reward', or leave target out",
        ),
        Rule(
            lambda c: c.target is not None and c.place == "loss",
            "no-effect: target = {0.target} has no effect, because the coefficient is fixed with kl.place "
            "= 'loss'; set kl.coef above 0 and kl.place = 'reward', or leave target out",
        ),
    ),
    "algorithm.rollout_correction": (
        Rule(
            lambda c: c.geometric_low is not None and c.geometric_high is None,
            "no-effect: geometric_low = {0.geometric_low} has no effect without geometric_high; set "
            "geometric_high, too, or leave geometric_low out",
        ),
        Rule(
            lambda c: c.kind == "icepop" and c.low >= c.high,
            "contradiction: low = {0.low} is not below high = {0.high}, so every token would be masked; "
            "lower low, or raise high",
        ),
    ),
    "cluster": (
        Rule(
            lambda c: c.gpus and c.slots != 1,
            "no-effect: slots = {0.slots} has no effect with gpus = {0.gpus}, because each GPU gets one "
            "rank; leave slots out, or set gpus = 0",
        ),
        Rule(
            lambda c: c.dedicated_gpus and not c.remote_groups,
            "no-effect: dedicated_gpus = true has no effect without remote roles, because all roles share "
            "the processes of the ranks; leave it out, or write several groups in colocate",
        ),
    ),
    "engine": (
        Rule(
            lambda c: c.url is not None and c.transfer == "ipc",
            "unsupported-combination: engine.transfer = 'ipc' needs a server that Lockstep started on the "
            "trainer's GPU; set 'auto', 'collective' or 'disk' with engine.url",
        ),
        Rule(
            lambda c: c.url is not None and not c.url.startswith(("http://", "https://")),
            "wrong-format: engine.url = {0.url!r} does not start with http:// or https://, such as "
            "http://127.0.0.1:8000",
        ),
    ),
    "engine (devices)": (
        Rule(
            lambda c: c.cuda_devices and len(c.cuda_devices) != c.replicas * c.tp,
            "contradiction: engine.cuda_devices = {0.cuda_devices} must name exactly engine.replicas * "
            "engine.tp = {0.replicas} * {0.tp} GPUs; list the GPUs of the first replica, then those of the "
            "second, and so on",
        ),
        Rule(
            lambda c: any(len(set(share)) < len(share) for share in c.shares),
            "duplicate: engine.cuda_devices = {0.cuda_devices} assigns a GPU twice to one replica; name "
            "{0.tp} different GPUs for each replica",
        ),
        Rule(
            lambda c: len(set(c.cuda_devices)) < len(c.cuda_devices) and c.memory_fraction is None,
            "missing-setting: engine.cuda_devices = {0.cuda_devices} puts several replicas on one GPU; set "
            "engine.memory_fraction, the fraction of the GPU that each replica may use",
            at="engine.memory_fraction",
        ),
    ),
    "engine (in the trainer's process)": (
        Rule(
            lambda c: c.transfer not in ("auto", "memory"),
            "no-effect: engine.transfer = {0.transfer!r} has no effect, because engine.name = {0.name!r} "
            "runs in the trainer's process and shares or copies its weights; leave it at 'auto', or set "
            "engine.process = 'separate'",
        ),
    ),
    "engine (seeds)": (
        Rule(
            lambda c: c.unseeded and c.batch_invariant,
            "no-effect: engine.unseeded = true has no effect with engine.batch_invariant = true, because "
            "each sample then has its own seed; leave it out",
        ),
    ),
    "engine (servers)": (
        Rule(
            lambda c: c.python is not None and c.url is not None,
            "contradiction: engine.python = '{0.python}' starts a server, but engine.url = {0.url!r} names "
            "a server that is already running; leave one of them out",
            at="engine.url",
        ),
    ),
    "eval": (
        Rule(
            lambda c: c.samples_per_prompt > 1 and c.temperature == 0,
            "unsupported-combination: samples_per_prompt = {0.samples_per_prompt} at temperature = 0 would "
            "sample the same completion every time; set temperature above 0, or samples_per_prompt = 1",
        ),
    ),
    "generate": (
        Rule(
            lambda c: c.sampling.temperature == 0 and c.n > 1,
            "unsupported-combination: n = {0.n} with sampling.temperature = 0 would sample the same "
            "completion {0.n} times; set sampling.temperature above 0, or n = 1",
        ),
        Rule(
            lambda c: c.model.lora is not None,
            "unsupported-combination: model.lora adds untrained adapters, which change nothing when "
            "sampling; name a run directory with trained adapters, or leave model.lora out",
        ),
        Rule(
            lambda c: c.iteration is not None and c.max_samples is not None,
            "contradiction: iteration = {0.iteration} always takes rollout_batch_size = "
            "{0.rollout_batch_size} prompts; leave max_samples out (data.size limits the data)",
            at="max_samples",
        ),
        Rule(
            lambda c: c.iteration is None and c.max_samples is None and c.data.generated and not c.data.size,
            "missing-setting: data.source = {0.data.source!r} generates prompts without end; set "
            "max_samples, iteration or data.size",
            at="max_samples",
        ),
    ),
    "model.lora": (
        Rule(
            lambda c: c.target_parameters and c.dropout,
            "unsupported-combination: dropout = {0.dropout} with target_parameters: peft has no dropout for "
            "adapters of Parameters; set dropout = 0",
        ),
    ),
    "record": (
        Rule(
            lambda c: c.last_step is not None and c.last_step < c.first_step,
            "nothing-to-do: last_step = {0.last_step} is before first_step = {0.first_step}, so nothing "
            "would be recorded; raise last_step, or leave it out for the run's last step",
        ),
    ),
    "reward_model": (
        Rule(
            lambda c: c.aggregation != "mean" and not c.others,
            "no-effect: aggregation = {0.aggregation!r} has no effect with one model; add models to "
            "others, or leave it out",
        ),
    ),
    "environment": (
        Rule(
            lambda c: c.name is None and not c.classes,
            "missing-setting: name is not set, so there is no environment; name a class of yours, such as "
            "my_module:Calculator, or several under classes",
        ),
        Rule(
            lambda c: c.name is not None and c.classes,
            "contradiction: name = {0.name!r} is for all rows, but classes = {0.classes} as well; remove one "
            "of the two",
        ),
        Rule(
            lambda c: any(":" not in target for target in c.targets.values()),
            "wrong-format: {0.shown_targets} is not of the form module:Class; name a class of yours, such as "
            "my_module:Calculator",
            at="name",
        ),
        Rule(
            lambda c: c.column != "environment" and not c.classes,
            "no-effect: column = {0.column!r} has no effect without classes, from which its values choose; "
            "set classes, or leave it out",
        ),
    ),
    "rewards": (
        Rule(
            lambda c: c.secrets and ":" not in c.name,
            "no-effect: secrets has no effect with name = {0.name!r}; leave it out (for http, use token_env)",
        ),
    ),
    "rewards (http)": (
        Rule(
            lambda c: c.name == "http" and not re.fullmatch(r"https?://[!-~]+", c.url or ""),
            "missing-setting: url = {0.url!r}, but name = 'http' needs the service's address; set it, such "
            "as url = 'http://127.0.0.1:8000/score'",
        ),
    ),
    "rollout.sampling": (
        Rule(
            lambda c: c.min_tokens > c.max_tokens,
            "contradiction: min_tokens = {0.min_tokens} exceeds max_tokens = {0.max_tokens}; lower "
            "min_tokens",
        ),
        Rule(
            lambda c: c.top_k == 0,
            "out-of-range: top_k = 0 would leave no tokens to sample; set -1 to turn top_k off",
        ),
    ),
    "run": (
        Rule(
            lambda r: r.train.min_lr_ratio > 0 and r.train.schedule == "constant",
            "no-effect: train.min_lr_ratio = {0.train.min_lr_ratio} has no effect with train.schedule = "
            "'constant'; set train.schedule = 'linear' or 'cosine', or leave it out",
        ),
    ),
    "run (dpo)": (
        Rule(
            lambda r: not r.algorithm.paired and r.batch_size < 2,
            "unsupported-combination: batch_size = {0.batch_size} with algorithm.name = "
            "{0.algorithm.name!r}, whose baseline combines each prompt with the answer to another prompt; "
            "set batch_size to 2 or more",
        ),
    ),
    "run (offline)": (
        Rule(
            lambda r: r.train.reuse_rollout_logprobs is not None,
            "no-effect: train.reuse_rollout_logprobs = {0.train.reuse_rollout_logprobs} has no effect "
            "with kind = {0.kind!r}, which has no rollouts; leave it out",
        ),
        Rule(
            lambda r: r.log.token_details,
            "no-effect: log.token_details = true has no effect with kind = {0.kind!r}, which has no "
            "rollouts; leave it out",
        ),
    ),
    "run (ppo)": (
        Rule(
            lambda r: r.epochs is None and r.value.warmup_batches >= r.steps,
            "nothing-to-do: value.warmup_batches = {0.value.warmup_batches} is not below steps = "
            "{0.steps}, so the policy would never be trained; lower it, or raise steps",
        ),
        Rule(
            lambda r: r.algorithm.kl.target is not None and r.algorithm.kl.horizon < r.rollout.samples,
            "out-of-range: algorithm.kl.horizon = {0.algorithm.kl.horizon} is below the "
            "{0.rollout.samples} rollouts of a step, so one step could change the coefficient by more than "
            "a fifth; raise it",
        ),
        Rule(
            lambda r: r.value.train(r.train).execution == "deepcompile",
            "unsupported-combination: train.execution = 'deepcompile' with kind = 'ppo': its graph "
            "includes the policy's head, but a value model has a different head; set train.execution = "
            "'compile' or 'joint'",
        ),
    ),
    "run (record)": (
        Rule(
            lambda r: r.epochs is None and r.record.enabled and r.record.first_step >= r.steps,
            "nothing-to-do: record.first_step = {0.record.first_step} is not below steps = {0.steps}, so "
            "nothing would be recorded; lower it, or raise steps (they count from 0)",
        ),
    ),
    "run (remote roles)": (
        Rule(
            lambda r: r.remote_roles,
            "unsupported-combination: cluster.colocate has several groups with kind = {0.kind!r}: all "
            "roles of such a run are in one process; leave it out",
        ),
    ),
    "run (rl offload)": (
        Rule(
            lambda r: len(set(r.offloaded)) < len(r.offloaded),
            "duplicate: offload = {0.offloaded} names a role twice; name each role once",
        ),
        Rule(
            lambda r: r.train.cuda_graph and {"ref", "value"} & set(r.offloaded),
            "unsupported-combination: offload = {0.offloaded} with train.cuda_graph = true: a graph reads "
            "weights at the addresses that they had when it was captured; name only 'policy' and "
            "'reward_model', or leave train.cuda_graph out",
        ),
        Rule(
            lambda r: r.record.enabled and "value" in r.offloaded,
            "unsupported-combination: offload = {0.offloaded} with record.enabled = true: recording reads "
            "the value model's weights between the model's calls; leave 'value' out",
        ),
    ),
    "run (rl remote roles)": (
        Rule(
            lambda r: r.train.backend not in ("auto", "local", "fsdp2"),
            "unsupported-combination: cluster.colocate has several groups with train.backend = "
            "{0.train.backend!r}: remote roles need 'local' or 'fsdp2'; set one of them, or use a single "
            "group",
        ),
        Rule(
            lambda r: r.record.enabled and "value" in r.remote_roles,
            "unsupported-combination: record.enabled = true with 'value' as a remote role in "
            "cluster.colocate: only the policy's process records inputs; put it with the policy, or set "
            "record.enabled = false",
        ),
    ),
    "rollout": (
        Rule(
            lambda c: c.trajectory_tokens < c.sampling.max_tokens,
            "contradiction: max_trajectory_tokens = {0.max_trajectory_tokens} is less than "
            "sampling.max_tokens = {0.sampling.max_tokens}, the limit of one turn; raise it, or leave it out",
            at="max_trajectory_tokens",
        ),
        Rule(
            lambda c: c.schedule == "fixed" and not c.max_lag,
            "no-effect: schedule = 'fixed' has no effect with max_lag = 0, with which every step samples its "
            "rollouts from beginning to end; raise max_lag, or leave it out",
        ),
        Rule(
            lambda c: c.slots is not None and c.schedule == "free",
            "no-effect: slots = {0.slots} has no effect with schedule = 'free'; set schedule = 'fixed', or "
            "leave it out",
        ),
    ),
    "run (rl sizes)": (
        Rule(
            lambda r: (
                r.eval.enabled and r.eval.max_tokens is not None and r.eval.max_tokens < r.sampling.min_tokens
            ),
            "contradiction: eval.max_tokens = {0.eval.max_tokens} is below rollout.sampling.min_tokens = "
            "{0.sampling.min_tokens}, which applies to evaluations, too; raise eval.max_tokens or lower "
            "rollout.sampling.min_tokens",
        ),
        Rule(
            lambda r: r.data.size is not None and r.data.size < r.rollout.prompts_per_step,
            "contradiction: data.size = {0.data.size} is less than one rollout batch of "
            "rollout.prompts_per_step = {0.rollout.prompts_per_step} prompts; raise data.size or lower "
            "rollout.prompts_per_step",
        ),
        Rule(
            lambda r: r.train.token_budget != "auto" and r.train.token_budget < r.longest_unit,
            "contradiction: data.max_prompt_tokens + {0.rollout.length_setting} = {0.longest_unit} tokens "
            "do not fit into one micro-batch of train.token_budget = {0.train.token_budget} tokens; raise "
            "train.token_budget, or lower one of the other two",
            at="train.token_budget",
        ),
        Rule(
            lambda r: (r.engine.kv_cache_limit or r.longest_context) < r.longest_context,
            "contradiction: engine.kv_cache_tokens = {0.engine.kv_cache_tokens} is below the "
            "{0.longest_context} tokens that one sample of training or evaluation can need "
            "(data.max_prompt_tokens + {0.rollout.length_setting} - 1; the evaluation before training may "
            "need more, see eval.before_max_tokens_factor); raise engine.kv_cache_tokens",
        ),
        Rule(
            lambda r: r.rollout.samples % r.train.minibatches,
            "not-divisible: train.minibatches = {0.train.minibatches} does not divide the "
            "{0.rollout.samples} rollouts of a step (rollout.prompts_per_step * rollout.group_size)",
        ),
    ),
    "run (rl lag)": (
        Rule(
            lambda r: not r.engine_goes_on,
            "unsupported-combination: rollout.max_lag = {0.rollout.max_lag} with engine.name = "
            "{0.engine.name!r}: only engine.name = 'native' goes on with samples that earlier weights began; "
            "set it, or rollout.max_lag = 0",
        ),
        Rule(
            lambda r: r.rollout.schedule == "fixed" and r.environment is not None,
            "unsupported-combination: rollout.schedule = 'fixed' with an environment of several turns, whose "
            "answers take time that no token counts; set rollout.schedule = 'free'",
        ),
        Rule(
            lambda r: r.rollout.schedule == "fixed" and r.engine.process != "separate",
            "no-effect: rollout.schedule = 'fixed' has no effect with an engine in the trainer's process, "
            "where the same run has the same bits anyway; set engine.process = 'separate', or leave it out",
        ),
        Rule(
            lambda r: r.rollout.schedule == "fixed" and not r.train.batch_invariant,
            "missing-setting: rollout.schedule = 'fixed' promises the same bits twice, and which samples "
            "are decoded together depends on memory; set train.batch_invariant = true",
        ),
        Rule(
            lambda r: r.rollout.schedule == "fixed" and r.engine.replicas > 1,
            "unsupported-combination: rollout.schedule = 'fixed' with engine.replicas = {0.engine.replicas}: "
            "the place of a sample in logical time is counted within one engine; set engine.replicas = 1",
        ),
        Rule(
            lambda r: r.rollout.schedule == "fixed" and r.engine.offloads,
            "unsupported-combination: rollout.schedule = 'fixed' with engine.offload = true, with which the "
            "engine sleeps while the trainer works; leave one of them out",
        ),
        Rule(
            lambda r: (
                r.train.deterministic and r.engine.process == "separate" and r.rollout.schedule == "free"
            ),
            "unsupported-combination: rollout.max_lag = {0.rollout.max_lag} with train.deterministic = true "
            "and engine.process = 'separate', which samples while the trainer works: where a sample is cut "
            "off then depends on time; set rollout.schedule = 'fixed', or leave engine.process out",
        ),
        Rule(
            lambda r: r.algorithm_options.dynamic_sampling,
            "unsupported-combination: rollout.max_lag = {0.rollout.max_lag} with "
            "algorithm.dynamic_sampling = true, which replaces the prompts of a step only once they are "
            "scored; set one of them to 0 or false",
        ),
        Rule(
            lambda r: (
                r.algorithm.rollout_correction.kind == "none"
                and r.algorithm.rollout_correction.geometric_high is None
                and r.algorithm_options.off_policy_mask_threshold is None
            ),
            "missing-setting: rollout.max_lag = {0.rollout.max_lag} trains on tokens of earlier weights, and "
            "algorithm.rollout_correction.kind = 'none' would weight them as if they were of the present "
            "ones; set it to 'tis', 'mask' or 'icepop'",
        ),
        Rule(
            lambda r: r.train.reuse_rollout_logprobs,
            "contradiction: train.reuse_rollout_logprobs = true takes the engine's logprobs for the "
            "trainer's, which tokens of earlier weights do not have (rollout.max_lag = {0.rollout.max_lag}); "
            "leave it out",
        ),
    ),
    "run (rl)": (
        Rule(
            lambda r: r.rollout.group_size == 1 and r.algorithm_options.compares_group,
            "nothing-to-do: rollout.group_size = 1 makes every advantage 0 with algorithm.name = "
            "{0.algorithm.name!r}, which compares the samples of a group; set rollout.group_size >= 2 or "
            "algorithm.name = 'reinforce++'",
        ),
        Rule(
            lambda r: r.algorithm.mask_truncated and not r.sampling.can_end,
            "nothing-to-do: algorithm.mask_truncated = true with rollout.sampling.ignore_eos = true and no "
            "stop means that every completion is truncated, so no tokens would be trained on; leave one of "
            "them out",
        ),
        Rule(
            lambda r: r.sampling.temperature == 0,
            "nothing-to-do: rollout.sampling.temperature = 0 samples the same completion group_size times, "
            "so every advantage is 0; set it above 0 (for evaluations, set eval.temperature)",
        ),
        Rule(
            lambda r: not r.rewards and r.reward_model is None and r.environment is None,
            "missing-setting: rewards is empty; name at least one reward, such as rewards = [{{name = "
            "'verifier'}}], or a reward_model",
        ),
        Rule(
            lambda r: r.log.token_details and not r.rollout.save,
            "no-effect: log.token_details = true adds to the rows of rollouts/, which are not written with "
            "rollout.save = false; set rollout.save = true, or leave it out",
        ),
    ),
    "run (rm)": (
        Rule(
            lambda r: r.train.batch_invariant,
            "unsupported-combination: train.batch_invariant = true with kind = 'rm': the score head has no "
            "batch-invariant implementation; leave it out",
        ),
    ),
    "score": (
        Rule(
            lambda c: not c.rewards and c.reward_model is None,
            "missing-setting: there is nothing to score with; set rewards (--reward math) or "
            "reward_model.name (--reward-model NAME)",
            at="rewards",
        ),
    ),
    **TRAIN_RULES,
    "value": (
        Rule(
            lambda c: c.loss == "squared" and c.huber_delta != 1.0,
            "no-effect: huber_delta = {0.huber_delta} has no effect with loss = 'squared'; set loss = "
            "'huber', or leave it out",
        ),
        Rule(
            lambda c: c.name == "policy" and c.revision is not None,
            "no-effect: revision = {0.revision!r} has no effect with name = 'policy', which has "
            "model.revision; leave it out, or set name",
        ),
    ),
}
"""Table of settings -> its rules, in the order in which they are checked. A word in brackets says when they
hold."""
