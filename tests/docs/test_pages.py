"""What the docs say about settings, metrics and files is what the code has."""

from __future__ import annotations

import importlib.util
import json
import re
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from lockstep import loops
from lockstep.config.load import load_run
from lockstep.config.old_names import RENAMED
from lockstep.config.ppo import PPORun
from lockstep.config.run import DPORun, GRPORun, RewardModelRun, SFTRun
from lockstep.ranks.environment import COPIES

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / "README.md", ROOT / "CHANGELOG.md", *sorted((ROOT / "docs").rglob("*.md"))]


def load(path: str) -> ModuleType:
    file = ROOT / path
    spec = importlib.util.spec_from_file_location(file.stem, file)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[file.stem] = module
    spec.loader.exec_module(module)
    return module


gen_docs = load("scripts/gen_docs.py")


@pytest.mark.parametrize("path", sorted(gen_docs.pages()))
def test_generated_pages_are_up_to_date(path: str) -> None:
    assert (ROOT / path).read_text(encoding="utf-8") == gen_docs.pages()[path], "run scripts/gen_docs.py"


def test_the_config_page_has_every_setting() -> None:
    page = gen_docs.config_page()
    named = set(re.findall(r"^\| `([\w.\[\]]+)` \|", page, re.MULTILINE))
    assert {"train.lr", "rewards[].weight", "algorithm.kl.coef", "model.lora.rank", "batch_size"} <= named
    for model in (GRPORun, SFTRun):
        for path in leaves(model):
            assert path in named or path.startswith("eval_data."), path


def test_every_setting_has_a_meaning() -> None:
    rows = re.findall(r"^\| (`[\w.\[\]]+`) \|.*\|([^|]*)\|$", gen_docs.config_page(), re.MULTILINE)
    assert len(rows) > 80
    assert [name for name, meaning in rows if not meaning.strip()] == []


def leaves(model: Any, prefix: str = "") -> list[str]:
    found = []
    for name, field in model.model_fields.items():
        inner = gen_docs.nested_model(field.annotation)
        if inner is None:
            found += [] if prefix + name == "kind" else [prefix + name]
        else:
            many = "[]" if name == "rewards" else ""
            found += leaves(inner, f"{prefix}{name}{many}.")
    return found


def test_marks_must_be_there() -> None:
    assert gen_docs.replaced("a <!-- x:begin -->old<!-- x:end --> b", "x", "new") == (
        "a <!-- x:begin -->\n\nnew\n\n<!-- x:end --> b"
    )
    with pytest.raises(ValueError, match="x:begin"):
        gen_docs.replaced("nothing", "x", "new")


TOML = [
    pytest.param(page, body, id=f"{page.relative_to(ROOT)}:{number}")
    for page in PAGES
    for number, body in enumerate(re.findall(r"^```toml\n(.*?)^```$", page.read_text(), re.M | re.S), start=1)
]


@pytest.mark.parametrize(("page", "body"), TOML)
def test_toml_on_a_page_is_a_run(page: Path, body: str, tmp_path: Path) -> None:
    file = tmp_path / "run.toml"
    file.write_text(body)
    assert load_run(file).kind in ("grpo", "ppo", "sft", "dpo", "rm")


LINKING = [*PAGES, *sorted((ROOT / "benchmarks").glob("*.md"))]


@pytest.mark.parametrize("page", LINKING, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path) -> None:
    targets = re.findall(r"\]\(([^)#\s]+)", page.read_text(encoding="utf-8"))
    absent = [t for t in targets if "://" not in t and not (page.parent / t).exists()]
    assert absent == []


def test_the_index_of_the_docs_has_every_page() -> None:
    index = (ROOT / "docs" / "README.md").read_text(encoding="utf-8")
    linked = {ROOT / "docs" / target for target in re.findall(r"\]\((?!\.\.)([^)#\s]+)", index)}
    assert {page for page in PAGES if ROOT / "docs" in page.parents} - {ROOT / "docs" / "README.md"} == linked


def test_settings_that_pages_name_exist() -> None:
    known = {path for model in (GRPORun, PPORun, SFTRun, DPORun, RewardModelRun) for path in leaves(model)}
    sections = {path.rpartition(".")[0] for path in known}
    starts = {path.split(".")[0] for path in known if "." in path} - {"log", "eval"}
    unknown = []
    for page in PAGES:
        for name in re.findall(r"`(?:--)?([a-z_]+(?:\.[a-z_]+)+)(?: = [^`]*)?`", page.read_text()):
            if name.endswith((".safetensors", ".json")):
                continue
            if name.split(".")[0] in starts and name not in known and name not in sections:
                unknown.append(f"{page.name}: {name}")
    old = {f"{page}: {each.old}" for each in RENAMED for page in ("renamed-settings.md", "CHANGELOG.md")}
    assert [line for line in unknown if not line.startswith("coming-from.md") and line not in old] == []


DOCUMENTED = re.compile(r"`([a-z_0-9]+(?:/[A-Za-z_0-9]+)*)`")
SELDOM = {  # they need a failure, a reward model, a GPU, or a check between steps: not made here
    "reward/http/retried",
    "reward/model",
    "reward/model/truncated",
    "reward/NAME/junk",
    "reward/NAME/timeout",
    "reward/NAME/failed",
    "reward/dropped",
    "eval/lenient_accuracy/NAME",  # of tasks that name kinds of problem
    "engine/kv_cache_use",  # these are of engines with weights of their own
    "engine/restarts",
    "engine/verify_gap",
    "world/restarts",  # of remote roles
    "time/verify",
    "time/sleep",
    "memory/cuda_peak_gib",
    "memory/cuda_reserved_gib",
    "memory/generate_peak_gib",
    "memory/train_peak_gib",
    "memory/update_peak_gib",
    "throughput/mfu",
    *("rollout/turns", "rollout/turns_max", "rollout/branches", "rollout/failed_episodes"),  # several turns
    *("rollout/ended_done", "_length", "_turns", "_tokens"),
    *("rollout/tool_calls", "rollout/tool_errors", "rollout/tool_errors/KIND", "rollout/tool_seconds"),
    *("rollout/template_mismatches", "rollout/template_mismatches/CAUSE", "rollout/noncanonical_turns"),
    *("time/environment", "time/token_checks"),
}


def documented() -> set[str]:
    """The names in the first column of the page's tables."""
    rows = [line.split("|") for line in (ROOT / "docs/reference/metrics.md").read_text().splitlines()]
    return {name for row in rows if len(row) > 3 for name in DOCUMENTED.findall(row[1])}


def logged(run_dir: Path) -> set[str]:
    lines = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    return {name for line in lines for name in line} - {"step", "timestamp", "evaluation"}


@pytest.mark.slow
@pytest.mark.exhaustive
def test_the_metrics_page_lists_what_runs_log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "copies").mkdir()
    monkeypatch.setenv(COPIES, str(tmp_path / "copies"))
    grpo = {
        "steps": 2,
        "run_dir": str(tmp_path / "grpo"),
        "eval.every": 1,
        "checkpoint.every": 1,
        "eval.num_prompts": 4,
        "algorithm.name": "dapo",
        "algorithm.kl.coef": 0.01,
        "algorithm.dual_clip": 3.0,
        "algorithm.off_policy_mask_threshold": 10.0,
        "algorithm.rollout_correction.kind": "tis",
        "train.minibatches": 2,
        "record.enabled": True,
    }
    run = load_run("tiny", kind="grpo", overrides=grpo)
    assert isinstance(run, GRPORun)
    loops.train(run)
    model = load("examples/tiny_text_model.py").save(tmp_path / "model")
    (tmp_path / "rows.jsonl").write_text(
        "".join(
            json.dumps({"prompt": f"{i}?", "completion": f"{i}!", "answer": str(i)}) + "\n" for i in range(8)
        )
    )
    shared = {"model.name": str(model), "model.dtype": "float32", "data.source": str(tmp_path / "rows.jsonl")}
    sft = {"steps": 1, "batch_size": 4, "run_dir": str(tmp_path / "sft")}
    held_out = {"eval_data.source": str(tmp_path / "rows.jsonl"), "data.max_length": 64}
    fine_tuning = load_run(kind="sft", overrides=shared | sft | held_out | {"eval_data.max_length": 64})
    assert isinstance(fine_tuning, SFTRun)
    loops.train(fine_tuning)
    boxed = {
        "steps": 1,
        "rollout.prompts_per_step": 2,
        "rollout.sampling.max_tokens": 4,
        "data.max_prompt_tokens": 64,
        "data.size": 4,
        "eval.num_prompts": 2,
        "rewards": [{"name": "math", "answer": "boxed"}, {"name": "length", "kwargs": {"target": 3}}],
        "run_dir": str(tmp_path / "math"),
    }
    answers = load_run(kind="grpo", overrides=shared | boxed)
    assert isinstance(answers, GRPORun)
    loops.train(answers)
    to_the_bit = {
        "steps": 1,
        "run_dir": str(tmp_path / "bits"),
        "train.execution": "compile",
        "train.batch_invariant": True,
        "train.deterministic": True,
        "train.minibatches": 2,
    }
    equal = load_run("tiny", kind="grpo", overrides=to_the_bit)
    assert isinstance(equal, GRPORun)
    loops.train(equal)
    ahead = {
        "steps": 2,
        "run_dir": str(tmp_path / "ahead"),
        "model.name": "shape:tiny-qwen3-moe",
        "engine.name": "native",
        "engine.max_batch": 96,  # half of the next step's rollouts begin
        "rollout.max_lag": 1,
        "algorithm.rollout_correction.kind": "tis",
        "train.router_aux_loss": 0.01,
        "train.router_z_loss": 0.01,
        "train.route_changes_every": 1,
    }
    loops.train(load_run("tiny", kind="grpo", overrides=ahead))
    critic = {"steps": 1, "run_dir": str(tmp_path / "ppo"), "algorithm.kl.coef": 0.01}
    ppo = load_run("tiny-ppo", kind="ppo", overrides=critic | {"algorithm.missing_end_penalty": 0.1})
    assert isinstance(ppo, PPORun)
    loops.train(ppo)

    real = set().union(*(logged(tmp_path / name) for name in ("grpo", "sft", "math", "bits", "ahead", "ppo")))
    named = documented()
    kinds = "ids|overlong|missing_end|kl|math|length|verifier"
    by_name = {re.sub(rf"^reward/({kinds})(?=$|/)", "reward/NAME", name) for name in real}
    assert sorted(by_name - named) == [], "logged, not on the page"
    assert sorted(named - by_name - SELDOM) == [], "on the page, not logged"
