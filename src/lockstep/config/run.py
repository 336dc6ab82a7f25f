"""The kinds of run. A run is one of these, whole; nothing else decides what happens."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, Literal, Self

from lockstep.config.algorithm import DPOConfig, GRPOConfig, RewardModelLossConfig, SFTConfig
from lockstep.config.base import Name, NonNegativeInt, PositiveInt, check
from lockstep.config.batch import RewardRoleConfig
from lockstep.config.cluster import ClusterConfig, _check_engine_gpus
from lockstep.config.data import DataConfig
from lockstep.config.declarations import backends, engines
from lockstep.config.engine import EngineConfig, has_own_weights, resolved
from lockstep.config.environment import EnvironmentConfig
from lockstep.config.rollout import RewardConfig, RolloutConfig, SamplingConfig
from lockstep.config.rules import refuse
from lockstep.config.run_config import RunConfig as RunConfig
from lockstep.config.run_config import on_ranks as on_ranks
from lockstep.config.support import check_support
from lockstep.config.train import (
    Auto,
    EvalConfig,
    _check_best,
    token_slots,
)
from lockstep.errors import ConfigError

RL_METRICS = ("strict_accuracy", "lenient_accuracy", "mean_reward", "mean_completion_tokens")
OFFLINE_METRICS = {"sft": ("loss", "perplexity"), "dpo": ("loss", "accuracy", "reward_margin")}
OFFLINE_METRICS["rm"] = OFFLINE_METRICS["dpo"]
"""The metrics of an evaluation, written eval/NAME."""


Role = Literal["policy", "ref", "value", "reward_model"]


class GRPORun(RunConfig):
    """GRPO and its family, on prompts, with rewards."""

    kind: Literal["grpo"] = "grpo"
    warm_start: Name | None = None
    """A run file or recipe of kind sft that is trained first, in RUN_DIR/warm_start, with the model, the seed
    and the chat template of this run. Training then begins from its export, which config.toml in the run
    directory names as the model; on several nodes they must share the file system of RUN_DIR."""
    algorithm: GRPOConfig = GRPOConfig()
    data: DataConfig = DataConfig()
    eval_data: DataConfig | None = None
    """Held-out prompts. By default they come from the same source: with another seed for generated data, and
    for files from the rows after data.size, or without it rows chosen by a hash of their content. Prompts
    with the same text, and under `environment` the same columns for `reset`, are left out of training.
    Without an evaluation (eval.before, eval.every, eval.after) nothing is held out."""
    rollout: RolloutConfig = RolloutConfig()
    rewards: tuple[RewardConfig, ...] = (RewardConfig(),)
    """Rewards of a completion: verifiers, built-in ones and your own `module:attribute`."""
    environment: EnvironmentConfig | None = None
    """Turns with the tools of a class, or its game. With this section `rewards` is empty unless it is set."""
    reward_model: RewardRoleConfig | None = None
    """Without this section, only reward functions and verifiers give rewards."""
    engine: EngineConfig = EngineConfig()
    offload: tuple[Role, ...] | Auto = "auto"
    """Roles whose GPU memory is offloaded to host memory while they are idle. The copies make a step slower.
    policy: the optimizer states. value: the value model's weights and optimizer states. ref, reward_model:
    everything. Offloading works with train.backend local and fsdp2, and results stay bitwise the same. For
    the engine, use engine.offload. auto: the roles that the memory plan cannot keep there."""
    eval: EvalConfig = EvalConfig()

    online: ClassVar[bool] = True

    @classmethod
    def completed(cls, values: Mapping[str, Any]) -> Mapping[str, Any]:
        """See Config."""
        environment = values.get("environment")
        if environment is None:
            return values
        named = {"name": environment} if isinstance(environment, str) else environment
        return {"rewards": (), **values, "environment": named}

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
        return () if self.offload == "auto" else self.offload

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
        return self.rollout.samples // self.train.minibatches

    @property
    def documents_setting(self) -> str:
        """The settings that decide it."""
        return "rollout.prompts_per_step * rollout.group_size / train.minibatches"

    @property
    def longest_unit(self) -> int:
        """Prompt and trajectory of training."""
        return self.data.max_prompt_tokens + self.rollout.trajectory_tokens

    @property
    def tokens_per_step(self) -> int:
        """See RunConfig."""
        return self.rollout.samples * self.longest_unit

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
        refuse(self, "run (rl remote roles)")

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
        """Prompt and trajectory of training and evaluations, as far as settings allow them."""
        prompts = self.data.max_prompt_tokens
        eval_prompts = prompts if self.eval_data is None else self.eval_data.max_prompt_tokens
        factors = [1] * (self.eval.after or self.eval.every > 0)
        factors += [self.eval.before_max_tokens_factor] * self.eval.before
        return max([self.longest_unit, *(eval_prompts + self.eval_tokens(factor)[1] for factor in factors)])

    def eval_tokens(self, factor: int = 1) -> tuple[int, int]:
        """Return the most tokens of a turn, and of a trajectory after its prompt, in an evaluation whose
        limits are multiplied by `factor`."""
        turn = (self.eval.max_tokens or self.rollout.sampling.max_tokens) * factor
        trajectory = self.rollout.max_trajectory_tokens
        return turn, turn if trajectory is None else max(turn, trajectory * factor)

    @property
    def longest_context(self) -> int:
        """Tokens of one sample in the KV cache: the last one is never fed back."""
        return self.longest_sequence - 1

    @check
    def _check(self) -> GRPORun:
        refuse(self, "run (rl)")
        return self

    @property
    def engine_goes_on(self) -> bool:
        """Whether the engine may go on with samples that earlier weights began, as far as is known here."""
        engine = engines().get(self.engine.name)
        where = "started" if has_own_weights(self.engine) else "embedded"
        return engine is None or where in engine.partial_rollouts

    @property
    def rows_are_slots(self) -> bool:
        """See RunConfig."""
        return self.rollout.schedule == "fixed" and self.rollout.slots is None

    @check
    def _check_lag(self) -> GRPORun:
        if self.rollout.max_lag:
            refuse(self, "run (rl lag)")
        return self

    @check
    def _check_sizes(self) -> GRPORun:
        _check_best(self.checkpoint, every=self.eval.every, known=RL_METRICS)
        refuse(self, "run (rl sizes)")
        return self

    @check
    def _check_engine(self) -> GRPORun:
        engine = engines().get(self.engine.name)
        served = self.engine.process == "separate" and self.engine.name in ("auto", "native", "hf")
        alone = self.train.batch_invariant if served else self.engine.batch_invariant
        if self.train.deterministic and has_own_weights(self.engine) and not alone:
            raise ConfigError(
                "unsupported-combination: train.deterministic = true with engine.name = "
                f"{self.engine.name!r}: which requests it decodes together depends on timing, and its "
                f"samples change with that; set {'train' if served else 'engine'}.batch_invariant = true, "
                "or engine.name = 'native' or 'hf' in the trainer's process"
            )
        if self.train.reuse_rollout_logprobs and engine is not None and not engine.keeps_bits:
            raise ConfigError(
                "unsupported-combination: train.reuse_rollout_logprobs = true with engine.name = "
                f"{self.engine.name!r}: its logprobs are not guaranteed to equal the trainer's; leave it "
                "out, or set engine.name = 'native' and train.batch_invariant = true"
            )
        return self

    @check
    def _check_sleep(self) -> GRPORun:
        what, train = f"offload = {list(self.offloaded)}", self.train
        missing = sorted(set(self.offloaded) - set(self.roles))
        if missing:
            raise ConfigError(
                f"unknown-name: {what}: this run has no {missing[0]} with separate memory (its roles are "
                f"{', '.join(self.roles)}); leave {missing[0]!r} out",
                setting="offload",
            )
        trained = [role for role in self.offloaded if role != "reward_model"]
        backend = backends().get(train.backend)
        if trained and backend is not None and not backend.offloads:
            able = " or ".join(repr(name) for name, other in backends().items() if other.offloads)
            raise ConfigError(
                f"unsupported-combination: {what} with train.backend = {train.backend!r}, which cannot "
                f"offload its memory between calls; set train.backend = {able}, or leave out "
                f"{' and '.join(map(repr, trained))}",
                setting="offload",
            )
        refuse(self, "run (rl offload)")
        return self


class OfflineRun(RunConfig):
    """The settings that runs on documents share."""

    data: DataConfig = DataConfig()
    eval_data: DataConfig | None = None
    batch_size: PositiveInt = 32
    """Number of documents per optimizer step. dpo and rm count pairs of answers, and kto counts single
    answers."""
    eval_every: NonNegativeInt = 0
    """Steps between evaluations on held-out documents. With 0, evaluations are made only before and after
    training, and only if eval_data is set."""

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
        """The unit that batch_size counts."""
        return "documents"

    def documents_of(self, row: Mapping[str, Any] | None) -> int:
        """Return the number of these units in a row; row None: the most that a row can have."""
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
        """The setting that decides it."""
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
        refuse(self, "run (offline)")
        for setting, value in (
            ("eval_every", self.eval_every),
            ("checkpoint.keep_best", self.checkpoint.keep_best),
        ):
            if value and self.eval_data is None:
                raise ConfigError(
                    f"missing-setting: {setting} = {value} needs evaluation documents; set eval_data",
                    setting="eval_data",
                )
        for name, data in self.data_sections.items():
            self._check_set(name, data)
        most = None if self.data.size is None else self.data.size * self.documents_of(None)
        if most is not None and most < self.batch_size:
            at_most = "" if most == self.data.size else f", at most {most} {self.documents_name},"
            raise ConfigError(
                f"contradiction: data.size = {self.data.size}{at_most} is less than batch_size = "
                f"{self.batch_size}; raise data.size or lower batch_size"
            )
        return self

    def _check_set(self, name: str, data: DataConfig) -> None:
        if data.exclude is not None:
            raise ConfigError(
                f"no-effect: {name}.exclude = {data.exclude!r} only has an effect on prompts of RL runs; "
                f"leave it out and remove such documents from {name}.source"
            )
        needed = self.unit * data.max_length
        if self.train.token_budget != "auto" and needed > token_slots(self.train.token_budget):
            budget = f"train.token_budget = {self.train.token_budget}"
            why = f" does not fit into one micro-batch of {budget}"
            if self.unit > 1:
                why = (
                    ": both answers of a pair must be in one micro-batch, but two answers of that length "
                    f"exceed {budget}"
                )
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
                    "compares answers, not prompts; leave it out"
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
        refuse(self, "run (dpo)")
        return self


class RewardModelRun(PairRun):
    """A reward model: the model's decoder with a head that gives a document one number."""

    kind: Literal["rm"] = "rm"
    algorithm: RewardModelLossConfig = RewardModelLossConfig()

    @check
    def _check_reward_model(self) -> RewardModelRun:
        refuse(self, "run (rm)")
        return self
