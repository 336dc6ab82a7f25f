"""A model folder without the files of an adapter in it."""

import os
from pathlib import Path

from lockstep.models.folder import copy_without_adapter


def test_subfolders_are_linked_too_and_a_second_start_finds_its_place(tmp_path: Path) -> None:
    """Checkpoints beside the weights may be large. Expected: the same files, by hand."""
    names = ["model.safetensors", "checkpoint-1/model.safetensors", "checkpoint-1/deep/a.bin"]
    for name in [*names, "adapter_config.json"]:
        (tmp_path / "model" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "model" / name).write_text(name)
    for _ in range(2):
        copy = copy_without_adapter(tmp_path / "model", tmp_path / "work")
        assert sorted(str(p.relative_to(copy)) for p in copy.rglob("*") if p.is_file()) == sorted(names)
        assert all(os.path.samefile(copy / name, tmp_path / "model" / name) for name in names)
    assert all((tmp_path / "model" / name).read_text() == name for name in names)
