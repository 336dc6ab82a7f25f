"""`lockstep chat`: chat with a run's checkpoint, or with any model.

lockstep chat runs/demo
echo "What is 2 + 3?" | lockstep chat runs/demo --temperature 0

One line is one turn. /reset forgets the conversation; Ctrl-C stops an answer; Ctrl-D ends.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

import tyro

from lockstep.errors import ConfigError, underway
from lockstep.observe.text import echo

if TYPE_CHECKING:
    from lockstep.cli.common_model import OpenModel
    from lockstep.data.chat import ChatFormat
    from lockstep.schema.rollout import SamplingParams

CHAT_STEP = -3
"""Stands in for the step in seeds."""


@dataclass(frozen=True, kw_only=True)
class ChatArguments:
    """Chat with a run's checkpoint, or with any model. /reset forgets the conversation, Ctrl-D ends."""

    model: Annotated[str, tyro.conf.Positional]
    """A run directory, or what model.name takes: a folder, a hub name, bundled:NAME."""
    checkpoint: str | None = None
    """Checkpoint of a run: export, last, or a step. None: the export, else the last."""
    temperature: float | None = None
    """Sampling temperature; 0 is greedy. None: the run's."""
    max_tokens: int = 512
    """Longest answer, in tokens."""
    seed: int = 0
    """Seed of the sampling noise."""


def main(argv: Sequence[str]) -> int:
    """Talk until the input ends; 0.

    Raises:
        ConfigError: the model has no tokenizer. And see lockstep.cli.common_model.
    """
    args = tyro.cli(ChatArguments, args=list(argv), prog="lockstep chat", description=__doc__)
    from lockstep.cli.common_model import open_model
    from lockstep.cli.sample import check_model_flags, override
    from lockstep.rollout.sampler import sampling_params

    values: dict[str, float | int] = {"max_tokens": args.max_tokens}
    if args.temperature is not None:
        values["temperature"] = args.temperature
    check_model_flags(args.model, seed=args.seed, sampling=values)
    opened = open_model(args.model, checkpoint=args.checkpoint, max_batch=1)
    chat = Chat(opened, sampling_params(override(opened.sampling, values)), seed=args.seed)
    terminal = sys.stdin.isatty()
    if terminal:
        echo(f"{opened.source}; /reset forgets the conversation, Ctrl-D ends")
    while True:
        try:
            line = input("> " if terminal else "")
        except UnicodeDecodeError as error:
            raise ConfigError(f"not-text: the input is not text in {sys.stdin.encoding}: {error}") from error
        except EOFError:
            if terminal:
                echo()
            return 0
        if line.strip() == "/reset":
            chat.reset()
            echo("(conversation forgotten)")
        elif line.strip():
            with underway(lambda: chat.turns > 0):
                chat.answer(line)


class Chat:
    """A conversation, and the model's turn in it."""

    def __init__(self, opened: OpenModel, sampling: SamplingParams, *, seed: int) -> None:
        self._engine = opened.engine
        self._format: ChatFormat = opened.chat_format()
        self._max_positions = opened.model.max_positions
        self._sampling = sampling
        self._seed = seed
        self._turn = 0
        self._messages: list[dict[str, str]] = []

    @property
    def turns(self) -> int:
        """Answers so far."""
        return self._turn

    def reset(self) -> None:
        """Forget the conversation so far."""
        self._messages = []

    def answer(self, text: str) -> None:
        """Print the answer to `text` as it is made, and keep both.

        Ctrl-C ends the answer; what was printed of it is kept.
        """
        from lockstep.rollout.sampler import sample_seed
        from lockstep.schema.rollout import GenerationRequest

        messages = [*self._messages, {"role": "user", "content": text}]
        ids = self._format.encode(self._render(messages))
        if len(ids) >= self._max_positions:
            raise ConfigError(
                f"too-long: the conversation has {len(ids)} tokens and the model {self._max_positions} "
                "positions; start over with /reset"
            )
        request = GenerationRequest(
            prompt_token_ids=tuple(ids),
            sampling=self._sampling,
            seeds=(sample_seed(self._seed, CHAT_STEP, self._turn, 0),),
        )
        decoding = self._engine.decoding(self._sampling)
        assert decoding is not None, "a model without a tokenizer has no chat format"
        printer = Printer(decoding)
        try:
            self._engine.on_token = lambda _, __, ids: printer.show(ids)
            completion = self._engine.generate([request])[0][0]
            printer.finish(completion.text or "")
        except KeyboardInterrupt:
            echo(" (stopped)", end="")
        echo(flush=True)
        self._turn += 1
        self._messages = [*messages, {"role": "assistant", "content": printer.text}]

    def _render(self, messages: list[dict[str, str]]) -> str:
        """The conversation as text; a model without a chat template goes on writing after the last line."""
        if self._format.template is None:
            return "".join(message["content"] for message in messages)
        return self._format.render(self._format.with_system(messages), generate=True, where="conversation")


class Printer:
    """Prints a growing completion, holding back what could still change."""

    def __init__(self, decoding: Callable[[Sequence[int]], str]) -> None:
        self._decoding = decoding
        self.text = ""
        """The text printed so far."""

    def show(self, token_ids: Sequence[int]) -> None:
        """Print what is new, unless it ends in the middle of a character."""
        text = self._decoding(token_ids)
        if not text.endswith("\ufffd"):
            self.finish(text)

    def finish(self, text: str) -> None:
        """Print the rest of the final text, control characters escaped; a stop string that was cut off has
        been seen already."""
        if text.startswith(self.text):
            echo(text[len(self.text) :], end="", flush=True)
            self.text = text
