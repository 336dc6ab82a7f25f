"""Train backend `fsdp2`: sharded weights, tensor parallel and ring attention."""
