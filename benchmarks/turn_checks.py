"""What the tokens of a conversation of many turns cost on the host: the ledger turn by turn (what the policy
wrote is read, the reply is rendered and encoded), and the checks of the whole trajectory at its end.

    python benchmarks/turn_checks.py                      20 turns of 400 tokens, and half and twice as many
    python benchmarks/turn_checks.py --step-seconds 30    and their share of a step of 1,024 trajectories

CPU milliseconds of this process and of the one that renders, medians over trajectories. Under "per turn" the
figures of a trajectory are divided by its turns: they stay as they are if the cost is linear in the turns.
The last line says whether twice the turns cost at most 2.5 times as much; the exit status is 0 when they do.
"""

from __future__ import annotations

import argparse
import json
import platform
import random
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

import psutil
from transformers import AutoTokenizer

from lockstep.environments.checks import Checks
from lockstep.environments.delta import ConversationTokens, Ledger
from lockstep.models.source import bundled_folder
from lockstep.observe.chat_template import ChatTemplate

TEMPLATE = (
    "{% if tools %}<|im_start|>system\n{% for tool in tools %}{{ tool | tojson }}\n{% endfor %}<|im_end|>\n"
    "{% endif %}{% for m in messages %}<|im_start|>{{ m.role + '\n' + m.content }}"
    "{% for c in m.tool_calls %}<tool_call>\n{{ c.function | tojson }}\n</tool_call>{% endfor %}"
    "{{ '<|im_end|>\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
TOOL = {
    "type": "function",
    "function": {
        "name": "lookup",
        "description": "Look a word up.",
        "parameters": {
            "type": "object",
            "properties": {"word": {"type": "string", "description": "The word."}},
            "required": ["word"],
        },
    },
}
PARTS = ("turn read", "reply", "checks")


def main(argv: Sequence[str] | None = None) -> int:
    """Exit status 0 when the cost is linear in the turns."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--turns", type=int, default=20, help="of a trajectory (default: %(default)s)")
    parser.add_argument("--tokens", type=int, default=400, help="of a turn (default: %(default)s)")
    parser.add_argument("--result-tokens", type=int, default=60, help="of a result (default: %(default)s)")
    parser.add_argument("--prompt-tokens", type=int, default=140, help="(default: %(default)s)")
    parser.add_argument("--repeats", type=int, default=9, help="trajectories (default: %(default)s)")
    parser.add_argument("--step-seconds", type=float, help="of a step of 1,024 trajectories, for the share")
    parser.add_argument("--json", type=Path, help="write the result to this file")
    args = parser.parse_args(argv)
    tokenizer = AutoTokenizer.from_pretrained(bundled_folder("smollm2-135m"))
    conversation = ConversationTokens(ChatTemplate(tokenizer, TEMPLATE), tools=[TOOL])
    run = Run(conversation, tokens=args.tokens, result=args.result_tokens, prompt=args.prompt_tokens)
    run.trajectory(2)  # caches are cold
    found = {
        turns: run.median(turns, args.repeats) for turns in (args.turns // 2, args.turns, 2 * args.turns)
    }
    print(f"{'CPU ms per turn':16} " + " ".join(f"{f'{turns} turns':>10}" for turns in found))
    for part in PARTS:
        print(f"{part:16} " + " ".join(f"{each[part] / turns:10.2f}" for turns, each in found.items()))
    whole = {turns: sum(each.values()) for turns, each in found.items()}
    print(f"{'a trajectory, ms':16} " + " ".join(f"{each:10.1f}" for each in whole.values()))
    result: dict[str, Any] = {
        "cpu_milliseconds": {str(turns): each for turns, each in found.items()},
        "arguments": {name: value for name, value in vars(args).items() if name != "json"},
        "machine": platform.platform(),
        "versions": {name: metadata.version(name) for name in ("transformers", "tokenizers", "jinja2")},
    }
    if args.step_seconds is not None:
        share = 1024 * whole[args.turns] / 1000 / args.step_seconds
        result["share_of_a_step"] = share
        print(f"CPU seconds of 1,024 trajectories, of a step of {args.step_seconds:g} s: {100 * share:.1f} %")
    if args.json is not None:
        args.json.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
    ratio = whole[2 * args.turns] / whole[args.turns]
    linear = ratio <= 2.5
    print(f"{'linear' if linear else 'NOT linear'}: twice the turns cost {ratio:.2f} times as much")
    return int(not linear)


class Run:
    """Makes trajectories of random words, and times them."""

    def __init__(self, conversation: ConversationTokens, *, tokens: int, result: int, prompt: int) -> None:
        self.conversation, self.tokens, self.result, self.prompt = conversation, tokens, result, prompt
        tokenizer = conversation.turns.tokenizer
        words = "the sum of all lines is two and seven"
        self._words = [f" {word}" for word in words.split()]
        self._ids = [tokenizer(word, add_special_tokens=False)["input_ids"][0] for word in self._words]
        self._random = random.Random(0)
        children = psutil.Process().children(recursive=True)
        self._schedstat = [Path(f"/proc/{child.pid}/schedstat") for child in children]
        call = '<tool_call>\n{"name": "lookup", "arguments": {"word": "seven"}}\n</tool_call><|im_end|>'
        self._call = tokenizer(call, add_special_tokens=False)["input_ids"]

    def median(self, turns: int, repeats: int) -> dict[str, float]:
        """CPU milliseconds of a trajectory, by part."""
        runs = [self.trajectory(turns) for _ in range(repeats)]
        return {part: statistics.median(run[part] for run in runs) for part in PARTS}

    def trajectory(self, turns: int) -> dict[str, float]:
        """CPU milliseconds of one trajectory, by part. Raises AssertionError: the checks found a mismatch."""
        spent, timed = dict.fromkeys(PARTS, 0.0), self._timed
        ledger = self.conversation.start([{"role": "user", "content": self._text(self.prompt)}])
        for _ in range(turns):
            ids = [*self._random.choices(self._ids, k=self.tokens - len(self._call)), *self._call]
            turn, milliseconds = timed(lambda ids=ids: ledger.add_policy(ids))
            spent["turn read"] += milliseconds
            replies = [call.result(self._text(self.result)) for call in turn.made]
            _, milliseconds = timed(lambda replies=replies: self.conversation.reply(ledger, replies))
            spent["reply"] += milliseconds
        checks, spent["checks"] = timed(lambda: self._checked(ledger))
        assert not checks.mismatches and checks.turns == turns
        return spent

    def _checked(self, ledger: Ledger) -> Checks:
        checks = Checks()
        checks.add(self.conversation.turns, ledger)
        return checks

    def _text(self, words: int) -> str:
        return "".join(self._random.choices(self._words, k=words)).strip()

    def _timed(self, run: Callable[[], Any]) -> tuple[Any, float]:
        before = self._nanoseconds() + time.process_time_ns()
        value = run()
        return value, (time.process_time_ns() + self._nanoseconds() - before) / 1e6

    def _nanoseconds(self) -> int:
        """CPU time of the processes that render."""
        return sum(int(each.read_text().split()[0]) for each in self._schedstat)


if __name__ == "__main__":
    sys.exit(main())
