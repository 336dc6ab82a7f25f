"""Write the parts of the docs that the code already knows; `--check` only says whether they are up to date.

docs/reference/config.md       from the config models
docs/reference/renamed-settings.md  from lockstep.config.old_names.RENAMED
docs/reference/support.md      from lockstep.config.support
docs/reference/errors.md       from lockstep.errors
docs/reference/engines.md      from the translate.py of each engine, by calling it
docs/reference/algorithms.md   its options table, from lockstep.config.algorithm.PUBLISHED
README.md                      its table of statuses, from lockstep.config.support
"""

from __future__ import annotations

import dataclasses
import re
import sys
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from string import Formatter
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel
from pydantic_core import PydanticUndefined

from lockstep.config.algorithm import PUBLISHED, GRPOConfig
from lockstep.config.base import OneOf
from lockstep.config.declarations import engines
from lockstep.config.engine import HAS_EFFECT, EngineConfig
from lockstep.config.load import recipes, toml_value
from lockstep.config.old_names import RENAMED
from lockstep.config.ppo import PPOConfig, PPORun
from lockstep.config.rules import RULES
from lockstep.config.run import DPORun, GRPORun, RewardModelRun, SFTRun
from lockstep.config.support import AXES, BATCH_INVARIANT, SETTINGS, support_rows
from lockstep.engine.sglang import translate as sglang
from lockstep.engine.spec import EngineSpec
from lockstep.engine.vllm import translate as vllm
from lockstep.errors import CODES, EngineError
from lockstep.schema.rollout import SamplingParams

ROOT = Path(__file__).resolve().parents[1]
NOTE = "<!-- Written by scripts/gen_docs.py; edit the source, then run it. -->"


def main(argv: list[str]) -> int:
    """0 when every page is (now) up to date."""
    stale = []
    for path, text in pages().items():
        file = ROOT / path
        if not file.is_file() or file.read_text(encoding="utf-8") != text:
            stale.append(path)
            if "--check" not in argv:
                file.write_text(text, encoding="utf-8")
    told = "out of date" if "--check" in argv else "written"
    print("\n".join(f"{told}: {path}" for path in stale) or "docs are up to date")
    return int(bool(stale) and "--check" in argv)


def pages() -> dict[str, str]:
    """Path -> the text that it should have."""
    found = {
        "docs/reference/config.md": config_page(),
        "docs/reference/renamed-settings.md": renamed_page(),
        "docs/reference/support.md": support_page(),
        "docs/reference/engines.md": engines_page(),
        "docs/reference/errors.md": errors_page(),
        "docs/reference/rules.md": rules_page(),
    }
    for path, name, text in (
        ("docs/reference/algorithms.md", "published", published_table()),
        ("README.md", "support", status_table()),
    ):
        found[path] = replaced((ROOT / path).read_text(encoding="utf-8"), name, text)
    return found


def replaced(page: str, name: str, text: str) -> str:
    """`page` with what stands between the marks NAME:begin and NAME:end exchanged."""
    marks = f"<!-- {name}:begin -->", f"<!-- {name}:end -->"
    if any(page.count(mark) != 1 for mark in marks):
        raise ValueError(f"the page needs each of {marks} once")
    head, rest = page.split(marks[0])
    return f"{head}{marks[0]}\n\n{text.strip()}\n\n{marks[1]}{rest.split(marks[1])[1]}"


def table(header: tuple[str, ...], rows: Iterator[tuple[str, ...]]) -> str:
    """A Markdown table."""
    lines = [header, tuple("---" for _ in header), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def config_page() -> str:
    """Every setting of every kind of run."""
    parts = [
        "# Settings",
        NOTE,
        "This page lists every setting of a run. In a TOML file, a dotted name is a key in a section: "
        "`train.lr` is `lr` under `[train]`. On the command line it is a flag: `--train.lr 1e-5`. Flags may "
        "have hyphens in place of underscores, and `no-` before the last part turns a setting off: "
        "`--train.no-activation-checkpointing`. `kind` at the top of a file is `grpo`, `ppo`, `sft`, `dpo` "
        "or `rm`. A dash in the default column means that it is unset by default.",
        f"Lockstep comes with the recipes {', '.join(f'`{name}`' for name in recipes())}. "
        "`lockstep train --recipe NAME --print-config` prints all settings of a recipe.",
    ]
    shared = set(GRPORun.model_fields) & set(SFTRun.model_fields) - {"algorithm", "kind", "eval_data"}
    parts.append("## Every kind of run")
    parts += sections(GRPORun, only=shared)
    parts.append('## `kind = "grpo"`')
    parts += sections(GRPORun, only=set(GRPORun.model_fields) - shared)
    parts.append('## `kind = "ppo"`')
    parts.append("The settings are those of `grpo`, except for these.")
    parts += sections(
        PPOConfig, only=set(PPOConfig.model_fields) - set(GRPOConfig.model_fields), prefix="algorithm."
    )
    parts += sections(PPORun, only={"value"})
    parts.append('## `kind = "sft"`')
    parts += sections(SFTRun, only=set(SFTRun.model_fields) - shared)
    parts.append('## `kind = "dpo"`')
    parts.append("The settings are those of `sft`, except for these.")
    parts += sections(DPORun, only={"algorithm"})
    parts.append('## `kind = "rm"`')
    parts.append("The settings are those of `sft`, except for these.")
    parts += sections(RewardModelRun, only={"algorithm"})
    return "\n\n".join(parts) + "\n"


def renamed_page() -> str:
    """Every setting that has had another name or other values."""

    def rows() -> Iterator[tuple[str, str]]:
        for each in RENAMED:
            for value in each.values or [None]:
                old, new = each.shown(value)
                yield f"`{old}`", f"`{new}`"

    parts = [
        "# Renamed settings",
        NOTE,
        "Lockstep 0.1 still accepts the old names and values and prints one warning. This applies to TOML "
        "files, flags, overrides, keyword arguments in Python, and the `config.toml` of a run that is "
        "resumed. Giving the old and the new name together is an error. Names of metrics have not changed.",
        table(("old", "new"), rows()),
        "A run that was started by an earlier version can be resumed even if its `config.toml` contains "
        'settings that new runs refuse: `train.min_lr_ratio` with `train.schedule = "constant"`, which has '
        "no effect and is left out; a single group in `cluster.colocate`, which is also the default; and "
        "secrets in plain text, such as an API key in `rewards.kwargs`. New runs have `rewards.secrets` and "
        "`engine.secrets` for these.",
    ]
    return "\n\n".join(parts) + "\n"


def sections(model: type[BaseModel], *, only: set[str], prefix: str = "") -> Iterator[str]:
    """A table of the plain fields, then one section per nested config."""
    plain, nested = [], []
    for name, field in model.model_fields.items():
        if name not in only or f"{prefix}{name}" == "kind":
            continue
        inner = nested_model(field.annotation)
        (nested if inner else plain).append((name, field, inner))
    if plain:
        rows = (
            (f"`{prefix}{n}`", type_text(f.annotation, f.metadata), default(f), words(f.description))
            for n, f, _ in plain
        )
        yield table(("setting", "type", "default", "meaning"), rows)
    for name, field, inner in nested:
        many = get_origin(field.annotation) is tuple
        yield f"### `{prefix}{name}`" + (" (a list of tables)" if many else "")
        about = [words(inner.__doc__), words(field.description)]
        if field.default is None:
            about.append("Off unless one of its settings is set.")
        if name == "eval_data":
            yield " ".join(filter(None, [about[1], "The settings are the same as under `data`."]))
            continue
        yield " ".join(filter(None, about))
        yield from sections(
            inner,
            only=set(inner.model_fields),
            prefix=f"{'' if many else prefix}{name}{'[].' if many else '.'}",
        )


def nested_model(annotation: Any) -> type[BaseModel] | None:
    """The config inside an annotation, if there is one."""
    for candidate in (annotation, *get_args(annotation)):
        if isinstance(candidate, type) and issubclass(candidate, BaseModel):
            return candidate
    return None


def type_text(annotation: Any, metadata: list[Any] | tuple[Any, ...] = ()) -> str:
    """An annotation in words: `int > 0`, `"a"` or `"b"`."""
    origin = get_origin(annotation)
    if origin is Annotated:
        return type_text(annotation.__origin__, annotation.__metadata__)
    if origin is Literal:
        return ", ".join(f"`{toml_value(value)}`" for value in get_args(annotation))
    if origin in (Union, types.UnionType):
        parts = [type_text(part) for part in get_args(annotation) if part is not type(None)]
        return ", ".join(parts)
    if origin is tuple:
        inner = [part for part in get_args(annotation) if part is not ...]
        return (
            f"list of {len(inner)} {type_text(inner[0])}"
            if len(inner) > 1
            else f"list of {type_text(inner[0])}"
        )
    if origin is dict:
        return "table"
    for item in metadata:
        if isinstance(choice := getattr(item, "func", None), OneOf):
            return ", ".join([f"`{toml_value(name)}`" for name in choice.names] + ["`module:attribute`"])
    names = {int: "integer", float: "number", str: "string", bool: "`true`, `false`", Path: "path"}
    plain = [inner for item in metadata for inner in getattr(item, "metadata", [item])]
    bounds = [
        f"{sign} {value}" if isinstance(value, int) else f"{sign} {value:g}"
        for item in plain
        for key, sign in (("gt", ">"), ("ge", "≥"), ("lt", "<"), ("le", "≤"))
        # The largest bounds only keep numbers that nobody means out of the machine's.
        if (value := getattr(item, key, None)) is not None and value < 1e9
    ]
    return " ".join([names.get(annotation, str(annotation)), ", ".join(bounds)]).strip()


def default(field: Any) -> str:
    """The default as TOML has it; — for none."""
    value = field.get_default(call_default_factory=True)
    if value is None or value is PydanticUndefined:
        return "—"
    return f"`{toml_value(list(value) if isinstance(value, tuple) else value)}`".replace("|", "\\|")


def words(text: str | None) -> str:
    """One line, without what would break a table."""
    return re.sub(r"\s+", " ", text or "").strip().replace("|", "\\|")


def support_page() -> str:
    """The whole table, in its order."""
    return (
        "\n\n".join(
            [
                "# Supported combinations",
                NOTE,
                "The first row that matches a combination decides. "
                "*supported* means that a parity test covers the combination, *untested* that you may use "
                "it, and *unsupported* that a run with it is refused for the reason in the note. "
                "`lockstep support` prints the same table, and can check a single combination.",
                table(
                    ("axis", "setting", "values"),
                    ((axis, f"`{SETTINGS[axis]}`", ", ".join(f"`{v}`" for v in AXES[axis])) for axis in AXES),
                ),
                table(
                    ("status", "combination", "note", "tested by"),
                    (support_line(row) for row in support_rows()),
                ),
                "## Architectures",
                "[`lockstep prove`](../how-to/prove.md) shows the numbers of a model. Others that pass train "
                "as generic: eager, with engine `hf`.",
                table(
                    ("architecture", "models", "engine native", "batch-invariant", "tensor parallel"),
                    architecture_lines(),
                ),
                "## Batch invariance",
                "`train.batch_invariant = true` (see [the lockstep step](../explanation/lockstep-step.md)) "
                "cannot be combined with:",
                table(
                    ("status", "combination", "note", "tested by"),
                    (support_line(row) for row in support_rows(BATCH_INVARIANT)),
                ),
                "While a trajectory waits for its environment, every engine works on others. What becomes of "
                "the keys and values of its context, whether the engine can pause between two tokens, and "
                "whether it serves `rollout.max_lag` above 0:",
                table(
                    ("engine", "where", "keys of a waiting trajectory", "pause", "max_lag"),
                    (
                        (
                            *(f"`{name}`", place, keys),
                            *(
                                "yes" if place in of else "no"
                                for of in (engine.pauses, engine.partial_rollouts)
                            ),
                        )
                        for name, engine in engines().items()
                        for place, keys in engine.waiting_keys.items()
                    ),
                ),
                "*kept*: until their memory is needed for samples that run; then they are recomputed. "
                "*prefix cache*: the engine's own cache decides, see `engine.prefix_caching`. *recomputed*: "
                "each turn computes its whole context.",
            ]
        )
        + "\n"
    )


def architecture_lines() -> Iterator[tuple[str, ...]]:
    """One line for each record."""
    from lockstep.models.architectures import ARCHITECTURES

    for name, record in sorted(ARCHITECTURES.items()):
        has = (record.native, record.batch_invariant, bool(record.tensor_parallel))
        yield (f"`{name}`", record.title, *("yes" if part else "no" for part in has))


def support_line(row: dict[str, str]) -> tuple[str, ...]:
    """One row of the table, with only the axes that it restricts."""
    axes = "; ".join(f"{axis} {row[axis]}" for axis in AXES if row[axis] != "any")
    file, _, on = row["tested"].partition(" on ")
    tested = f"`{file}`" + (f" ({on})" if on else "") if file else ""
    return row["status"], axes or "everything else", row["note"], tested


def status_table() -> str:
    """Per axis, the values that some supported or untested row allows, and those that every row refuses."""
    rows = list(support_rows())

    def status(axis: str, value: str) -> str:
        alone = [r for r in rows if r["status"] == "unsupported" and r[axis] == value]
        if any(all(r[a] == "any" for a in AXES if a != axis) for r in alone):
            return "refused"
        named = [r for r in rows if r["status"] == "supported" and value in r[axis].split(", ")]
        return "supported" if named else "untested"

    lines = []
    for axis in ("backend", "engine", "attention", "execution", "layout", "device", "dtype"):
        by = {
            name: [f"`{v}`" for v in AXES[axis] if status(axis, v) == name]
            for name in ("supported", "untested", "refused")
        }
        lines.append((axis, *(", ".join(by[name]) for name in by)))
    return table(("axis", "supported (parity-tested)", "usable, untested", "refused"), iter(lines))


def published_table() -> str:
    """Options by published name."""
    options = [
        name for name in GRPOConfig.model_fields if any(name in values for values in PUBLISHED.values())
    ]
    rows = (
        (
            f"`{name}`",
            *(
                f"`{toml_value(values[option])}`" if values.get(option) not in (None, {}) else "—"
                for option in options
            ),
        )
        for name, values in PUBLISHED.items()
    )
    return table(("`algorithm.name`", *(f"`{option}`" for option in options)), rows)


def rules_page() -> str:
    """The combinations of settings that are refused, by table."""
    parts = [
        "# Refused combinations of settings",
        NOTE,
        "These combinations of settings are refused before anything is loaded. If several in one table "
        "apply, the error shows only the first of that table. `...` stands for the value that was set. "
        "For combinations of "
        "backend, engine, attention and the other axes of a run, see [supported combinations](support.md).",
    ]
    for name, rules in sorted(RULES.items()):
        rows = ((f"`{r.setting}`", f"`{r.code}`", _with_dots(r.text)) for r in rules)
        parts += [f"## {name}", table(("setting", "code", "message"), rows)]
    return "\n\n".join(parts) + "\n"


def _with_dots(template: str) -> str:
    parts = Formatter().parse(template)
    return "".join(text + ("" if field is None else "...") for text, field, *_ in parts)


def errors_page() -> str:
    """The kinds of mistakes, by code."""
    parts = [
        "# Error codes",
        NOTE,
        "Every error that Lockstep raises on purpose is a `lockstep.errors.LockstepError`. Its text is for "
        "people, and its wording may change in the next version. The command line prints the text after the "
        "code: `lockstep train: error[out-of-range]: train.lr = ...`. Programs should read `error.code`, the "
        "kind of mistake, and `error.fields`. If the text begins with a setting or flag, "
        '`fields["setting"]` names it. Several problems in one config raise a single error. It has the code '
        'and the setting of the first problem, and `fields["problems"]` lists those of all of them. `code` '
        "is also in the `summary.json` of a failed run, and below the traceback in its log.",
        table(
            ("code", "what it means, and what to do"), ((f"`{c}`", text) for c, text in sorted(CODES.items()))
        ),
    ]
    return "\n\n".join(parts) + "\n"


PLACE = EngineSpec(
    folder=Path("MODEL"),
    weights="pushed",
    model_name="MODEL",
    dtype="bfloat16",
    vocab_size=1000,
    max_model_len=4096,
    eos_token_ids=(2,),
    tokenizer=object(),
    device="cuda:0",
    shares_device=False,
    temperatures=frozenset({1.0}),
    work_dir=Path("RUN"),
)
CONFIGS = {
    "vllm": EngineConfig(name="vllm", python=Path("PYTHON")),
    "sglang": EngineConfig(name="sglang", python=Path("PYTHON"), unseeded=True),
}
STARTS: tuple[tuple[str, dict[str, Any], dict[str, Any]], ...] = (
    ("`max_batch = 8`", {"max_batch": 8}, {}),
    ("`tp = 2`", {"tp": 2}, {}),
    ("`max_model_len = 1024`", {}, {"max_model_len": 1024}),
    ("`memory_fraction = 0.8`", {"memory_fraction": 0.8}, {}),
    ("no `memory_fraction`, on the trainer's GPU", {}, {"shares_device": True}),
    ("`prefix_caching = false`", {"prefix_caching": False}, {}),
    ("`eager = true`", {"eager": True}, {}),
    ("`batch_invariant = true`", {"batch_invariant": True, "unseeded": False}, {}),
    ("`offload = true`", {"offload": True}, {}),
    ("weights of the model's folder, not of the trainer", {}, {"weights": "folder"}),
    ("a model without a tokenizer", {}, {"tokenizer": None}),
    ('`model.dtype = "float32"`', {}, {"dtype": "float32"}),
    ("`seed = 7`", {}, {"seed": 7}),
    ("a sampling temperature other than 0 and 1", {}, {"temperatures": frozenset({0.7})}),
)
"""What is set, and how: engine settings, and what the model and the run say."""

SAMPLINGS: tuple[dict[str, Any], ...] = (
    {"max_tokens": 16},
    {"min_tokens": 4},
    {"temperature": 0.0},
    {"temperature": 0.7},
    {"top_p": 0.9},
    {"top_k": 20},
    {"min_p": 0.1},
    {"repetition_penalty": 1.2},
    {"presence_penalty": 0.5},
    {"frequency_penalty": 0.5},
    {"stop": ("END",)},
    {"keep_stop": False},
    {"stop_token_ids": (5,)},
    {"ignore_eos": True},
    {"ignore_eos": True, "stop_token_ids": (5,)},
)


def engines_page() -> str:
    """What each engine is sent, found out by asking for it."""
    places = list(dict.fromkeys(place for known, _ in HAS_EFFECT.values() for place in known))
    counts = (
        (f"`engine.{name}`", *("yes" if place in known else "refused" for place in places))
        for name, (known, _) in HAS_EFFECT.items()
    )
    changed, started = start_rows()
    sampled, refusals, sent = sampling_rows()
    parts = [
        "# Engine arguments",
        NOTE,
        "This page lists the arguments that vLLM and SGLang get for each setting. Lockstep's own engines, "
        '`native` and `hf`, read the settings themselves, also with `engine.process = "separate"` ("started" '
        "below). Lockstep sends every argument explicitly, so that the engines' defaults do not matter, and "
        "refuses settings that an engine would ignore or change.",
        "## Where a setting counts",
        "In other places, the setting is refused when the config is created. `name`, `max_batch`, "
        "`transfer` and `verify` count everywhere.",
        table(("setting", *places), counts),
        "## At the start",
        "The table shows which arguments of `vllm.LLM` and SGLang's `ServerArgs`, and which environment "
        "variables, each setting changes. A started server gets the same arguments on its command line.",
        table(("setting", "vLLM", "SGLang"), changed),
        "If none of these is set, Lockstep sends:",
        started,
        "## In a request",
        "Each sample is one request with its own seed. Its arguments go into `vllm.SamplingParams` or "
        "SGLang's `sampling_params`. vLLM computes logprobs before temperature if all temperatures of a run "
        "are 0 or 1, and otherwise after temperature, truncation and penalties. SGLang computes them after "
        "temperature, and uses seeds only with `engine.batch_invariant`. For SGLang, Lockstep itself "
        "searches for stop strings in the ids that stream in.",
        table(
            ("sampling", "vLLM, 0 and 1 only", "vLLM, others", "SGLang, seeded", "SGLang, unseeded"), sampled
        ),
        "Refused:",
        "\n".join(f"{number}. {text}" for text, number in refusals.items()),
        "If none of these is set, Lockstep sends:",
        sent,
    ]
    return "\n\n".join(parts) + "\n"


def start_rows() -> tuple[Iterator[tuple[str, ...]], str]:
    """What each setting changes, and a list of what is sent without any."""
    makers: dict[str, Callable[[EngineConfig, EngineSpec], dict[str, Any]]] = {
        "vllm": lambda c, p: vllm.vllm_constructor(c, p) | vllm.vllm_environment(c, p, in_process=False),
        "sglang": lambda c, p: sglang.sglang_constructor(c, p) | sglang.sglang_environment(c, p),
    }
    plain = {name: make(CONFIGS[name], PLACE) for name, make in makers.items()}
    rows = []
    for label, settings, where in STARTS:
        cells = []
        for name, make in makers.items():
            known = {k: v for k, v in settings.items() if k != "unseeded" or name == "sglang"}
            config = EngineConfig(**(CONFIGS[name].model_dump() | known))
            found = make(config, dataclasses.replace(PLACE, **where))
            cells.append(arguments({k: v for k, v in found.items() if plain[name].get(k) != v}))
        rows.append((label, *cells))
    return iter(rows), "\n".join(f"- {name}: {arguments(found)}" for name, found in plain.items())


def sampling_rows() -> tuple[Iterator[tuple[str, ...]], dict[str, int], str]:
    """What each sampling field changes, or the number of its refusal; the refusals; a list of the rest."""
    refusals: dict[str, int] = {}
    ways: tuple[Callable[[SamplingParams], dict[str, Any]], ...] = (
        lambda p: vllm.vllm_sampling(p, seed=11, eos_token_ids=(2,), logprobs_mode="raw_logprobs"),
        lambda p: vllm.vllm_sampling(p, seed=11, eos_token_ids=(2,), logprobs_mode="processed_logprobs"),
        lambda p: sglang.sglang_sampling(p, seed=11, eos_token_ids=(2,), seeded=True),
        lambda p: sglang.sglang_sampling(p, seed=11, eos_token_ids=(2,), seeded=False),
    )
    plain = SamplingParams(max_tokens=128)
    rows = []
    for changes in SAMPLINGS:
        cells = []
        for way in ways:
            try:
                found = way(dataclasses.replace(plain, **changes))
            except EngineError as error:
                engine, _, reason = words(str(error)).removeprefix("engine ").partition(" cannot honour ")
                text = f"{engine}: {reason.partition(': ')[2]}"
                cells.append(f"refused ({refusals.setdefault(text, len(refusals) + 1)})")
                continue
            cells.append(arguments({k: v for k, v in found.items() if way(plain).get(k) != v}))
        label = ", ".join(f"`{name} = {toml_value(_toml(value))}`" for name, value in changes.items())
        rows.append((label, *cells))
    sent = [f"- vllm: {arguments(ways[0](plain))}", f"- sglang: {arguments(ways[2](plain))}"]
    return iter(rows), refusals, "\n".join(sent)


def _toml(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else value


def arguments(found: dict[str, Any]) -> str:
    """Arguments as they are written in Python; — for none."""
    return ", ".join(f"`{name}={value!r}`" for name, value in found.items()) or "—"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
