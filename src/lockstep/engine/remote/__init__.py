"""What engines behind an HTTP server share: the client, the process, the stall detector."""
