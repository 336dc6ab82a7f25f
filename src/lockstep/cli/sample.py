"""`lockstep sample` and `lockstep chat`: completions of a run's checkpoint, or of any model."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, cast

import tyro

from lockstep.cli import arguments
from lockstep.config.load import check, to_values
from lockstep.config.model import ModelConfig
from lockstep.config.rollout import SamplingConfig
from lockstep.config.run import GRPORun
from lockstep.errors import CheckpointError, ConfigError, underway
from lockstep.models.architectures import text_config
from lockstep.observe.files import check_writable, read_json, write_json
from lockstep.observe.text import counted, echo

if TYPE_CHECKING:
    from lockstep.cli.common_model import OpenModel
    from lockstep.data.chat import ChatFormat
    from lockstep.observe.template_renderer import Rendered
    from lockstep.schema.rollout import Completion, Prompt, SamplingParams

# tyro keeps the line breaks before a line that does not begin with a letter.
SAMPLE_HELP = """Print completions of a run's checkpoint, or of any model.

$ lockstep sample runs/demo --num-prompts 8
$ lockstep sample runs/demo --checkpoint 20 --prompt "What is 2 + 3?" --n 4
$ lockstep sample bundled:smollm2-135m --prompt "What is 2 + 3?" --temperature 0
"""
CHAT_HELP = """Chat with a run's checkpoint, or with any model.

$ lockstep chat runs/demo
$ echo "What is 2 + 3?" | lockstep chat runs/demo --temperature 0

Each line is one turn. /reset forgets the conversation, Ctrl-C stops an answer, and Ctrl-D or /quit ends
the chat.
"""
CHAT_KEYS = "/reset forgets the conversation, /quit or Ctrl-D ends the chat"
SAMPLE_STEP = -2
"""Used as step in seeds, so that samples differ from all rollouts of the run."""
CHAT_STEP = -3
"""Stands in for the step in seeds."""


@dataclass(frozen=True, kw_only=True)
class SampleArguments:
    """Print completions of a run's checkpoint, or of any model."""

    model: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="RUN")]
    """A run directory, or a model as for model.name: a folder, a hub name or bundled:NAME."""
    prompt: Annotated[str | None, tyro.conf.arg(metavar="TEXT")] = None
    """The user's text, to which the chat template is applied. By default, held-out prompts are used."""
    num_prompts: int = 4
    """Number of held-out prompts to use without --prompt."""
    checkpoint: Annotated[str | None, tyro.conf.arg(metavar="STEP")] = None
    """Checkpoint of a run: export, last, or a step. By default the export if there is one, else the last."""
    temperature: Annotated[float | None, tyro.conf.arg(metavar="T")] = None
    """Sampling temperature; 0 is greedy. By default the run's."""
    max_tokens: Annotated[int | None, tyro.conf.arg(metavar="N")] = None
    """Maximum length of a completion, in tokens. By default the run's."""
    n: int = 1
    """Completions per prompt."""
    seed: int = 0
    """Seed for the sampling noise."""
    json: Annotated[Path | None, tyro.conf.arg(metavar="FILE")] = None
    """Write prompts and completions to this file."""


def sample(argv: Sequence[str]) -> int:
    """Print the completions; 0.

    Raises:
        ConfigError, ModelError, CheckpointError, DataError: see lockstep.cli.common_model.
    """
    args = tyro.cli(SampleArguments, args=list(argv), prog="lockstep sample", description=SAMPLE_HELP)
    for name in ("n", "num_prompts"):
        if not 1 <= getattr(args, name) <= arguments.MOST:
            flag = f"--{name.replace('_', '-')} {getattr(args, name)}"
            raise ConfigError(f"out-of-range: {flag} must be at least 1, and at most {arguments.MOST:,}")
    check_writable(args.json)
    overrides = {"temperature": args.temperature, "max_tokens": args.max_tokens}
    overrides = {name: value for name, value in overrides.items() if value is not None}
    check_model_flags(args.model, seed=args.seed, sampling=overrides)
    from lockstep.cli.common_model import open_model

    opened = open_model(args.model, checkpoint=args.checkpoint)
    prompts = read_prompts(opened, args)
    sampling = override(opened.sampling, overrides)
    completions = generate(opened, prompts, sampling, args)
    for prompt, group in zip(prompts, completions, strict=True):
        show(prompt, group)
    if args.json is not None:
        rows = [
            {"prompt": prompt.text, "prompt_index": prompt.index, "completions": [asdict(c) for c in group]}
            for prompt, group in zip(prompts, completions, strict=True)
        ]
        result = {"model": opened.source, "sampling": sampling.model_dump(), "prompts": rows}
        write_json(args.json, result)
    total = sum(len(c.token_ids) for group in completions for c in group)
    number = counted(len(prompts) * args.n, "completion")
    echo(f"sample: {number}, {counted(total, 'token')}, from {opened.source}")
    return 0


def check_model_flags(model: str, *, seed: int, sampling: Mapping[str, Any]) -> None:
    """Check the flags that do not depend on the model, before it is loaded. Raises ConfigError."""
    check({"name": model, "seed": seed}, ModelConfig, origin="the model's name and --seed")
    override(SamplingConfig(), sampling)


def override(sampling: SamplingConfig, values: Mapping[str, Any]) -> SamplingConfig:
    """The same settings with some replaced; raises ConfigError for impossible ones."""
    together = to_values(sampling) | dict(values)
    return check(together, SamplingConfig, origin=f"cannot sample with {dict(values)}")


def read_prompts(opened: OpenModel, args: SampleArguments) -> list[Prompt]:
    """The prompt of --prompt, or the first held-out prompts of the run."""
    from lockstep.data.held_out import holds_out, load_train_and_held_out
    from lockstep.environments.hosts import tools_of
    from lockstep.observe.chat_template import check_known
    from lockstep.schema.rollout import Prompt

    vocab_size = text_config(opened.model.module).vocab_size
    if args.prompt is not None:
        chat = opened.chat_format()
        rendered = chat.render(
            chat.with_system([{"role": "user", "content": args.prompt}]), generate=True, where="--prompt"
        )
        text, ids = rendered.text, chat.encode(rendered.text, rendered.plain)
        check_known(ids, vocab_size, tokenizer=opened.model.tokenizer, model=opened.source, where="--prompt")
        return [Prompt(index=0, token_ids=tuple(ids), text=text, where="--prompt")]
    run = opened.run
    if run is None or not run.online:
        raise ConfigError(f"missing-setting: {opened.source} has no held-out prompts; pass --prompt TEXT")
    online = cast(GRPORun, run)
    manifest = read_json(Path(args.model).expanduser() / "manifest.json", CheckpointError)
    held_out = load_train_and_held_out(
        online,
        tokenizer=opened.model.tokenizer,
        vocab_size=vocab_size,
        hold_out=holds_out(online, manifest) or "hash",
        tools=tools_of(online.environment),
    )[1]
    return [held_out[i] for i in range(min(args.num_prompts, len(held_out)))]


def generate(
    opened: OpenModel, prompts: Sequence[Prompt], sampling: SamplingConfig, args: SampleArguments
) -> list[list[Completion]]:
    """args.n completions of each prompt."""
    from lockstep.rollout.sampler import sample_seed, sampling_params
    from lockstep.schema.rollout import GenerationRequest

    params = sampling_params(sampling)
    return opened.engine.generate(
        [
            GenerationRequest(
                prompt_token_ids=prompt.token_ids,
                sampling=params,
                seeds=tuple(sample_seed(args.seed, SAMPLE_STEP, prompt.index, i) for i in range(args.n)),
            )
            for prompt in prompts
        ]
    )


def show(prompt: Prompt, group: Sequence[Completion]) -> None:
    """One prompt and its completions as text; control characters in it are escaped."""
    echo(f"=== prompt {prompt.index} ({len(prompt.token_ids)} tokens)\n{prompt.text}")
    for completion in group:
        text = completion.text if completion.text is not None else str(list(completion.token_ids))
        echo(f"--- {len(completion.token_ids)} tokens, {completion.finish_reason}\n{text}")
    echo()


@dataclass(frozen=True, kw_only=True)
class ChatArguments:
    """Chat with a run's checkpoint, or with any model. /reset forgets the conversation; Ctrl-D exits."""

    model: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="RUN")]
    """A run directory, or a model as for model.name: a folder, a hub name or bundled:NAME."""
    checkpoint: Annotated[str | None, tyro.conf.arg(metavar="STEP")] = None
    """Checkpoint of a run: export, last, or a step. By default the export if there is one, else the last."""
    temperature: Annotated[float | None, tyro.conf.arg(metavar="T")] = None
    """Sampling temperature; 0 is greedy. By default the run's."""
    max_tokens: int = 512
    """Maximum length of an answer, in tokens."""
    seed: int = 0
    """Seed for the sampling noise."""


def chat(argv: Sequence[str]) -> int:
    """Talk until the input ends; 0.

    Raises:
        ConfigError: the model has no tokenizer. And see lockstep.cli.common_model.
    """
    args = tyro.cli(ChatArguments, args=list(argv), prog="lockstep chat", description=CHAT_HELP)
    from lockstep.cli.common_model import open_model
    from lockstep.rollout.sampler import sampling_params

    values: dict[str, float | int] = {"max_tokens": args.max_tokens}
    if args.temperature is not None:
        values["temperature"] = args.temperature
    check_model_flags(args.model, seed=args.seed, sampling=values)
    opened = open_model(args.model, checkpoint=args.checkpoint, max_batch=1)
    talk = Chat(opened, sampling_params(override(opened.sampling, values)), seed=args.seed)
    terminal = sys.stdin.isatty()
    if terminal:
        echo(f"{opened.source}; {CHAT_KEYS}")
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
            talk.reset()
            echo("(conversation forgotten)")
        elif line.strip() in ("/exit", "/quit"):
            return 0
        elif line.strip() == "/help":
            echo(CHAT_KEYS)
        elif line.strip():
            with underway(lambda: talk.turns > 0):
                talk.answer(line)


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
        from lockstep.rollout.environment import Environment, TrajectoryRules
        from lockstep.rollout.episodes import at_once, run_episodes
        from lockstep.rollout.sampler import sample_seed
        from lockstep.schema.rollout import Prompt

        messages = [*self._messages, {"role": "user", "content": text}]
        rendered = self._render(messages)
        ids = self._format.encode(rendered.text, rendered.plain)
        if len(ids) >= self._max_positions:
            raise ConfigError(
                f"too-long: the conversation has {len(ids)} tokens, but the model has only "
                f"{self._max_positions} positions; start over with /reset"
            )
        prompt = Prompt(index=0, token_ids=tuple(ids), text="")
        seed = sample_seed(self._seed, CHAT_STEP, self._turn, 0)
        decoding = self._engine.decoding(self._sampling)
        assert decoding is not None, "a model without a tokenizer has no chat format"
        printer = Printer(decoding)
        try:
            self._engine.on_token = lambda _, __, ids: printer.show(ids)
            ((answer,),) = run_episodes(
                self._engine,
                Environment(),
                at_once([(prompt, (seed,))]),
                rules=TrajectoryRules.of(self._sampling),
                on_end=lambda *_: None,
            )
            printer.finish(answer.text or "")
        except KeyboardInterrupt:
            echo(" (stopped)", end="")
        echo(flush=True)
        self._turn += 1
        self._messages = [*messages, {"role": "assistant", "content": printer.text}]

    def _render(self, messages: list[dict[str, str]]) -> Rendered:
        """The conversation as text; a model without a chat template goes on writing after the last line."""
        from lockstep.observe.template_renderer import Rendered

        if self._format.template is None:
            return Rendered(text="".join(message["content"] for message in messages))
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
