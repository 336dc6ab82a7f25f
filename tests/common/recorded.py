"""What a recording says of its run, with everything filled in that most tests do not look at."""

from __future__ import annotations

from typing import Any

from lockstep.schema.recording import RecordingHeader


def recording_header(**changes: Any) -> RecordingHeader:
    """The header of a recording of Lockstep's own."""
    fields: dict[str, Any] = {
        "created": "2026-01-01T00:00:00Z",
        "framework": "lockstep",
        "versions": {},
        "model": {},
        "vocab_size": 256,
        "algorithm": {"name": "sft"},
        "temperature": 1.0,
        "max_tokens": None,
        "axes": {},
        "capacity": {},
    }
    return RecordingHeader(**fields | changes)
