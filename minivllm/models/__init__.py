"""Model definitions, the registry that finds them, and the loader that fills them.

A model takes token ids and positions, one flat row of tokens for the whole batch, and gives hidden states. Mirrors
`vllm/model_executor/models` and `vllm/model_executor/model_loader`.
"""
