"""Every page of `lockstep view` in a headless Chromium, compared with the files of the runs.

Asserts what the DOM says and the points of the charts' data, on a finished and on a running run, and on runs
that are damaged, hostile or of another version; that nothing is written to the console; and that no request
is blocked or goes elsewhere.

    view_pages.py                                  # all checks
    view_pages.py --only curves running            # some
    view_pages.py --faults                         # faults in a copy of the source: checks must fail
    view_pages.py --shots FOLDER [--of RUN]        # pictures of every page, at both widths, light and dark
"""

from __future__ import annotations

import argparse
import asyncio
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Awaitable, Callable, Collection
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))
import view_browser
import view_checks
import view_odd
import view_runs
from view_browser import Browser
from view_faults import FAULTS, plant
from view_scene import ROOT, TRAIN, Scene, Training, same, serving

Check = Callable[[Scene], Awaitable[None]]
CHECKS: dict[str, Check] = {
    name.removeprefix("check_"): check
    for module in (view_odd, view_checks)
    for name, check in vars(module).items()
    if name.startswith("check_")
}
EXPECTED = {"deleted": "404 (Not Found)"}
"""Check -> what its browser says though all is well."""
NEED_TRAINING = {"runs", "running"}
FAULT_SECONDS = 15.0


async def run_checks(scene: Scene, names: Collection[str]) -> None:
    """Run checks, each with a look at what the browser complained about.

    Raises:
        AssertionError: some failed.
    """
    scene.browser.origin = scene.base
    await scene.browser.open(scene.url)
    failed = []
    for name in names:
        scene.browser.problems.clear()
        try:
            await CHECKS[name](scene)
            problems = [each for each in scene.browser.problems if EXPECTED.get(name, "\0") not in each]
            same(f"{name}: problems that the browser had", problems, [])
        except (AssertionError, LookupError, RuntimeError, TimeoutError, ValueError) as error:
            failed.append(name)
            print(f"FAILED {name}: {error}\n  the browser said {scene.browser.problems}", flush=True)
    if failed:
        raise AssertionError(f"failed: {', '.join(failed)}")


async def check_faults(base: Scene, folder: Path, cache: Path) -> list[str]:
    """Plant each fault in a copy of the source; return the names of those that no check found."""
    view_browser.SECONDS = FAULT_SECONDS
    shutil.copytree(ROOT / "src", folder, ignore=shutil.ignore_patterns("__pycache__"))
    found_none = []
    for fault in FAULTS:
        was = plant(fault, folder)
        view_runs.write(fresh(base.runs))
        shutil.rmtree(cache, ignore_errors=True)
        try:
            with serving(folder, base.runs, cache=cache) as url:
                scene = Scene(
                    browser=base.browser, url=url, source=folder, runs=base.runs, training=base.training
                )
                await run_checks(scene, [fault.check])
        except AssertionError as error:
            print(f"fault {fault.name!r}: found: {error}", flush=True)
        else:
            print(f"fault {fault.name!r}: NOT found by {fault.check}", flush=True)
            found_none.append(fault.name)
        finally:
            (folder / "lockstep" / "view" / fault.file).write_text(was)
    return found_none


def fresh(runs: Path) -> Path:
    """Remove the runs of view_runs; return the folder."""
    for path in runs.iterdir():
        if path.name not in ("finished", "running"):
            shutil.rmtree(path)
    return runs


def make_runs(runs: Path, finished: Path | None) -> None:
    """Make all runs but the one that trains."""
    if finished is None:
        quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
        subprocess.run([*TRAIN, "--run-dir", str(runs / "finished")], check=True, **quiet)
    else:
        shutil.copytree(finished, runs / "finished")
    view_runs.write(runs)


async def main(options: argparse.Namespace, folder: Path) -> int:
    """Make the runs, serve them, check them; the exit status."""
    runs, cache = folder / "runs", folder / "cache"
    runs.mkdir()
    wanted = [fault.check for fault in FAULTS] if options.faults else options.only or CHECKS
    with Training(
        runs / "running", begin=bool(NEED_TRAINING & set(wanted)) and not options.shots
    ) as training:
        make_runs(runs, options.finished)
        async with Browser() as browser:
            scene = Scene(browser=browser, url="", source=ROOT / "src", runs=runs, training=training)
            if options.faults:
                missed = await check_faults(scene, folder / "src", cache)
                print(f"view: {len(FAULTS) - len(missed)} of {len(FAULTS)} faults are found")
                return int(bool(missed))
            paths = [runs] if options.of is None else [runs, options.of]
            with serving(scene.source, *paths, cache=cache) as scene.url:
                if options.shots is None:
                    await run_checks(scene, wanted)
                else:
                    await run_checks(scene, [])
                    await view_checks.shoot(scene, options.of or runs / "finished", options.shots)
    print("view: every page agrees with the files")
    return 0


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", nargs="+", choices=CHECKS, help="checks (default: all)")
    parser.add_argument("--faults", action="store_true", help="check that planted faults are found")
    parser.add_argument("--shots", type=Path, help="folder for pictures of every page")
    parser.add_argument("--of", type=Path, help="with --shots: this run instead of the small one")
    parser.add_argument("--finished", type=Path, help="a finished run to copy, instead of training one")
    with tempfile.TemporaryDirectory() as name:
        sys.exit(asyncio.run(main(parser.parse_args(), Path(name))))
