"""What Lockstep relies on in SGLang, checked against the source in its wheels: 0.5.16 and the newest.

SGLang has no build that runs without a GPU, so nothing of it is imported: fields, endpoints and behaviour are
read from the syntax tree. Two small classes without dependencies, which decide whether weights are accepted,
are taken out of the wheel and run. The wheels are downloaded at test time into pytest's cache.
"""

import ast
import base64
import io
import pickle
import re
import subprocess
import sys
import zipfile
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from lockstep.config.engine import EngineConfig
from lockstep.engine.sglang.translate import (
    NOT_FINITE,
    SGLangPackage,
    check_version,
    request_body,
    sglang_constructor,
    sglang_sampling,
    sglang_server_command,
)
from lockstep.engine.sglang.weights import tensor_payload
from lockstep.schema.rollout import SamplingParams

from .fakes import FAKE, spec_in, weights
from .test_updates import ipc_bucket

pytestmark = pytest.mark.slow
OLDEST = "0.5.16"
SRT = "srt"


@pytest.fixture(scope="module", params=[OLDEST, "newest"])
def wheel(request):
    """The package's folder, unpacked."""
    folder = request.config.cache.mkdir("sglang-wheels") / request.param
    done = folder / "unpacked"
    if not done.exists():
        wanted = "sglang" if request.param == "newest" else f"sglang=={request.param}"
        command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:", "-q", wanted]
        # whatever Python runs the tests: nothing of it is run
        command += ["--python-version", "3.11", "--platform", "manylinux_2_34_x86_64"]
        command += ["--platform", "manylinux2014_x86_64", "--platform", "any", "--dest", str(folder)]
        try:
            subprocess.run(command, check=True, capture_output=True, text=True, timeout=300)
        except (subprocess.SubprocessError, OSError) as error:
            said = (getattr(error, "stderr", "") or str(error)).strip().splitlines()
            pytest.skip(f"pip cannot download {wanted} here: {said[-1] if said else error}")
        (file,) = folder.glob("sglang-*.whl")
        with zipfile.ZipFile(file) as archive:
            archive.extractall(folder, [n for n in archive.namelist() if n.endswith(".py")])
        file.unlink()
        done.touch()
    return Wheel(folder / "sglang")


class Wheel:
    def __init__(self, folder):
        self.folder = folder
        self.package = SGLangPackage(folder)

    def source(self, path):
        return (self.folder / SRT / path).read_text()

    def tree(self, path):
        return ast.parse(self.source(path))

    def fields(self, path, name):
        """Annotated names of a class and of its bases in the same file."""
        classes = {n.name: n for n in ast.walk(self.tree(path)) if isinstance(n, ast.ClassDef)}
        found, todo = set(), [name]
        while todo:
            node = classes.get(todo.pop())
            if node is None:
                continue
            found |= {f.target.id for f in node.body if isinstance(f, ast.AnnAssign)}
            todo += [base.id for base in node.bases if isinstance(base, ast.Name)]
        return found

    def class_source(self, path, name):
        (node,) = [n for n in self.tree(path).body if isinstance(n, ast.ClassDef) and n.name == name]
        return ast.unparse(node)

    def text(self, *paths):
        """All on one line, quotes and spaces made one kind."""
        found = []
        for pattern in paths:
            files = sorted((self.folder / SRT).glob(pattern))
            assert files, f"no file {pattern}"
            found += [file.read_text() for file in files]
        return re.sub(r"\s+", " ", "\n".join(found)).replace("'", '"')

    def endpoints(self):
        """Path -> (methods, classes in the handler's annotations, query names)."""
        found = {}
        for path in ("entrypoints/http_server.py", "entrypoints/v1_loads.py"):
            for node in ast.walk(self.tree(path)):
                if not isinstance(node, ast.AsyncFunctionDef):
                    continue
                for call in node.decorator_list:
                    if not (
                        isinstance(call, ast.Call) and isinstance(call.func, ast.Attribute) and call.args
                    ):
                        continue
                    if not isinstance(call.args[0], ast.Constant):
                        continue
                    methods = {call.func.attr.upper()}
                    for word in call.keywords:
                        if word.arg == "methods":
                            methods = set(ast.literal_eval(word.value))
                    names = {
                        n.id
                        for a in node.args.args
                        if a.annotation is not None
                        for n in ast.walk(a.annotation)
                        if isinstance(n, ast.Name)
                    }
                    queries = {a.arg for a in node.args.args}
                    found[call.args[0].value] = (methods, names, queries)
        return found


IO_STRUCT = "managers/io_struct.py"
BODIES = {
    "/generate": "GenerateReqInput",
    "/abort_request": "AbortReq",
    "/release_memory_occupation": "ReleaseMemoryOccupationReqInput",
    "/resume_memory_occupation": "ResumeMemoryOccupationReqInput",
    "/update_weights_from_tensor": "UpdateWeightsFromTensorReqInput",
    "/update_weights_from_distributed": "UpdateWeightsFromDistributedReqInput",
    "/update_weights_from_disk": "UpdateWeightFromDiskReqInput",
    "/init_weights_update_group": "InitWeightsUpdateGroupReqInput",
    "/destroy_weights_update_group": "DestroyWeightsUpdateGroupReqInput",
    "/update_weight_version": "UpdateWeightVersionReqInput",
    "/get_weights_by_name": "GetWeightsByNameReqInput",
}
GETS = ("/model_info", "/server_info", "/v1/loads")


@pytest.fixture(scope="module")
def fake():
    """Tables of the fake server, which refuses what is not in them: flow tests prove that we send no more."""
    tree = ast.parse((FAKE / "sglang" / "launch_server.py").read_text())
    names = {}
    for node in tree.body:
        if isinstance(node, ast.Assign) and node.targets[0].id in ("FIELDS", "SAMPLING", "NEW_IN_23"):
            value = ast.unparse(node.value).replace("set()", "()")
            names[node.targets[0].id] = ast.literal_eval(value)
    return names


def test_the_version_is_one_that_lockstep_speaks_to(wheel):
    check_version(wheel.package.version)


def test_every_field_of_every_request_exists(wheel, fake):
    endpoints = wheel.endpoints()
    for path, fields in fake["FIELDS"].items():
        if path in fake["NEW_IN_23"]:
            continue
        methods, classes, _ = endpoints[path]
        assert "POST" in methods and BODIES[path] in classes, path
        assert set(fields) <= wheel.fields(IO_STRUCT, BODIES[path]), path
    for path in GETS:
        assert "GET" in endpoints[path][0]
    methods, _, queries = endpoints["/flush_cache"]
    assert "POST" in methods and "timeout" in queries
    assert "include" in endpoints["/v1/loads"][2]


def test_a_session_of_updates_is_there_exactly_where_it_is_asked_for(wheel):
    text = wheel.text("managers/scheduler_components/weight_updater.py")
    if "/begin_weight_update" not in wheel.endpoints():
        assert "begin_weight_update" not in text
        return
    assert "/end_weight_update" in wheel.endpoints()
    assert "a weight-update session is already open" in text  # the driver looks for "already open"


def test_what_we_send_is_what_the_tables_say(fake):
    from lockstep.engine.remote.driver import Job
    from lockstep.schema.rollout import GenerationRequest

    request = GenerationRequest(prompt_token_ids=(1, 2), sampling=SamplingParams(max_tokens=4), seeds=(5,))
    job = Job(id="x", request=request, index=0, sample=0)
    sampling = sglang_sampling(request.sampling, seed=5, eos_token_ids=(7,), seeded=True)
    import json

    body = json.loads(request_body([job], [sampling], incremental=True))
    assert set(body) == set(fake["FIELDS"]["/generate"])
    assert set(body["sampling_params"][0]) == set(fake["SAMPLING"])


def test_every_sampling_field_exists(wheel, fake):
    assert set(fake["SAMPLING"]) <= wheel.fields("sampling/sampling_params.py", "SamplingParams")


CONFIGS = [
    {},
    {"eager": True, "prefix_caching": False, "memory_fraction": 0.4},
    {"batch_invariant": True, "offload": True, "tp": 2, "cuda_devices": (0, 1)},
    {"options": {"attention_backend": "triton", "sampling_backend": "pytorch", "log_level": "warning"}},
]


@pytest.mark.parametrize("settings", CONFIGS)
@pytest.mark.parametrize("stored", ["folder", "pushed"])
def test_every_argument_of_the_command_line_exists(wheel, tmp_path, settings, stored):
    config = EngineConfig(name="sglang", **{"unseeded": "batch_invariant" not in settings} | settings)
    spec = spec_in(tmp_path, weights=stored)
    command = sglang_server_command(config, spec, port=1, flags=wheel.package.flags)
    assert command[:2] == ["-m", "sglang.launch_server"]
    assert (wheel.folder / "launch_server.py").is_file()
    assert {c for c in command if c.startswith("--")} <= wheel.package.flags
    known = wheel.fields("server_args.py", "ServerArgs")
    for file in sorted((wheel.folder / SRT / "arg_groups" / "fields").glob("*.py")):
        known |= {
            f.target.id
            for c in ast.walk(ast.parse(file.read_text()))
            if isinstance(c, ast.ClassDef)
            for f in c.body
            if isinstance(f, ast.AnnAssign)
        }
    assert set(sglang_constructor(config, spec)) <= known
    assert "--config" in wheel.package.flags and "api_key" in known  # the file with the token


def test_switches_are_switches_and_the_rest_takes_values(wheel, tmp_path):
    """`--flag` without a value is only right for a bool."""
    config = EngineConfig(name="sglang", unseeded=True, eager=True, prefix_caching=False)
    command = sglang_server_command(config, spec_in(tmp_path), port=1, flags=wheel.package.flags)
    alone = {
        flag[2:].replace("-", "_")
        for flag, after in zip(command, [*command[1:], "--"], strict=True)
        if flag.startswith("--") and after.startswith("--")
    }
    text = wheel.text("server_args.py", "arg_groups/*.py") + (
        wheel.text("arg_groups/fields/*.py") if (wheel.folder / SRT / "arg_groups/fields").is_dir() else ""
    )
    for name in alone:
        assert re.search(rf"\b{name}: A\[ ?bool,", text), name


def test_the_fakes_options_are_sglangs(wheel):
    tree = ast.parse((FAKE / "sglang" / "srt" / "server_args.py").read_text())
    (node,) = [n for n in tree.body if isinstance(n, ast.ClassDef) and n.name == "ServerArgs"]
    names = {f.target.id for f in node.body} - {"disable_cuda_graph"}
    assert {f"--{n.replace('_', '-')}" for n in names} <= wheel.package.flags


@pytest.mark.parametrize(
    ("paths", "texts"),
    [
        # what a sample's event holds
        (
            ("managers/tokenizer_manager.py",),
            (
                '"id": rid', '"finish_reason": recv_obj.finished_reasons[i]', '"weight_version":',
                '"prompt_tokens": recv_obj.prompt_tokens[i]', '"completion_tokens":', '"cached_tokens":',
                'meta_info["output_token_logprobs"]', '"output_ids":', 'result["index"]',
            ),
        ),
        # chunks are cut where the ids are
        (
            ("managers/tokenizer_manager.py",),
            ("meta_info[key] = meta_info[key][last_output_offset:]", '"output_token_logprobs",'),
        ),
        # how samples end
        (
            ("managers/schedule_batch.py",),
            ('"type": "stop"', '"matched": self.matched', '"type": "length"', '"type": "abort"',
             '"status_code": self.status_code', f'matched="{NOT_FINITE}"'),
        ),
        # an abort takes every id that begins like this, and not an empty one
        (("managers/scheduler.py",), ("rid.startswith(recv_req.rid)",)),
        (("managers/tokenizer_manager.py",), ("if not abort_all and not rid:",)),
        # samples end before context_length: SPARE_CONTEXT
        (
            ("managers/tp_worker.py", "managers/scheduler.py"),
            ("self.model_config.context_len - 1", "max_req_len - 5", "self.max_req_len - input_len - 1"),
        ),
        (("configs/model_config.py",), ("SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN",)),
        # what a server says about itself
        (("managers/scheduler.py",), ('"max_req_input_len"', '"max_total_num_tokens"')),
        (("entrypoints/http_server.py",), ('"version": __version__', '"architectures":', '"model_path":')),
        (("managers/load_snapshot.py",), ("num_used_tokens", "token_usage")),
        # weights
        (
            ("managers/scheduler_components/weight_updater.py",),
            ("release_memory_occupation should be called only when server is idle",),
        ),
        (
            ("model_executor/model_runner_components/weight_updater.py",),
            ('load_format == "flattened_bucket"', "init_custom_process_group", "rank_offset + self.tp_rank"),
        ),
        (("models/llama.py",), ("not found in params_dict", "tolist()[:truncate_size]")),
        (("constants.py",), ('"kv_cache"', '"weights"')),
        (("environ.py",), ("SGLANG_RETURN_ORIGINAL_LOGPROB = EnvBool(False)",)),
        # a stream in chunks of `stream_interval`, the first token at once
        (
            ("managers/scheduler_components/output_streamer.py",),
            ("req.sampling_params.stream_interval or",),
        ),
        # seeds are only read in the deterministic mode, and are 42 where there are none
        (("sampling/sampling_batch_info.py",), ("else 42", "if enable_deterministic")),
    ],
)  # fmt: skip
def test_behaviour_that_the_driver_counts_on(wheel, paths, texts):
    source = wheel.text(*paths)
    for text in texts:
        assert text in source, f"{paths}: {text}"


def test_memory_is_reported_under_the_names_that_are_read(wheel):
    source = wheel.text("managers/scheduler.py", "managers/scheduler_components/*.py")
    assert '"memory_usage"' in source and '"weight": round(' in source and '"kvcache": round(' in source


def unpickler_of(wheel):
    """SGLang's own, out of the wheel; nothing else of the wheel is run."""
    space = {"pickle": pickle, "io": io, "_safe_load_torch_storage": None}
    exec(wheel.class_source("utils/common.py", "SafeUnpickler"), space)
    return space["SafeUnpickler"]


def test_sglangs_unpickler_reads_our_weights(wheel, monkeypatch):
    payload = base64.b64decode(tensor_payload(ipc_bucket(weights())), validate=True)
    called = []
    monkeypatch.setattr(
        torch.multiprocessing.reductions, "rebuild_cuda_tensor", lambda *args: called.append(args) or "flat"
    )
    value = unpickler_of(wheel)(io.BytesIO(payload)).load()
    assert value["flattened_tensor"] == "flat" and called[0][6] == "1234-uuid"
    assert [m.name for m in value["metadata"]] == list(weights())


def test_sglangs_unpickler_lets_nothing_else_in(wheel):
    """So that the test above can fail."""
    with pytest.raises(RuntimeError, match="Blocked unsafe"):
        unpickler_of(wheel)(io.BytesIO(pickle.dumps(Path))).load()


def test_the_gpu_is_named_where_sglang_looks_for_its_uuid(wheel):
    source = wheel.source("utils/patch_torch.py")
    assert "_REDUCE_TENSOR_ARG_DEVICE_INDEX = 6" in source
    assert "str(torch.cuda.get_device_properties(device).uuid) == device_maybe_uuid" in source


def test_sglangs_bucket_gives_our_tensors_back(wheel):
    from lockstep.wire.buckets import pack

    sent = weights() | {"half": torch.arange(5).bfloat16(), "after": torch.ones(3)}  # 10 bytes, then a gap
    bucket = ipc_bucket(sent)
    data = torch.zeros(bucket.num_bytes, dtype=torch.uint8)
    pack(data, bucket.specs, list(sent.values()))
    value = FakeLoad.load(tensor_payload(bucket))
    metadata = [
        SimpleNamespace(**{k: getattr(m, k) for k in wheel.fields(BUCKET, "FlattenedTensorMetadata")})
        for m in value["metadata"]
    ]
    space = {"torch": torch, "List": list, "Tuple": tuple, "FlattenedTensorMetadata": SimpleNamespace}
    exec("from __future__ import annotations\n" + wheel.class_source(BUCKET, "FlattenedTensorBucket"), space)
    got = space["FlattenedTensorBucket"](flattened_tensor=data, metadata=metadata).reconstruct_tensors()
    for (name, tensor), (sent_name, sent_tensor) in zip(got, sent.items(), strict=True):
        assert name == sent_name and tensor.dtype == sent_tensor.dtype and torch.equal(tensor, sent_tensor)


BUCKET = "weight_sync/tensor_bucket.py"


class FakeLoad(pickle.Unpickler):
    """Metadata without a GPU."""

    @classmethod
    def load(cls, payload):
        return pickle.Unpickler.load(cls(io.BytesIO(base64.b64decode(payload))))

    def find_class(self, module, name):
        found = super().find_class(module, name)
        return (lambda *_: None) if name == "rebuild_cuda_tensor" else found


def test_only_these_attributes_of_the_metadata_are_read(wheel):
    tree = wheel.tree("model_executor/model_runner_components/weight_updater.py")
    read = {
        node.attr
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "meta"
    }
    assert read <= {"name", "shape", "dtype", "start_idx", "end_idx", "numel"} and read


def test_0_5_23_accepts_our_request_by_its_own_contract(wheel):
    """From then on a body is also checked against a schema; the generated decoder has no dependency but
    msgspec, so its table of fields is read."""
    path = wheel.folder / "api" / "v1" / "api_types.py"
    if not path.exists():
        pytest.skip("this version has no schema of requests")
    node = next(
        n
        for n in ast.parse(path.read_text()).body
        if isinstance(n, ast.ClassDef) and n.name == "GenerateRequest"
    )
    annotations = {f.target.id: ast.unparse(f.annotation) for f in node.body if isinstance(f, ast.AnnAssign)}
    for name in ("rid", "input_ids", "sampling_params"):
        assert "OrList" in annotations[name]
    assert "bool" in annotations["stream"] and "bool" in annotations["return_text_in_logprobs"]


def test_options_are_found_as_sglang_makes_them(wheel):
    """Our reader of options agrees with theirs on a renamed one and on one without a flag."""
    flags = wheel.package.flags
    assert {"--tp-size", "--tensor-parallel-size", "--model-path", "--model"} <= flags
    assert "--uses-mamba-radix-cache" not in flags  # Arg(no_cli=True)
    assert "--no-such-option" not in flags
