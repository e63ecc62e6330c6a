"""Looks inside a running engine: printers of the forward context and of the KV cache."""
