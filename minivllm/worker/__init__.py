"""PREPARES: persistent rows, block tables and slots, cache memory, the model runner. Never imports engine or llm.

Mirrors the folder vllm/v1/worker of vLLM 0.32.0.
"""
