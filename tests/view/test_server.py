"""The pages over HTTP, as a browser asks for them: who may see them, and that nothing in a run is obeyed."""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from page_run import EVIL, REWARDS, Page, make_run, serving

from lockstep.cli.main import main
from lockstep.observe.text import printable_text
from lockstep.view import server as module
from lockstep.view.render import STATIC, Site, figure
from lockstep.view.server import HEADERS, REPORT_POLICY, listen

RUN = "run-a"
PAGES = (
    "/",
    f"/run/{RUN}",
    f"/run/{RUN}/rollouts",
    f"/run/{RUN}/rollouts?text=answer&min_reward=x",
    f"/run/{RUN}/rollouts/1/2",
    f"/run/{RUN}/step",
    f"/run/{RUN}/step/1",
    f"/run/{RUN}/about",
    f"/compare?run={RUN}&run=run-b",
)


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs")
    make_run(folder / RUN)
    make_run(folder / "run-b", metric=EVIL)
    (folder / RUN / "matrix.html").write_text("<style>b{color:red}</style><b>matrix</b>")
    (folder / RUN / "hang.json").write_text('{"ranks": [{"why": "rank 1 never came"}]}')
    return folder


@pytest.fixture(scope="module")
def client(runs):
    with serving(runs) as client:
        yield client


def test_the_token_becomes_a_cookie_of_this_server_alone(client):
    answer = client.ask(f"/run/{RUN}/step?token={client.server.token}&x=1%262", cookie="")
    assert answer.status == 303
    assert answer.headers["location"] == f"/run/{RUN}/step?x=1%262"
    cookie, *flags = answer.headers["set-cookie"].split("; ")
    assert cookie == client.cookie
    assert {flag.lower() for flag in flags} == {"httponly", "samesite=strict", "path=/"}
    assert client.ask("/", cookie=cookie).status == 200


@pytest.mark.parametrize("cookie", ["", "lockstep-view-{port}=wrong", "lockstep-view-1={token}", "\xff=;;="])
def test_without_the_token_nothing_is_shown(cookie, client):
    cookie = cookie.format(port=client.server.port, token=client.server.token)
    for path in (
        *PAGES,
        "/static/view.js",
        f"/run/{RUN}/curves.json?names=loss",
        "/?token=wrong",
        "/?token=",
    ):
        answer = client.ask(path, cookie=cookie)
        assert answer.status == 401
        assert RUN not in answer.content.decode().replace(path.partition("?")[0], "")


@pytest.mark.parametrize(
    "host",
    [
        "evil.example:{port}",
        "127.0.0.1",
        "127.0.0.1:1",
        "localhost.evil.example:{port}",
        "127.0.0.1:{port}\nx",
        "",
    ],
)
def test_other_names_of_the_host_are_refused(host, client):
    answer = client.ask("/", headers={"Host": host.format(port=client.server.port)})
    assert answer.status in (400, 421)
    assert RUN.encode() not in answer.content


@pytest.mark.parametrize("host", ["localhost", "LOCALHOST", "[::1]", "127.0.0.1"])
def test_its_own_names_are_answered(host, client):
    assert client.ask("/", headers={"Host": f"{host}:{client.server.port}"}).status == 200


def test_only_get(client):
    for method in ("POST", "PUT", "DELETE", "OPTIONS"):
        assert client.ask("/", method=method).status == 405


@pytest.mark.parametrize(
    ("path", "status"),
    [(f"/run/{RUN}/step/{'1' * 1800}", 404), (f"/run/{RUN}/step/{'1' * 5000}", 414), ("/" * 3000, 414)],
)
def test_a_path_is_not_too_long(path, status, client):
    assert client.ask(path).status == status


def test_a_file_that_cannot_be_read_is_named(runs, monkeypatch):
    def denied(self, **_):  # whoever runs tests as root may read everything
        raise PermissionError(13, "Permission denied", f"{RUN}/rollouts")

    monkeypatch.setattr(Site, "rollouts", denied)
    with serving(runs) as client:
        answer = client.ask(f"/run/{RUN}/rollouts")
    assert answer.status == 400 and b"Permission denied" in answer.content


def test_a_redirect_stays_here(client):
    answer = client.ask(f"//evil.example/?token={client.server.token}")
    assert (answer.status, answer.headers["location"]) == (303, "/evil.example/")
    answer = client.ask(f"/%5C/evil.example/?token={client.server.token}")
    assert answer.headers["location"] == "/evil.example/"


def test_every_answer_has_the_headers(client):
    asked = [(path, {}) for path in (*PAGES, "/static/view.css", "/nowhere", "/run/none")]
    asked += [(f"/run/{RUN}/curves.json?names=loss", {}), ("/", {"Cookie": ""}), ("/", {"Host": "x"})]
    tag = client.ask("/static/view.js").headers["etag"]
    asked.append(("/static/view.js", {"If-None-Match": tag}))
    for path, headers in asked:
        answer = client.ask(path, headers=headers)
        assert {name: answer.headers[name] for name in HEADERS} == HEADERS, path
    assert answer.status == 304


@pytest.mark.parametrize("path", PAGES)
def test_a_page_holds_nothing_that_the_policy_would_block(path, client):
    page = client.page(path)
    assert page.styles == [] and all(text == "" for text in page.scripts)
    for tag, has in page.tags:
        assert "style" not in has and not any(name.startswith("on") for name in has), (tag, has)
        for name in ("src", "href", "action"):
            if name in has:
                assert re.match(r"/(?!/)|\?|data:image/svg|#", has[name]), has
        assert "src" in has or tag != "script"
    assert [has["src"] for has in page.all("script")] == [
        "/static/uplot/uPlot.iife.min.js",
        "/static/view.js",
    ]


def test_text_of_rows_is_shown_and_never_obeyed(client):
    group = client.page(f"/run/{RUN}/rollouts/1/2")
    assert f"question 2 {printable_text(EVIL)}" in group.text
    assert group.text.count(printable_text(EVIL)) == 3  # the prompt of both, and their completions
    found = client.page(f"/run/{RUN}/rollouts?text=%3Cscript%3E")
    assert found.all("mark") and f"answer 0 {printable_text(EVIL)}" in found.text
    assert found.all("input", name="text") == [found.all("input", name="text")[0] | {"value": "<script>"}]
    other = client.page("/run/run-b")
    assert other.all("figure", data_metric=printable_text(EVIL))
    missing = client.ask("/run/%3Cscript%3Ealert(1)")
    assert missing.status == 404 and b"<script>alert" not in missing.content
    for page in (group, found, other):
        assert "\x1b" not in page.source and "\u202e" not in page.source


def test_the_table_of_runs(client):
    page = client.page("/")
    assert [has["href"] for has in page.all("a", class_="row")] == [f"/run/{RUN}", "/run/run-b"]
    assert "finished" in page.text and "0.750" in page.text
    assert not client.page("/?q=nothing-like-it").all("a", class_="row")
    assert len(client.page("/?q=RUN-B+grpo").all("a", class_="row")) == 1
    assert client.page("/?sort=-id").all("a", class_="row")[0]["href"] == "/run/run-b"


def test_a_run_that_begins_later_is_found(tmp_path):
    make_run(tmp_path / "old")
    with serving(tmp_path) as client:
        make_run(tmp_path / "new")
        assert client.page("/run/new/step/1").all("g")
        assert {has["href"] for has in client.page("/").all("a", class_="row")} == {"/run/old", "/run/new"}


def test_a_run_that_is_deleted_while_a_page_of_it_is_open(tmp_path):
    make_run(tmp_path / "kept")
    gone = make_run(tmp_path / "gone")
    group, pages = "/run/gone/rollouts/1/2", ("", "/rollouts", "/step", "/about")
    with serving(tmp_path) as client:
        head = client.page(group).all("div", id="runhead")
        shutil.rmtree(gone)
        answers = {path: client.ask(path) for path in (group, "/run/gone/step/1")}
        answers |= {path: client.ask(f"/run/gone{path}") for path in pages}
    for path, answer in answers.items():
        page = Page(answer.content.decode())
        assert answer.status == (200 if path in pages else 404)
        assert page.all("span", class_="state unreadable"), path
        # The script takes the head of the page that it fetches.
        assert page.all("div", id="runhead") == head != []


def test_curves_are_those_of_the_run(client):
    answer = json.loads(client.ask(f"/run/{RUN}/curves.json?names=reward/mean,loss,nothing").content)
    assert set(answer["series"]) == {"reward/mean", "loss"}
    assert answer["series"]["reward/mean"]["y"] == list(REWARDS)
    assert answer["series"]["loss"]["y"] == [0, -0.5, -1]
    assert answer["series"]["loss"]["step"] == [0, 1, 2]
    odd = json.loads(client.ask(f"/run/{RUN}/curves.json?names=entropy").content)["series"]["entropy"]
    assert (odd["y"], odd["not_finite"]) == ([1.0], [1, 2])
    assert "entropyinf" in client.page(f"/run/{RUN}/step/2").text
    assert client.ask(f"/run/{RUN}/curves.json?names=loss&points=x").status == 400
    assert client.ask(f"/run/{RUN}/curves.json?names=loss&from=1").status == 400
    assert client.ask("/run/none/curves.json?names=loss").status == 404
    one = json.loads(client.ask(f"/run/{RUN}/curves.json?names=reward/mean,entropy&from=2&to=2").content)
    assert one["series"]["reward/mean"]["y"] == [REWARDS[2]]
    assert (one["series"]["entropy"]["y"], one["series"]["entropy"]["not_finite"]) == ([], [1, 2])
    figures = client.page(f"/run/{RUN}").all("figure")
    assert {"reward/mean", "loss", "time/step", "eval/mean_reward"} <= {has["data-metric"] for has in figures}


def test_tokens_carry_their_figures(client):
    page = client.page(f"/run/{RUN}/rollouts/1/2?sample=1")
    # id, logprob, gap = trainer - engine, entropy, advantage
    assert [has["data-t"] for has in page.all("i") if "data-t" in has] == [
        "7,-0.5,0,0.1,1.5",
        "8,-1.25,0.25,0.2,1.5",
        "9,-2,-0.5,0.3,1.5",
    ]
    assert not any("disabled" in has for has in page.all("button"))


def test_without_token_details_the_page_says_how_to_have_them(tmp_path):
    make_run(tmp_path / "run", details=False)
    with serving(tmp_path) as client:
        page = client.page("/run/run/rollouts/1/2?sample=1")
    assert [has["data-t"] for has in page.all("i") if "data-t" in has] == [
        "7,-0.5,,,",
        "8,-1.25,,,",
        "9,-2,,,",
    ]
    assert "log.token_details = true" in page.text
    disabled = [has["data-paint"] for has in page.all("button") if "disabled" in has]
    assert disabled == ["gap", "entropy", "advantage"]


def test_a_step(client):
    page = client.page(f"/run/{RUN}/step/1")
    widths = {
        re.sub("^ph ", "", group["class"]): rect["width"]
        for (tag, group), (_, rect) in zip(page.tags, page.tags[1:], strict=False)
        if tag == "g"
    }
    assert widths["generate"] == "75.000%" and widths["optimizer"] == "12.500%"
    assert widths["idle"] == "12.500%"
    assert [has["href"] for has in page.all("a", rel="prev")] == [f"/run/{RUN}/step/0"]
    assert [has["href"] for has in page.all("a", rel="next")] == [f"/run/{RUN}/step/2"]
    assert f"reward/mean{figure(REWARDS[1])}" in page.text
    assert client.ask(f"/run/{RUN}/step/7").status == 404


def test_numbers_of_the_form_that_are_none_are_named(client):
    page = client.page(f"/run/{RUN}/rollouts?min_reward=many&ids=a&last_step=nan")
    assert "min_reward = 'many' is not a number" in page.text
    assert "ids = 'a' are not token ids" in page.text
    assert "last_step = 'nan' is not a number" in page.text


def test_a_page_that_has_not_changed_is_not_sent_again(client):
    first = client.ask(f"/run/{RUN}/about")
    again = client.ask(f"/run/{RUN}/about", headers={"If-None-Match": first.headers["etag"]})
    assert (again.status, again.content) == (304, b"")


def test_no_file_but_its_own(client):
    for name in ("../server.py", "..%2Fserver.py", "/etc/passwd", "uplot", "../templates/page.html.j2"):
        assert client.ask(f"/static/{name}").status == 404
    assert client.ask(f"/run/{RUN}/report/config.toml").status == 404
    assert client.ask(f"/run/{RUN}/report/../config.toml").status == 404


def test_a_report_has_no_script(client):
    links = [has["href"] for has in client.page(f"/run/{RUN}/about").all("a") if "/report/" in has["href"]]
    assert links == [f"/run/{RUN}/report/matrix.html", f"/run/{RUN}/report/hang.json"]
    answer = client.ask(links[0])
    assert answer.content == b"<style>b{color:red}</style><b>matrix</b>"
    assert answer.headers["content-security-policy"] == REPORT_POLICY
    assert REPORT_POLICY.startswith("sandbox; default-src 'none';")
    page = client.page(links[1])
    assert "rank 1 never came" in page.text and page.all("script", src="/static/view.js")


def test_the_chart_library_is_the_one_that_was_vendored():
    folder = STATIC / "uplot"
    listed = dict(re.findall(r"(?m)^([0-9a-f]{64})  (\S+)$", (folder / "SOURCE.txt").read_text()))
    files = {path.name for path in folder.iterdir()} - {"SOURCE.txt"}
    assert set(listed.values()) == files
    for digest, name in listed.items():
        assert hashlib.sha256((folder / name).read_bytes()).hexdigest() == digest


def test_a_port_in_use():
    with listen(18900) as first, listen(first.getsockname()[1]) as second:
        assert second.getsockname()[1] > first.getsockname()[1]
        assert second.getsockname()[0] == "127.0.0.1"


def test_no_free_port(monkeypatch, capsys, runs):
    monkeypatch.setattr(module, "_PORTS_TRIED", 1)
    with listen(18950) as taken:
        port = str(taken.getsockname()[1])
        assert main(["view", str(runs), "--port", port]) == 2
    assert f"error[port-in-use]: --port {port}: none of the ports" in capsys.readouterr().err
    assert main(["view", str(runs), "--port", "65536"]) == 2
    assert "error[out-of-range]: --port 65536 is above 65535" in capsys.readouterr().err


def test_the_command_says_the_url_and_ends_quietly(runs):
    source = Path(module.__file__).parents[2]
    environment = {**os.environ, "PYTHONPATH": str(source)}
    with listen(18980) as taken:
        port = taken.getsockname()[1]
        command = [sys.executable, "-m", "lockstep", "view", str(runs), "--port", str(port)]
        with subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment
        ) as view:
            try:
                assert view.stdout.readline() == f"view: port {port} is taken\n"
                url = re.fullmatch(
                    r"view: http://127\.0\.0\.1:(\d+)/\?token=[\w-]{32}\n", view.stdout.readline()
                )
                assert int(url[1]) > port
                with socket.create_connection(("127.0.0.1", int(url[1])), timeout=10):
                    view.send_signal(signal.SIGINT)
                    out, err = view.communicate(timeout=20)
            finally:
                view.kill()
    assert (view.returncode, out.strip(), err) == (0, "", "")


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        (None, "\u2013"),
        (float("nan"), "nan"),
        (float("-inf"), "-inf"),
        (0.0, "0"),
        (12345.6, "12,346"),
        (123.456, "123.5"),
        (0.012345, "0.01235"),
        (0.0012345, "0.001234"),
        (-0.5, "-0.5000"),
        (1.234e-7, "1.234e-7"),
        (3, "3"),
        (2e12, "2.000e12"),
        ("text", "text"),
        (True, "True"),
    ],
)
def test_figures(value, shown):
    assert figure(value) == shown
