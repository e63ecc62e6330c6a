"""Names for blocks of tokens: equal hashes mean equal tokens, equal whole prefix, and equal extra keys.

A block's hash covers its parent's hash, so one hash stands for everything before it too. Extra keys keep blocks apart
whose tokens are equal but whose K and V are not: another LoRA adapter, other images behind the same placeholders,
another tenant's salt.

Mirrors the hashing half of vllm/v1/core/kv_cache_utils.py (0.32.0). Left out: prompt embeddings, other hash functions.
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NewType

if TYPE_CHECKING:
    from minivllm.request import Request

BlockHash = NewType("BlockHash", bytes)
# Any fixed value does: it only has to differ from every real hash, so it is not 32 bytes long.
ROOT = BlockHash(b"minivllm")


def generate_block_hash_extra_keys(request: Request, start: int, end: int) -> tuple[Any, ...]:
    """What tells the tokens [start, end) of a request apart, besides the tokens; () for plain text.

    The salt is in block 0 only, from where the chain carries it on. An image that covers a part of the block counts
    with its offset from the block's start, which is negative where it began in an earlier block.

    Mirrors: vllm/v1/core/kv_cache_utils.py generate_block_hash_extra_keys.
    """
    keys: list[Any] = []
    if request.lora_request is not None:
        keys.append(("lora", request.lora_request.name, request.lora_request.path))
    for feature in request.mm_features:
        if feature.offset < end and feature.offset + feature.length > start:
            keys.append(("mm", feature.identifier, feature.offset - start))
    if start == 0 and request.cache_salt:
        keys.append(("salt", request.cache_salt))
    return tuple(keys)


def make_block_hasher(block_size: int) -> Callable[[Request], list[BlockHash]]:
    """A function that returns the hashes of a request's blocks that became full since it was last called.

    Mirrors: vllm/v1/core/kv_cache_utils.py get_request_block_hasher.
    """
    if block_size < 1:
        raise ValueError(f"the hash block size must be at least 1 token, got {block_size}")
    width = block_size * array("q").itemsize

    def hasher(request: Request) -> list[BlockHash]:
        known = len(request.block_hashes)
        first, last = known * block_size, request.num_tokens // block_size * block_size
        if first >= last:  # the usual case while decoding
            return []
        parent = request.block_hashes[-1] if known else ROOT
        data = array("q", request.all_token_ids[first:last]).tobytes()
        plain = not (request.lora_request or request.mm_features or (request.cache_salt and first == 0))
        hashes: list[BlockHash] = []
        for index in range((last - first) // block_size):
            message = parent + data[index * width : (index + 1) * width]
            if not plain:
                start = first + index * block_size
                keys = generate_block_hash_extra_keys(request, start, start + block_size)
                message += repr(keys).encode() if keys else b""
            parent = BlockHash(hashlib.sha256(message).digest())
            hashes.append(parent)
        return hashes

    return hasher


def hashes_for(block_hashes: Sequence[BlockHash], hash_block_size: int, block_size: int) -> Sequence[BlockHash]:
    """The hashes as a group with blocks of `block_size` tokens sees them.

    A block that is several hash blocks long has the hash of the last one inside it, which covers the others too.

    Mirrors: vllm/v1/core/kv_cache_utils.py BlockHashListWithBlockSize.
    """
    if block_size % hash_block_size:
        raise ValueError(f"block_size={block_size} is not a multiple of the hash block size {hash_block_size}")
    scale = block_size // hash_block_size
    return block_hashes if scale == 1 else block_hashes[scale - 1 :: scale]
