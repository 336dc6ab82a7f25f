"""Where the recording lies that comes with Lockstep."""

from __future__ import annotations

from pathlib import Path

from lockstep.errors import RecordingError


def corpus_path() -> Path:
    """The shipped corpus: inputs of a GRPO run of the bundled model on two data-parallel ranks.

    Raises:
        RecordingError: this installation comes without it.
    """
    path = Path(__file__).parent / "corpus"
    if not (path / "recording.json").is_file():
        raise RecordingError(
            f"{path}: this installation comes without the shipped corpus; install lockstep-rl from a wheel "
            "or a "
            "whole checkout, or name a recording"
        )
    return path
