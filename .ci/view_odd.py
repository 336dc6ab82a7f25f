"""Checks of runs that no training leaves behind, and of requests that no user sends."""

from __future__ import annotations

import shutil
import subprocess
from urllib.parse import quote, urlsplit

import view_runs
from view_runs import HOSTILE, LONG_TOKENS, NEWER
from view_scene import COMMAND, Scene, lines, same, there, url_of, view

RAW = r"/[\x00-\x08\x0b-\x1f\x7f\u202a-\u202e\u2066-\u2069]/.test(document.documentElement.textContent)"
MADE = "document.querySelectorAll('main script, main img, main [onerror]').length"
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src 'self' data:; "
    "form-action 'self'; base-uri 'none'; frame-ancestors 'none'"
)


async def check_access(scene: Scene) -> None:
    """Who may see the pages, and what a browser is told about them."""
    browser, address = scene.browser, urlsplit(scene.base)
    await browser.open(scene.url)
    same(
        "access: the token is not kept in the address", await browser.look("location.href"), f"{scene.base}/"
    )
    same("access: no script sees the cookie", await browser.look("document.cookie"), "")
    port = address.port
    for host in (f"example.com:{port}", "127.0.0.1", f"127.0.0.1.example.com:{port}", f"0.0.0.0:{port}"):
        same(f"access: host {host}", scene.ask("/", host=host).status, 421)
    for host in (f"localhost:{port}", f"[::1]:{port}"):
        same(f"access: host {host}", scene.ask("/", host=host).status, 200)
    same("access: no cookie", scene.ask("/run/finished", cookie="").status, 401)
    wrong = f"lockstep-view-{port}={'x' * len(scene.token)}"
    same("access: a wrong cookie", scene.ask("/run/finished", cookie=wrong).status, 401)
    same("access: a wrong token", scene.ask("/?token=wrong").status, 401)
    same("access: POST", scene.ask("/", method="POST").status, 405)
    moved = scene.ask(f"/run/finished?token={scene.token}", cookie="")
    same("access: moved", (moved.status, moved.headers["location"]), (303, "/run/finished"))
    there("access: the cookie", moved.headers["set-cookie"], "HttpOnly", "SameSite=strict")
    for path in ("/", "/run/finished", "/run/finished/curves.json?names=loss", "/static/view.js", "/nowhere"):
        told = scene.ask(path).headers
        same(f"access: policy of {path}", told["content-security-policy"], POLICY)
        kept = (told["referrer-policy"], told["x-content-type-options"])
        same(f"access: referrer and types of {path}", kept, ("no-referrer", "nosniff"))
    same("access: no file outside", scene.ask("/static/..%2fserver.py").status, 404)
    same("access: no file that is no report", scene.ask("/run/other/report/config.toml").status, 404)


async def check_hostile(scene: Scene) -> None:
    """Text of models and files is text."""
    browser = scene.browser
    prompts = [f"/rollouts/0/{number}" for number in range(len(HOSTILE))]
    search = f"/rollouts?text={quote('<script>')}"
    for page in ("", "/rollouts", search, *prompts, "/step/1", "/about"):
        await scene.open("hostile", page)
        found = [await browser.look(each) for each in (MADE, RAW, "window.hurt ?? null")]
        same(f"hostile{page}: no element, no control character, nothing ran", found, [0, False, None])
    await scene.open("hostile", prompts[0])
    there("hostile: shown as it is", await scene.main(), f"question {HOSTILE[0]}", f"answer {HOSTILE[0]}")
    await scene.open("hostile", prompts[2])
    there("hostile: escapes are shown", await scene.main(), r"\x1b[31mred\x1b[0m\x07\x00")
    await scene.open("hostile", prompts[3])
    there("hostile: right-to-left text", await scene.main(), "\u05e9\u05dc\u05d5\u05dd", r"\u202eevil\u2066")
    await scene.open("hostile", search)
    same("hostile: search for markup", await scene.texts("a.row"), ["0/0/0", "0/0/1"])
    same("hostile: marked", set(await scene.texts("mark")), {"<script>"})
    await browser.open(f"{scene.base}/?q={quote(HOSTILE[0])}")
    found = [await browser.look(each) for each in (MADE, "window.hurt ?? null")]
    same("hostile: in the table of runs", found, [0, None])


async def check_long_rollout(scene: Scene) -> None:
    """A rollout of 20,000 tokens: its beginning beside others, the whole of it alone."""
    prompt, count = len(HOSTILE), "document.querySelectorAll('.tokens i').length"
    await scene.open("hostile", "/rollouts?only=truncated")
    same("long rollout: found", await scene.texts("a.row"), [f"0/{prompt}/0"])
    await scene.open("hostile", f"/rollouts/0/{prompt}")
    shown = await scene.browser.look(count)
    left = f"{LONG_TOKENS - shown:,} more tokens"
    same("long rollout: the rest is named", (shown < LONG_TOKENS, await scene.texts(".more")), (True, [left]))
    await scene.browser.look("document.querySelector('.more a').click()")
    await scene.browser.wait(f"location.search.includes('sample') && {count} === {LONG_TOKENS}")
    row = lines(scene.runs / "hostile/rollouts/step-000000.jsonl")[-1]
    ids = "[...document.querySelectorAll('.tokens i')].map(each => parseInt(each.dataset.t))"
    same("long rollout: all its tokens", await scene.browser.look(ids), row["token_ids"])


async def check_damaged(scene: Scene) -> None:
    """What cannot be read is named, and the rest is shown."""
    await scene.open("damaged")
    there("damaged: named", await scene.main(), "metrics.jsonl, line 2: not valid JSON", "manifest.json")
    await scene.unfold()
    same("damaged: the other steps", await scene.curve("loss"), [[0, 2], [1.5, 0.25]])
    await scene.open("damaged", "/rollouts")
    there("damaged: rollouts", await scene.main(), "step-000000.jsonl, line 2", "kept words", "1 rollout")
    for page in ("/step/2", "/about", "/rollouts/0/0"):
        same(f"damaged{page}: shown", scene.ask(f"/run/damaged{page}").status, 200)


async def check_empty(scene: Scene) -> None:
    """A run that has only begun says what it does not have."""
    said = {"": "has no step yet", "/rollouts": "has saved no rollouts", "/step": "", "/about": "Settings"}
    for page, words in said.items():
        await scene.open("empty", page)
        there(f"empty{page}: says so", await scene.main(), "not started", words)


async def check_versions(scene: Scene) -> None:
    """A run of an earlier version is shown; one of a newer version is refused by name."""
    await scene.open("earlier")
    same("earlier: curves", await scene.curve("reward/mean"), [[0, 1, 2], [0, 0.5, 1]])
    await scene.open("earlier", "/rollouts")
    there("earlier: rollouts", await scene.main(), "early", "words", "1 rollout")
    await scene.open("earlier", "/rollouts/0/0")
    there("earlier: how to get what it lacks", await scene.main(), "log.token_details = true")
    for page in ("/step/1", "/about"):
        same(f"earlier{page}: shown", scene.ask(f"/run/earlier{page}").status, 200)
    await scene.browser.open(f"{scene.base}/?q=newer")
    same("newer: in the table", await scene.texts("tr[data-row] .state"), ["newer version"])
    for page in ("", "/rollouts", "/step/0", "/about"):
        answer = scene.ask(f"/run/newer{page}")
        same(f"newer{page}: refused", (answer.status, NEWER in answer.text), (400, True))


async def check_changed(scene: Scene) -> None:
    """A search finds what is in the files now, not what an index was built from."""
    await scene.open("changed", "/rollouts?text=old+words")
    same("changed: before", await scene.texts("a.row"), ["0/0/0"])
    built = "document.querySelector('#found').textContent.includes('index is being built')"
    await scene.browser.wait(f"!{built}")
    view_runs.change(scene.runs)
    await scene.open("changed", "/rollouts?text=old+words")
    same("changed: the old words are gone", await scene.texts("a.row"), [])
    await scene.open("changed", "/rollouts?text=different+words")
    same("changed: the new ones are there", await scene.texts("a.row"), ["0/0/0"])


async def check_deleted(scene: Scene) -> None:
    """A run that is deleted while it is open: the page says so, and every page still answers."""
    browser = scene.browser
    await scene.open("deleted")
    await scene.unfold()
    await scene.curve("loss")
    shutil.rmtree(scene.runs / "deleted")
    await browser.wait("document.querySelector('#runhead .state').textContent === 'unreadable'")
    there("deleted: says so", await scene.main(), "contains no run")
    for page in ("", "/rollouts", "/about", "/curves.json?names=loss"):
        same(f"deleted{page}: answers", scene.ask(f"/run/deleted{page}").status, 200)
    same("deleted/rollouts/0/0: not there", scene.ask("/run/deleted/rollouts/0/0").status, 404)
    same("deleted/step/0: not there", scene.ask("/run/deleted/step/0").status, 404)
    await browser.open(f"{scene.base}/")
    same("deleted: the table is there", "finished" in await scene.texts("a.row"), True)


async def check_process(scene: Scene) -> None:
    """Another server beside the first, on a port that is taken; and what is no run."""
    port, cache = urlsplit(scene.base).port, scene.runs.parent / "cache"
    second = view(scene.source, [scene.runs / "other", "--port", str(port)], cache=cache)
    try:
        said = second.stdout.readline() if second.stdout else ""
        there("process: the port is taken", said, f"port {port} is taken")
        url = url_of(second)
        await scene.browser.open("about:blank")
        scene.browser.origin = url.partition("/?")[0]
        await scene.browser.open(url)
        there("process: the second serves", " ".join(await scene.texts("a.row")), "other")
        await scene.browser.open("about:blank")
        scene.browser.origin = scene.base
        await scene.browser.open(f"{scene.base}/run/finished")
        there("process: the first still does", await scene.main(), "finished")
    finally:
        second.terminate()
        second.communicate(timeout=60)
    nothing = scene.runs.parent / "nothing"
    nothing.mkdir(exist_ok=True)
    for path in (nothing, scene.runs.parent / "not-there"):
        process = view(scene.source, [path], cache=cache)
        _, error = process.communicate(timeout=60)
        same(f"process: {path.name}", (process.returncode, "contains no run" in error), (2, True))
    same("process: help", subprocess.run([*COMMAND, "view", "--help"], capture_output=True).returncode, 0)
