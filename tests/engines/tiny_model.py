"""Small Llama models with random weights, written as a Hugging Face directory and as GGUF files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import numpy.typing as npt
from safetensors.numpy import save_file
from tokenizers import AddedToken, decoders, models, pre_tokenizers
from tokenizers import Tokenizer as Backend

Tensors = dict[str, npt.NDArray[np.float32]]

SPECIALS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
EOS = 2  # <|im_end|>
MERGES = [("t", "h"), ("th", "e"), ("Ġ", "the"), ("Ġ", "a"), ("i", "n"), ("Ġ", "in"), ("o", "n")]
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)

CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "num_hidden_layers": 3,
    "hidden_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "intermediate_size": 96,
    "vocab_size": 288,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10_000.0,
    "tie_word_embeddings": True,
    "eos_token_id": EOS,
}


def alphabet() -> list[str]:
    """The 256 characters that stand for bytes, in a fixed order."""
    return sorted(pre_tokenizers.ByteLevel.alphabet())


def vocabulary() -> list[str]:
    return [*SPECIALS, *alphabet(), *("".join(pair) for pair in MERGES)]


def make_tensors(config: dict[str, Any], seed: int = 0) -> Tensors:
    """Random weights by Hugging Face's names; large enough that tokens differ clearly in probability."""
    rng = np.random.default_rng(seed)
    hidden, ffn, vocab = config["hidden_size"], config["intermediate_size"], config["vocab_size"]
    q, kv = (config[k] * config["head_dim"] for k in ("num_attention_heads", "num_key_value_heads"))

    def matrix(rows: int, columns: int, gain: float = 1.0) -> npt.NDArray[np.float32]:
        return (rng.standard_normal((rows, columns)) * gain / np.sqrt(columns)).astype(np.float32)

    def norm() -> npt.NDArray[np.float32]:
        return (1 + 0.1 * rng.standard_normal(hidden)).astype(np.float32)

    tensors: Tensors = {"model.embed_tokens.weight": matrix(vocab, hidden, 4.0), "model.norm.weight": norm()}
    if not config["tie_word_embeddings"]:
        tensors["lm_head.weight"] = matrix(vocab, hidden, 4.0)
    for index in range(config["num_hidden_layers"]):
        at = f"model.layers.{index}"
        tensors |= {
            f"{at}.input_layernorm.weight": norm(),
            f"{at}.self_attn.q_proj.weight": matrix(q, hidden, 2.0),
            f"{at}.self_attn.k_proj.weight": matrix(kv, hidden, 2.0),
            f"{at}.self_attn.v_proj.weight": matrix(kv, hidden),
            f"{at}.self_attn.o_proj.weight": matrix(hidden, q),
            f"{at}.post_attention_layernorm.weight": norm(),
            f"{at}.mlp.gate_proj.weight": matrix(ffn, hidden),
            f"{at}.mlp.up_proj.weight": matrix(ffn, hidden),
            f"{at}.mlp.down_proj.weight": matrix(hidden, ffn),
        }
    return tensors


def write_tokenizer(directory: Path) -> None:
    backend = Backend(models.BPE(vocab={text: i for i, text in enumerate(vocabulary())}, merges=MERGES))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in SPECIALS])
    backend.save(str(directory / "tokenizer.json"))
    settings = {"chat_template": TEMPLATE, "eos_token": "<|im_end|>", "bos_token": "<|im_start|>"}
    (directory / "tokenizer_config.json").write_text(json.dumps(settings))


def write_hf(directory: Path, tensors: Tensors | None = None, **changes: Any) -> Path:
    """A model directory; `changes` are to the config."""
    directory.mkdir(parents=True, exist_ok=True)
    config = CONFIG | changes
    (directory / "config.json").write_text(json.dumps(config))
    save_file(make_tensors(config) if tensors is None else tensors, str(directory / "model.safetensors"))
    write_tokenizer(directory)
    return directory


_GGUF_NAMES = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def _gguf_name(name: str) -> str:
    plain = {
        "model.embed_tokens.weight": "token_embd.weight",
        "model.norm.weight": "output_norm.weight",
        "lm_head.weight": "output.weight",
    }
    if name in plain:
        return plain[name]
    _, _, layer, part = name.split(".", 3)
    return f"blk.{layer}.{_GGUF_NAMES[part.removesuffix('.weight')]}.weight"


def _permute(rows: npt.NDArray[np.float32], heads: int) -> npt.NDArray[np.float32]:
    """As the usual converter reorders q and k for the llama architecture."""
    half = rows.shape[0] // heads // 2
    return rows.reshape(heads, 2, half, -1).swapaxes(1, 2).reshape(rows.shape)


def write_gguf(
    path: Path,
    tensors: Tensors | None = None,
    *,
    kind: gguf.GGMLQuantizationType = gguf.GGMLQuantizationType.F32,
    architecture: str = "llama",
    pre: str = "gpt-2",
    leave_out: str | None = None,
    rope_factors: list[float] | None = None,
    **changes: Any,
) -> Path:
    """The same model as `write_hf` as one file, its matrices of type `kind`."""
    config = CONFIG | changes
    tensors = make_tensors(config) if tensors is None else tensors
    writer = gguf.GGUFWriter(str(path), architecture)
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_freq_base(config["rope_theta"])
    writer.add_rope_dimension_count(config["head_dim"])
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(vocabulary())
    writer.add_token_types([3 if text in SPECIALS else 1 for text in vocabulary()])
    writer.add_token_merges([" ".join(pair) for pair in MERGES])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(EOS)
    writer.add_add_bos_token(False)
    writer.add_chat_template(TEMPLATE)
    if rope_factors is not None:
        writer.add_tensor("rope_freqs.weight", np.array(rope_factors, np.float32))
    for name, values in tensors.items():
        if name == leave_out:
            continue
        for part, heads in (("q_proj", "num_attention_heads"), ("k_proj", "num_key_value_heads")):
            if part in name:
                values = _permute(values, config[heads])
        if values.ndim == 2 and kind is not gguf.GGMLQuantizationType.F32:
            packed = gguf.quantize(values, kind)
            writer.add_tensor(_gguf_name(name), packed, raw_dtype=kind)
        else:
            writer.add_tensor(_gguf_name(name), values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
