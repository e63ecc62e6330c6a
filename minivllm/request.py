"""One request and everything the scheduler knows about it.

Mirrors `vllm/v1/request.py` (vLLM 0.32.0) without pooling, structured output, streamed input, speculation and KV
transfer. No torch here.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from minivllm.core.block_hash import BlockHash
    from minivllm.sampling.params import SamplingParams


class RequestStatus(enum.IntEnum):
    """Where a request is in its life. Everything after PREEMPTED is an end.

    Mirrors: vllm/v1/request.py RequestStatus.
    Leaves out: the states of waiting for grammars, remote K/V and streamed input.
    """

    WAITING = enum.auto()
    RUNNING = enum.auto()
    PREEMPTED = enum.auto()
    FINISHED_STOPPED = enum.auto()
    FINISHED_LENGTH_CAPPED = enum.auto()
    FINISHED_ABORTED = enum.auto()
    FINISHED_ERROR = enum.auto()

    @property
    def is_finished(self) -> bool:
        """Whether the request has come to an end."""
        return self > RequestStatus.PREEMPTED


_FINISH_REASONS = {
    RequestStatus.FINISHED_STOPPED: "stop",
    RequestStatus.FINISHED_LENGTH_CAPPED: "length",
    RequestStatus.FINISHED_ABORTED: "abort",
    RequestStatus.FINISHED_ERROR: "error",
}


class LoRARequest(NamedTuple):
    """The adapter a request asks for: blocks computed with different adapters are never shared.

    Mirrors: vllm/lora/request.py LoRARequest.
    Leaves out: everything but the identity; adapters are not loaded.
    """

    name: str
    int_id: int
    path: str


class MultiModalFeature(NamedTuple):
    """Where an image or sound stands in the prompt: `length` placeholder tokens from `offset` on.

    Mirrors: vllm/multimodal/inputs.py MultiModalFeatureSpec.
    Leaves out: the data itself; only block hashing reads this.
    """

    identifier: str
    offset: int
    length: int


class Request:
    """The tokens of one sequence, prompt and output, and how far they are computed.

    There is no "prefill" or "decode" state: the scheduler only sees num_tokens - num_computed_tokens.

    prompt_token_ids: at least one token. arrival_time: seconds; with equal priorities the earlier comes first.
    priority: lower is scheduled first under the "priority" policy. block_hasher: gives the hashes of the blocks that
    became full since its last call; None where nothing is cached.

    Mirrors: vllm/v1/request.py Request.
    Leaves out: pooling, prompt embeddings, structured output, streamed input, speculative tokens, KV transfer.
    """

    def __init__(
        self,
        request_id: str,
        prompt_token_ids: Sequence[int],
        sampling_params: SamplingParams,
        *,
        eos_token_id: int | None = None,
        arrival_time: float = 0.0,
        priority: int = 0,
        cache_salt: str | None = None,
        lora_request: LoRARequest | None = None,
        mm_features: Sequence[MultiModalFeature] = (),
        block_hasher: Callable[[Request], list[BlockHash]] | None = None,
    ) -> None:
        if not prompt_token_ids:
            raise ValueError(f"request {request_id!r} has an empty prompt: it must hold at least one token")
        self.request_id = request_id
        self.prompt_token_ids = list(prompt_token_ids)
        self.sampling_params = sampling_params
        self.eos_token_id = eos_token_id
        self.arrival_time = arrival_time
        self.priority = priority
        self.cache_salt = cache_salt
        self.lora_request = lora_request
        self.mm_features = tuple(mm_features)

        self.status = RequestStatus.WAITING
        self.stop_reason: int | str | None = None
        self.num_prompt_tokens = len(self.prompt_token_ids)
        self.num_computed_tokens = 0
        # Tokens found in the prefix cache at the first admission.
        self.num_cached_tokens = 0
        self.num_preemptions = 0
        # Set by the KV-cache manager: up to here the prefix is shared with other requests.
        self.shared_prefix_boundary = 0
        self._all_token_ids = self.prompt_token_ids.copy()
        self._output_token_ids: list[int] = []

        self._block_hasher = block_hasher
        self.block_hashes: list[BlockHash] = []
        self._update_block_hashes()

    def __repr__(self) -> str:
        return (
            f"Request({self.request_id!r}, {self.status.name}, {self.num_computed_tokens} of {self.num_tokens} tokens"
            f" computed, {self.num_output_tokens} of them output)"
        )

    @property
    def num_tokens(self) -> int:
        """Tokens known so far, prompt and output."""
        return len(self._all_token_ids)

    @property
    def num_output_tokens(self) -> int:
        """Tokens generated so far."""
        return len(self._output_token_ids)

    @property
    def all_token_ids(self) -> Sequence[int]:
        """Prompt and output tokens, to read only: `append_output_token_ids` adds to them."""
        return self._all_token_ids

    @property
    def output_token_ids(self) -> Sequence[int]:
        """Output tokens, to read only: `append_output_token_ids` adds to them."""
        return self._output_token_ids

    def append_output_token_ids(self, token_ids: int | Sequence[int]) -> None:
        """Add generated tokens, and the hashes of the blocks they fill."""
        if isinstance(token_ids, int):
            self._output_token_ids.append(token_ids)
            self._all_token_ids.append(token_ids)
        else:
            self._output_token_ids.extend(token_ids)
            self._all_token_ids.extend(token_ids)
        self._update_block_hashes()

    def _update_block_hashes(self) -> None:
        if self._block_hasher is not None:
            self.block_hashes.extend(self._block_hasher(self))

    def is_finished(self) -> bool:
        """Whether the request has come to an end."""
        return self.status.is_finished

    def get_finished_reason(self) -> str | None:
        """Why it ended: "stop", "length", "abort" or "error"; None while it lives."""
        return _FINISH_REASONS.get(self.status)
