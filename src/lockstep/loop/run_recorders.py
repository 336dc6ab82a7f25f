"""The recorders of one rank of a run: of the policy's inputs, and of those of a value model."""

from __future__ import annotations

import dataclasses
import datetime
import platform
from collections.abc import Collection
from pathlib import Path
from typing import Any, Protocol

import torch

from lockstep.config.record import RecordConfig
from lockstep.errors import CheckpointError
from lockstep.loop.checkpoint_files import seen_field
from lockstep.loop.distributed import MeshCoordinates
from lockstep.loop.resolve import Resolved
from lockstep.models.architectures import text_config
from lockstep.models.load import LoadedModel
from lockstep.observe.metrics import Spans
from lockstep.packing import Planner
from lockstep.protocols import TrainBackend
from lockstep.ranks.context import RankContext
from lockstep.ranks.node_folders import NodeFolders
from lockstep.recording.recorder import Recorder, RecorderSettings
from lockstep.recording.shards import rank_folder
from lockstep.schema.contract import KernelContract
from lockstep.schema.recording import RecordingHeader
from lockstep.version import library_versions


class Recorded(Protocol):
    """A model that is trained, and whose inputs are recorded."""

    backend: TrainBackend
    recorder: Recorder | None

    @property
    def model(self) -> LoadedModel: ...
    @property
    def updates_per_step(self) -> int: ...


class RunRecorders:
    """The recorders of a run, by role; empty for a run that records nothing.

    Args:
        directory: the run's.
        folders: which ranks see the files of rank 0 there.
        spans: get the time that recording takes.
    """

    def __init__(self, directory: Path, ranks: RankContext, *, folders: NodeFolders, spans: Spans) -> None:
        self._directory, self._ranks = directory, ranks
        self._folders, self._spans = folders, spans
        self._by_role: dict[str, Recorder] = {}

    @property
    def all(self) -> Collection[Recorder]:
        return self._by_role.values()

    def open(
        self,
        recorded: Recorded,
        header: RecordingHeader,
        config: RecordConfig,
        *,
        coordinates: MeshCoordinates,
        first_step: int,
        inputs_seen: int,
    ) -> None:
        """Let the inputs of a role, which the header names, go through a recorder, after the first
        `first_step` steps.

        Args:
            inputs_seen: by the recorder of this role before the first `first_step` steps ended.
        """
        role = header.role
        settings = RecorderSettings(
            config=config,
            header=dataclasses.replace(
                header,
                world_size=coordinates.sizes["dp"],
                mesh=coordinates.sizes if self._ranks.world_size > 1 else {},
            ),
            updates_per_step=recorded.updates_per_step,
            resume_at=first_step,
            inputs_seen=inputs_seen,
            rank=coordinates.at["dp"],
            world_size=coordinates.sizes["dp"],
            mesh=coordinates.at if self._ranks.world_size > 1 else {},
            own_batches=False,
            writes=coordinates.at["tp"] == coordinates.at["ring"] == 0,
        )
        folder = self._directory / ("recordings" if role == "policy" else f"recordings-{role}")
        with self._ranks.fail_together("looking for the recordings"):
            self._check_recorded(folder, settings)
        module, update = recorded.model.module, recorded.backend.weights(policy_version=0)
        recorder = self._by_role[role] = Recorder(
            folder,
            settings,
            module=module,
            spans=self._spans,
            spread=None if update.shared_module is module else (self._ranks, update.tensors),
        )
        recorded.recorder, recorded.backend = recorder, recorder.around(recorded.backend)

    def begin_step(self, step: int) -> None:
        """Tell every recorder that step `step` begins."""
        for recorder in self._by_role.values():
            recorder.begin_step(step)

    def inputs_seen(self) -> dict[str, int]:
        """Return the fields of run_state.json with the number of inputs that each recorder has seen."""
        return {seen_field(role): recorder.inputs_seen for role, recorder in self._by_role.items()}

    def finish(self) -> None:
        """End the recordings, of which nothing more comes, and bring what the ranks have written together."""
        for recorder in self._by_role.values():
            recorder.close()
            self._folders.collect(recorder.directory)

    def _check_recorded(self, folder: Path, settings: RecorderSettings) -> None:
        """Raise CheckpointError where a node is new to the run, and its ranks have recorded elsewhere: at the
        end that would be overwritten by what is recorded here."""
        recorded = settings.inputs_seen > 0 and settings.writes and self._ranks.rank in self._folders.leaders
        if recorded and not (own := rank_folder(folder, settings.rank)).is_dir():
            raise CheckpointError(
                f"no-such-file: {own} does not exist, although this rank has recorded before, and this node "
                "cannot see the folder of that name on the node of rank 0; copy it from there",
                path=own,
            )


def recording_header(
    resolved: Resolved[Any],
    *,
    model: LoadedModel,
    plan: Planner,
    temperature: float = 1.0,
    contract: KernelContract | None = None,
) -> RecordingHeader:
    """Build the header that all inputs of this run's recording share. contract: the train backend's, if it
    has one."""
    run = resolved.run
    folder, axes = Path(run.model.name), resolved.axes
    settings = {"name": str(folder.resolve())} if folder.is_dir() else {}
    cuda = resolved.device.startswith("cuda")
    return RecordingHeader(
        created=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        framework="lockstep",
        versions=library_versions(),
        model=run.model.model_copy(update=settings).model_dump(mode="json"),
        vocab_size=text_config(model.module).vocab_size,
        algorithm=run.algorithm_options.model_dump(mode="json"),
        temperature=temperature,
        max_tokens=None if run.sampling is None else run.sampling.max_tokens,
        axes={
            **{name: axes[name] for name in ("backend", "engine", "attention", "execution", "layout")},
            "padding_side": run.train.padding_side,
            **{name: axes[name] for name in ("device", "dtype", "static_capacity")},
            "activation_checkpointing": run.train.activation_checkpointing,
            "batch_invariant": resolved.batch_invariant,
        },
        contract=None if contract is None else contract.as_json(),
        capacity={
            "token_budget": resolved.token_budget,
            "max_seqlen": plan.max_seqlen,
            "max_documents": plan.max_documents,
        },
        router_losses={
            name: value
            for name in ("router_aux_loss", "router_z_loss")
            if (value := getattr(run.train, name))
        },
        device_name=torch.cuda.get_device_name(resolved.device) if cuda else platform.processor() or "cpu",
    )
