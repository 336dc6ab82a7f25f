"""The kinds of run. A run is one of these, whole; nothing else decides what happens."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, Literal, Self

from lockstep.config.algorithm import PER_GROUP, DPOConfig, GRPOConfig, RewardModelLossConfig, SFTConfig
from lockstep.config.base import NonNegativeInt, PositiveInt, check
from lockstep.config.batch import RewardRoleConfig
from lockstep.config.cluster import ClusterConfig, _check_engine_gpus
from lockstep.config.data import DataConfig
from lockstep.config.declarations import backends, engines
from lockstep.config.engine import EngineConfig, has_own_weights, resolved
from lockstep.config.rollout import RewardConfig, RolloutConfig, SamplingConfig
from lockstep.config.run_config import RunConfig as RunConfig
from lockstep.config.run_config import check_ranks as check_ranks
from lockstep.config.support import check_support
from lockstep.config.train import (
    EvalConfig,
    _check_best,
    token_slots,
)
from lockstep.errors import ConfigError

RL_METRICS = ("strict_accuracy", "lenient_accuracy", "mean_reward", "mean_completion_tokens")
OFFLINE_METRICS = {"sft": ("loss", "perplexity"), "dpo": ("loss", "accuracy", "reward_margin")}
OFFLINE_METRICS["rm"] = OFFLINE_METRICS["dpo"]
"""The metrics of an evaluation, written eval/NAME."""


def _check_eval_tokens(run: GRPORun) -> None:
    """Evaluations sample as training does, but for temperature and max_tokens."""
    least, most = run.rollout.sampling.min_tokens, run.eval.max_tokens
    if most is not None and most < least and (run.eval.before or run.eval.after or run.eval.every > 0):
        raise ConfigError(
            f"contradiction: eval.max_tokens = {most} is below rollout.sampling.min_tokens = {least}, which "
            "evaluations have as well; raise eval.max_tokens or lower rollout.sampling.min_tokens"
        )


Role = Literal["policy", "ref", "value", "reward_model"]


class GRPORun(RunConfig):
    """GRPO and its family, on prompts, with rewards."""

    kind: Literal["grpo"] = "grpo"
    algorithm: GRPOConfig = GRPOConfig()
    data: DataConfig = DataConfig()
    eval_data: DataConfig | None = None
    """Held-out prompts. None: the same source with another seed (generated data) or the rows after the
    training rows (files); prompts with the same text are left out of training. Without an evaluation
    (eval.before, eval.every, eval.after) nothing is held out."""
    rollout: RolloutConfig = RolloutConfig()
    rewards: tuple[RewardConfig, ...] = (RewardConfig(),)
    reward_model: RewardRoleConfig | None = None
    """None: rewards are functions and verifiers only."""
    engine: EngineConfig = EngineConfig()
    offload: tuple[Role, ...] = ()
    """Roles whose GPU memory is offloaded to host memory while they are idle; the copies make a step slower.
    policy: the optimizer states. value: the value model's weights and optimizer states. ref, reward_model:
    everything. Works with train.backend local and fsdp2; results stay bitwise the same. The engine has
    engine.offload."""
    eval: EvalConfig = EvalConfig()

    online: ClassVar[bool] = True

    @property
    def algorithm_options(self) -> GRPOConfig:
        """See RunConfig."""
        return self.algorithm.resolved()

    @property
    def has_ref(self) -> bool:
        """See RunConfig."""
        return self.algorithm.kl.coef > 0

    @property
    def offloaded(self) -> tuple[Role, ...]:
        """See RunConfig."""
        return self.offload

    def columns_read(self, config: DataConfig, row: Mapping[str, Any]) -> list[str]:
        """See RunConfig."""
        return [] if config.messages_column in row else ["prompt_column"]

    @property
    def reward_functions(self) -> tuple[RewardConfig, ...]:
        """See RunConfig."""
        return self.rewards

    def without_rewards(self) -> Self:
        """See RunConfig."""
        return self.model_copy(update={"rewards": ()})

    @property
    def sampling(self) -> SamplingConfig:
        """See RunConfig."""
        return self.rollout.sampling

    @property
    def keeps_rollouts(self) -> bool:
        """See RunConfig."""
        return self.rollout.save

    @property
    def longest_document(self) -> int:
        """See RunConfig."""
        return self.longest_unit

    def is_evaluation_due(self, name: Literal["before", "during", "after"], done: int) -> bool:
        """See RunConfig."""
        if name == "during":
            return self.eval.every > 0 and done % self.eval.every == 0
        return self.eval.before if name == "before" else self.eval.after

    @property
    def roles(self) -> tuple[Role, ...]:
        """The models of the run that hold memory of their own."""
        ref = self.has_ref and self.model.lora is None
        own: tuple[Role, ...] = ("policy", "ref") if ref else ("policy",)
        return own if self.reward_model is None else (*own, "reward_model")

    @property
    def documents_per_update(self) -> int:
        """Rollouts of one minibatch."""
        return self.rollout.prompts_per_step * self.rollout.group_size // self.train.minibatches

    @property
    def documents_setting(self) -> str:
        """Which settings decide that."""
        return "rollout.prompts_per_step * rollout.group_size / train.minibatches"

    @property
    def longest_unit(self) -> int:
        """Prompt and completion of training."""
        return self.data.max_prompt_tokens + self.rollout.sampling.max_tokens

    @property
    def tokens_per_step(self) -> int:
        """See RunConfig."""
        return self.rollout.prompts_per_step * self.rollout.group_size * self.longest_unit

    @property
    def has_groups(self) -> bool:
        """See RunConfig."""
        return self.rollout.group_size > 1

    @property
    def engine_name(self) -> str:
        """See RunConfig."""
        return self.engine.name

    @property
    def engine_devices(self) -> tuple[int, ...]:
        """See RunConfig."""
        return self.engine.cuda_devices

    @property
    def engine_has_own_memory(self) -> bool:
        """See RunConfig."""
        return self.engine.name not in engines() or has_own_weights(self.engine)

    @property
    def compiles_sampling(self) -> bool:
        """See RunConfig."""
        return self.engine.name == "native" and not self.engine.eager

    def _check_places(self, cluster: ClusterConfig) -> None:
        """See RunConfig."""
        cluster.check_roles(self.roles)
        if not self.remote_roles:
            return
        if self.train.backend not in ("local", "fsdp2"):
            raise ConfigError(
                "unsupported-combination: cluster.colocate has several groups with train.backend = "
                f"{self.train.backend!r}: remote roles need 'local' or 'fsdp2'; set one "
                "of them, or write one group"
            )
        if self.record.enabled and "value" in self.remote_roles:
            raise ConfigError(
                "unsupported-combination: record.enabled = true with 'value' as a remote role in "
                "cluster.colocate: only the policy's process records inputs; put it with the policy, "
                "or set record.enabled = false"
            )

    def _check_engine_gpus(self, cluster: ClusterConfig) -> None:
        """See RunConfig."""
        _check_engine_gpus(self.engine, cluster)

    def with_engine(self, **settings: Any) -> Self:
        """See RunConfig."""
        return self.model_copy(update={"engine": self.engine.model_copy(update=settings)})

    def with_auto_engine(self, *, native: bool) -> Self:
        """See RunConfig."""
        if self.engine.name != "auto":
            return self
        run = self.model_copy(update={"engine": resolved(self.engine, native=native)})
        check_support(run)
        return run

    @property
    def longest_sequence(self) -> int:
        """Prompt and completion of training and evaluations, as far as settings allow them."""
        tokens, prompts = self.rollout.sampling.max_tokens, self.data.max_prompt_tokens
        eval_prompts = prompts if self.eval_data is None else self.eval_data.max_prompt_tokens
        eval_tokens = self.eval.max_tokens or tokens
        evaluated = [eval_tokens] * (self.eval.after or self.eval.every > 0)
        evaluated += [eval_tokens * self.eval.before_max_tokens_factor] * self.eval.before
        return max([prompts + tokens, *(eval_prompts + each for each in evaluated)])

    @check
    def _check(self) -> GRPORun:
        if self.rollout.group_size == 1 and self.algorithm.resolved().advantage in (
            *PER_GROUP,
            "group_mean_batch_std",
        ):
            raise ConfigError(
                "nothing-to-do: rollout.group_size = 1 gives every advantage 0 under algorithm.name = "
                f"{self.algorithm.name!r}, which compares the samples of a group; set rollout.group_size >= "
                "2 or algorithm.name = 'reinforce++'"
            )
        sampling = self.rollout.sampling
        ends = sampling.stop or sampling.stop_token_ids or not sampling.ignore_eos
        if self.algorithm.mask_truncated and not ends:
            raise ConfigError(
                "nothing-to-do: algorithm.mask_truncated = true with rollout.sampling.ignore_eos = true and "
                "no stop: every completion is cut off, so nothing would be trained on; leave one of them out"
            )
        if self.rollout.sampling.temperature == 0:
            raise ConfigError(
                "nothing-to-do: rollout.sampling.temperature = 0 samples one and the same completion "
                "group_size times, so every advantage is 0; set it above 0 (evaluation has eval.temperature)"
            )
        if not self.rewards and self.reward_model is None:
            raise ConfigError(
                "missing-setting: rewards is empty; name at least one, such as rewards = [{name = "
                "'verifier'}], or a reward_model"
            )
        return self

    @check
    def _check_sizes(self) -> GRPORun:
        _check_best(self.checkpoint, every=self.eval.every, known=RL_METRICS)
        _check_eval_tokens(self)
        if self.data.size is not None and self.data.size < self.rollout.prompts_per_step:
            raise ConfigError(
                f"contradiction: data.size = {self.data.size} is below one rollout batch of "
                f"rollout.prompts_per_step = {self.rollout.prompts_per_step} prompts; raise data.size or "
                "lower rollout.prompts_per_step"
            )
        longest = self.data.max_prompt_tokens + self.rollout.sampling.max_tokens
        if longest > token_slots(self.train) and self.train.token_budget != "auto":
            raise ConfigError(
                f"contradiction: data.max_prompt_tokens + rollout.sampling.max_tokens = {longest} tokens do "
                f"not fit one micro-batch of train.token_budget = {self.train.token_budget}; raise "
                "train.token_budget or lower one of the two",
                setting="train.token_budget",
            )
        cache = self.engine.kv_cache_tokens
        if cache is not None and cache < self.longest_sequence - 1:
            raise ConfigError(
                f"contradiction: engine.kv_cache_tokens = {cache} is below the {self.longest_sequence - 1} "
                "tokens that one sample of training or evaluation can need (data.max_prompt_tokens + "
                "rollout.sampling.max_tokens - 1; the evaluation before training may use more, see "
                "eval.before_max_tokens_factor); raise engine.kv_cache_tokens"
            )
        samples = self.rollout.prompts_per_step * self.rollout.group_size
        if samples % self.train.minibatches:
            raise ConfigError(
                f"not-divisible: train.minibatches = {self.train.minibatches} does not divide the {samples} "
                "rollouts of a step (rollout.prompts_per_step * rollout.group_size)"
            )
        return self

    @check
    def _check_engine(self) -> GRPORun:
        engine = engines().get(self.engine.name)
        served = self.engine.process == "separate" and self.engine.name in ("auto", "native", "hf")
        alone = self.train.batch_invariant if served else self.engine.batch_invariant
        if self.train.deterministic and has_own_weights(self.engine) and not alone:
            raise ConfigError(
                "unsupported-combination: train.deterministic = true with engine.name = "
                f"{self.engine.name!r}: what it decodes together is a matter of timing, and its samples "
                f"change with it; set {'train' if served else 'engine'}.batch_invariant = true, or "
                "engine.name = 'native' or 'hf' in the trainer's process"
            )
        if self.train.reuse_rollout_logprobs and engine is not None and not engine.keeps_bits:
            raise ConfigError(
                "unsupported-combination: train.reuse_rollout_logprobs = true with engine.name = "
                f"{self.engine.name!r}: nothing promises that its logprobs are the trainer's; leave it out, "
                "or set engine.name = 'native' and train.batch_invariant = true"
            )
        return self

    @check
    def _check_sleep(self) -> GRPORun:
        what, train = f"offload = {list(self.offload)}", self.train
        missing = sorted(set(self.offload) - set(self.roles))
        if missing:
            raise ConfigError(
                f"unknown-name: {what}: this run has no {missing[0]} with memory of its own (it has "
                f"{', '.join(self.roles)}); leave {missing[0]!r} out",
                setting="offload",
            )
        if len(set(self.offload)) < len(self.offload):
            raise ConfigError(f"duplicate: {what} names a role twice; name each once", setting="offload")
        trained = [role for role in self.offload if role != "reward_model"]
        backend = backends().get(train.backend)
        if trained and backend is not None and not backend.offloads:
            able = " or ".join(repr(name) for name, other in backends().items() if other.offloads)
            raise ConfigError(
                f"unsupported-combination: {what} with train.backend = {train.backend!r}, which cannot "
                f"offload its memory between calls: set train.backend = {able}, or leave out "
                f"{' and '.join(map(repr, trained))}",
                setting="offload",
            )
        if train.cuda_graph and {"ref", "value"} & set(trained):
            raise ConfigError(
                f"unsupported-combination: {what} with train.cuda_graph = true: a graph reads weights where "
                "they were when it was captured; name 'policy' and 'reward_model' alone, or leave "
                "train.cuda_graph out",
                setting="offload",
            )
        if self.record.enabled and "value" in trained:
            raise ConfigError(
                f"unsupported-combination: {what} with record.enabled = true: recording reads the value "
                "model's weights between its calls; leave 'value' out",
                setting="offload",
            )
        return self


class OfflineRun(RunConfig):
    """The settings that runs on documents share."""

    data: DataConfig = DataConfig()
    eval_data: DataConfig | None = None
    batch_size: PositiveInt = 32
    """Documents (DPO: pairs, but for kto) per optimizer step."""
    eval_every: NonNegativeInt = 0
    """Steps between held-out evaluations; 0: only before and after, if eval_data is set."""

    def is_evaluation_due(self, name: Literal["before", "during", "after"], done: int) -> bool:
        """See RunConfig."""
        if name == "during" and (self.eval_every == 0 or done % self.eval_every):
            return False
        return self.eval_data is not None

    @property
    def unit(self) -> int:
        """Documents that are in one micro-batch together: of pairs both answers."""
        return 1

    @property
    def documents_name(self) -> str:
        """What batch_size counts."""
        return "documents"

    def documents_of(self, row: Mapping[str, Any] | None) -> int:
        """How many of them a row holds; None: at most."""
        return 1

    @property
    def longest_document(self) -> int:
        """See RunConfig."""
        return self.data.max_length

    @property
    def documents_per_update(self) -> int:
        """Documents of one optimizer step."""
        return self.batch_size * self.unit

    @property
    def documents_setting(self) -> str:
        """Which setting decides that."""
        return "batch_size"

    @property
    def tokens_per_step(self) -> int:
        """See RunConfig."""
        return self.documents_per_update * self.longest_document

    @property
    def longest_unit(self) -> int:
        """The documents of a unit, in training or evaluation."""
        return self.unit * max(data.max_length for data in self.data_sections.values())

    @check
    def _check(self) -> OfflineRun:
        _check_best(self.checkpoint, every=self.eval_every, known=OFFLINE_METRICS[self.kind])
        if self.train.reuse_rollout_logprobs is not None:
            raise ConfigError(
                f"no-effect: train.reuse_rollout_logprobs = {self.train.reuse_rollout_logprobs} has no "
                f"effect with kind = {self.kind!r}, which has no rollouts; leave it out"
            )
        for setting, value in (
            ("eval_every", self.eval_every),
            ("checkpoint.keep_best", self.checkpoint.keep_best),
        ):
            if value and self.eval_data is None:
                raise ConfigError(
                    f"missing-setting: {setting} = {value} needs documents to evaluate on; set eval_data",
                    setting="eval_data",
                )
        for name, data in self.data_sections.items():
            self._check_set(name, data)
        most = None if self.data.size is None else self.data.size * self.documents_of(None)
        if most is not None and most < self.batch_size:
            at_most = "" if most == self.data.size else f", at most {most} {self.documents_name},"
            raise ConfigError(
                f"contradiction: data.size = {self.data.size}{at_most} is below batch_size = "
                f"{self.batch_size}; raise data.size or lower batch_size"
            )
        return self

    def _check_set(self, name: str, data: DataConfig) -> None:
        if data.exclude is not None:
            raise ConfigError(
                f"no-effect: {name}.exclude = {data.exclude!r} is for prompts of RL runs; remove such "
                f"documents from {name}.source"
            )
        needed = self.unit * data.max_length
        if self.train.token_budget != "auto" and needed > token_slots(self.train):
            budget = f"train.token_budget = {self.train.token_budget}"
            why = f" does not fit one micro-batch of {budget}"
            if self.unit > 1:
                why = f": both answers of a pair are in one micro-batch, and {budget} holds no two of them"
            raise ConfigError(
                f"contradiction: {name}.max_length = {data.max_length}{why}; raise train.token_budget to "
                f"{needed} or lower {name}.max_length"
            )


class SFTRun(OfflineRun):
    """Supervised fine-tuning on conversations or prompt/completion pairs."""

    kind: Literal["sft"] = "sft"
    algorithm: SFTConfig = SFTConfig()


class PairRun(OfflineRun):
    """The settings that runs on pairs of a chosen and a rejected answer share."""

    @check
    def _check_trained(self) -> PairRun:
        for name, data in self.data_sections.items():
            if data.train_on == "all":
                raise ConfigError(
                    f"unsupported-combination: {name}.train_on = 'all' with kind = {self.kind!r}, which "
                    "compares answers, and the prompt is not part of them; leave it out"
                )
        return self

    @property
    def unit(self) -> int:
        """Both answers of a pair."""
        return 2

    def columns_read(self, config: DataConfig, row: Mapping[str, Any]) -> list[str]:
        """See RunConfig."""
        kinds = [type(row.get(column)) for column in (config.chosen_column, config.rejected_column)]
        return ["chosen_column", "rejected_column", *(["prompt_column"] if str in kinds else [])]

    @property
    def has_groups(self) -> bool:
        """See RunConfig: both answers have the pair's prompt."""
        return self.unit > 1

    @property
    def documents_name(self) -> str:
        """See OfflineRun."""
        return "pairs"


class DPORun(PairRun):
    """Direct preference optimisation, and the losses that came after it; KTO on single answers."""

    kind: Literal["dpo"] = "dpo"
    algorithm: DPOConfig = DPOConfig()

    @property
    def algorithm_options(self) -> DPOConfig:
        """See RunConfig."""
        return self.algorithm.resolved()

    @property
    def has_ref(self) -> bool:
        """See RunConfig."""
        return self.algorithm.needs_ref

    def columns_read(self, config: DataConfig, row: Mapping[str, Any]) -> list[str]:
        """See RunConfig: under kto a row may be one answer with a label."""
        if not self.algorithm.paired and config.label_column in row:
            return ["prompt_column", "completion_column"]
        return super().columns_read(config, row)

    @property
    def unit(self) -> int:
        """A pair; under kto an answer."""
        return 2 if self.algorithm.paired else 1

    @property
    def documents_name(self) -> str:
        """See OfflineRun."""
        return "pairs" if self.algorithm.paired else "answers"

    def documents_of(self, row: Mapping[str, Any] | None) -> int:
        """See OfflineRun: under kto a pair is two answers."""
        label = self.data.label_column
        labels = (label, self.data.columns.get(label, label))
        single = self.algorithm.paired or (row is not None and any(name in row for name in labels))
        return 1 if single else 2

    @check
    def _check_unpaired(self) -> DPORun:
        if not self.algorithm.paired and self.batch_size < 2:
            raise ConfigError(
                f"unsupported-combination: batch_size = {self.batch_size} with algorithm.name = "
                f"{self.algorithm.name!r}, whose baseline is of each prompt with another one's answer; set "
                "batch_size to 2 or more"
            )
        return self


class RewardModelRun(PairRun):
    """A reward model: the model's decoder with a head that gives a document one number."""

    kind: Literal["rm"] = "rm"
    algorithm: RewardModelLossConfig = RewardModelLossConfig()

    @check
    def _check_reward_model(self) -> RewardModelRun:
        if self.train.batch_invariant:
            raise ConfigError(
                "unsupported-combination: train.batch_invariant = true with kind = 'rm': the head that gives "
                "scores has no such form; leave it out"
            )
        return self
