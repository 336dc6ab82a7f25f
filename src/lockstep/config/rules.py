"""Combinations of settings that are refused, one row each.

A check of a table of settings (`lockstep.config.base.check`) calls `refuse(self, "algorithm.kl")`: the first
row whose `when` is true raises its error. docs/reference/rules.md lists all rows, and a test trips each one.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from lockstep.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Rule:
    """A refused combination of settings of one table."""

    code: str
    setting: str
    """The setting at fault, as the table names it."""
    when: Callable[[Any], Any]
    """Given the table of settings, says whether it is this combination."""
    say: str
    """What is wrong, why, and what to set: a template of str.format, where {0} is the table."""


def refuse(table: Any, name: str) -> None:
    """Raise ConfigError for the first rule that a table of settings breaks.

    Args:
        name: which rules, a key of RULES.
    """
    for rule in RULES[name]:
        if rule.when(table):
            raise ConfigError(rule.say.format(table), code=rule.code, setting=rule.setting)


RULES: dict[str, tuple[Rule, ...]] = {
    "algorithm (dpo)": (
        Rule(
            "nothing-to-do",
            "desirable_weight",
            lambda c: c.desirable_weight == 0 == c.undesirable_weight,
            "desirable_weight = 0 and undesirable_weight = 0: nothing would be trained; raise one",
        ),
        Rule(
            "no-effect",
            "average",
            lambda c: c.average and c.name == "kto",
            "average = true has no effect with name = 'kto'; leave it out",
        ),
        Rule(
            "unsupported-combination",
            "average",
            lambda c: c.average is False and c.name == "orpo",
            "average = false with name = 'orpo': the odds of a whole answer are 0 in any float; leave it out",
        ),
    ),
    "algorithm (ppo)": (
        Rule(
            "no-effect",
            "lam",
            lambda c: c.lam_length_alpha is not None and c.lam != 1.0,
            "lam = {0.lam} has no effect with lam_length_alpha = {0.lam_length_alpha}, which takes its "
            "place; leave one of them out (lam_value is that of the returns)",
        ),
    ),
    "algorithm.kl (ppo)": (
        Rule(
            "no-effect",
            "target",
            lambda c: c.target is not None and c.coef == 0,
            "target = {0.target} has no effect: kl.coef = 0 stays 0; set kl.coef above 0 and kl.place = "
            "'reward', or leave target out",
        ),
        Rule(
            "no-effect",
            "target",
            lambda c: c.target is not None and c.place == "loss",
            "target = {0.target} has no effect: kl.place = 'loss' has a fixed coefficient; set kl.coef "
            "above 0 and kl.place = 'reward', or leave target out",
        ),
    ),
    "algorithm.rollout_correction": (
        Rule(
            "no-effect",
            "geometric_low",
            lambda c: c.geometric_low is not None and c.geometric_high is None,
            "geometric_low = {0.geometric_low} has no effect without geometric_high; set that, too, or "
            "leave it out",
        ),
        Rule(
            "contradiction",
            "low",
            lambda c: c.kind == "icepop" and c.low >= c.high,
            "low = {0.low} is not below high = {0.high}: every token would be masked",
        ),
    ),
    "engine": (
        Rule(
            "unsupported-combination",
            "engine.transfer",
            lambda c: c.url is not None and c.transfer == "ipc",
            "engine.transfer = 'ipc' needs a server that Lockstep started on the trainer's GPU; set 'auto',"
            " 'collective' or 'disk' with engine.url",
        ),
        Rule(
            "wrong-format",
            "engine.url",
            lambda c: c.url is not None and not c.url.startswith(("http://", "https://")),
            "engine.url = {0.url!r} does not start with http:// or https://, such as http://127.0.0.1:8000",
        ),
    ),
    "engine (seeds)": (
        Rule(
            "no-effect",
            "engine.unseeded",
            lambda c: c.unseeded and c.batch_invariant,
            "engine.unseeded = true has no effect with engine.batch_invariant = true: each sample has its "
            "seed then; leave it out",
        ),
    ),
    "eval": (
        Rule(
            "unsupported-combination",
            "samples_per_prompt",
            lambda c: c.samples_per_prompt > 1 and c.temperature == 0,
            "samples_per_prompt = {0.samples_per_prompt} at temperature = 0 would sample one and the same "
            "completion every time; set temperature above 0, or samples_per_prompt = 1",
        ),
    ),
    "generate": (
        Rule(
            "unsupported-combination",
            "n",
            lambda c: c.sampling.temperature == 0 and c.n > 1,
            "n = {0.n} with sampling.temperature = 0 would sample one and the same completion {0.n} times; "
            "set sampling.temperature above 0, or n = 1",
        ),
        Rule(
            "unsupported-combination",
            "model.lora",
            lambda c: c.model.lora is not None,
            "model.lora is for training: fresh adapters change nothing; name a run directory whose adapters"
            " were trained, or leave model.lora out",
        ),
        Rule(
            "contradiction",
            "max_samples",
            lambda c: c.iteration is not None and c.max_samples is not None,
            "iteration = {0.iteration} takes rollout_batch_size = {0.rollout_batch_size} prompts; leave "
            "max_samples out (data.size bounds the data)",
        ),
        Rule(
            "missing-setting",
            "max_samples",
            lambda c: c.iteration is None and c.max_samples is None and c.data.generated and not c.data.size,
            "data.source = {0.data.source!r} has no end; set max_samples, iteration or data.size",
        ),
    ),
    "record": (
        Rule(
            "nothing-to-do",
            "last_step",
            lambda c: c.last_step is not None and c.last_step < c.first_step,
            "last_step = {0.last_step} is before first_step = {0.first_step}, so nothing would be recorded;"
            " raise last_step, or leave it out for the run's last step",
        ),
    ),
    "reward_model": (
        Rule(
            "no-effect",
            "aggregation",
            lambda c: c.aggregation != "mean" and not c.others,
            "aggregation = {0.aggregation!r} has no effect with one model; name others, or leave it out",
        ),
    ),
    "rewards": (
        Rule(
            "no-effect",
            "secrets",
            lambda c: c.secrets and ":" not in c.name,
            "secrets has no effect with name = {0.name!r}; leave it out (http has token_env)",
        ),
    ),
    "rollout.sampling": (
        Rule(
            "contradiction",
            "min_tokens",
            lambda c: c.min_tokens > c.max_tokens,
            "min_tokens = {0.min_tokens} exceeds max_tokens = {0.max_tokens}; lower min_tokens",
        ),
        Rule(
            "out-of-range",
            "top_k",
            lambda c: c.top_k == 0,
            "top_k = 0 would leave no token; set -1 to turn it off",
        ),
    ),
    "score": (
        Rule(
            "missing-setting",
            "rewards",
            lambda c: not c.rewards and c.reward_model is None,
            "nothing to score with: set rewards (--reward math) or reward_model.name (--reward-model NAME)",
        ),
    ),
    "train": (
        Rule(
            "no-effect",
            "train.tp_plan",
            lambda c: c.tp_plan != "auto" and c.tp == 1,
            "train.tp_plan = {0.tp_plan!r} splits nothing with train.tp = 1; set train.tp, or leave "
            "train.tp_plan at 'auto'",
        ),
        Rule(
            "no-effect",
            "train.cuda_graph",
            lambda c: c.cuda_graph and c.execution != "joint",
            "train.cuda_graph = true has no effect with train.execution = {0.execution!r}: it replays joint"
            " graphs; set train.execution = 'joint', or leave train.cuda_graph out",
        ),
    ),
    "train (joint graphs)": (
        Rule(
            "unsupported-combination",
            "train.static_capacity",
            lambda c: c.execution == "joint" and c.static_capacity is False,
            "train.static_capacity = false with train.execution = 'joint' makes one graph of the whole "
            "decoder for every length of a pack; leave it out, or set train.execution = 'compile'",
        ),
    ),
    "train (batch-invariant)": (
        Rule(
            "unsupported-combination",
            "train.tp",
            lambda c: c.batch_invariant and c.tp > 1,
            "train.batch_invariant = true with train.tp = {0.tp}: sums over ranks add up in another order "
            "than one rank does, so that logprobs differ in their last bits from those of one rank; set "
            "train.tp = 1, or train.batch_invariant = false",
        ),
        Rule(
            "unsupported-combination",
            "train.ring",
            lambda c: c.batch_invariant and c.ring > 1,
            "train.batch_invariant = true with train.ring = {0.ring}: its ranks each attend to a part of "
            "the keys and merge what they got, so that logprobs differ in their last bits from those of one"
            " rank; set train.ring = 1, or train.batch_invariant = false",
        ),
        Rule(
            "unsupported-combination",
            "train.reuse_rollout_logprobs",
            lambda c: c.reuse_rollout_logprobs and c.batch_invariant is False,
            "train.reuse_rollout_logprobs = true needs train.batch_invariant = true: elsewhere the engine's"
            " logprobs are not the trainer's. Leave it out, and they are computed",
        ),
    ),
    "train (ring)": (
        Rule(
            "unsupported-combination",
            "train.ring",
            lambda c: c.ring > 1 and c.layout not in ("auto", "packed"),
            "train.ring = {0.ring}: it shards packs, and train.layout = {0.layout!r} has none; set "
            "train.layout = 'packed', or train.ring = 1",
        ),
        Rule(
            "unsupported-combination",
            "train.ring",
            lambda c: c.ring > 1 and c.execution not in ("eager", "auto"),
            "train.ring = {0.ring}: ring attention talks to other ranks inside of a layer, which layers "
            "under train.execution = {0.execution!r} cannot; set train.execution = 'eager', or train.ring ="
            " 1",
        ),
        Rule(
            "unsupported-combination",
            "train.ring",
            lambda c: c.ring > 1 and c.attention not in ("auto", "varlen", "sdpa"),
            "train.ring = {0.ring}: ring attention runs the kernels of 'varlen', not of train.attention = "
            "{0.attention!r}; set train.attention = 'varlen', or train.ring = 1",
        ),
    ),
    "train (backends of several ranks)": (
        Rule(
            "unsupported-combination",
            "train.optimizer",
            lambda c: c.optimizer == "adamw8bit",
            "train.optimizer = 'adamw8bit' is not available with train.backend = {0.backend!r}: its blocks "
            "of 8-bit codes would lie across the ranks' shards; set train.optimizer = 'adamw', and "
            "train.optimizer_device = 'cpu' for memory",
        ),
        Rule(
            "unsupported-combination",
            "train.device",
            lambda c: c.device.startswith("cuda:"),
            "train.device = {0.device!r} names one GPU, and train.backend = {0.backend!r} gives each rank "
            "one: local rank r takes cuda:r. Set train.device = 'cuda', and CUDA_VISIBLE_DEVICES for fewer",
        ),
    ),
}
"""Table of settings -> its rules, in the order in which they are checked. A word in brackets says when they
hold."""
