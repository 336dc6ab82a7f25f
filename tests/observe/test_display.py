import io
import os
import pty
import re
import signal
import subprocess
import sys
import textwrap
import threading

import pytest
from starting import until

from lockstep.observe import display as module
from lockstep.observe.display import Display, Status, clock, step_line


def test_plain_mode_writes_one_line_per_step() -> None:
    out = io.StringIO()
    with Display("demo", total_steps=4, stream=out) as display:
        assert display.mode == "plain"
        for step, seconds in enumerate((9.0, 2.0, 3.0)):
            display.begin(step)
            metrics = {"reward/mean": 0.25 * step, "throughput/tokens_per_second": 1204.4, "other": 1.0}
            display.step(step, metrics, seconds=seconds)
        display.note("saved")
    assert out.getvalue().splitlines() == [
        "step 1/4  reward 0.000  1,204 tok/s  9.0 s  ETA 0:27",
        "step 2/4  reward 0.250  1,204 tok/s  2.0 s  ETA 0:04",
        "step 3/4  reward 0.500  1,204 tok/s  3.0 s  ETA 0:03",
        "saved",
    ]


def test_a_slow_phase_ticks_from_the_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "SLOW_SECONDS", 0.05)
    out = io.StringIO()
    with Display("demo", total_steps=4, mode="plain", stream=out) as display:
        display.phase(("generate",))
        display.progress(12, 64)
        until(lambda: "generate" in out.getvalue())
    assert re.match(r"step 1/4  generate \d s, 12/64 completions \.\.\.\n", out.getvalue())
    assert not [t for t in threading.enumerate() if t.name == "display"]


def test_a_slow_save_is_reported_soon_and_then_as_seldom_as_any_phase(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now = 1000.0
    monkeypatch.setattr(module.time, "monotonic", lambda: now)
    out = io.StringIO()
    display = Display("demo", total_steps=4, mode="plain", stream=out)
    display.phase(("save",))
    said = []
    for seconds in range(70):
        now = 1000.0 + seconds
        before = out.tell()
        display._view.tick()
        if out.tell() > before:
            said.append(seconds)
    assert said == [3, 33, 63]


def test_a_line_shows_what_its_kind_of_run_is_judged_by() -> None:
    def line(**metrics: float) -> str:
        status = Status("demo", total_steps=9, compiled=False, step=9, metrics=metrics)
        return step_line(status, 1.0)

    pairs = line(reward_margin=-0.25, accuracy=0.75, loss=0.6931, reward_chosen=0.1)
    assert pairs == "step 9/9  loss 0.6931  accuracy 0.750  margin -0.250  1.0 s"
    # the loss of the sampling policy is 0 but for rounding
    assert line(loss=-4e-6, grad_norm=0.5) == "step 9/9  loss 0.0000  grad 0.5  1.0 s"


def test_the_save_after_the_last_step_is_no_further_step() -> None:
    display = Display("demo", total_steps=4, mode="plain", stream=(out := io.StringIO()))
    display.status.step, display.status.phase = 4, "save"
    display._view.tick()
    assert out.getvalue().startswith("step 4/4  save ")


def test_only_the_first_time_in_a_compiled_phase_is_called_compiling() -> None:
    status = Status("demo", total_steps=2, compiled=True, phase="forward_backward", phase_since=100.0)
    assert status.activity(114.0) == "compiling, 14 s (forward_backward)"
    display = Display("demo", total_steps=2, compiled=True, mode="off")
    said = []
    for phase in ("generate", "forward_backward", "optimizer", "forward_backward"):
        display.phase((phase,))
        said.append(display.status.activity(display.status.phase_since))
    assert said == [
        "generate 0 s",
        "compiling, 0 s (forward_backward)",
        "optimizer 0 s",
        "forward_backward 0 s",
    ]
    eager = Status("demo", total_steps=2, compiled=False, phase="forward_backward", phase_since=100.0)
    assert eager.activity(114.0) == "forward_backward 14 s"


def test_progress_belongs_to_its_phase() -> None:
    display = Display("demo", total_steps=2, mode="off")
    display.phase(("generate",))
    display.progress(3, 8)
    display.phase(("generate",))
    assert display.status.progress == (3, 8)
    display.phase(("generate", "reward"))
    assert display.status.progress is None


def test_errors_pass_through() -> None:
    with pytest.raises(ZeroDivisionError), Display("demo", total_steps=1, mode="plain", stream=io.StringIO()):
        raise ZeroDivisionError


def test_clock() -> None:
    assert [clock(s) for s in (0.4, 61, 3599.6, 7322)] == ["0:00", "1:01", "1:00:00", "2:02:02"]


LIVE = textwrap.dedent("""
    import time
    from lockstep.observe.display import Display
    with Display("demo", total_steps=2) as display:
        assert display.mode == "live"
        display.phase(("generate",))
        display.progress(3, 8)
        time.sleep(0.6)
        display.step(0, {"reward/mean": 0.5}, seconds=0.6)
        display.note("a note")
        time.sleep(0.6)
        print("ready", flush=True)
        time.sleep(30)
""")


def test_live_mode_draws_in_a_terminal_and_gives_it_back_on_ctrl_c() -> None:
    master, slave = pty.openpty()
    child = subprocess.Popen(
        [sys.executable, "-c", LIVE],
        stdin=slave,
        stdout=slave,
        stderr=slave,
        env=os.environ | {"TERM": "xterm", "COLUMNS": "120"},
    )
    os.close(slave)
    shown = b""
    try:
        while b"ready" not in shown:
            shown += os.read(master, 65536)
        child.send_signal(signal.SIGINT)
        while True:
            try:
                chunk = os.read(master, 65536)
            except OSError:  # Linux: the other end is closed
                break
            if not chunk:
                break
            shown += chunk
    finally:
        child.kill()
        child.wait()
        os.close(master)
    text = shown.decode()
    assert "3/8 completions" in text and "reward 0.500" in text and "a note" in text
    assert "KeyboardInterrupt" in text
    assert text.rindex("\x1b[?25h") > text.rindex("\x1b[?25l"), "the cursor stays hidden"
    assert child.returncode == -signal.SIGINT or child.returncode == 130
