"""Engine `vllm`: in this process, or vLLM's own server."""
