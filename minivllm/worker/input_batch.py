"""The persistent batch: one row a running request, kept in place from step to step.

A step touches only what changed: requests leave (`remove_request`), come (`add_request`, into the holes), the last
rows move down into the holes that are left (`condense`), and decodes may be moved to the front (`swap_states`, called
by `reorder_batch_to_split_decodes_and_prefills`). Whatever belongs to a row moves in one place, so that no part of a
row can stay behind or be shared (vLLM #43894, #48419). Rows that hold no request are zero and own no blocks.

Mirrors vllm/v1/worker/gpu_input_batch.py (0.32.0). Left out: speculative and multimodal fields, LoRA, pooling, prompt
embeddings; the tensors of sampling parameters live in `minivllm/sampling/metadata.py`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from minivllm.sampling.metadata import SamplingMetadata, SamplingRow
from minivllm.sampling.params import SamplingParams
from minivllm.worker.block_table import Int32Array, IntArray, MultiGroupBlockTable


@dataclass(slots=True, kw_only=True, eq=False)
class CachedRequestState:
    """What the worker remembers of a request, in the batch or not: a preempted one waits here for its return.

    block_ids: one list a KV-cache group. output_token_ids grows in place; the sampler's metadata refers to it.

    Mirrors: vllm/v1/worker/gpu_input_batch.py CachedRequestState.
    Leaves out: multimodal features, rotary positions of several axes, LoRA, prompt embeddings.
    """

    req_id: str
    prompt_token_ids: list[int]
    sampling_params: SamplingParams
    block_ids: tuple[list[int], ...]
    num_computed_tokens: int = 0
    output_token_ids: list[int] = field(default_factory=list)
    generator: torch.Generator | None = None
    eos_token_id: int | None = None

    @property
    def num_prompt_tokens(self) -> int:
        return len(self.prompt_token_ids)

    @property
    def num_tokens(self) -> int:
        """Prompt and output tokens together."""
        return len(self.prompt_token_ids) + len(self.output_token_ids)


class InputBatch:
    """Rows of the running requests: tokens, counts, blocks, sampling parameters.

    Sized by the max_model_len it is given: after that shrinks or grows, make a new batch (vLLM #46787).

    Mirrors: vllm/v1/worker/gpu_input_batch.py InputBatch.
    Leaves out: speculative tokens, LoRA, multimodal inputs, pooling, a copy of every sampling parameter as an array.
    """

    def __init__(
        self,
        max_num_reqs: int,
        max_model_len: int,
        max_num_batched_tokens: int,
        device: torch.device | str,
        vocab_size: int,
        block_sizes: Sequence[int],
        kernel_block_sizes: Sequence[int] | None = None,
        max_num_blocks: Sequence[int] | None = None,
    ) -> None:
        self.max_num_reqs = max_num_reqs
        self.max_model_len = max_model_len
        self.device = torch.device(device)
        self.vocab_size = vocab_size
        # Pages of a zeroed numpy array take memory only once they are written.
        self.token_ids_cpu: Int32Array = np.zeros((max_num_reqs, max_model_len), dtype=np.int32)
        # The counts of a row are one column, so that they move together.
        self._counts: Int32Array = np.zeros((3, max_num_reqs), dtype=np.int32)
        self.num_tokens, self.num_prompt_tokens, self.num_computed_tokens_cpu = self._counts  # num_tokens: with output
        self.block_table = MultiGroupBlockTable(
            max_num_reqs, max_model_len, max_num_batched_tokens, device, block_sizes, kernel_block_sizes, max_num_blocks
        )
        self.req_id_to_index: dict[str, int] = {}
        self._states: list[CachedRequestState | None] = []  # None: a hole, between removal and condense
        self.sampling_rows_changed = True  # since the metadata below was made
        self._sampling_metadata: SamplingMetadata | None = None
        self._sampled_rows: list[int] = []

    @property
    def num_reqs(self) -> int:
        """Requests in the batch, holes not counted."""
        return len(self.req_id_to_index)

    @property
    def req_ids(self) -> list[str]:
        """Request ids in row order, holes left out."""
        return [state.req_id for state in self._states if state is not None]

    def state(self, row: int) -> CachedRequestState:
        """The request of a row."""
        state = self._states[row] if 0 <= row < len(self._states) else None
        if state is None:
            raise ValueError(f"row {row} holds no request; rows in use: {sorted(self.req_id_to_index.values())}")
        return state

    def add_request(self, state: CachedRequestState) -> int:
        """Give a request the first free row, and return it. On an error the batch is as before."""
        row = self._states.index(None) if self.num_reqs < len(self._states) else len(self._states)
        if state.req_id in self.req_id_to_index:
            raise ValueError(f"request {state.req_id!r} is already in row {self.req_id_to_index[state.req_id]}")
        if row >= self.max_num_reqs:
            raise ValueError(
                f"request {state.req_id!r} finds all {self.max_num_reqs} rows taken: raise max_num_seqs or remove one"
            )
        if state.num_tokens > self.max_model_len:
            raise ValueError(
                f"request {state.req_id!r} has {state.num_tokens} tokens, a row holds max_model_len="
                f"{self.max_model_len}: shorten the prompt or raise max_model_len"
            )
        prompt_len = state.num_prompt_tokens
        self.token_ids_cpu[row, :prompt_len] = state.prompt_token_ids
        self.token_ids_cpu[row, prompt_len : state.num_tokens] = state.output_token_ids
        try:
            self.block_table.add_row(state.block_ids, row)
        except Exception:
            self.block_table.clear_row(row)
            raise
        self._counts[:, row] = state.num_tokens, prompt_len, state.num_computed_tokens
        self._states[row : row + 1] = [state]
        self.req_id_to_index[state.req_id] = row
        self.sampling_rows_changed = True
        return row

    def remove_request(self, req_id: str) -> int | None:
        """Empty a request's row, and return it; None if it has none. Call `condense` after the last change."""
        row = self.req_id_to_index.pop(req_id, None)
        if row is None:
            return None
        self._states[row] = None
        self.block_table.clear_row(row)
        self._counts[:, row] = 0
        self.sampling_rows_changed = True
        return row

    def condense(self) -> None:
        """Fill each hole, from the front, with the last row, until rows 0 to num_reqs - 1 are in use."""
        while self.num_reqs < len(self._states):
            state = self._states.pop()
            if state is None:
                continue
            src, tgt = len(self._states), self._states.index(None)
            length = self.num_tokens[src]
            self.token_ids_cpu[tgt, :length] = self.token_ids_cpu[src, :length]
            self._counts[:, tgt] = self._counts[:, src]
            self._counts[:, src] = 0
            self.block_table.move_row(src, tgt)
            self._states[tgt] = state
            self.req_id_to_index[state.req_id] = tgt
            self.sampling_rows_changed = True

    def swap_states(self, i1: int, i2: int) -> None:
        """Exchange two rows in use."""
        first, second = self.state(i1), self.state(i2)
        if i1 == i2:
            return
        pair, reverse = [i1, i2], [i2, i1]
        length = max(self.num_tokens[pair])
        # Indexing with a list copies before it writes, so that neither row is read after it was overwritten.
        self.token_ids_cpu[pair, :length] = self.token_ids_cpu[reverse, :length]
        self._counts[:, pair] = self._counts[:, reverse]
        self.block_table.swap_row(i1, i2)
        self._states[i1], self._states[i2] = second, first
        self.req_id_to_index[first.req_id], self.req_id_to_index[second.req_id] = i2, i1
        self.sampling_rows_changed = True

    def append_token(self, row: int, token_id: int) -> None:
        """Record a sampled token, in the row and in the request's output."""
        state, end = self.state(row), self.num_tokens[row]
        if end >= self.max_model_len:
            raise ValueError(
                f"request {state.req_id!r} already holds max_model_len={self.max_model_len} tokens:"
                " finish it or raise max_model_len"
            )
        self.token_ids_cpu[row, end] = token_id
        self.num_tokens[row] = end + 1
        state.output_token_ids.append(token_id)

    def sampling_metadata(self, rows: IntArray | None = None) -> SamplingMetadata:
        """The sampling settings of these rows (None: all), in this order; made anew only where rows changed.

        The output tokens in it are the requests' own lists, so a new token needs no new metadata.
        """
        chosen = list(range(self.num_reqs)) if rows is None else rows.tolist()
        if self._sampling_metadata is None or self.sampling_rows_changed or chosen != self._sampled_rows:
            self._sampling_metadata = SamplingMetadata.from_rows(
                [
                    SamplingRow(
                        params=state.sampling_params,
                        prompt_token_ids=state.prompt_token_ids,
                        output_token_ids=state.output_token_ids,
                        generator=state.generator,
                    )
                    for state in map(self.state, chosen)
                ],
                self.vocab_size,
                self.device,
            )
            self._sampled_rows, self.sampling_rows_changed = chosen, False
        return self._sampling_metadata

    def check_integrity(self) -> None:
        """Raise RuntimeError naming everything that does not agree; for tests and debugging."""
        found: list[str] = []
        live = {row: state for row, state in enumerate(self._states) if state is not None}
        if self.req_id_to_index != {state.req_id: row for row, state in live.items()}:
            found.append(f"req_id_to_index {self.req_id_to_index} is not what the rows hold")
        lists = [ids for state in live.values() for ids in (*state.block_ids, state.output_token_ids)]
        if len({id(item) for item in lists}) != len(lists):
            found.append("two rows share one list of blocks or outputs")
        nobody = CachedRequestState(
            req_id="no request",
            prompt_token_ids=[],
            sampling_params=SamplingParams(),
            block_ids=tuple([] for _ in self.block_table.block_tables),
        )
        for row in range(self.max_num_reqs):
            state = live.get(row, nobody)
            name, computed = f"row {row} ({state.req_id})", self.num_computed_tokens_cpu[row]
            tokens = self.token_ids_cpu[row, : self.num_tokens[row]].tolist()
            if tokens != state.prompt_token_ids + state.output_token_ids:
                found.append(f"{name}: its tokens are not the request's")
            if self.num_prompt_tokens[row] != state.num_prompt_tokens:
                found.append(f"{name}: num_prompt_tokens {self.num_prompt_tokens[row]}, not {state.num_prompt_tokens}")
            if not 0 <= computed <= state.num_tokens:
                found.append(f"{name}: {computed} of {state.num_tokens} tokens computed")
            held = tuple(table.get_row(row) for table in self.block_table.block_tables)
            if held != tuple(state.block_ids):
                found.append(f"{name}: holds blocks {held}, not {state.block_ids}")
        if found:
            raise RuntimeError("the input batch is inconsistent: " + "; ".join(found))
