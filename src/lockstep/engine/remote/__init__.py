"""What engines behind an HTTP server share: the client, the process, its supervisor, the stall detector."""
