"""A Llama of a few megabytes with random weights, made on the spot.

SGLang's `--load-format dummy` will not do: with its weights of about 1e-3 the greedy tokens stay
the same even when every cached page is zero, so "equal output" would say nothing. Here the weights
keep the scale of what passes through them, and a wrong page changes every token.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

HIDDEN, INNER, LAYERS, HEADS, KV_HEADS, HEAD_DIM, VOCABULARY = 256, 512, 4, 4, 2, 64, 4096

CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": HIDDEN,
    "intermediate_size": INNER,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS,
    "head_dim": HEAD_DIM,
    "vocab_size": VOCABULARY,
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "hidden_act": "silu",
    "torch_dtype": "bfloat16",
    "bos_token_id": 1,
    "eos_token_id": 2,
    "tie_word_embeddings": False,
    "attention_bias": False,
    "mlp_bias": False,
}


def write_tiny_llama(folder: Path, sizes: Mapping[str, int] | None = None) -> Path:
    """Write config.json and model.safetensors of the Llama; equal bytes every time.

    sizes: what its config.json has instead of CONFIG's.
    """
    config: dict[str, Any] = {**CONFIG, **(sizes or {})}
    folder.mkdir(parents=True, exist_ok=True)
    generator = torch.Generator().manual_seed(0)

    def weight(rows: int, columns: int, gain: float = 1.0) -> torch.Tensor:
        values = torch.randn(rows, columns, generator=generator) * gain / columns**0.5
        return values.to(torch.bfloat16)

    hidden, inner, vocabulary = (
        config[name] for name in ("hidden_size", "intermediate_size", "vocab_size")
    )
    attended = config["num_attention_heads"] * config["head_dim"]
    kept = config["num_key_value_heads"] * config["head_dim"]
    ones = torch.ones(hidden, dtype=torch.bfloat16)
    tensors = {
        "model.embed_tokens.weight": weight(vocabulary, hidden, hidden**0.5),
        "model.norm.weight": ones.clone(),
        "lm_head.weight": weight(vocabulary, hidden, 2.0),
    }
    for layer in range(config["num_hidden_layers"]):
        parts = {
            "self_attn.q_proj": weight(attended, hidden, 2.0),
            "self_attn.k_proj": weight(kept, hidden, 2.0),
            "self_attn.v_proj": weight(kept, hidden, 2.0),
            "self_attn.o_proj": weight(hidden, attended, 2.0),
            "mlp.gate_proj": weight(inner, hidden),
            "mlp.up_proj": weight(inner, hidden),
            "mlp.down_proj": weight(hidden, inner),
            "input_layernorm": ones.clone(),
            "post_attention_layernorm": ones.clone(),
        }
        tensors |= {f"model.layers.{layer}.{name}.weight": t for name, t in parts.items()}
    (folder / "config.json").write_text(json.dumps(config))
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def write_tokenizer(folder: Path) -> None:
    """Write a tokenizer of the Llama, for servers that are sent text: a number is one token."""
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import WhitespaceSplit

    special = ("<unk>", "<s>", "</s>")
    words = [*special, *(str(number) for number in range(VOCABULARY - len(special)))]
    tokenizer = Tokenizer(WordLevel({word: at for at, word in enumerate(words)}, special[0]))
    tokenizer.pre_tokenizer = WhitespaceSplit()
    tokenizer.save(str(folder / "tokenizer.json"))
    names = dict(zip(("unk_token", "bos_token", "eos_token"), special, strict=True))
    (folder / "tokenizer_config.json").write_text(
        json.dumps({"tokenizer_class": "PreTrainedTokenizerFast", **names})
    )
