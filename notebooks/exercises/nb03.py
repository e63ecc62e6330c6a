"""Exercises of notebook 03, block table and slot mapping."""

from __future__ import annotations

import random
from typing import Any

from minivllm.check.exercise import Inputs, exercise


def slots_of_batch(
    block_table: list[list[int]],
    query_start_loc: list[int],
    positions: list[int],
    block_size: int,
) -> list[int]:
    """The slot of every token of the step, in the order of the batch.

    block_table: one list of block ids a request.
    query_start_loc: [num_reqs + 1]. positions: [num_tokens].
    """
    slots = []
    for row, blocks in enumerate(block_table):
        for token in range(query_start_loc[row], query_start_loc[row + 1]):
            block, offset = divmod(positions[token], block_size)
            slots.append(blocks[block] * block_size + offset)
    return slots


def owner_of_slot(
    slot: int,
    block_table: list[list[int]],
    seq_lens: list[int],
    block_size: int,
) -> tuple[int, int] | None:
    """(row, position) of the token that lies in a slot, or None where no token does.

    Entries of a row beyond its seq_len are stale: ignore them.
    """
    for row, (blocks, seq_len) in enumerate(zip(block_table, seq_lens)):
        for position in range(seq_len):
            if (
                blocks[position // block_size] * block_size + position % block_size
                == slot
            ):
                return row, position
    return None


def _rows(rng: random.Random, i: int) -> tuple[list[list[int]], list[int], int]:
    """Block ids shuffled over the requests, lengths, block size."""
    block_size = 4 if i < 5 else rng.choice([1, 2, 3, 4, 16])
    seq_lens = [rng.randint(1, 3 * block_size) for _ in range(1 + min(i, 4))]
    ids = rng.sample(range(1, 40), 30)
    table = [
        [ids.pop() for _ in range(-(-length // block_size))] for length in seq_lens
    ]
    return table, seq_lens, block_size


@exercise("ex03", slots_of_batch)
def _batch(rng: random.Random, i: int) -> Inputs:
    """A batch of prefills, chunks and decodes.

    Hint: Two loops: over the requests, then over the tokens of each, query_start_loc[row] to [row + 1].

    Hint: divmod(position, block_size) gives the column in the request's row and the offset in the block.

    Hint: slot = row[column] * block_size + offset. Use the token's position, not its place in the step.
    """
    table, seq_lens, block_size = _rows(rng, i)
    starts: list[int] = [0]
    positions: list[int] = []
    for length in seq_lens:
        computed = rng.randrange(length)
        positions += range(computed, length)
        starts.append(len(positions))
    return {
        "block_table": table,
        "query_start_loc": starts,
        "positions": positions,
        "block_size": block_size,
    }


def _why_slot(given: Inputs, got: Any, want: Any) -> str:
    if want is None:
        return "No token lies there: that entry of the row is beyond its seq_len."
    return f"Row {want[0]} is {given['block_table'][want[0]]}; position {want[1]} falls into slot {given['slot']}."


@exercise("ex03_2", owner_of_slot, why=_why_slot)
def _slot(rng: random.Random, i: int) -> Inputs:
    """A slot that holds a token, or a stale one.

    Hint: divmod(slot, block_size) gives the block and the offset. Whose row holds that block, at which column?

    Hint: position = column * block_size + offset, but only if it is below the row's seq_len.
    """
    table, seq_lens, block_size = _rows(rng, i)
    row = rng.randrange(len(table))
    position = rng.randrange(seq_lens[row])
    slot = table[row][position // block_size] * block_size + position % block_size
    if i % 3 == 2:  # a stale entry: the last block of a request that is gone
        table[row].append(rng.randint(41, 50))
        slot = table[row][-1] * block_size
    return {
        "slot": slot,
        "block_table": table,
        "seq_lens": seq_lens,
        "block_size": block_size,
    }
