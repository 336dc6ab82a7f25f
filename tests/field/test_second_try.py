"""Situations of users of other frameworks, from public reports of 2026: the input, what should come of it,
and the source of the expected value. The link above a case is the report."""

from __future__ import annotations

import decimal
import fractions
import functools
import json
import shutil
import socket
import threading
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from raising import raises
from transformers import AutoTokenizer

from lockstep.cli import train
from lockstep.cli.main import main
from lockstep.config.data import DataConfig
from lockstep.config.load import dump_toml, load_run
from lockstep.config.model import ModelConfig
from lockstep.config.rollout import RewardConfig
from lockstep.data.preferences import load_preferences
from lockstep.data.prompts import load_prompts
from lockstep.data.sft import load_sft
from lockstep.data.sources import check_source
from lockstep.errors import ConfigError, DataError, ModelError, RewardError
from lockstep.loops.online import build_online
from lockstep.models.export import export_hf
from lockstep.models.load import load_model
from lockstep.protocols.reward import RewardInput
from lockstep.rollout.rewards import RewardSet, boxed, tags
from lockstep.schema.batch import TrainSample

TURNS = [{"role": "user", "content": "Q"}, {"role": "assistant", "content": "A"}]
MORE = [*TURNS, {"role": "user", "content": "R"}]


@pytest.fixture(scope="module")
def tokenizer(tiny_folder: Path) -> Any:
    """One token a byte; turns are <|ROLE|>TEXT<|end|>."""
    return AutoTokenizer.from_pretrained(tiny_folder)


def source(folder: Path, *rows: Any, name: str = "rows.jsonl") -> str:
    path = folder / name
    path.write_text("\n".join(map(json.dumps, rows)))
    return str(path)


def trained(sample: TrainSample, tokenizer: Any) -> str:
    """The text whose tokens carry loss: entry t of the mask is about token t + 1."""
    return str(tokenizer.decode([sample.token_ids[t + 1] for t in sample.loss_mask.nonzero().flatten()]))


# Rows and files


# Several results of tools in one turn of the template, as Qwen's have them.
TOOLS = """{%- for m in messages %}{%- if m.role == 'tool' %}
{%- if loop.previtem.role != 'tool' %}{{- '<|user|>' }}{%- endif %}{{- '[' + m.content + ']' }}
{%- if loop.last or loop.nextitem.role != 'tool' %}{{- '<|end|>' }}{%- endif %}
{%- else %}{{- '<|' + m.role + '|>' + m.content }}
{%- for c in m.tool_calls or [] %}{{- '(' + c.function.arguments.x + ')' }}{%- endfor %}{{- '<|end|>' }}
{%- endif %}{%- endfor %}{%- if add_generation_prompt %}{{- '<|assistant|>' }}{%- endif %}"""


def call(x: str) -> dict[str, Any]:
    return {"type": "function", "function": {"name": "f", "arguments": {"x": x}}}


@pytest.mark.parametrize(
    ("messages", "expected"),
    [
        # https://github.com/THUDM/slime/pull/2264 (2026-08-12). By hand: both calls and the last answer, each
        # with its end; nothing of the tools' turn.
        (
            [
                {"role": "user", "content": "Q"},
                {"role": "assistant", "content": None, "tool_calls": [call("1"), call("2")]},
                {"role": "tool", "content": "r1"},
                {"role": "tool", "content": "r2"},
                {"role": "assistant", "content": "A"},
            ],
            "(1)(2)<|end|>A<|end|>",
        ),
        # https://github.com/unslothai/unsloth-zoo/pull/1270 (2026-09-17). By hand: a conversation that
        # ends in the results of tools trains the call alone.
        (
            [
                {"role": "user", "content": "Q"},
                {"role": "assistant", "content": "B", "tool_calls": [call("1")]},
                {"role": "tool", "content": "r1"},
            ],
            "B(1)<|end|>",
        ),
    ],
)
def test_turns_of_tools_are_not_trained_on(
    messages: list[dict[str, Any]], expected: str, tokenizer: Any, tmp_path: Path
) -> None:
    config = DataConfig(source=source(tmp_path, {"messages": messages}), chat_template=TOOLS)
    assert trained(load_sft(config, tokenizer=tokenizer)[0], tokenizer) == expected


# Calls whose arguments are JSON text, as OpenAI writes them, or an object, as transformers documents:
# https://github.com/oumi-ai/oumi/pull/2599 (2026-08-12), https://github.com/vortico/flama/issues/258
# (2026-07-30),
# https://github.com/Layr-Labs/d-inference/pull/250 (2026-05-29). By hand: the object once, whatever the
# template
# does with it and whichever form the row has.
@pytest.mark.parametrize("arguments", [{"city": "SF"}, '{"city":"SF"}'])
@pytest.mark.parametrize(
    ("written", "expected"),
    [
        ("{{ a | tojson }}", '{"city": "SF"}'),  # as Qwen2.5's
        ("{{ a if a is string else a | tojson }}", '{"city": "SF"}'),  # as Qwen3's
        ("{% for k, v in a.items() %}{{ k + '=' + v }}{% endfor %}", "city=SF"),  # as Qwen3.5's
        # as Gemma's
        ("{% for k, v in a|dictsort %}{{ k + ':' + v }}{% endfor %}", "city:SF"),
        (
            "{% if a is mapping %}{% for k, v in a|dictsort %}{{ k + ':' + v }}{% endfor %}"
            "{% elif a is string %}{{ a }}{% endif %}",
            "city:SF",
        ),
        ("{{ 'x' + a }}", "x"),  # as DeepSeek's, which takes text alone: the row's own
        ("{{ a }}", ""),
    ],
)
def test_arguments_of_calls_have_the_form_that_a_template_takes(
    written: str, expected: str, arguments: Any, tokenizer: Any, tmp_path: Path
) -> None:
    template = (
        "{% for m in messages %}{{ '<|' + m.role + '|>' + m.content }}{% for c in m.tool_calls or [] %}"
        "{% set a = c.function.arguments %}{{ '{' }}" + written + "{{ '}' }}{% endfor %}{{ '<|end|>' }}"
        "{% endfor %}{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
    )
    call = {"type": "function", "function": {"name": "f", "arguments": arguments}}
    messages = [TURNS[0], {"role": "assistant", "content": None, "tool_calls": [call]}]
    config = DataConfig(source=source(tmp_path, {"messages": messages}), chat_template=template)
    found = trained(load_sft(config, tokenizer=tokenizer)[0], tokenizer)
    own = arguments if isinstance(arguments, str) else json.dumps(arguments)
    assert found == f"{{{expected}{own if expected in ('', 'x') else ''}}}<|end|>"


# https://github.com/huggingface/trl/pull/6433 (2026-07-20): answers that begin alike.
# https://github.com/unslothai/unsloth-zoo/pull/1110: the border is one of tokens. By hand: the whole answers.
def test_answers_that_begin_alike_are_trained_from_their_beginning(tokenizer: Any, tmp_path: Path) -> None:
    chosen, rejected = "Paris is it", "Paris it is"
    rows = [{"prompt": "Q", "chosen": chosen, "rejected": rejected}]
    pair = load_preferences(DataConfig(source=source(tmp_path, *rows)), tokenizer=tokenizer)[0]
    assert [trained(sample, tokenizer) for sample in pair] == [f"{chosen}<|end|>", f"{rejected}<|end|>"]


# https://github.com/huggingface/trl/pull/6357 (2026-07-15): pad and end are one token.
# By hand: the end is trained.
def test_the_end_is_trained_when_padding_is_the_same_token(tiny_folder: Path, tmp_path: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(tiny_folder)
    tokenizer.pad_token = tokenizer.eos_token
    sample = load_sft(DataConfig(source=source(tmp_path, {"messages": TURNS})), tokenizer=tokenizer)[0]
    assert trained(sample, tokenizer) == "A<|end|>"
    assert int(sample.token_ids[-1]) == tokenizer.pad_token_id


MARK = "\ufeff"
"""A byte order mark, with which editors of Windows begin a file."""


# https://github.com/huggingface/datasets/pull/8243 (2026-06-09). The right rows are those without the mark.
@pytest.mark.parametrize("name", ["rows.jsonl", "rows.json"])
def test_a_byte_order_mark_is_no_part_of_the_rows(name: str, tokenizer: Any, tmp_path: Path) -> None:
    text = json.dumps({"prompt": "Q"})
    text = f"[{text}]" if name.endswith(".json") else f"{text}\r\n{text}\r\n"
    (tmp_path / name).write_text(MARK + text, newline="")
    assert load_prompts(DataConfig(source=str(tmp_path / name)), tokenizer=tokenizer)[0].row["prompt"] == "Q"


# The same report, and https://github.com/huggingface/trl/pull/5869 (2026-05-27), about templates.
def test_a_byte_order_mark_is_no_part_of_a_template_or_config(tokenizer: Any, tmp_path: Path) -> None:
    (tmp_path / "chat.jinja").write_text(MARK + tokenizer.chat_template)
    config = DataConfig(source=source(tmp_path, {"prompt": "Q"}), chat_template=str(tmp_path / "chat.jinja"))
    assert load_prompts(config, tokenizer=tokenizer)[0].text == "<|user|>Q<|end|><|assistant|>"
    (tmp_path / "run.toml").write_text(MARK + 'kind = "grpo"\nsteps = 3\n')
    assert load_run(tmp_path / "run.toml").steps == 3


# https://github.com/huggingface/datasets/pull/8358 (2026-07-24): CSV files. Ours are not read, and no name on
# the hub is looked for in their place.
@pytest.mark.parametrize(
    ("name", "there"), [("rows.csv", True), ("rows.jsonl.gz", False), ("rows.txt", False), ("rows", True)]
)
def test_files_of_other_kinds_are_refused(
    name: str, there: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    if there:
        (tmp_path / name).write_text("prompt,completion\na,b\n")
    with raises(ConfigError, "wrong-kind-of-file: data.source"):
        check_source(DataConfig(source=name))


# Formats that other frameworks convert, such as ShareGPT's in
# https://github.com/unslothai/unsloth/issues/11321
# (2026-09-19), and rows with nulls. Expected: an error that names the row, and what to write.
@pytest.mark.parametrize(
    ("name", "text", "problem", "hint"),
    [
        ("a.jsonl", '{"messages": [{"from": "human", "value": "Q"}]}', "wrong-row: line 1", "ShareGPT"),
        ("a.jsonl", '{"prompt": null}', "wrong-row: line 1", "None"),
        ("a.jsonl", '{"prompt": 5}', "wrong-row: line 1", "neither text"),
        ("a.json", '{"prompt": "Q"}', "wrong-type", ".jsonl"),
        ("a.jsonl", '{"prompt": "Q"}\n'.encode("utf-16"), "not-text", "UTF-8"),
    ],
)
def test_rows_of_other_formats_are_refused_with_a_remedy(
    name: str, text: str | bytes, problem: str, hint: str, tokenizer: Any, tmp_path: Path
) -> None:
    (tmp_path / name).write_bytes(text if isinstance(text, bytes) else text.encode())
    with raises(DataError, problem) as caught:
        load_prompts(DataConfig(source=str(tmp_path / name)), tokenizer=tokenizer)
    assert hint in str(caught.value)


# https://github.com/pytorch/torchtitan/pull/4268 (2026-08-22): a document of exactly the limit. By hand.
@pytest.mark.parametrize(("less", "truncated", "text"), [(0, 0, "A<|end|>"), (1, 1, "A")])
def test_a_document_of_exactly_max_length_is_whole(
    less: int, truncated: int, text: str, tokenizer: Any, tmp_path: Path
) -> None:
    tokens = len(tokenizer("<|user|>Q<|end|><|assistant|>A<|end|>")["input_ids"])
    config = DataConfig(source=source(tmp_path, {"messages": TURNS}), max_length=tokens - less)
    documents = load_sft(config, tokenizer=tokenizer)
    assert (len(documents[0]), documents.report["truncated"]) == (tokens - less, truncated)
    assert trained(documents[0], tokenizer) == text


# https://github.com/huggingface/trl/issues/6548 (2026-07-26), https://github.com/huggingface/trl/pull/6025
# (2026-06-12): truncation leaves nothing of an answer. The row is named; it is neither NaN nor a loss of 0.
@pytest.mark.parametrize("load", [load_sft, load_preferences])
def test_an_answer_of_which_truncation_leaves_nothing_is_refused(
    load: Callable[..., Any], tokenizer: Any, tmp_path: Path
) -> None:
    row = {"prompt": "Q" * 50, "completion": "A", "chosen": "A", "rejected": "B"}
    with raises(DataError, "nothing-left"):
        load(DataConfig(source=source(tmp_path, row), max_length=40), tokenizer=tokenizer)


# https://github.com/THUDM/slime/pull/2237 (2026-08-12): leaving long prompts out keeps the others' order.
def test_prompts_keep_their_order_where_long_ones_are_left_out(tokenizer: Any, tmp_path: Path) -> None:
    rows = [{"prompt": text} for text in ("a", "b" * 99, "c", "d" * 99, "e")]
    config = DataConfig(source=source(tmp_path, *rows), max_prompt_tokens=60, overlong_prompts="drop")
    prompts = load_prompts(config, tokenizer=tokenizer)
    assert [prompts[i].row["prompt"] for i in range(len(prompts))] == ["a", "c", "e"]


# Rewards


def sample(answer: Any = "34", completion: str = "It is 34") -> RewardInput:
    return RewardInput(
        prompt="p",
        completion=completion,
        row={"answer": answer},
        prompt_token_ids=(1,),
        completion_token_ids=(1, 2),
        finish_reason="stop",
        index=0,
    )


def scaled(prompt: str, completion: str, row: Any, scale: float = 1.0) -> float:
    return 0.5 * scale


async def awaited(prompt: str, completion: str, row: Any) -> float:
    return 0.25


class Judge:
    def __call__(self, prompt: str, completion: str, row: Any) -> float:
        return 2.0

    def method(self, *, prompt: str, completion: str, row: Any) -> float:
        return 4.0


# https://github.com/huggingface/trl/pull/6313 (2026-07-13). Expected: what the callable returns.
@pytest.mark.parametrize(
    ("function", "name", "expected"),
    [
        (functools.partial(scaled, scale=3.0), "partial", 1.5),
        (functools.partial(awaited), "partial", 0.25),
        (Judge(), "Judge", 2.0),
        (Judge().method, "method", 4.0),
    ],
)
def test_callables_of_every_kind_are_rewards(
    function: Callable[..., Any], name: str, expected: float
) -> None:
    rewards = RewardSet([], functions=[function])
    (scored,) = rewards.score([sample()])
    assert scored is not None and scored.by_name == {name: expected} and scored.total == expected


# https://github.com/THUDM/slime/pull/2121 (2026-06-23): rewards that are no float.
# Expected: Python's float().
@pytest.mark.parametrize(
    "value",
    [1, True, np.bool_(True), np.float32(0.5), np.array(1.5), torch.tensor(0.5, requires_grad=True), -0.0],
)
def test_numbers_of_every_kind_are_scores(value: Any) -> None:
    (scored,) = RewardSet([], functions=[lambda prompt, completion, row: value]).score([sample()])
    assert scored is not None and scored.total == float(value)


# https://github.com/modelscope/ms-swift/issues/8123 (2026-02-27),
# https://github.com/huggingface/trl/pull/5775
# (2026-05-15): None or NaN from a reward. It ends the run or, if asked for, drops the rollout; it is never 0.
@pytest.mark.parametrize(
    "value", [None, float("nan"), "0.5", [0.5], decimal.Decimal("0.5"), fractions.Fraction(1, 2)]
)
def test_what_is_no_number_is_no_score(value: Any) -> None:
    with raises(RewardError, "reward-failed"):
        RewardSet([], functions=[lambda prompt, completion, row: value]).score([sample()])


# https://github.com/OpenRLHF/OpenRLHF/pull/1219 (2026-04-14),
# https://github.com/PrimeIntellect-ai/prime-rl/pull/3182 (2026-08-03): a score of 0.0 is a score, and counts
# in the total and the means.
def test_a_score_of_zero_is_not_missing() -> None:
    def zero(prompt: str, completion: str, row: Any) -> float:
        return 0.0

    rewards = RewardSet([], functions=[zero, scaled])
    (scored,) = rewards.score([sample()])
    assert scored is not None and scored.by_name == {"zero": 0.0, "scaled": 0.5}
    assert scored.total == 0.5 and rewards.pop_counts() == {}


# https://github.com/OpenRLHF/OpenRLHF/commit/9e70af9a844dadb88fd0f1a492f65ca665d84010 (2026-02-03):
# the columns of DAPO-17k. Text and numbers are compared by math-verify; a table or a null is no answer, and
# scores no 0.
@pytest.mark.parametrize(
    ("answer", "expected"),
    [
        ("34", 1.0),
        (34, 1.0),
        (34.0, 1.0),
        pytest.param(10**400, 0.0, id="beyond any float"),
        (["34"], 1.0),
        (decimal.Decimal(34), 1.0),
        ("35", 0.0),
        ({"ground_truth": "34", "style": "rule"}, None),
        (None, None),
        (float("nan"), None),
        (True, None),
        (["34", "35"], None),
    ],
)
def test_an_answer_that_is_neither_text_nor_number_is_refused(
    answer: Any, expected: float | None, math: RewardSet
) -> None:
    if expected is None:
        with raises(RewardError, "reward-failed"):
            math.score([sample(answer)])
    else:
        (scored,) = math.score([sample(answer)])
        assert scored is not None and scored.total == expected


# The same, before a model samples anything: the row is named, also one that training comes to much later.
def test_answers_are_checked_before_the_first_step(tiny_folder: Path, tmp_path: Path) -> None:
    rows = [{"prompt": f"{n} + 1?", "answer": None if n == 9 else n + 1} for n in range(12)]
    settings = {
        "model.name": str(tiny_folder),
        "data.source": source(tmp_path, *rows),
        "rewards": [{"name": "math"}],
        "rollout.prompts_per_step": 2,
        "eval.num_prompts": 2,
    }
    with raises(DataError, "wrong-row: line 10", name="answer"):
        build_online(load_run(kind="grpo", overrides=settings))


@pytest.fixture(scope="module")
def math() -> Any:
    rewards = RewardSet([RewardConfig(name="math", answer="last_number")])
    yield rewards
    rewards.close()


# https://github.com/huggingface/trl/pull/5798 (2026-05-20): parsing that takes exponentially long. A policy
# that
# repeats an opening is common; with time in the square of the length these texts would take hours.
@pytest.mark.parametrize(
    ("extract", "text", "expected"),
    [
        (boxed, "\\boxed{" * 300_000, None),
        (boxed, "\\boxed{" * 300_000 + "7}", "7"),
        (boxed, "\\boxed{1}{" * 200_000, "1"),
        (tags, "<answer>" * 300_000, None),
        (tags, "<answer></answer" * 200_000, None),
    ],
)
def test_answers_are_found_in_one_pass(
    extract: Callable[[str], str | None], text: str, expected: str | None
) -> None:
    assert extract(text) == expected


class Service(BaseHTTPRequestHandler):
    def do_POST(self) -> None:
        request = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        scores = [1.0 for _ in request["samples"]]
        body = json.dumps({"request_id": request["request_id"], "scores": scores}).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: Any) -> None:
        pass


class Six(ThreadingHTTPServer):
    address_family = socket.AF_INET6


# https://github.com/THUDM/slime/pull/2199 (2026-08-12): addresses of IPv6.
def test_a_reward_service_may_have_an_address_of_ipv6() -> None:
    try:
        server = Six(("::1", 0), Service)
    except OSError as error:
        pytest.skip(f"no IPv6 here: {error}")
    threading.Thread(target=server.serve_forever, daemon=True).start()
    rewards = RewardSet([RewardConfig(name="http", url=f"http://[::1]:{server.server_address[1]}/score")])
    try:
        (scored,) = rewards.score([sample()])
        assert scored is not None and scored.total == 1.0
    finally:
        rewards.close()
        server.shutdown()
        server.server_close()


# Settings


@pytest.mark.parametrize(
    ("settings", "problem"),
    [
        # https://github.com/THUDM/slime/pull/2297 (2026-08-20)
        ({"rollout.sampling.temperature": -1.0}, "out-of-range: rollout.sampling.temperature"),
        ({"rollout.sampling.temperature": 0.0}, "nothing-to-do: rollout.sampling.temperature"),
        # https://github.com/OpenRLHF/OpenRLHF/pull/1250 (2026-06-09)
        ({"algorithm.name": "dr_grpo", "rollout.group_size": 1}, "nothing-to-do: rollout.group_size"),
        ({"algorithm.name": "rloo", "rollout.group_size": 1}, "nothing-to-do: rollout.group_size"),
        # https://github.com/OpenRLHF/OpenRLHF/pull/1238 (2026-05-15)
        ({"train.min_lr_ratio": 0.1}, "no-effect: train.min_lr_ratio"),
        # https://github.com/THUDM/slime/pull/2242 (2026-08-12): an evaluation has min_tokens, too. It was
        # refused
        # when it began, after the training.
        (
            {"rollout.sampling.min_tokens": 8, "eval.max_tokens": 4, "eval.before": False},
            "contradiction: eval.max_tokens",
        ),
        # Messages that hid the value, as in https://github.com/huggingface/trl/pull/6373 (2026-07-17)
        ({"data.columns": {"answer": 1}}, "wrong-type: data.columns.answer"),
        (
            {"rewards": [{"name": "m:f", "kwargs": {"words": ["a"]}}]},
            "wrong-type: rewards[0].kwargs.words",
        ),
    ],
)
def test_settings_that_cannot_be_are_refused_by_name(settings: dict[str, Any], problem: str) -> None:
    with raises(ConfigError, problem):
        load_run(kind="grpo", overrides=settings)


# https://github.com/NovaSky-AI/SkyRL/pull/1962 (2026-07-30): values of tables that are parsed once more.
# Expected:
# the words of the command line.
@pytest.mark.parametrize(
    ("argv", "setting", "expected"),
    [
        (["--data.columns", "answer=1", "id=1e5"], "columns", {"answer": "1", "id": "1e5"}),
        (["--data.columns", 'answer="a b"'], "columns", {"answer": "a b"}),
        (["--data.system-prompt", "null"], "system_prompt", "null"),
        (["--data.system-prompt", "007"], "system_prompt", "007"),
        (
            ["--data.chat-template-kwargs", "think=false", "effort=007", "n=2"],
            "chat_template_kwargs",
            {"think": False, "effort": "007", "n": 2},
        ),
    ],
)
def test_texts_of_the_command_line_stay_texts(argv: list[str], setting: str, expected: Any) -> None:
    run = train.parse(["grpo", "--data.source", "rows.jsonl", *argv]).run
    assert run.model_dump()["data"][setting] == expected


def test_the_environment_of_a_server_is_text() -> None:
    run = train.parse(
        ["grpo", "--engine.name", "hf", "--engine.process", "own", "--engine.env", "A=1", "B=true"]
    )
    assert run.run.model_dump()["engine"]["env"] == {"A": "1", "B": "true"}


# https://github.com/PrimeIntellect-ai/prime-rl/pull/2981 (2026-07-13): a setting that is taken back must not
# return
# when the saved config is read again.
def test_a_setting_that_is_taken_back_stays_so_in_the_saved_config(tmp_path: Path) -> None:
    run = load_run("demo", overrides={"data.system_prompt": None, "eval_data": None, "run_dir": None})
    (tmp_path / "config.toml").write_text(dump_toml(run))
    again = load_run(tmp_path / "config.toml")
    assert again == run and again.model_dump()["data"]["system_prompt"] is None


# Models


GENERATION = {"eos_token_id": [2, 5]}


# https://github.com/QwenLM/Qwen3-ASR/issues/210: a generation_config.json that transformers loads and does
# not save.
# https://github.com/huggingface/lighteval/pull/1279 (2026-07-02),
# https://github.com/Blaizzy/mlx-vlm/pull/2112
# (2026-08-31): ends of all sources count. Expected: the file's values, and the union of the ids.
@pytest.mark.parametrize("sampling", [{"temperature": 1e-6, "do_sample": False}, {"top_p": 0.9}, {}])
def test_a_generation_config_goes_through_an_export(
    sampling: dict[str, Any], tiny_folder: Path, tmp_path: Path
) -> None:
    folder = with_generation(tiny_folder, tmp_path, GENERATION | sampling)
    model = load_model(ModelConfig(name=str(folder)), device=torch.device("cpu"), attention="sdpa")
    assert model.eos_token_ids == (2, 5)
    export_hf(model.module, model.tokenizer, tmp_path / "out")
    written = json.loads((tmp_path / "out" / "generation_config.json").read_text())
    assert {name: written[name] for name in GENERATION | sampling} == GENERATION | sampling


# The same report: one that transformers does not load either is an error that names the file.
def test_a_generation_config_that_cannot_be_is_named(tiny_folder: Path, tmp_path: Path) -> None:
    folder = with_generation(tiny_folder, tmp_path, {"num_return_sequences": 4})
    with raises(ModelError, "refused: generation_config.json"):
        load_model(ModelConfig(name=str(folder)), device=torch.device("cpu"), attention="sdpa")


def with_generation(model: Path, tmp_path: Path, values: dict[str, Any]) -> Path:
    folder = tmp_path / "model"
    shutil.copytree(model, folder)
    (folder / "generation_config.json").write_text(json.dumps(values))
    return folder


# Runs


# https://github.com/PrimeIntellect-ai/prime-rl/pull/3332 (2026-08-21),
# https://github.com/pytorch/torchtitan/pull/3908
# (2026-07-13): a second resume must not begin the data again. Expected: the losses of one undisturbed run.
def test_a_run_that_is_resumed_twice_trains_on_the_same_data(tiny_folder: Path, tmp_path: Path) -> None:
    rows = [{"prompt": f"q{i}", "completion": f"a{i * i}"} for i in range(10)]
    model = ["--model.name", str(tiny_folder), "--data.source", source(tmp_path, *rows)]
    options = ["--batch-size", "2", "--checkpoint.no-export-at-end", "--log.no-tensorboard"]
    start = ["train", "sft", *model, *options]
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    assert main([*start, "--steps", "3", "--run-dir", str(whole)]) == 0
    assert main([*start, "--steps", "1", "--run-dir", str(parts)]) == 0
    for steps in ("2", "3"):
        assert main(["train", "--resume", str(parts), "--steps", steps]) == 0
    assert losses(parts) == losses(whole)


# https://github.com/pytorch/torchtitan/pull/3863 (2026-07-06): a loss that is not finite ends the run, and
# changes no
# weight.
def test_a_loss_that_is_not_finite_ends_the_run(
    tiny_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = [{"prompt": f"q{i}", "completion": f"a{i}"} for i in range(4)]
    argv = ["train", "sft", "--model.name", str(tiny_folder), "--data.source", source(tmp_path, *rows)]
    argv += ["--batch-size", "2", "--steps", "4", "--train.lr", "1e20", "--train.max-grad-norm", "1e9"]
    argv += ["--log.no-tensorboard", "--run-dir", str(tmp_path / "run")]
    assert main(argv) == 1
    assert "No weight was changed" in capsys.readouterr().err
    assert len(losses(tmp_path / "run")) == 1


def losses(run: Path) -> list[tuple[int, float]]:
    lines = map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
    return [(line["step"], line["loss"]) for line in lines if "loss" in line]
