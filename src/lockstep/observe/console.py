"""rich's console for text from files, servers and models: it shows the text, whatever it says."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from typing import TextIO

from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment

from lockstep.observe.text import printable_text


class PlainConsole(Console):
    """Escapes what a terminal could obey, and takes [red] and :smile: for text. Styles are those of the code.

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
        """The pieces of `renderable`; rich's own control codes are no text and stay."""
        for segment in super().render(renderable, options):
            if segment.control:
                yield segment
            else:
                yield Segment(printable_text(segment.text), segment.style)
