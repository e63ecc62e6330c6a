"""The parts a model is made of: norms, rotary embedding, linear layers, activations, embeddings.

Plain modules on tensors of shape [num_tokens, ...]. They know nothing of requests, caches or batches; the one layer
that does, attention, lives in `minivllm.attention`. Mirrors `vllm/model_executor/layers` without tensor parallelism
and without quantized kernels.
"""
