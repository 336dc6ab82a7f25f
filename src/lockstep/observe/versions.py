"""The versions that the numbers of a run depend on."""

from __future__ import annotations

import platform

import numpy
import torch
import transformers

from lockstep.version import __version__


def library_versions() -> dict[str, str]:
    """Return the versions of Lockstep, Python, torch, transformers and numpy, for manifests and headers."""
    return {
        "lockstep": __version__,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "numpy": numpy.__version__,
    }
