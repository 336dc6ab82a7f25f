"""Every page of `lockstep view` on a finished and on a running run, compared with the run's own files.

Asserts what the DOM says, the points of the charts' data, that nothing is written to the console, and that
no request is blocked or goes elsewhere. With --shots FOLDER, writes a picture of every page, at both widths,
light and dark.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import re
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))
from view_browser import Browser

TRAIN = (sys.executable, "-m", "lockstep", "train", "grpo", "--recipe", "tiny")
VIEW = (sys.executable, "-m", "lockstep", "view")
CHART = "document.querySelector('.chart[data-metric=\"reward/mean\"]')"
POINTS = f"{CHART}.chart && [...{CHART}.chart.data].slice(0, 2).map(column => [...column])"


def lines(file: Path) -> list[dict[str, Any]]:
    """Rows of JSON Lines; not the last one, if it is being written."""
    return [json.loads(line) for line in file.read_text().splitlines(keepends=True) if line.endswith("\n")]


def steps(run: Path) -> list[dict[str, Any]]:
    """Metrics of the steps."""
    return [row for row in lines(run / "metrics.jsonl") if "evaluation" not in row]


def texts(selector: str) -> str:
    """JavaScript for the texts of all elements that a selector finds."""
    return f"[...document.querySelectorAll({json.dumps(selector)})].map(each => each.textContent.trim())"


def same(what: str, found: Any, expected: Any) -> None:
    """Compare; raise AssertionError with both."""
    if found != expected:
        raise AssertionError(f"{what}:\n  the page has {found!r:.2000}\n  the files  {expected!r:.2000}")
    print(f"  {what}")


async def check_runs(browser: Browser, base: str, run: Path) -> None:
    """The table of runs."""
    await browser.open(f"{base}/")
    row = f"[...document.querySelectorAll('tr[data-row]')].find(row => row.innerText.includes({run.name!r}))"
    cells = await browser.look(f"[...{row}.cells].slice(1).map(cell => cell.innerText.trim())")
    last, total = steps(run)[-1], 10
    shown = [cells[column] for column in (0, 2, 3, 4, 5)]
    reward = f"{last['reward/mean']:.3f}"
    expected = [run.name, "grpo", "shape:tiny-llama", f"{last['step'] + 1}/{total}", reward]
    same("runs: name, algorithm, model, step, reward", shown, expected)
    await browser.press("j")
    await browser.press("j")
    same("runs: j goes down", await browser.look("document.querySelectorAll('.cur').length"), 1)


async def check_curves(browser: Browser, base: str, run: Path) -> None:
    """Points, hover, zoom by dragging, and by time."""
    await browser.open(f"{base}/run/{run.name}")
    xs, ys = await browser.wait(POINTS)
    rows = steps(run)
    same("curves: steps", xs, [row["step"] for row in rows])
    same("curves: reward/mean", ys, [row["reward/mean"] for row in rows])
    box = await browser.look(f"{CHART}.querySelector('.u-over').getBoundingClientRect().toJSON()")
    middle = box["top"] + box["height"] / 2
    await browser.mouse("mouseMoved", box["left"] + box["width"] * 4 / 9, middle)
    await browser.wait(f"document.querySelector('.at').textContent === 'step {rows[4]['step']}'")
    read = await browser.look(f"{CHART}.querySelector('.read b').textContent")
    same("curves: hover", float(read), float(f"{rows[4]['reward/mean']:.4g}"))
    other = await browser.look("document.querySelector('.chart[data-metric=entropy] .read b').textContent")
    same("curves: hover reads the other charts", float(other), float(f"{rows[4]['entropy']:.4g}"))
    await browser.mouse("mouseMoved", box["left"] + box["width"] * 0.3, middle)
    await browser.mouse("mousePressed", box["left"] + box["width"] * 0.3, middle, pressed=True)
    await browser.mouse("mouseMoved", box["left"] + box["width"] * 0.7, middle, pressed=True)
    await browser.mouse("mouseReleased", box["left"] + box["width"] * 0.7, middle)
    zoomed = f"{CHART}.chart.data[0].length < {len(rows)} && {POINTS}"
    xs, ys = await browser.wait(zoomed)
    same("curves: zoom", xs, [3, 4, 5, 6])
    same("curves: zoomed values", ys, [rows[step]["reward/mean"] for step in xs])
    await browser.press("Escape")
    await browser.wait(f"{CHART}.chart.data[0].length === {len(rows)}")
    await browser.look("document.querySelector('[data-x=time]').click()")
    xs, ys = await browser.wait(f"{CHART}.chart.data[0][{len(rows) - 1}] !== {len(rows) - 1} && {POINTS}")
    same("curves: values by time", ys, [row["reward/mean"] for row in rows])
    apart = [row["timestamp"] - rows[0]["timestamp"] for row in rows]
    same("curves: times", [round(x - xs[0], 3) for x in xs], [round(each, 3) for each in apart])


async def check_rollouts(browser: Browser, base: str, run: Path) -> None:
    """The list, a search, and a group token by token."""
    await browser.open(f"{base}/run/{run.name}/rollouts?first_step=3&last_step=3")
    rows = lines(run / "rollouts" / "step-000003.jsonl")
    ids = [f"{row['step']}/{row['prompt_index']}/{row['sample']}" for row in rows][:50]
    same("rollouts: ids", await browser.look(texts("a.row")), ids)
    found = await browser.look(texts("td[data-name=Reward]"))
    same("rollouts: rewards", found, [f"{row['reward']:.3f}" for row in rows][:50])
    some = rows[17]
    wanted = "+".join(map(str, some["token_ids"][:6]))
    await browser.open(f"{base}/run/{run.name}/rollouts?ids={wanted}")
    there = await browser.look(texts("a.row"))
    same("rollouts: search by ids", f"3/{some['prompt_index']}/{some['sample']}" in there, True)
    await browser.open(f"{base}/run/{run.name}/rollouts/3/{some['prompt_index']}?sample={some['sample']}")
    tokens = await browser.look("[...document.querySelectorAll('.tokens i')].map(each => each.dataset.t)")
    shown = [tuple(map(float, each.split(",")[:2])) for each in tokens]
    pairs = zip(some["token_ids"], some["rollout_logprobs"], strict=True)
    same("group: ids and logprobs", shown, [(token, float(f"{value:.6g}")) for token, value in pairs])
    painted = await browser.look("document.querySelector('.tokens i').style.background !== ''")
    same("group: tokens are coloured", painted, True)


async def check_step_and_about(browser: Browser, base: str, run: Path) -> None:
    """A step's metrics, and the settings that differ."""
    await browser.open(f"{base}/run/{run.name}/step/5")
    row = steps(run)[5]
    shown = await browser.look("document.querySelector('[data-metric=\"grad_norm\"]').textContent")
    same("step: grad_norm", float(shown), float(f"{row['grad_norm']:.4g}"))
    width = "parseFloat(g.firstElementChild.getAttribute('width'))"
    bars = await browser.look(
        f"[...document.querySelectorAll('.timeline g')].map(g => [g.classList[1], {width}])"
    )
    share = 100 * row["time/generate"] / row["time/step"]
    same("step: share of generate", abs(dict(bars)["generate"] - share) < 0.5, True)
    await browser.press("ArrowRight")
    await browser.wait("location.pathname.endsWith('/step/6')")
    await browser.open(f"{base}/run/{run.name}/about")
    text = await browser.look("document.querySelector('main').innerText")
    same("about: versions", json.loads((run / "manifest.json").read_text())["torch"] in text, True)


async def check_running(browser: Browser, base: str, run: Path) -> None:
    """A run that trains: its page changes without being loaded again."""
    await browser.open(f"{base}/run/{run.name}")
    await browser.wait(POINTS)
    await browser.look("window.kept = true")
    same("running: state", await browser.look("document.querySelector('.state').textContent"), "training")
    had = await browser.look(f"{CHART}.chart.data[0].length")
    await browser.wait(f"{CHART}.chart.data[0].length >= {had + 2}")
    xs, ys = await browser.look(POINTS)
    rows = steps(run)[: len(xs)]
    same("running: reward/mean", ys, [row["reward/mean"] for row in rows])
    await browser.wait(f"Number(document.querySelector('#runhead b').textContent) >= {had + 2}")
    same("running: not loaded again", await browser.look("window.kept"), True)


async def check_export(browser: Browser, run: Path, folder: Path) -> None:
    """The same values in a file."""
    file = folder / "export.html"
    subprocess.run([*VIEW, str(run), "--export", str(file)], check=True, stdout=subprocess.DEVNULL)
    browser.origin = file.as_uri()
    await browser.open(file.as_uri())
    _, ys = await browser.wait(POINTS)
    same("export: reward/mean", ys, [row["reward/mean"] for row in steps(run)])
    await browser.look(f"location.hash = '#/run/{run.name}/rollouts'")
    await browser.wait("document.querySelector('section:not([hidden]) table.rollouts') !== null")
    links = await browser.look(
        "[...document.querySelectorAll('a[href]')].map(a => a.getAttribute('href')[0])"
    )
    same("export: links stay in the file", set(links), {"#"})


async def shoot(browser: Browser, base: str, run: Path, folder: Path) -> None:
    """Pictures of every page; none may be wider than the window."""
    prompt = lines(run / "rollouts" / "step-000003.jsonl")[0]["prompt_index"]
    parts = {"curves": "", "rollouts": "/rollouts", "group": f"/rollouts/3/{prompt}"}
    parts |= {"step": "/step/5", "about": "/about"}
    pages = {"runs": "/"} | {name: f"/run/{run.name}{part}" for name, part in parts.items()}
    for width in (1280, 390):
        for dark in (False, True):
            await browser.resize(width, dark=dark)
            for name, path in pages.items():
                await browser.open(base + path)
                await asyncio.sleep(0.5)
                wide = await browser.look("document.documentElement.scrollWidth - innerWidth")
                same(f"{name}: at {width} px nothing sticks out", max(0, wide), 0)
                await browser.shoot(folder / f"{name}-{width}-{'dark' if dark else 'light'}.png")


async def check_all(url: str, finished: Path, running: Path, folder: Path, shots: Path | None) -> None:
    """Every view, then what the browser complained about."""
    base = url.partition("/?")[0]
    async with Browser() as browser:
        browser.origin = base
        await browser.open(url)
        same("the token is not kept in the address", await browser.look("location.href"), f"{base}/")
        for check in (check_runs, check_curves, check_rollouts, check_step_and_about):
            await check(browser, base, finished)
        await check_running(browser, base, running)
        if shots is not None:
            shots.mkdir(parents=True, exist_ok=True)
            await shoot(browser, base, finished, shots)
        await check_export(browser, finished, folder)
        same("problems that the browser had", browser.problems, [])


def main() -> int:
    """Make the runs, serve them, check them; the exit status."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shots", type=Path, help="folder for pictures of every page")
    shots = parser.parse_args().shots
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        finished, running = folder / "runs" / "finished", folder / "runs" / "running"
        quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
        subprocess.run([*TRAIN, "--run-dir", str(finished)], check=True, **quiet)
        training = subprocess.Popen([*TRAIN, "--steps", "100000", "--run-dir", str(running)], **quiet)
        while not (running / "metrics.jsonl").exists() or len(steps(running)) < 3:
            if training.poll() is not None:
                raise RuntimeError(f"the run ended with {training.returncode}")
        view = subprocess.Popen([*VIEW, str(folder / "runs")], stdout=subprocess.PIPE, text=True)
        try:
            url = next(found[0] for line in view.stdout if (found := re.search(r"http://\S+", line)))
            asyncio.run(check_all(url, finished, running, folder, shots))
        finally:
            for process in (view, training):
                process.send_signal(signal.SIGINT)
                process.wait(120)
    print("view: every page agrees with the files")
    return 0


if __name__ == "__main__":
    sys.exit(main())
