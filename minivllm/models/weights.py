"""Weights from a checkpoint into a model, one to one: nothing missing, nothing left over, every shape right.

Files are read tensor by tensor, and each tensor is cast while it is copied into its place: no second copy of the model
ever exists. Pickled files are never opened, because reading one can run code.

Mirrors `vllm/model_executor/model_loader/weight_utils.py` and the `AutoWeightsLoader` of its models.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from pathlib import Path

import torch
from torch import Tensor, nn

from minivllm.layers.linear import checkpoint_targets

_DERIVED = "rotary_emb.inv_freq"  # old checkpoints store these; they follow from the config
_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)  # others are quantized, in some way unknown
_HEAD, _EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"


def load_weights(model: nn.Module, weights: Iterable[tuple[str, Tensor]]) -> None:
    """Copy every (name, tensor) into the parameter of that name. Raises ValueError naming what does not fit."""
    wanted, owner = dict(checkpoint_targets(model)), type(model).__name__
    missing, tied_head = set(wanted), None
    for name, tensor in weights:
        target = wanted.get(name)
        if target is not None:
            if target.shape != tensor.shape:
                raise ValueError(
                    f"weight {name!r} has shape {tuple(tensor.shape)}, but {owner} needs {tuple(target.shape)}: the"
                    " config belongs to another checkpoint"
                )
            if tensor.dtype not in _DTYPES:
                raise ValueError(f"weight {name!r} is stored as {tensor.dtype}; it must be one of {list(_DTYPES)}")
            target.copy_(tensor)
            missing.discard(name)
        elif name == _HEAD and _EMBEDDING in wanted:
            tied_head = tensor
        elif not name.endswith(_DERIVED):
            raise ValueError(f"weight {name!r} of shape {tuple(tensor.shape)} has no place in {owner}")
    if missing:
        names = ", ".join(f"{name!r} of shape {tuple(wanted[name].shape)}" for name in sorted(missing)[:4])
        raise ValueError(f"{len(missing)} of {len(wanted)} weights of {owner} are missing: {names}")
    if tied_head is not None and not torch.equal(tied_head.to(wanted[_EMBEDDING]), wanted[_EMBEDDING]):
        raise ValueError(
            f"weight {_HEAD!r} differs from {_EMBEDDING!r}, but the config ties them: set tie_word_embeddings to false"
        )


class SafetensorsStream:
    """(name, tensor) of every tensor in a folder's safetensors files. source: the file being read, for messages.

    Mirrors: none; vLLM has the generator safetensors_weights_iterator.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = self.source = folder

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        from safetensors import SafetensorError, safe_open

        for path in self._files():
            self.source = path
            try:
                with safe_open(path, framework="pt") as file:
                    names = list(file.keys())
                    for name in names:
                        yield name, file.get_tensor(name)
            except (SafetensorError, OSError) as error:
                raise ValueError(f"not readable as safetensors ({error}): damaged? Fetch it again") from error

    def _files(self) -> list[Path]:
        """model.safetensors, or every file that the index of a sharded checkpoint names."""
        index = self.folder / "model.safetensors.index.json"
        if not index.exists():
            return sorted(self.folder.glob("*.safetensors"))
        self.source = index
        names = sorted(set(json.loads(index.read_text())["weight_map"].values()))
        absent = [name for name in names if not (self.folder / name).is_file()]
        if absent:
            raise ValueError(f"the index names {len(names)} files, of which these are not there: {absent}; fetch them")
        return [self.folder / name for name in names]
