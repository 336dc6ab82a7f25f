import re
import sys
from html.parser import HTMLParser
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
import matrix_results as made

from lockstep_lab.matrix.report import report, write_reports
from lockstep_lab.suite.report import markdown, page

HOSTILE = "<script>alert(1)</script>\"'><img src=x onerror=alert(2)>\x1b[31m|`${x}`\n| a | b |"


class Tags(HTMLParser):
    """Every tag with its attributes, and all text."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.open: list[str] = []
        self.text = ""
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in ("meta", "br", "img"):
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data


def hostile() -> str:
    cells = (
        made.reference(name=HOSTILE, values={"packing": HOSTILE}),
        made.cell(
            name="b" + HOSTILE,
            status="failed",
            reason=HOSTILE,
            command=HOSTILE,
            log=f"cells/{HOSTILE}/log.txt",
            reference=HOSTILE,
            timing_note=HOSTILE,
        ),
        made.cell(name="c", agrees=False, disagreement=HOSTILE, measures=made.Measures(weights=HOSTILE)),
    )
    result = made.result(
        *cells,
        command=HOSTILE,
        recording={"path": HOSTILE, "inputs": HOSTILE, "model": HOSTILE},
        environment={HOSTILE: HOSTILE},
        axes={HOSTILE: [HOSTILE]},
    )
    return page(report(result))


def test_the_page_is_well_formed_and_loads_nothing() -> None:
    text = page(report(made.result()))
    tags = Tags(text)
    assert tags.open == []
    assert not {"script", "link", "img", "iframe", "object", "embed"} & {tag for tag, _ in tags.tags}
    assert not re.search(r"https?:|url\(|@import|javascript:", text)
    assert "default-src 'none'" in text and 'name="viewport"' in text and "prefers-color-scheme: dark" in text
    links = [attrs["href"] for tag, attrs in tags.tags if tag == "a"]
    assert set(links) == {"cells/padded/log.txt", "cells/packed/log.txt"}
    assert "1.50" in tags.text  # 1500 against 1000 tokens/s


def test_everything_from_elsewhere_is_escaped() -> None:
    tags = Tags(hostile())
    assert tags.open == []
    assert not {"script", "img"} & {tag for tag, _ in tags.tags}
    assert not any(name.startswith("on") for _, attrs in tags.tags for name in attrs)
    assert "<script>alert(1)</script>" in tags.text
    assert "\x1b" not in tags.text and r"\x1b[31m" in tags.text
    for href in (attrs["href"] or "" for tag, attrs in tags.tags if tag == "a"):
        assert re.fullmatch(r"cells/[A-Za-z0-9._/%~-]+", href)


def test_markdown_from_elsewhere_stays_in_its_cell() -> None:
    bad = made.cell(status="failed", reason=HOSTILE, command=HOSTILE, name="b" + HOSTILE)
    text = markdown(report(made.result(made.reference(), bad)))
    rows = [line for line in text.splitlines() if line.startswith("|")]
    table = rows[: rows.index("| | |")]
    assert len({len(re.findall(r"(?<!\\)\|", row)) for row in table}) == 1
    outside_code = re.sub(r"`[^`]*`", "", text.partition("```text")[0])
    assert "<script>" not in outside_code and "\x1b" not in text
    assert text.count("```") == 2


def test_a_page_on_disk(tmp_path: Path) -> None:
    write_reports(made.result(complete=False), tmp_path)
    assert "Not complete" in (tmp_path / "matrix.html").read_text()
