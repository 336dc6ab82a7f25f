"""Combinations of settings that are refused, one row each.

A check of a table of settings (`lockstep.config.base.check`) calls `refuse(self, "algorithm.kl")`: the first
row whose `when` is true raises its error. docs/reference/rules.md lists all rows, and a test trips each one.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from string import Formatter
from typing import Any

from lockstep.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Rule:
    """A refused combination of settings of one table."""

    when: Callable[[Any], Any]
    """Given the table of settings, says whether it is this combination."""
    say: str
    """"CODE: what is wrong, why, and what to set", a template of str.format, where {0} is the table."""
    at: str = ""
    """The setting at fault, as the table names it; "": the first word after the code."""

    @property
    def code(self) -> str:
        """The kind of mistake, a key of `lockstep.errors.CODES`."""
        return self.say.partition(": ")[0]

    @property
    def text(self) -> str:
        """The template without the code."""
        return self.say.partition(": ")[2]

    @property
    def setting(self) -> str:
        """The setting at fault."""
        return self.at or self.text.partition(" ")[0]


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
            "nothing-to-do: desirable_weight = 0 and undesirable_weight = 0: nothing would be trained; "
            "raise one",
        ),
        Rule(
            lambda c: c.average and c.name == "kto",
            "no-effect: average = true has no effect with name = 'kto'; leave it out",
        ),
        Rule(
            lambda c: c.average is False and c.name == "orpo",
            "unsupported-combination: average = false with name = 'orpo': the odds of a whole answer are "
            "0 in any float; leave it out",
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
            "takes its place; leave one of them out (lam_value is that of the returns)",
        ),
    ),
    "algorithm.kl (ppo)": (
        Rule(
            lambda c: c.target is not None and c.coef == 0,
            "no-effect: target = {0.target} has no effect: kl.coef = 0 stays 0; set kl.coef above 0 and "
            "kl.place = 'reward', or leave target out",
        ),
        Rule(
            lambda c: c.target is not None and c.place == "loss",
            "no-effect: target = {0.target} has no effect: kl.place = 'loss' has a fixed coefficient; set "
            "kl.coef above 0 and kl.place = 'reward', or leave target out",
        ),
    ),
    "algorithm.rollout_correction": (
        Rule(
            lambda c: c.geometric_low is not None and c.geometric_high is None,
            "no-effect: geometric_low = {0.geometric_low} has no effect without geometric_high; set that, "
            "too, or leave it out",
        ),
        Rule(
            lambda c: c.kind == "icepop" and c.low >= c.high,
            "contradiction: low = {0.low} is not below high = {0.high}: every token would be masked",
        ),
    ),
    "cluster": (
        Rule(
            lambda c: c.gpus and c.slots != 1,
            "no-effect: slots = {0.slots} with gpus = {0.gpus}: there is one rank per GPU; leave slots "
            "out, or set gpus = 0",
        ),
        Rule(
            lambda c: c.dedicated_gpus and not c.remote_groups,
            "no-effect: dedicated_gpus = true without remote roles: all roles share the processes of the "
            "ranks; leave it out, or write several groups in colocate",
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
            "contradiction: engine.cuda_devices = {0.cuda_devices} must name as many GPUs as "
            "engine.replicas * engine.tp = {0.replicas} * {0.tp} need; list each replica's one after the "
            "other",
        ),
        Rule(
            lambda c: any(len(set(share)) < len(share) for share in c.shares),
            "duplicate: engine.cuda_devices = {0.cuda_devices} gives one replica a GPU twice; name {0.tp} "
            "different ones for each",
        ),
        Rule(
            lambda c: len(set(c.cuda_devices)) < len(c.cuda_devices) and c.memory_fraction is None,
            "missing-setting: engine.cuda_devices = {0.cuda_devices} puts several replicas on one GPU; "
            "set engine.memory_fraction, of the whole GPU for each of them",
            at="engine.memory_fraction",
        ),
    ),
    "engine (in the trainer's process)": (
        Rule(
            lambda c: c.transfer not in ("auto", "memory"),
            "no-effect: engine.transfer = {0.transfer!r}: engine.name = {0.name!r} is in the trainer's "
            "process and shares or copies its weights; leave it at 'auto', or set engine.process = "
            "'separate'",
        ),
    ),
    "engine (seeds)": (
        Rule(
            lambda c: c.unseeded and c.batch_invariant,
            "no-effect: engine.unseeded = true has no effect with engine.batch_invariant = true: each "
            "sample has its seed then; leave it out",
        ),
    ),
    "engine (servers)": (
        Rule(
            lambda c: c.python is not None and c.url is not None,
            "contradiction: engine.python = '{0.python}' starts a server and engine.url = {0.url!r} is "
            "one that runs already; leave one of them out",
            at="engine.url",
        ),
    ),
    "eval": (
        Rule(
            lambda c: c.samples_per_prompt > 1 and c.temperature == 0,
            "unsupported-combination: samples_per_prompt = {0.samples_per_prompt} at temperature = 0 "
            "would sample one and the same completion every time; set temperature above 0, or "
            "samples_per_prompt = 1",
        ),
    ),
    "generate": (
        Rule(
            lambda c: c.sampling.temperature == 0 and c.n > 1,
            "unsupported-combination: n = {0.n} with sampling.temperature = 0 would sample one and the "
            "same completion {0.n} times; set sampling.temperature above 0, or n = 1",
        ),
        Rule(
            lambda c: c.model.lora is not None,
            "unsupported-combination: model.lora is for training: fresh adapters change nothing; name a "
            "run directory whose adapters were trained, or leave model.lora out",
        ),
        Rule(
            lambda c: c.iteration is not None and c.max_samples is not None,
            "contradiction: iteration = {0.iteration} takes rollout_batch_size = {0.rollout_batch_size} "
            "prompts; leave max_samples out (data.size bounds the data)",
            at="max_samples",
        ),
        Rule(
            lambda c: c.iteration is None and c.max_samples is None and c.data.generated and not c.data.size,
            "missing-setting: data.source = {0.data.source!r} has no end; set max_samples, iteration or "
            "data.size",
            at="max_samples",
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
            "no-effect: aggregation = {0.aggregation!r} has no effect with one model; name others, or "
            "leave it out",
        ),
    ),
    "rewards": (
        Rule(
            lambda c: c.secrets and ":" not in c.name,
            "no-effect: secrets has no effect with name = {0.name!r}; leave it out (http has token_env)",
        ),
    ),
    "rewards (http)": (
        Rule(
            lambda c: c.name == "http" and not re.fullmatch(r"https?://[!-~]+", c.url or ""),
            "missing-setting: url = {0.url!r} with name = 'http'; set the service's address, such as url "
            "= 'http://127.0.0.1:8000/score'",
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
            "out-of-range: top_k = 0 would leave no token; set -1 to turn it off",
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
            "{0.algorithm.name!r}, whose baseline is of each prompt with another one's answer; set "
            "batch_size to 2 or more",
        ),
    ),
    "run (offline)": (
        Rule(
            lambda r: r.train.reuse_rollout_logprobs is not None,
            "no-effect: train.reuse_rollout_logprobs = {0.train.reuse_rollout_logprobs} has no effect "
            "with kind = {0.kind!r}, which has no rollouts; leave it out",
        ),
    ),
    "run (ppo)": (
        Rule(
            lambda r: r.value.warmup_batches >= r.steps,
            "nothing-to-do: value.warmup_batches = {0.value.warmup_batches} is not below steps = "
            "{0.steps}: the policy would never be trained; lower it, or raise steps",
        ),
        Rule(
            lambda r: r.algorithm.kl.target is not None and r.algorithm.kl.horizon < r.rollout.samples,
            "out-of-range: algorithm.kl.horizon = {0.algorithm.kl.horizon} is below the "
            "{0.rollout.samples} rollouts of a step: the coefficient would change by more than a fifth at "
            "once; raise it",
        ),
        Rule(
            lambda r: r.value.train(r.train).execution == "deepcompile",
            "unsupported-combination: train.execution = 'deepcompile' with kind = 'ppo': its graph holds "
            "the policy's head, and a value model has another one; set train.execution = 'compile' or "
            "'joint'",
        ),
    ),
    "run (record)": (
        Rule(
            lambda r: r.record.enabled and r.record.first_step >= r.steps,
            "nothing-to-do: record.first_step = {0.record.first_step} is not below steps = {0.steps}, so "
            "nothing would be recorded; lower it, or raise steps (they count from 0)",
        ),
    ),
    "run (remote roles)": (
        Rule(
            lambda r: r.remote_roles,
            "unsupported-combination: cluster.colocate has several groups with kind = {0.kind!r}: the "
            "roles of such a run are in one process; leave it out",
        ),
    ),
    "run (rl offload)": (
        Rule(
            lambda r: len(set(r.offload)) < len(r.offload),
            "duplicate: offload = {0.offload} names a role twice; name each once",
        ),
        Rule(
            lambda r: r.train.cuda_graph and {"ref", "value"} & set(r.offload),
            "unsupported-combination: offload = {0.offload} with train.cuda_graph = true: a graph reads "
            "weights where they were when it was captured; name 'policy' and 'reward_model' alone, or "
            "leave train.cuda_graph out",
        ),
        Rule(
            lambda r: r.record.enabled and "value" in r.offload,
            "unsupported-combination: offload = {0.offload} with record.enabled = true: recording reads "
            "the value model's weights between its calls; leave 'value' out",
        ),
    ),
    "run (rl remote roles)": (
        Rule(
            lambda r: r.train.backend not in ("local", "fsdp2"),
            "unsupported-combination: cluster.colocate has several groups with train.backend = "
            "{0.train.backend!r}: remote roles need 'local' or 'fsdp2'; set one of them, or write one "
            "group",
        ),
        Rule(
            lambda r: r.record.enabled and "value" in r.remote_roles,
            "unsupported-combination: record.enabled = true with 'value' as a remote role in "
            "cluster.colocate: only the policy's process records inputs; put it with the policy, or set "
            "record.enabled = false",
        ),
    ),
    "run (rl sizes)": (
        Rule(
            lambda r: (
                r.eval.enabled and r.eval.max_tokens is not None and r.eval.max_tokens < r.sampling.min_tokens
            ),
            "contradiction: eval.max_tokens = {0.eval.max_tokens} is below rollout.sampling.min_tokens = "
            "{0.sampling.min_tokens}, which evaluations have as well; raise eval.max_tokens or lower "
            "rollout.sampling.min_tokens",
        ),
        Rule(
            lambda r: r.data.size is not None and r.data.size < r.rollout.prompts_per_step,
            "contradiction: data.size = {0.data.size} is below one rollout batch of "
            "rollout.prompts_per_step = {0.rollout.prompts_per_step} prompts; raise data.size or lower "
            "rollout.prompts_per_step",
        ),
        Rule(
            lambda r: r.train.token_budget != "auto" and r.train.token_budget < r.longest_unit,
            "contradiction: data.max_prompt_tokens + rollout.sampling.max_tokens = {0.longest_unit} "
            "tokens do not fit one micro-batch of train.token_budget = {0.train.token_budget}; raise "
            "train.token_budget or lower one of the two",
            at="train.token_budget",
        ),
        Rule(
            lambda r: r.engine.kv_cache_tokens is not None and r.engine.kv_cache_tokens < r.longest_context,
            "contradiction: engine.kv_cache_tokens = {0.engine.kv_cache_tokens} is below the "
            "{0.longest_context} tokens that one sample of training or evaluation can need "
            "(data.max_prompt_tokens + rollout.sampling.max_tokens - 1; the evaluation before training "
            "may use more, see eval.before_max_tokens_factor); raise engine.kv_cache_tokens",
        ),
        Rule(
            lambda r: r.rollout.samples % r.train.minibatches,
            "not-divisible: train.minibatches = {0.train.minibatches} does not divide the "
            "{0.rollout.samples} rollouts of a step (rollout.prompts_per_step * rollout.group_size)",
        ),
    ),
    "run (rl)": (
        Rule(
            lambda r: r.rollout.group_size == 1 and r.algorithm_options.compares_group,
            "nothing-to-do: rollout.group_size = 1 gives every advantage 0 under algorithm.name = "
            "{0.algorithm.name!r}, which compares the samples of a group; set rollout.group_size >= 2 or "
            "algorithm.name = 'reinforce++'",
        ),
        Rule(
            lambda r: r.algorithm.mask_truncated and not r.sampling.can_end,
            "nothing-to-do: algorithm.mask_truncated = true with rollout.sampling.ignore_eos = true and "
            "no stop: every completion is cut off, so nothing would be trained on; leave one of them out",
        ),
        Rule(
            lambda r: r.sampling.temperature == 0,
            "nothing-to-do: rollout.sampling.temperature = 0 samples one and the same completion "
            "group_size times, so every advantage is 0; set it above 0 (evaluation has eval.temperature)",
        ),
        Rule(
            lambda r: not r.rewards and r.reward_model is None,
            "missing-setting: rewards is empty; name at least one, such as rewards = [{{name = "
            "'verifier'}}], or a reward_model",
        ),
    ),
    "run (rm)": (
        Rule(
            lambda r: r.train.batch_invariant,
            "unsupported-combination: train.batch_invariant = true with kind = 'rm': the head that gives "
            "scores has no such form; leave it out",
        ),
    ),
    "score": (
        Rule(
            lambda c: not c.rewards and c.reward_model is None,
            "missing-setting: nothing to score with: set rewards (--reward math) or reward_model.name "
            "(--reward-model NAME)",
            at="rewards",
        ),
    ),
    "train": (
        Rule(
            lambda c: c.tp_plan != "auto" and c.tp == 1,
            "no-effect: train.tp_plan = {0.tp_plan!r} splits nothing with train.tp = 1; set train.tp, or "
            "leave train.tp_plan at 'auto'",
        ),
        Rule(
            lambda c: c.cuda_graph and c.execution != "joint",
            "no-effect: train.cuda_graph = true has no effect with train.execution = {0.execution!r}: it "
            "replays joint graphs; set train.execution = 'joint', or leave train.cuda_graph out",
        ),
    ),
    "train (backends of several ranks)": (
        Rule(
            lambda c: c.optimizer == "adamw8bit",
            "unsupported-combination: train.optimizer = 'adamw8bit' is not available with train.backend = "
            "{0.backend!r}: its blocks of 8-bit codes would lie across the ranks' shards; set "
            "train.optimizer = 'adamw', and train.optimizer_device = 'cpu' for memory",
        ),
        Rule(
            lambda c: c.device.startswith("cuda:"),
            "unsupported-combination: train.device = {0.device!r} names one GPU, and train.backend = "
            "{0.backend!r} gives each rank one: local rank r takes cuda:r. Set train.device = 'cuda', and "
            "CUDA_VISIBLE_DEVICES for fewer",
        ),
    ),
    "train (batch-invariant)": (
        Rule(
            lambda c: c.batch_invariant and c.tp > 1,
            "unsupported-combination: train.batch_invariant = true with train.tp = {0.tp}: sums over "
            "ranks add up in another order than one rank does, so that logprobs differ in their last bits "
            "from those of one rank; set train.tp = 1, or train.batch_invariant = false",
            at="train.tp",
        ),
        Rule(
            lambda c: c.batch_invariant and c.ring > 1,
            "unsupported-combination: train.batch_invariant = true with train.ring = {0.ring}: its ranks "
            "each attend to a part of the keys and merge what they got, so that logprobs differ in their "
            "last bits from those of one rank; set train.ring = 1, or train.batch_invariant = false",
            at="train.ring",
        ),
        Rule(
            lambda c: c.reuse_rollout_logprobs and c.batch_invariant is False,
            "unsupported-combination: train.reuse_rollout_logprobs = true needs train.batch_invariant = "
            "true: elsewhere the engine's logprobs are not the trainer's. Leave it out, and they are "
            "computed",
        ),
    ),
    "train (deepspeed)": (
        Rule(
            lambda c: c.execution == "deepcompile" and c.zero_stage == 0,
            "unsupported-combination: train.execution = 'deepcompile' (--deepcompile) works with ZeRO 1, "
            "2 and 3 only; set train.zero_stage = 1 (--zero-stage 1), or another execution",
        ),
        Rule(
            lambda c: c.execution == "joint" and c.zero_stage == 3,
            "unsupported-combination: train.execution = 'joint' (--joint) needs ZeRO 0, 1 or 2: at stage "
            "3 weights are gathered by hooks of modules, and none runs inside of the graph; set "
            "train.zero_stage = 2 (--zero-stage 2), or 'compile' (--compile)",
        ),
        Rule(
            lambda c: c.ring > 1,
            "unsupported-combination: train.ring = {0.ring} is not available with train.backend = "
            "'deepspeed': its data-parallel group is all ranks; set train.backend = 'fsdp2', or "
            "train.ring = 1",
        ),
        Rule(
            lambda c: c.tp > 1,
            "unsupported-combination: train.tp = {0.tp} is not available with train.backend = "
            "'deepspeed': its AutoTP puts modules of its own in the place of the policy's, and a part of "
            "the vocabulary into the head, whose weight the loss reads; set train.backend = 'fsdp2', or "
            "train.tp = 1",
        ),
        Rule(
            lambda c: c.optimizer_device == "cpu" and c.zero_stage == 0,
            "unsupported-combination: train.optimizer_device = 'cpu' needs train.zero_stage = 1, 2 or 3: "
            "at stage 0 DeepSpeed has no partition that it could put into host memory",
        ),
        Rule(
            lambda c: c.parameter_device == "cpu" and c.zero_stage != 3,
            "unsupported-combination: train.parameter_device = 'cpu' needs train.zero_stage = 3, not "
            "{0.zero_stage}: at the others every rank computes with whole weights where they are",
        ),
        Rule(
            lambda c: c.parameter_device == "cpu" and c.optimizer_device != "cpu",
            "unsupported-combination: train.parameter_device = 'cpu' with DeepSpeed needs "
            "train.optimizer_device = 'cpu' too: the step writes the weights where the masters are",
        ),
        Rule(
            lambda c: c.execution == "deepcompile" and "cpu" in (c.optimizer_device, c.parameter_device),
            "unsupported-combination: train.execution = 'deepcompile' does not offload; set "
            "train.optimizer_device and train.parameter_device to 'model', or train.execution = 'compile'",
        ),
    ),
    "train (deepspeed's optimizers)": (
        Rule(
            lambda c: c.optimizer == "adamw8bit",
            "unsupported-combination: train.optimizer = 'adamw8bit' is not available with train.backend = "
            "'deepspeed', whose optimizers update flat float32 partitions; set 'adamw' or 'sgd', or "
            "train.backend = 'fsdp2'",
        ),
    ),
    "train (joint graphs)": (
        Rule(
            lambda c: c.execution == "joint" and c.static_capacity is False,
            "unsupported-combination: train.static_capacity = false with train.execution = 'joint' makes "
            "one graph of the whole decoder for every length of a pack; leave it out, or set "
            "train.execution = 'compile'",
        ),
    ),
    "train (ring)": (
        Rule(
            lambda c: c.ring > 1 and c.layout not in ("auto", "packed"),
            "unsupported-combination: train.ring = {0.ring}: it shards packs, and train.layout = "
            "{0.layout!r} has none; set train.layout = 'packed', or train.ring = 1",
        ),
        Rule(
            lambda c: c.ring > 1 and c.execution not in ("eager", "auto"),
            "unsupported-combination: train.ring = {0.ring}: ring attention talks to other ranks inside "
            "of a layer, which layers under train.execution = {0.execution!r} cannot; set train.execution "
            "= 'eager', or train.ring = 1",
        ),
        Rule(
            lambda c: c.ring > 1 and c.attention not in ("auto", "varlen", "sdpa"),
            "unsupported-combination: train.ring = {0.ring}: ring attention runs the kernels of 'varlen', "
            "not of train.attention = {0.attention!r}; set train.attention = 'varlen', or train.ring = 1",
        ),
    ),
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
