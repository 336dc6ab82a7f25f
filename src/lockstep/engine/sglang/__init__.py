"""Engine `sglang`: SGLang's own server."""
