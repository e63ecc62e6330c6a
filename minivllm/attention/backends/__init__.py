"""Attention backends, one file each; `minivllm.attention.selector` names them."""
