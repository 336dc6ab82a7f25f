"""Keep transformers quiet while files are read."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator

from transformers.utils import logging as hf_logging


@contextlib.contextmanager
def quiet_transformers() -> Iterator[None]:
    """Silence progress bars and warnings of transformers inside, and restore its settings afterwards.

    Where accelerate and DeepSpeed are installed, save_pretrained imports DeepSpeed, whose logger writes to
    standard output that there is no GPU.
    """
    deepspeed = logging.getLogger("DeepSpeed")
    # A filter, because DeepSpeed sets its logger's level when it is imported, which may be inside.
    deepspeed.addFilter(_is_error)
    verbosity, bars = hf_logging.get_verbosity(), hf_logging.is_progress_bar_enabled()
    hf_logging.set_verbosity_error()
    hf_logging.disable_progress_bar()
    try:
        yield
    finally:
        deepspeed.removeFilter(_is_error)
        hf_logging.set_verbosity(verbosity)
        if bars:
            hf_logging.enable_progress_bar()


def _is_error(record: logging.LogRecord) -> bool:
    return record.levelno >= logging.ERROR
