"""Inference engines: token ids in, token ids and logprobs out."""
