"""`lockstep view --export`: one file that needs nothing else, and obeys nothing in a run."""

from __future__ import annotations

import base64
import hashlib
import json
import re

import pytest
from page_run import EVIL, REWARDS, Page, make_run

from lockstep.cli.main import main
from lockstep.observe.text import printable_text
from lockstep.view import export


def sha(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


@pytest.fixture(scope="module")
def page(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs")
    make_run(folder / "run-a")
    make_run(folder / "run-b", metric=f"</script>{EVIL}")
    file = folder / "page.html"
    assert main(["view", str(folder), "--export", str(file)]) == 0
    return Page(file.read_text(encoding="utf-8"))


def test_its_policy_admits_its_own_script_and_style_and_nothing_else(page):
    data, script = page.scripts
    (style,) = page.styles
    (policy,) = page.all("meta", http_equiv="Content-Security-Policy")
    rules = dict(rule.strip().split(" ", 1) for rule in policy["content"].split(";"))
    assert rules == {
        "default-src": "'none'",
        "script-src": sha(script),
        "style-src": sha(style),
        "img-src": "data:",
        "base-uri": "'none'",
        "form-action": "'none'",
    }
    assert json.loads(data)["curves"]["run-a"]["step"]["series"]["reward/mean"]["y"] == list(REWARDS)
    for tag, has in page.tags:
        assert "style" not in has and not any(name.startswith("on") for name in has), (tag, has)
        assert "src" not in has and has.get("href", "#").startswith("#"), has
        assert tag not in ("link", "iframe", "img", "form") or has.get("method") == "dialog", has


def test_it_holds_the_pages_of_the_server(page):
    sections = [has["data-page"] for has in page.all("section") if "data-page" in has]
    of_run = ["", "/step", "/about", "/rollouts", "/rollouts/2/4", "/rollouts/2/5"]
    assert sections == [
        "/",
        "/compare",
        *(f"/run/{run}{part}" for run in ("run-a", "run-b") for part in of_run),
    ]
    targets = {has["href"][1:] for has in page.all("a") if has.get("href", "#") != "#"}
    assert targets <= set(sections)
    assert f"question 4 {printable_text(EVIL)}" in page.text
    assert "question 3" not in page.text
    assert "holds those of step 2 only" in re.sub(r"\s+", " ", page.text)


def test_names_and_texts_of_a_run_end_no_script(page):
    assert page.source.count("<script") == page.source.count("</script>") == 2
    assert "\x1b" not in page.source and "\u202e" not in page.source
    assert f"</script>{EVIL}" in json.loads(page.scripts[0])["curves"]["run-b"]["step"]["names"]


def test_it_says_what_it_holds(tmp_path, monkeypatch, capsys):
    make_run(tmp_path / "run")
    monkeypatch.setattr(export, "MOST_ROLLOUTS", 3)
    file = tmp_path / "page.html"
    assert main(["view", str(tmp_path / "run"), "--export", str(file)]) == 0
    said = capsys.readouterr().out
    assert said.startswith(f"view: {file}, 0.")
    assert "MiB: 1 run, 4 rollouts (the groups of the first 3 of each run's last step), curves" in said
    assert [has["data-page"] for has in Page(file.read_text()).all("section") if "data-page" in has] == [
        "/run/run",
        "/run/run/step",
        "/run/run/about",
        "/run/run/rollouts",
        "/run/run/rollouts/2/4",
        "/run/run/rollouts/2/5",
    ]


def test_a_file_that_cannot_be_written(tmp_path, capsys):
    make_run(tmp_path / "run")
    assert main(["view", str(tmp_path / "run"), "--export", str(tmp_path / "no" / "x.html")]) == 2
    assert "--export" in capsys.readouterr().err
