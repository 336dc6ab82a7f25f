"""A small recording on the disk: three inputs of tiny-llama."""

from __future__ import annotations

from pathlib import Path

from bisect_arms import batch_of
from recorded import recording_header

from lockstep.recording import RecordingWriter
from lockstep.schema.recording import InputMeta, RecordedInput

GROUPS = ((5, 7), (5, 12, 3), (3, 3, 16, 2))


def write_recording(path: Path, **axes: str) -> Path:
    header = recording_header(
        model={"name": "shape:tiny-llama", "dtype": "float32"},
        axes=axes,
        capacity={"token_budget": 64, "max_seqlen": 32, "max_documents": 8},
    )
    with RecordingWriter(path, header) as writer:
        for update, lengths in enumerate(GROUPS):
            meta = InputMeta(step=update, update=update, micro_batch=0, num_micro_batches=1)
            inputs = [RecordedInput(meta=meta, batch=batch_of(lengths, seed=update), outputs=None)]
            writer.begin(inputs)
            writer.finish(inputs)
    return path
