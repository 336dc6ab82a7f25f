"""Records what a policy is fed and what it makes of it, and reads that back bitwise; executes nothing.

>>> from lockstep.recording import Recording
>>> for recorded in Recording.open("runs/demo"):  # doctest: +SKIP
...     print(recorded.meta.key, recorded.batch.num_tokens, recorded.outputs.loss)
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lockstep.recording.files import fingerprint as fingerprint
    from lockstep.recording.hooks import record as record
    from lockstep.recording.reader import Recording as Recording
    from lockstep.recording.reader import corpus_path as corpus_path
    from lockstep.recording.writer import RecordingWriter as RecordingWriter

_HOMES = {
    "Recording": "lockstep.recording.reader",
    "RecordingWriter": "lockstep.recording.writer",
    "corpus_path": "lockstep.recording.reader",
    "fingerprint": "lockstep.recording.files",
    "record": "lockstep.recording.hooks",
}
"""Public name -> the module that defines it; imported at first use."""

__all__ = ["Recording", "RecordingWriter", "corpus_path", "fingerprint", "record"]


def __getattr__(name: str) -> Any:
    """PEP 562. A name is not kept here: `fingerprint` is a module of this package as well."""
    if name not in _HOMES:
        raise AttributeError(
            f"module 'lockstep.recording' has no attribute {name!r}; it has {', '.join(__all__)}"
        )
    return getattr(importlib.import_module(_HOMES[name]), name)
