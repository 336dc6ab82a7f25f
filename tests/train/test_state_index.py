"""Which tensors of a checkpoint a run reads, and how much of each."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from raising import raises
from torch import Tensor

from lockstep.errors import CheckpointError
from lockstep.train.state.files import Layout, LiveTensors, read_flat
from lockstep.train.state.index import StoredTensors, read_index
from lockstep.train.state.save_load import load_state, save_state


def test_a_checkpoint_with_more_than_the_run_has_is_refused(tmp_path: Path) -> None:
    """A run without optimizer leaves that of the checkpoint alone, but no weights."""
    live = {f"{kind}/{name}": torch.ones(2) for kind in ("model", "exp_avg") for name in "ab"}
    layout = Layout(backend="local", mesh={})
    save_state(tmp_path, parts=LiveTensors(live), progress={"step": 0}, layout=layout)
    for gone, total_steps, message in (
        ("exp_avg/b", 5, "other-model: exp_avg/b"),
        ("model/b", 5, "other-model: model/b"),
        ("model/b", 0, "other-model: model/b"),
    ):
        parts = LiveTensors({name: torch.zeros(2) for name in live if name != gone})
        progress = {"total_steps": total_steps}
        with raises(CheckpointError, message):
            load_state(tmp_path, parts=parts, progress=progress, layout=layout)
    weights = {name: torch.zeros(2) for name in live if name.startswith("model")}
    load_state(tmp_path, parts=LiveTensors(weights), progress={"total_steps": 0}, layout=layout)
    assert weights["model/b"].tolist() == [1.0, 1.0]


def test_only_the_slices_that_are_asked_for_are_read(tmp_path: Path) -> None:
    whole = torch.arange(60.0).reshape(5, 4, 3)
    live = {"model/a": whole, "updates/a": torch.tensor(7.0), "exp_avg/a": torch.zeros(0, 4)}
    layout = Layout(backend="local", mesh={})
    save_state(tmp_path, parts=LiveTensors(live), progress={"step": 0}, layout=layout)
    index = read_index(tmp_path)
    wanted = LiveTensors(live).tensors()
    asked: list[Any] = []

    class Opened:
        """What is asked of the file."""

        def __init__(self, opened: Any) -> None:
            self._opened = opened

        def get_slice(self, key: str) -> Any:
            inner = self._opened.get_slice(key)

            class Part:
                def __getitem__(self, parts: tuple[slice, ...]) -> Tensor:
                    asked.append([(part.start, part.stop) for part in parts])
                    found: Tensor = inner[parts]
                    return found

            return Part()

        def get_tensor(self, key: str) -> Tensor:
            asked.append("whole")
            found: Tensor = self._opened.get_tensor(key)
            return found

    with StoredTensors(index) as stored:
        sources = stored.resolve(wanted, optimizer=True)
        stored._open = {file: Opened(opened) for file, opened in stored._open.items()}
        read = stored.reader(sources["model/a"], wanted["model/a"])
        assert torch.equal(read(slice(1, 3)), whole[1:3])
        assert torch.equal(read(slice(None), slice(1, 2)), whole[:, 1:2])
        assert torch.equal(read(slice(4, 9), slice(0, 4), slice(2, 3)), whole[4:, :, 2:])
        assert asked == [[(1, 3)], [(0, 5), (1, 2)], [(4, 5), (0, 4), (2, 3)]]
        assert read(slice(2, 2)).shape == (0, 4, 3) and len(asked) == 3
        for start, stop in ((0, 60), (7, 8), (7, 29), (12, 24), (59, 60), (30, 30)):
            assert torch.equal(read_flat(read, start, stop), whole.reshape(-1)[start:stop])
        assert asked[3:] == ["whole", [(0, 1)], [(0, 3)], [(1, 2)], [(4, 5)]]
        count = stored.reader(sources["updates/a"], wanted["updates/a"])
        assert read_flat(count, 0, 1).tolist() == [7.0] and count().shape == ()
        empty = stored.reader(sources["exp_avg/a"], wanted["exp_avg/a"])
        assert empty().shape == (0, 4) and read_flat(empty, 0, 0).shape == (0,)
