import json
import resource
import subprocess
import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec
from pathlib import Path

import pytest

from lockstep.cli import doctor
from lockstep.cli.doctor import Finding


def by_name(findings: Sequence[Finding]) -> dict[str, Finding]:
    return {finding.name: finding for finding in findings}


def test_the_report_and_its_json_agree(tmp_path, capsys):
    file = tmp_path / "doctor.json"
    code = doctor.main(["--json", str(file), "--run-dir", str(tmp_path)])
    out = capsys.readouterr().out
    result = json.loads(file.read_text())
    assert (code, result["ok"]) == (0, True)
    assert out.splitlines()[-1].startswith("doctor: trains on cpu")
    assert "sdpa" in out.splitlines()[-1]
    rows = {row["name"]: row for row in result["findings"]}
    import torch
    import transformers

    assert torch.__version__.partition("+")[0] in rows["torch"]["detail"]
    assert rows["transformers"]["detail"] == transformers.__version__
    assert rows["local"]["status"] == rows["hf"]["status"] == "ok"
    assert str(tmp_path) in rows["run directory"]["detail"]
    groups = {row["group"] for row in result["findings"]}
    assert groups == {"machine", "software", "device", "package", "disk", "setting", *doctor._AXES}


def test_kernels_by_device():
    cpu = by_name(doctor.axis("attention kernel", device="cpu"))
    assert cpu["sdpa"].status == "ok"
    assert "cpu reference" in cpu["varlen"].detail
    assert (cpu["flex"].status, "no backward on a CPU" in cpu["flex"].detail) == ("unavailable", True)


def test_what_the_support_table_refuses_is_unavailable_though_installed(monkeypatch):
    monkeypatch.setattr(doctor, "_version", lambda name: "9.9")
    flash = by_name(doctor.axis("attention kernel", device="cpu"))["hf:flash_attention_2"]
    assert flash.status == "unavailable"
    assert "flash_attn 9.9 is installed" in flash.detail


def test_an_engine_may_be_in_another_environment(monkeypatch):
    monkeypatch.setattr(doctor, "_version", lambda name: None)
    engines = by_name(doctor.axis("inference engine", device="cpu"))
    assert engines["sglang"].status == "unavailable" and "engine.python" in engines["sglang"].detail
    assert (engines["native"].status, engines["native"].detail) == ("ok", "built in")


def test_a_missing_package_is_the_reason(monkeypatch):
    monkeypatch.setattr(doctor, "_version", lambda name: None)
    monkeypatch.setattr(doctor, "_refusal", lambda axis, value, device: "")
    deepspeed = by_name(doctor.axis("train backend", device="cpu"))["deepspeed"]
    assert (deepspeed.status, deepspeed.detail) == ("unavailable", "deepspeed is not installed")


def test_compile_on_a_cpu_needs_a_compiler(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    finding = by_name(doctor.axis("execution mode", device="cpu"))["compile"]
    assert (finding.status, "g++" in finding.detail) == ("unavailable", True)
    compiler = tmp_path / "g++"
    compiler.touch(mode=0o755)
    assert by_name(doctor.axis("execution mode", device="cpu"))["compile"].status == "ok"


def test_an_old_torch_is_a_problem(monkeypatch):
    versions = {"torch": "2.10.1+cu128", "transformers": "5.23.0"}
    monkeypatch.setattr(doctor, "_version", versions.get)
    findings = doctor.python_and_torch()
    assert by_name(findings)["torch"].status == "problem"
    assert "2.11 or newer is needed" in doctor.verdict(findings)


def test_a_missing_transformers_is_a_problem(monkeypatch, capsys):
    found = doctor._version
    monkeypatch.setattr(doctor, "_version", lambda name: None if name == "transformers" else found(name))
    assert doctor.main([]) == 1
    last = capsys.readouterr().out.splitlines()[-1]
    assert last == "doctor: cannot run: transformers: missing: pip install transformers"


def test_libraries_that_shadow_torchs_are_named(tmp_path):
    (tmp_path / "cuda").mkdir()
    (tmp_path / "cuda" / "libcudart.so.12").touch()
    (tmp_path / "own").mkdir()
    finding = doctor._library_path(f"{tmp_path}/own:{tmp_path}/cuda:")
    assert finding.status == "warning"
    assert finding.detail.startswith(f"{tmp_path}/cuda may replace")
    assert doctor._library_path(f"{tmp_path}/own").status == "note"


@pytest.mark.parametrize(
    ("value", "status"),
    [(None, "note"), ("2", "note"), ("4,2", "note"), ("64", "warning"), ("all", "warning")],
)
def test_thread_counts(value, status):
    assert doctor._threads(value, cores=4).status == status


@pytest.mark.parametrize(
    ("value", "status"), [(None, "note"), ("0,1", "note"), ("", "warning"), ("-1", "warning")]
)
def test_hidden_gpus(value, status):
    assert doctor._visible_devices(value).status == status


@pytest.mark.parametrize(
    ("kept", "written", "status"),
    [(True, True, "note"), (True, False, "note"), (False, True, "note"), (False, False, "warning")],
)
def test_bytecode(kept, written, status, tmp_path):
    spec = ModuleSpec("torch", None)
    spec.cached = str(tmp_path / "torch.pyc")
    if kept:
        Path(spec.cached).touch()
    assert doctor._bytecode(spec, written=written).status == status


@pytest.mark.parametrize(
    ("limit", "status"), [(1024, "warning"), (4096, "note"), (resource.RLIM_INFINITY, "note")]
)
def test_open_files(limit, status):
    assert doctor._open_files(limit).status == status


def test_a_full_disk_is_a_warning(tmp_path, monkeypatch):
    import shutil

    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=2**30))
    finding = doctor._disk("run directory", tmp_path / "not" / "there" / "yet")
    assert (finding.status, "1.0 GiB free" in finding.detail) == ("warning", True)


def test_engines_and_backends_are_not_imported():
    script = (
        "import sys\nfrom lockstep.cli import doctor\ndoctor.examine(doctor.Path('.'))\n"
        "heavy = 'vllm', 'sglang', 'deepspeed', 'ray', 'datasets', 'peft'\n"
        "print([m for m in heavy if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_what_every_backend_refuses_on_a_cpu_is_not_usable():
    found = {finding.name: finding for finding in doctor.axis("execution mode", device="cpu")}
    assert found["deepcompile"].status == "unavailable"
    assert "CUDA extension" in found["deepcompile"].detail
    assert found["eager"].status == found["joint"].status == "ok"
