"""Checks of the pages of a finished and of a running run: what they show is what the run's files say."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

from view_runs import LONG_STEPS, SPIKE
from view_scene import CHART, COMMAND, Scene, figures, lines, number, same, steps, there

COLOURS = ("logprob", "gap", "entropy", "advantage")


async def check_runs(scene: Scene) -> None:
    """The table of runs."""
    browser, run = scene.browser, scene.runs / "finished"
    scene.training.wait()
    await browser.open(f"{scene.base}/?q=finished")
    cells = await browser.look(
        "[...document.querySelector('tr[data-row]').cells].map(each => each.innerText)"
    )
    last = steps(run)[-1]
    speed, gap = last["throughput/tokens_per_second"], last["logprob_gap_mean"]
    expected = ["finished", "finished", "grpo", "shape:tiny-llama", f"{last['step'] + 1}/10"]
    expected += [f"{last['reward/mean']:.3f}"]
    same("runs: name to reward", [cell.strip() for cell in cells[1:7]], expected)
    same("runs: speed and gap", [cells[9].strip(), cells[10].strip()], [f"{speed:,.0f}", f"{gap:.1e}"])
    await browser.open(f"{scene.base}/?sort=-steps")
    shown = [int(text.partition("/")[0].replace(",", "")) for text in await scene.texts("td[data-name=Step]")]
    same("runs: sorted by step", shown, sorted(shown, reverse=True))
    names = {path.name for path in scene.runs.iterdir()}
    same("runs: all there", names - set(await scene.texts("a.row")), set())
    await browser.press("j")
    await browser.press("j")
    same("runs: j goes down", await browser.look("document.querySelectorAll('.cur').length"), 1)


async def check_curves(scene: Scene) -> None:
    """Points, hover, zoom by dragging, by time, and smoothing beside the raw values."""
    browser, rows = scene.browser, steps(scene.runs / "finished")
    await scene.open("finished")
    rewards = [row["reward/mean"] for row in rows]
    xs, ys = await scene.curve("reward/mean")
    same("curves: steps", xs, [row["step"] for row in rows])
    same("curves: reward/mean", ys, rewards)
    await _hover(scene, rows)
    await _zoom(scene, rows)
    await browser.look("document.querySelector('[data-x=time]').click()")
    xs, ys = await scene.curve("reward/mean", until=f"data[0][{len(rows) - 1}] !== {len(rows) - 1}")
    same("curves: values by time", ys, rewards)
    apart = [row["timestamp"] - rows[0]["timestamp"] for row in rows]
    same("curves: times", [round(x - xs[0], 3) for x in xs], [round(each, 3) for each in apart])
    smooth = "const box = document.querySelector('[name=smooth]'); box.value = '5'; box.onchange()"
    await browser.look(smooth)
    _, ys, means = await scene.curve("reward/mean", until="data.length === 3", count=3)
    same("curves: raw values beside smoothed ones", ys, rewards)
    expected = [sum(part) / len(part) for n in range(len(rows)) if (part := rewards[max(0, n - 4) : n + 1])]
    same("curves: means", [round(each, 9) for each in means], [round(each, 9) for each in expected])
    await scene.unfold()
    for metric in ("loss", "time/step", "memory/host_peak_gib"):
        if metric in rows[-1]:
            _, ys = await scene.curve(metric)
            same(f"curves: {metric}", ys, [row[metric] for row in rows])


async def _hover(scene: Scene, rows: list[dict[str, Any]]) -> None:
    browser, chart = scene.browser, CHART.format("reward/mean")
    box = await browser.look(f"{chart}.querySelector('.u-over').getBoundingClientRect().toJSON()")
    middle = box["top"] + box["height"] / 2
    await browser.mouse("mouseMoved", box["left"] + box["width"] * 4 / 9, middle)
    await browser.wait(f"document.querySelector('.at').textContent === 'step {rows[4]['step']}'")
    for metric in ("reward/mean", "entropy", "grad_norm"):
        read = await browser.look(f"{CHART.format(metric)}.querySelector('.read b').textContent")
        same(f"curves: hover reads {metric}", number(read), figures(rows[4][metric]))


async def _zoom(scene: Scene, rows: list[dict[str, Any]]) -> None:
    browser, chart = scene.browser, CHART.format("reward/mean")
    box = await browser.look(f"{chart}.querySelector('.u-over').getBoundingClientRect().toJSON()")
    middle = box["top"] + box["height"] / 2
    await browser.mouse("mouseMoved", box["left"] + box["width"] * 0.3, middle)
    await browser.mouse("mousePressed", box["left"] + box["width"] * 0.3, middle, pressed=True)
    await browser.mouse("mouseMoved", box["left"] + box["width"] * 0.7, middle, pressed=True)
    await browser.mouse("mouseReleased", box["left"] + box["width"] * 0.7, middle)
    xs, ys = await scene.curve("reward/mean", until=f"data[0].length < {len(rows)}")
    same("curves: zoom", xs, [3, 4, 5, 6])
    same("curves: zoomed values", ys, [rows[int(step)]["reward/mean"] for step in xs])
    await browser.press("Escape")
    await scene.curve("reward/mean", until=f"data[0].length === {len(rows)}")


async def check_long(scene: Scene) -> None:
    """A thinned curve keeps its extremes; a smaller range, and the cursor, read the logged values."""
    rows = steps(scene.runs / "long")
    await scene.open("long")
    await scene.unfold()
    xs, ys = await scene.curve("loss")
    logged = {row["step"]: row["loss"] for row in rows}
    same("long: points that were logged", [logged[x] for x in xs], ys)
    same("long: fewer than all", len(xs) < LONG_STEPS, True)
    same("long: the largest", xs[ys.index(max(ys))], SPIKE)
    same("long: first and last", (xs[0], xs[-1]), (0, LONG_STEPS - 1))
    dip = min(logged, key=lambda step: logged[step])
    same("long: the smallest", xs[ys.index(min(ys))], dip)
    await _read_exactly(scene, rows)
    await scene.browser.look("lockstep.charts[0].range([100, 199])")
    xs, ys = await scene.curve("loss", until="data[0].length === 100")
    same("long: all values of a range", ys, [logged[step] for step in range(100, 200)])


async def _read_exactly(scene: Scene, rows: list[dict[str, Any]]) -> None:
    """Each chart of thinned curves reads the step under the cursor, which its own points need not have."""
    browser, names = scene.browser, [name for name in rows[0] if name not in ("step", "timestamp")]
    chart = CHART.format("loss")
    await browser.look(f"{chart}.scrollIntoView({{ block: 'center' }})")
    box = await browser.look(f"{chart}.querySelector('.u-over').getBoundingClientRect().toJSON()")
    await browser.mouse("mouseMoved", box["left"] + box["width"] * 0.37, box["top"] + box["height"] / 2)
    step = int(number((await browser.wait("document.querySelector('.at b').textContent"))[len("step ") :]))
    for name in names:
        shown = f"{CHART.format(name)}.querySelector('.read b').textContent.replaceAll(',', '')"
        await browser.wait(f"Math.abs({shown} - {figures(rows[step][name])}) < 1e-9")
    same("long: hover reads a step", (rows[step]["step"], 0 < step < LONG_STEPS - 1), (step, True))


async def check_rollouts(scene: Scene) -> None:
    """The list, searches and filters, and a group token by token."""
    browser, run = scene.browser, scene.runs / "finished"
    rows = lines(run / "rollouts" / "step-000003.jsonl")
    ids = [f"{row['step']}/{row['prompt_index']}/{row['sample']}" for row in rows]
    await scene.open("finished", "/rollouts?first_step=3&last_step=3&limit=100")
    same("rollouts: ids", await scene.texts("a.row"), ids)
    found = await scene.texts("td[data-name=Reward]")
    same("rollouts: rewards", found, [f"{row['reward']:.3f}" for row in rows])
    some = rows[17]
    wanted = "+".join(map(str, some["token_ids"][:6]))
    await scene.open("finished", f"/rollouts?ids={wanted}")
    same("rollouts: search by ids", ids[17] in await scene.texts("a.row"), True)
    every = [row for step in steps(run) for row in lines(run / f"rollouts/step-{step['step']:06d}.jsonl")]
    best = sorted((row["reward"] for row in every), reverse=True)[:50]
    await browser.look("[...document.querySelectorAll('.chip')][1].click()")
    await browser.wait("location.search.includes('highest') && document.readyState === 'complete'")
    shown = await scene.texts("td[data-name=Reward]")
    same("rollouts: highest reward", shown, [f"{reward:.3f}" for reward in best])
    low = sum(row["reward"] >= 0.75 for row in every)
    await scene.open("finished", "/rollouts?min_reward=0.75")
    there("rollouts: filter by reward", await scene.main(), f"{low} rollout")
    await _group(scene, rows, some)


async def _group(scene: Scene, rows: list[dict[str, Any]], some: dict[str, Any]) -> None:
    browser, prompt = scene.browser, some["prompt_index"]
    await scene.open("finished", f"/rollouts/3/{prompt}")
    of = [row for row in rows if row["prompt_index"] == prompt]
    samples = await browser.look(
        "[...document.querySelectorAll('article')].map(each => +each.dataset.sample)"
    )
    same("group: samples", samples, [row["sample"] for row in of])
    same("group: rewards", await scene.texts("b.reward"), [f"{row['reward']:.3f}" for row in of])
    tokens = await browser.look(
        f"[...document.querySelectorAll('article[data-sample=\"{some['sample']}\"] .tokens i')]"
        ".map(each => each.dataset.t.split(',').map(Number))"
    )
    gaps = [p - e for p, e in zip(some["policy_logprobs"], some["rollout_logprobs"], strict=True)]
    columns = (some["token_ids"], some["rollout_logprobs"], gaps, some["entropies"], some["advantages"])
    expected = [[float(f"{round(value, 6):.6g}") for value in each] for each in zip(*columns, strict=True)]
    same("group: id, logprob, gap, entropy and advantage of each token", tokens, expected)
    for colour in COLOURS:
        await browser.look(f"document.querySelector('[data-paint={colour}]').click()")
        painted = await browser.look(
            "[...document.querySelectorAll('.tokens i')].some(each => each.style.background)"
        )
        same(f"group: coloured by {colour}", painted or not any(row["advantages"][0] for row in of), True)
    await browser.look("document.querySelector('.tokens i').scrollIntoView({ block: 'center' })")
    box = await browser.look("document.querySelector('.tokens i').getBoundingClientRect().toJSON()")
    await browser.mouse("mouseMoved", box["left"] + 3, box["top"] + 5)
    tip = await browser.wait(
        "!document.querySelector('.tip').hidden && document.querySelector('.tip').innerText"
    )
    read = dict(line.split() for line in tip.splitlines())
    same("group: hover reads the logprob", number(read["logprob"]), figures(of[0]["rollout_logprobs"][0]))


async def check_step(scene: Scene) -> None:
    """A step's metrics and its timeline."""
    browser, row = scene.browser, steps(scene.runs / "finished")[5]
    await scene.open("finished", "/step/5")
    shown = await browser.look(
        "Object.fromEntries([...document.querySelectorAll('dd[data-metric]')]"
        ".map(each => [each.dataset.metric, each.textContent]))"
    )
    values = {name: v for name, v in row.items() if isinstance(v, float) and name != "timestamp"}
    read = {name: number(text) for name, text in shown.items() if name in values}
    same("step: all metrics", read, {name: _page_figure(value) for name, value in values.items()})
    width = "parseFloat(g.firstElementChild.getAttribute('width'))"
    bars = await browser.look(
        f"[...document.querySelectorAll('.timeline g')].map(g => [g.classList[1], {width}])"
    )
    share = 100 * row["time/generate"] / row["time/step"]
    same("step: share of generate", abs(dict(bars)["generate"] - share) < 0.5, True)
    same("step: the bars fill the step", abs(sum(width for _, width in bars) - 100) < 0.5, True)
    await browser.press("ArrowRight")
    await browser.wait("location.pathname.endsWith('/step/6') && document.querySelector('main') !== null")


def _page_figure(value: float) -> float:
    """A whole number is shown with all its digits."""
    return (
        value
        if value.is_integer() and abs(value) < 1e9
        else float(f"{value:.0f}")
        if abs(value) >= 1e4
        else figures(value)
    )


async def check_about(scene: Scene) -> None:
    """Versions, settings that differ, reports."""
    await scene.open("finished", "/about")
    text = await scene.main()
    there(
        "about: versions", text, json.loads((scene.runs / "finished" / "manifest.json").read_text())["torch"]
    )
    differing = await scene.texts("tr.differs td:first-child")
    for key in ("model.name", "steps", "rollout.sampling.max_tokens", "log.token_details"):
        same(f"about: {key} differs", key in differing, True)
    same("about: seed does not", "seed" in differing, False)
    await scene.open("other", "/about")
    links = await scene.browser.look(
        "[...document.querySelectorAll('a[href*=report]')].map(a => a.getAttribute('href'))"
    )
    same("about: reports", len(links), 2)
    await scene.open("other", "/report/hang.json")
    there("report: JSON", await scene.main(), "rank 1 never came")
    answer = scene.ask("/run/other/report/matrix.html")
    there("report: sandboxed", answer.headers["content-security-policy"], "sandbox;", "default-src 'none'")


async def check_compare(scene: Scene) -> None:
    """Two runs with different metrics, over each other."""
    await scene.browser.open(f"{scene.base}/compare?run=finished&run=other")
    await scene.unfold()
    mine, others = steps(scene.runs / "finished"), steps(scene.runs / "other")
    table = await scene.curve("loss", until="data.length === 3", count=3)
    there_ = [row["loss"] for row in others] + [None] * (len(mine) - len(others))
    same("compare: both have it", table[1:], [[row["loss"] for row in mine], there_])
    xs, ys = await scene.curve("other")
    same("compare: one has it", (xs, ys), ([0, 1, 2, 3], [row["other"] for row in others]))
    there("compare: settings", await scene.main(), "rollout.sampling.max_tokens")


async def check_running(scene: Scene) -> None:
    """Pages of a run that trains change without being loaded again."""
    browser, run = scene.browser, scene.runs / "running"
    scene.training.wait()
    for page in ("", "/rollouts?descending=1", "/about"):
        await scene.open("running", page)
        same(f"running{page}: state", (await scene.texts("#runhead .state"))[0], "training")
    row = steps(run)[2]
    await scene.open("running", "/step/2")
    shown = await scene.texts('dd[data-metric="grad_norm"]')
    same("running: grad_norm of a step", number(shown[0]), figures(row["grad_norm"]))
    await scene.open("running")
    xs, _ = await scene.curve("reward/mean")
    await browser.look("window.kept = true")
    had = len(xs)
    with scene.training.goes_on():
        await scene.curve("reward/mean", until=f"data[0].length >= {had + 2}")
    rows = steps(run)
    xs, ys = await scene.curve("reward/mean", until=f"data[0].length === {len(rows)}")
    same("running: reward/mean to the last line", ys, [row["reward/mean"] for row in rows])
    await browser.wait(f"Number(document.querySelector('#runhead b').textContent) === {len(rows)}")
    same("running: not loaded again", await browser.look("window.kept"), True)
    await scene.open("running", "/rollouts?order=step&descending=1")
    with scene.training.goes_on():
        await browser.wait(f"Number(document.querySelector('a.row').textContent.split('/')[0]) > {len(rows)}")
    await browser.open(f"{scene.base}/?q=running")
    same("running: in the table", await scene.texts("tr[data-row] .state"), ["training"])


async def check_export(scene: Scene) -> None:
    """The same values in a file, which asks for nothing."""
    run, browser = scene.runs / "finished", scene.browser
    file = scene.runs.parent / "export.html"
    environment = os.environ | {"PYTHONPATH": str(scene.source)}
    command = [*COMMAND, "view", str(run), str(scene.runs / "hostile"), "--export", str(file)]
    said = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, env=environment).stdout
    there("export: says what it holds", said, "2 runs", "rollouts", "600 points")
    await browser.open("about:blank")  # so that the page of the server asks for nothing more
    kept, browser.origin, browser.requests = browser.origin, file.as_uri(), []
    try:
        await browser.open(file.as_uri() + "#/run/finished")
        _, ys = await scene.curve("reward/mean")
        same("export: reward/mean", ys, [row["reward/mean"] for row in steps(run)])
        await browser.look("location.hash = '#/run/finished/rollouts'")
        await browser.wait("document.querySelector('body > section:not([hidden]) table.rollouts') !== null")
        links = "[...document.querySelectorAll('[href]')].map(a => a.getAttribute('href')[0])"
        same("export: links stay in the file", set(await browser.look(links)), {"#"})
        await browser.look("location.hash = '#/run/hostile/rollouts'")
        await browser.wait(
            "document.querySelector('body > section:not([hidden])').dataset.page.includes('hostile')"
        )
        same("export: nothing hostile ran", await browser.look("window.hurt"), None)
        same("export: no request", set(browser.requests), {file.as_uri() + "#/run/finished"})
    finally:
        browser.origin = kept


async def shoot(scene: Scene, run: Path, folder: Path) -> None:
    """Pictures of every page of a run; none may be wider than the window."""
    browser = scene.browser
    step = steps(run)[-1]["step"]
    rows = next(
        rows for file in sorted((run / "rollouts").glob("step-*"), reverse=True) if (rows := lines(file))
    )
    parts = {"curves": "", "rollouts": "/rollouts"}
    parts |= {"group": f"/rollouts/{rows[0]['step']}/{rows[0]['prompt_index']}"}
    parts |= {"step": f"/step/{step}", "about": "/about"}
    pages = {"runs": "/", "compare": "/compare?run=finished&run=other"}
    pages |= {name: f"/run/{run.name}{part}" for name, part in parts.items()}
    folder.mkdir(parents=True, exist_ok=True)
    for width in (1280, 390):
        for dark in (False, True):
            await browser.resize(width, dark=dark)
            for name, path in pages.items():
                await browser.open(scene.base + path)
                if name in ("curves", "compare"):
                    await scene.curve("reward/mean")
                wide = await browser.look("document.documentElement.scrollWidth - innerWidth")
                await browser.shoot(folder / f"{name}-{width}-{'dark' if dark else 'light'}.png", height=1400)
                same(f"{name}: at {width} px nothing sticks out", max(0, wide), 0)
