import pytest

from lockstep.observe.metrics import Spans


class Clock:
    """Stands still until `pass_`."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now

    def pass_(self, seconds: float) -> None:
        self.now += seconds


def test_self_time_leaves_out_inner_spans_and_host_is_what_is_no_work() -> None:
    clock = Clock()
    spans = Spans(clock=clock)
    spans.start()
    clock.pass_(0.5)  # outside of any span: host
    with spans("generate"):
        clock.pass_(4)
        with spans("reward"):
            clock.pass_(1)
        with spans("wait"):  # inside generation: its time, not the host's
            clock.pass_(2)
    with spans("pack"):
        clock.pass_(0.25)
        with spans("logprobs"):  # work inside a host span is work
            clock.pass_(3)
    with spans("generate"):
        clock.pass_(1)
    clock.pass_(0.25)
    assert spans.flush() == {
        "time/generate": 5.0,
        "time/reward": 1.0,
        "time/wait": 2.0,
        "time/pack": 0.25,
        "time/logprobs": 3.0,
        "time/step": 12.0,
        "time/host": 1.0,
        "time/host_share": 1.0 / 12.0,
    }
    with spans("optimizer"):
        clock.pass_(2)
    assert spans.flush() == {
        "time/optimizer": 2.0,
        "time/step": 2.0,
        "time/host": 0.0,
        "time/host_share": 0.0,
    }


def test_an_error_passes_through_and_leaves_no_open_span() -> None:
    synchronized: list[str] = []
    spans = Spans(clock=Clock(), synchronize=lambda: synchronized.append("s"))
    with pytest.raises(KeyboardInterrupt), spans("generate"), spans("reward"):
        raise KeyboardInterrupt
    assert spans.open == ()
    assert synchronized == ["s", "s"]  # on entry only: a broken device must not hide the error
    with spans("generate"):
        pass
    assert len(synchronized) == 4


def test_the_display_hears_what_is_open() -> None:
    heard: list[tuple[str, ...]] = []
    spans = Spans(on_change=heard.append)
    with spans("generate"), spans("reward"):
        pass
    assert heard == [("generate",), ("generate", "reward"), ("generate",), ()]


def test_misuse_is_an_error() -> None:
    spans = Spans()
    with pytest.raises(ValueError, match="'host'"), spans("host"):
        pass
    with pytest.raises(RuntimeError, match="inside span 'pack'"), spans("pack"):
        spans.flush()
