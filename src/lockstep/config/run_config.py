"""The settings that all kinds of run share, and what each kind says of itself."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Self, TypeVar

from pydantic import Field, ValidationError, field_validator

from lockstep.config.base import Config, FilePath, Name, PositiveInt, Seed, check
from lockstep.config.cluster import ClusterConfig
from lockstep.config.data import DataConfig
from lockstep.config.declarations import backends
from lockstep.config.model import ModelConfig
from lockstep.config.problems import explain, refusal
from lockstep.config.record import RecordConfig, record_refusal
from lockstep.config.rollout import RewardConfig, SamplingConfig
from lockstep.config.rules import refuse
from lockstep.config.support import check_backend, check_support, shards_weights
from lockstep.config.train import CheckpointConfig, LogConfig, TrainConfig
from lockstep.config.train_rules import ep_does_not_divide
from lockstep.config.value import ValueConfig
from lockstep.errors import ConfigError


class RunConfig(Config):
    """The settings that all kinds of run share."""

    section: ClassVar[str | None] = ""

    seed: Seed = 0
    """Seed for the data order and the sampling noise."""
    steps: PositiveInt = 100
    """Number of rollout batches (grpo, ppo) or optimizer steps (sft, dpo, rm)."""
    epochs: float | None = Field(None, gt=0.0, le=1e6)
    """Passes over the data, instead of `steps`, which is then computed. Held-out prompts do not count, nor do
    groups that dynamic_sampling draws again; rows that are too long or at fault do. config.toml in the run
    directory has the steps."""
    run_dir: FilePath | None = None
    """Folder for all output. If unset, runs/NAME-TIMESTAMP is used."""
    name: Name = "run"
    """Name of the run, used for its folder and in wandb."""
    model: ModelConfig = ModelConfig()
    train: TrainConfig = TrainConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    record: RecordConfig = RecordConfig()
    log: LogConfig = LogConfig()
    cluster: ClusterConfig | None = None

    if TYPE_CHECKING:
        # Each kind of run declares its own; here they would come before `model` and the like in a dump.
        kind: str

        @property
        def algorithm(self) -> Config: ...
        @property
        def data(self) -> DataConfig: ...
        @property
        def eval_data(self) -> DataConfig | None: ...

    online: ClassVar[bool] = False
    """Whether the run samples what it trains on."""

    @property
    def algorithm_options(self) -> Config:
        """The options of the algorithm, with published values filled in."""
        return self.algorithm

    @property
    def roles(self) -> tuple[str, ...]:
        """The models of the run that have memory of their own."""
        return ("policy", "ref") if self.has_ref else ("policy",)

    @property
    def has_ref(self) -> bool:
        """Whether the loss compares with the policy as it was loaded."""
        return False

    @property
    def offloaded(self) -> tuple[str, ...]:
        """The roles that are in host memory while they do not work."""
        return ()

    @property
    def model_names(self) -> dict[str, str]:
        """The models that the run trains, by their settings."""
        return {"model.name": self.model.name}

    @property
    def data_sections(self) -> dict[str, DataConfig]:
        """The data of training, and of evaluations if they have their own, by the name of the table."""
        sections = {"data": self.data, "eval_data": self.eval_data}
        return {name: data for name, data in sections.items() if data is not None}

    def columns_read(self, config: DataConfig, row: Mapping[str, Any]) -> list[str]:
        """Return the settings of `config` that name columns which `row` must have."""
        return []

    @property
    def reward_functions(self) -> tuple[RewardConfig, ...]:
        """The rewards that score samples, besides reward models."""
        return ()

    def without_rewards(self) -> Self:
        """Return the run without them."""
        return self

    @property
    def sampling(self) -> SamplingConfig | None:
        """The sampling settings of training; None: it does not sample."""
        return None

    @property
    def keeps_rollouts(self) -> bool:
        """Whether samples are written to rollouts/."""
        return False

    @property
    def policy_steps(self) -> int:
        """The steps that train the policy."""
        return self.steps

    @property
    def rows_are_slots(self) -> bool:
        """Whether samples depend on engine.max_batch, as the slots of logical time."""
        return False

    @property
    def schedules(self) -> frozenset[str]:
        """The schedules of the learning rates."""
        return frozenset({self.train.schedule})

    @property
    def sampling_temperature(self) -> float:
        """The temperature at which the trained tokens were sampled; 1 without rollouts."""
        return 1.0 if self.sampling is None else self.sampling.temperature

    def is_evaluation_due(self, name: Literal["before", "during", "after"], done: int) -> bool:
        """Return whether the evaluation before, during or after training is made after `done` steps."""
        raise NotImplementedError

    @property
    def documents_per_update(self) -> int:
        """Documents of one optimizer step."""
        raise NotImplementedError

    @property
    def documents_setting(self) -> str:
        """The settings that decide it."""
        raise NotImplementedError

    @property
    def longest_document(self) -> int:
        """Tokens of the longest document of training."""
        raise NotImplementedError

    @property
    def longest_unit(self) -> int:
        """Tokens that one micro-batch must hold: the longest document, or pair of them."""
        raise NotImplementedError

    @property
    def tokens_per_step(self) -> int:
        """The most tokens that one step can have: every document as long as settings allow."""
        raise NotImplementedError

    @property
    def has_groups(self) -> bool:
        """Whether documents come in groups with one prompt."""
        return False

    @property
    def critic(self) -> ValueConfig | None:
        """The value model; None: the run has none."""
        return None

    @property
    def engine_name(self) -> str | None:
        """The inference engine; None: the run samples nothing."""
        return None

    @property
    def engine_devices(self) -> tuple[int, ...]:
        """The GPUs that engine.cuda_devices names."""
        return ()

    @property
    def engine_has_own_memory(self) -> bool:
        """Whether the engine takes memory that no plan counts."""
        return False

    @property
    def compiles_sampling(self) -> bool:
        """Whether the engine samples with the blocks that train.execution compiles."""
        return False

    def with_engine(self, **settings: Any) -> Self:
        """Return the run with other settings of the engine, unchecked."""
        return self

    def with_auto_engine(self, *, native: bool) -> Self:
        """Return the run with engine.name = "auto" resolved, checked as if the engine had been named.

        Args:
            native: what "auto" means; else hf.

        Raises:
            ConfigError: a setting of the engine has no effect with it.
        """
        return self

    @field_validator("name")
    @classmethod
    def _check_run_name(cls, name: str) -> str:
        if not name or "/" in name or len(name.encode()) > 200:
            raise ConfigError(
                f"wrong-format: name = {name[:80]!r} is not usable as the beginning of a folder name; write "
                "1 to 200 bytes without /, and set run_dir to choose the folder itself"
            )
        return name

    @check
    def _check_support(self) -> RunConfig:
        check_support(self)
        lora = self.model.lora
        dropout = 0.0 if lora is None else lora.dropout
        check_backend(self.train, lora=lora is not None, lora_dropout=dropout)
        return self

    @check
    def _check_schedule(self) -> RunConfig:
        refuse(self, "run")
        return self

    @property
    def remote_groups(self) -> tuple[tuple[str, ...], ...]:
        """The groups of cluster.colocate without the policy, each in a separate process beside each rank."""
        return () if self.cluster is None else self.cluster.remote_groups

    @property
    def remote_roles(self) -> frozenset[str]:
        """Roles that do not run in the policy's process."""
        return frozenset(role for group in self.remote_groups for role in group)

    @check
    def _check_remote_groups(self) -> RunConfig:
        if self.cluster is None or not self.cluster.colocate:
            return self
        self._check_places(self.cluster)
        return self

    def _check_places(self, cluster: ClusterConfig) -> None:
        """Raise ConfigError for groups of cluster.colocate that this run cannot have."""
        refuse(self, "run (remote roles)")

    @check
    def _check_devices(self) -> RunConfig:
        cluster, device = self.cluster, self.train.device
        if cluster is None or cluster.layout().per_rank == 1:
            return self
        own = "dedicated_gpus = true" if cluster.dedicated_gpus else f"engine_gpus = {cluster.engine_gpus}"
        if device.startswith("cuda:"):
            raise ConfigError(
                f"contradiction: train.device = {device!r} with cluster.{own}: GPUs are assigned starting "
                "with cuda:0 for the first rank; set train.device = 'cuda', and choose GPUs by "
                "CUDA_VISIBLE_DEVICES"
            )
        self._check_engine_gpus(cluster)
        return self

    def _check_engine_gpus(self, cluster: ClusterConfig) -> None:
        """Raise ConfigError for GPUs that cluster.engine_gpus gives to an engine which cannot have them."""
        if cluster.engine_gpus:
            own = (
                "dedicated_gpus = true" if cluster.dedicated_gpus else f"engine_gpus = {cluster.engine_gpus}"
            )
            raise ConfigError(
                f"no-effect: cluster.{own} has no effect with kind = {self.kind!r}, which has no engine; "
                "leave it out",
                setting="cluster.engine_gpus",
            )

    @check
    def _check_record(self) -> RunConfig:
        refusal = (
            record_refusal(self.record, self.train, lora=bool(self.model.lora))
            if shards_weights(self.train)
            else None
        )
        if refusal is not None:
            raise ConfigError(refusal, code="unsupported-combination", setting="record.enabled")
        refuse(self, "run (record)")
        return self


Run = TypeVar("Run", bound=RunConfig)
MAX_RANKS = 2**16
"""More processes than any machine starts."""


def on_ranks(run: Run, ranks: int) -> Run:
    """Return `run` as it is on so many ranks, with train.backend = "auto" resolved; called before any of them
    starts.

    Raises:
        ConfigError: it cannot be spread over them: names the numbers, and those that would work; or the
            backend does not support its settings.
    """
    if not 1 <= ranks <= MAX_RANKS:
        raise ConfigError(f"out-of-range: --ranks {ranks} is not between 1 and {MAX_RANKS}")
    if run.train.backend == "auto":
        backend = "local" if ranks == run.train.tp * run.train.ring * run.train.ep == 1 else "fsdp2"
        try:
            train = type(run.train).model_validate(dict(run.train) | {"backend": backend})
            run = run.model_copy(update={"train": train})
            type(run).model_validate(dict(run))
        except ValidationError as error:
            many = f"{ranks} rank{'s' if ranks > 1 else ''}"
            raise refusal(f"train.backend = 'auto' with {many}: ", explain(error, type(run))) from error
    _check_ranks(run, ranks)
    return run


def _check_ranks(run: RunConfig, ranks: int) -> None:
    """Raises ConfigError."""
    train = run.train
    known = backends()
    if ranks > 1 and train.backend in known and not known[train.backend].spans_ranks:
        spanning = " or ".join(name for name, backend in known.items() if backend.spans_ranks)
        raise ConfigError(
            f"unsupported-combination: train.backend = {train.backend!r} uses one process on one device, "
            f"but there are {ranks} ranks, each of which would train a separate copy. Set --train.backend "
            f"{spanning}, or start one process"
        )
    if ranks > 1 and run.engine_devices:
        raise ConfigError(
            f"unsupported-combination: engine.cuda_devices = {list(run.engine_devices)} with {ranks} ranks: "
            "each rank has its own engine on its own GPU; leave engine.cuda_devices out"
        )
    together = train.tp * train.ring
    if ranks % together:
        sizes = ", ".join(str(together * n) for n in (1, 2, 4))
        raise ConfigError(
            f"not-divisible: {ranks} rank{'s' if ranks > 1 else ''} cannot be split into groups of train.tp "
            f"* train.ring = {train.tp} * {train.ring} = {together} ranks; start a multiple of {together} "
            f"(--ranks {sizes}, ...), or lower train.tp or train.ring",
            setting="train.tp",
        )
    if ranks % train.ep:
        raise ep_does_not_divide(train.ep, ranks=ranks)
    documents = run.documents_per_update
    if ranks // together > documents:
        what = f"ranks / (tp * ring) = {ranks // together}" if together > 1 else f"{ranks} ranks"
        raise ConfigError(
            f"nothing-to-do: {what} share the documents of an optimizer step, but {run.documents_setting} "
            f"gives only {documents}, so the other ranks would have nothing to do. Start fewer ranks, or "
            "raise that number",
            setting=run.documents_setting,
        )
