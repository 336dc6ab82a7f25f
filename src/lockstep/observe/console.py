"""rich's console for untrusted text from files, servers and models: it shows the text literally."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from typing import TextIO

from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment

from lockstep.observe.text import printable_text


class PlainConsole(Console):
    """Escapes control characters, and shows [red] and :smile: as text. Only the code sets styles.

    Args:
        file: None: stdout.
        width: of the lines where the output is no terminal; None: rich's choice.
        highlight: whether numbers and the like get colours.
    """

    def __init__(
        self, *, file: TextIO | None = None, width: int | None = None, highlight: bool = False
    ) -> None:
        terminal = (sys.stdout if file is None else file).isatty()
        super().__init__(
            file=file, width=None if terminal else width, highlight=highlight, markup=False, emoji=False
        )

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        """Yield the segments of `renderable`, escaped; rich's own control codes stay."""
        for segment in super().render(renderable, options):
            if segment.control:
                yield segment
            else:
                yield Segment(printable_text(segment.text), segment.style)
