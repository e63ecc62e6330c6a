"""Triton kernels, one file an operation, each beside its plain-torch reference twin. Imports nothing of minivllm.

The folder above, `kernels/`, has no `__init__.py` on purpose: Transformers probes for a package of that name, and a
repository root on `sys.path` would hand it ours.
"""
