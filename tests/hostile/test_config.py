"""Settings from a hostile file, command line or caller: every one gives a config or a ConfigError, soon."""

import random
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from pydantic import BaseModel
from raising import raises

from lockstep.config.base import Config
from lockstep.config.batch import GenerateConfig, ScoreConfig
from lockstep.config.load import check, dump_toml, load_run, merge, read_toml
from lockstep.config.problems import model_of
from lockstep.config.run import DPORun, GRPORun, SFTRun
from lockstep.config.run_config import on_ranks
from lockstep.errors import ConfigError

HUGE = 10**5000  # Python refuses to print it
HOSTILE: tuple[Any, ...] = (
    *(0, -1, 1, 2**31 - 1, 2**31, 2**63 - 1, 2**63, -(2**63), 10**20, -(10**400), HUGE),
    *(1e-320, 1e308, -1e308, float("nan"), float("inf"), -0.0, 0.5),
    *(
        "",
        "x" * 5000,
        "a/" * 3000,
        "a\0b",
        "\x1b]0;pwn\x07",
        "a\nb\rc",
        "\ud800",
        "\u202e",
        "..",
        "/",
        "~",
        "-",
    ),
    *("hf:x", "hf:evil/repo", "meta", "cuda:99999999999", "every 99999999999999999999", "module:attribute"),
    *(True, None, [], [[]], {}, [10**20], ["\x1b", "\ud800"], [-1], [{}], [None], {"a": {"b": [1]}}),
    *(
        {"\x1b]0;k": 1},
        {"\0": 1},
        {"\ud800": 1},
        {"a": HUGE},
        {"name": "\x1b"},
        {"a": float("nan")},
        object(),
    ),
)
MODELS: tuple[type[Config], ...] = (GRPORun, SFTRun, DPORun, GenerateConfig, ScoreConfig)


def settings(model: type[BaseModel], prefix: str = "") -> Iterator[str]:
    """Every setting and every table, by its dotted path."""
    for name, field in model.model_fields.items():
        nested, many = model_of(field.annotation)
        yield prefix + name
        if nested is not None and not many:
            yield from settings(nested, f"{prefix}{name}.")


def entries(model: type[BaseModel]) -> Iterator[tuple[str, type[BaseModel]]]:
    """Tables that stand in lists, such as rewards."""
    for name, field in model.model_fields.items():
        nested, many = model_of(field.annotation)
        if nested is not None and many:
            yield name, nested


def cases(model: type[Config]) -> Iterator[tuple[str, Any]]:
    """One setting and one hostile value. What the kinds of run share is tried in full for one of them."""
    for path in settings(model):
        shared = model is not GRPORun and path.split(".")[0] in GRPORun.model_fields
        chosen = random.Random(path).sample(HOSTILE, 8) if shared else HOSTILE
        yield from ((path, value) for value in chosen)
    for name, entry in entries(model):
        yield from ((name, [{"name": "math", inner: v}]) for inner in settings(entry) for v in HOSTILE)


def load(model: type[Config], overrides: dict[str, Any]) -> Config:
    start = {"kind": model.model_fields["kind"].default} if "kind" in model.model_fields else {}
    return check(merge(start, overrides), model, origin="a file")


def check_text(text: str) -> None:
    """Lines that a terminal may show as they are."""
    assert all(line.isprintable() for line in text.split("\n")), ascii(text)


@pytest.mark.parametrize("model", MODELS)
def test_a_hostile_value_gives_a_config_or_a_config_error(model: type[Config]) -> None:
    accepted = refused = 0
    for path, value in cases(model):
        try:
            config = load(model, {path: value})
        except ConfigError as error:
            check_text(str(error))
            refused += 1
            continue
        accepted += 1
        text = dump_toml(config)
        assert dump_toml(check(tomllib.loads(text), model, origin="again")) == text
    assert refused > 2 * accepted > 0


@pytest.mark.parametrize(
    ("path", "value", "reason"),
    [
        ("seed", 10**20, "67 bits"),
        ("seed", -1, "greater than or equal to 0"),
        ("steps", 10**400, "1329 bits"),
        ("steps", 2**31, "less than 2147483648"),
        ("data.task.min_terms", HUGE, "16610 bits"),
        ("run_dir", "a\0b", "NUL"),
        ("run_dir", "x" * 5000, "5,000 bytes long; the maximum is 4,095"),
        ("run_dir", "x" * 300, "300 bytes long; the maximum is 255"),
        ("name", "../../etc", "without /"),
        ("train.device", "meta", "must be 'auto', 'cpu', 'cuda'"),
        ("train.attention", "hf:evil/repo", "unknown attention kernel"),
        ("train.lr", 1e300, "float32"),
        ("train.eps", 1e-300, "float32"),
        ("train.num_threads", 10**6, "less than or equal to 4096"),
        ("rollout.sampling.temperature", 1e-9, "set 0 (greedy)"),
        ("engine.request_seconds", 1e300, "less than or equal to 1000000000"),
        ("engine.replicas", 10**9, "less than or equal to 1024"),
        ("model.name", "\x1b]0;pwn\x07", "control character"),
        ("model.name", "\ud800", "surrogate"),
        ("model.lora.rank", 2**30, "less than or equal to 65536"),
        ("rewards", [{"name": "math", "timeout_seconds": 1e300}], "less than or equal to 1000000000"),
    ],
    ids=lambda value: None if isinstance(value, str) else "value",
)
def test_what_would_fail_later_is_refused_with_its_reason(path: str, value: Any, reason: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_run(kind="grpo", overrides={path: value})
    first, *lines = str(caught.value).splitlines()
    assert first == "grpo run: 1 problem"
    assert len(lines) == 1
    assert lines[0].startswith(f"  {path.split('.')[0]}")
    assert reason in lines[0]


TOML = {
    "nested lists": "seed = " + "[" * 5000 + "]" * 5000,
    "nested tables": "data = " + "{a = " * 5000 + "1" + "}" * 5000,
    "nested 200 deep": "data.task.a = " + "[" * 200 + "]" * 200,
    "a long key": ".".join("a" * 100_000) + " = 1",
    "a long header": "[" + ".".join(['"a"'] * 100_000) + "]",
    "a long word": "a" * 1_000_000,
    "digits": "seed = " + "9" * 5000,
    "10^20": f"seed = {10**20}",
    "10^400": f"steps = {10**400}",
    "an escape in a key": '"\\u001b]0;pwn\\u0007" = 1',
    "an escape in a nested key": '[train]\n"\\u001b]0;pwn\\u0007\\nforged" = 1',
    "an escape in a table's name": '["\\u001b]0;pwn\\u0007"]\na = 1',
    "an escape in a value": 'steps = "\\u001b]0;pwn\\u0007"',
    "a bare escape": 'steps = "\x1b"',
    "NUL": 'run_dir = "a\\u0000b"',
    "half a pair": 'run_dir = "\\ud800"',
    "nothing": "",
    "no TOML": "\x7fELF\x02",
    "an odd kind": "kind = " + "9" * 400,
    "a kind that is a table": "[kind]\nseed = 1",
    "too large": "# " + "x" * 2_000_000,
}


@pytest.mark.parametrize("text", TOML.values(), ids=TOML)
def test_a_hostile_file_is_a_config_error(text: str, tmp_path: Path) -> None:
    file = tmp_path / "run.toml"
    file.write_text(text)
    with pytest.raises(ConfigError) as caught:
        load_run(file, kind=None if "kind" in text or not text else "grpo")
    check_text(str(caught.value))
    assert len(str(caught.value)) < 2000


def test_a_file_that_is_no_plain_text_is_a_config_error(tmp_path: Path) -> None:
    file = tmp_path / "run.toml"
    file.write_bytes(b"seed = 1 # \xff\xfe")
    with raises(ConfigError, "not-toml"):
        read_toml(file)
    with raises(ConfigError, "not-a-file: test_a_file_that_is_no_plain_t0"):
        read_toml(tmp_path)
    for name in ("x" * 5000, "x" * 300 + ".toml", "a\0.toml"):
        with raises(ConfigError, "bad-file-name"):
            load_run(name)


def test_more_ranks_than_could_be_started_are_refused() -> None:
    overrides = {"train.backend": "fsdp2", "rollout.prompts_per_step": 2**30, "steps": 1}
    with raises(ConfigError, "out-of-range: --ranks"):
        on_ranks(load_run(kind="grpo", overrides=overrides), 10**6)
