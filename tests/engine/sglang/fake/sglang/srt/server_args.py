"""The options that the FAKE server takes; test_contract.py checks that SGLang has each of them."""

from dataclasses import dataclass
from typing import Annotated, Any


class Arg:
    def __init__(self, **settings: Any) -> None:
        self.settings = settings


@dataclass
class ServerArgs:
    model_path: str
    host: str = "127.0.0.1"
    port: int = 30000
    skip_tokenizer_init: bool = False
    dtype: str = "auto"
    random_seed: int = 0
    context_length: int = 0
    max_running_requests: int = 0
    tp_size: Annotated[int, Arg(cli_name="--tensor-parallel-size", aliases=["--tp-size"])] = 1
    disable_radix_cache: bool = False
    disable_decode_cuda_graph: bool = False
    disable_prefill_cuda_graph: bool = False
    disable_cuda_graph: Annotated[bool, Arg(no_cli=True)] = False
    enable_memory_saver: bool = False
    enable_deterministic_inference: bool = False
    sampling_defaults: str = "model"
    load_format: str = "auto"
    skip_server_warmup: bool = False
    incremental_streaming_output: bool = False
    mem_fraction_static: float = 0.0
    api_key: str = ""
    attention_backend: str = ""
    sampling_backend: str = ""
