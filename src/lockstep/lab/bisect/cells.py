"""Cells of a recording as the arms of a bisection, and the inputs that both are fed."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import TYPE_CHECKING

from lockstep import invariant
from lockstep.errors import ConfigError
from lockstep.lab.bisect.arms import Arm
from lockstep.lab.replay.options import ReplayOptions
from lockstep.lab.replay.policy import check_usable
from lockstep.lab.replay.replayer import Replayer
from lockstep.models.load import share_parameters
from lockstep.schema.batch import PackedBatch
from lockstep.train.local import LocalBackend

if TYPE_CHECKING:
    from lockstep.recording import Recording


class OpenCells:
    """Both cells, loaded.

    Raises:
        ConfigError, RecordingError, ModelError: before the first forward.
    """

    def __init__(self, recording: Recording, options_a: ReplayOptions, options_b: ReplayOptions) -> None:
        for name, options in (("a", options_a), ("b", options_b)):
            check_bisectable(name, options)
        self.recording = recording
        self._replayers = tuple(Replayer(recording, options) for options in (options_a, options_b))
        for replayer in self._replayers:
            replayer.policy.take_back_settings()  # each arm sets its own when it runs
        self.order = self._replayers[0].order
        self.a, self.b = (_arm(name, one) for name, one in zip("ab", self._replayers, strict=True))
        if self._replayers[0].size.num_layers != self._replayers[1].size.num_layers:
            raise ConfigError(
                "the cells have different numbers of layers; give --num-layers once, outside of --a and --b",
                code="contradiction",
                setting="--num-layers",
            )

    def inputs(self) -> Iterator[tuple[int, PackedBatch]]:
        """Yield (index, batch), with the weights that saw this input loaded."""
        for index in self.order:
            recorded = self.recording[index]
            check_usable(recorded.meta, index=index)
            for replayer in self._replayers:
                replayer.policy.use(recorded.meta)
            yield index, recorded.batch

    def weights_descriptions(self) -> tuple[str, str]:
        """Describe the weights of each cell."""
        return self._replayers[0].weights_description, self._replayers[1].weights_description


def check_bisectable(name: str, options: ReplayOptions) -> None:
    """Raise ConfigError for cells that run in several processes or inside another compiler's graph, or whose
    documents share rows."""
    cell = options.cell
    if cell.deepspeed or cell.ranks > 1 or options.simulate:
        raise ConfigError(
            f"--{name}: bisect looks into the modules of one process; leave --zero-stage, --deepcompile, "
            "--ranks and --simulate out (`lockstep matrix` compares such cells from outside)",
            code="unsupported-combination",
            setting=f"--{name}",
        )
    if cell.layout == "shared":
        raise ConfigError(
            f"--{name} has --layout shared: one row is computed for several documents there, whose gradients "
            "are not those of a row of another cell; use --layout packed",
            code="unsupported-combination",
            setting="--layout",
        )
    if options.optimizer_step:
        raise ConfigError(
            f"--{name}: --optimizer-step moves the weights apart; leave it out",
            code="unsupported-combination",
            setting="--optimizer-step",
        )


def _arm(name: str, replayer: Replayer) -> Arm:
    backend = replayer.policy.backend
    assert isinstance(backend, LocalBackend)
    arm = Arm(
        name=name,
        label=replayer.options.cell.label(),
        backend=backend,
        loss=replayer.loss,
        fit=replayer.bucketing.fit,
        backward=replayer.options.backward,
        settings_apply=replayer.policy.settings_apply,
    )
    if backend.config.execution == "eager":
        return arm

    def eager() -> Arm:
        """Make the eager arm over the same Parameters, with the same padded tail."""
        config = backend.config.model_copy(update={"execution": "eager"})
        module = share_parameters(backend.module, attention=replayer.options.cell.attention)
        if config.batch_invariant:
            invariant.convert(module)
        twin = LocalBackend(
            config,
            model=dataclasses.replace(backend.model, module=module),
            total_steps=0,
            temperature=backend.temperature,
        )
        label = dataclasses.replace(replayer.options.cell, execution="eager").label()
        return dataclasses.replace(arm, name=f"{name}-eager", label=label, backend=twin, eager=None)

    return dataclasses.replace(arm, eager=eager)
