"""Small GGUF files: a Llama with a byte-level vocabulary, in any type of tensor that `gguf` can write."""

import json
import re

import numpy as np
import torch
from gguf import GGMLQuantizationType, GGUFWriter, LlamaFileType
from gguf.quants import dequantize, quantize
from transformers import LlamaConfig, LlamaForCausalLM

from lit_klrb.seeding import forked_rng

TEMPLATE = (
    "{% for m in messages %}<s>{{ m['role'] }}\n{{ m['content'] }}</s>{% endfor %}"
    "{% if add_generation_prompt %}<s>{% endif %}"
)
LAYER = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
}
OUTER = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}


def llama(vocab_size, tied=False, seed=0, **changes):
    """A small Llama with random weights, large enough that no two log-probabilities are the same."""
    settings = {
        **{"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4},
        **{"num_key_value_heads": 2, "max_position_embeddings": 64, "bos_token_id": 0, "eos_token_id": 1},
        **{"pad_token_id": 1, "initializer_range": 0.2, "tie_word_embeddings": tied, **changes},
    }
    with forked_rng(seed):
        return LlamaForCausalLM(LlamaConfig(vocab_size=vocab_size, **settings)).eval()


def vocabulary(tokenizer):
    """Tokens by id and merges of a byte-level tokenizer, as GGUF has them."""
    content = json.loads(tokenizer.backend_tokenizer.to_str())["model"]
    ids = tokenizer.get_vocab()
    merges = [merge if isinstance(merge, str) else " ".join(merge) for merge in content["merges"]]
    return sorted(ids, key=ids.__getitem__), merges


def gguf_name(name):
    """The name of a weight in a GGUF file."""
    place = re.fullmatch(r"model\.layers\.(\d+)\.(.*)\.weight", name)
    return f"blk.{place[1]}.{LAYER[place[2]]}.weight" if place else f"{OUTER[name[:-7]]}.weight"


def permuted(name, weight, config):
    """Rows of queries and keys in the order of llama.cpp, which rotates neighbouring pairs."""
    heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}
    count = next((heads[part] for part in heads if part in name), None)
    if count is None:
        return weight
    return weight.reshape(count, 2, -1, weight.shape[1]).swapaxes(1, 2).reshape(weight.shape)


def write(path, model, tokenizer, kind="Q4_1", settings=(), leave_out=(), tensors=(), specials=2):
    """Write a model as a GGUF file and give the model its rounded weights.

    `settings` replaces settings, or removes them where the value is None; `tensors` adds tensors.
    """
    config, (tokens, merges) = model.config, vocabulary(tokenizer)
    values = {
        "llama.block_count": config.num_hidden_layers,
        "llama.context_length": config.max_position_embeddings,
        "llama.embedding_length": config.hidden_size,
        "llama.feed_forward_length": config.intermediate_size,
        "llama.attention.head_count": config.num_attention_heads,
        "llama.attention.head_count_kv": config.num_key_value_heads,
        "llama.attention.layer_norm_rms_epsilon": config.rms_norm_eps,
        "llama.rope.freq_base": 10000.0,
        "llama.rope.dimension_count": config.hidden_size // config.num_attention_heads,
        "llama.vocab_size": config.vocab_size,
        "general.name": "Tiny",
        "general.author": "Nobody",
        "general.license": "mit",
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [3] * specials + [1] * (len(tokens) - specials),
        "tokenizer.ggml.merges": merges,
        "tokenizer.ggml.bos_token_id": 0,
        "tokenizer.ggml.eos_token_id": 1,
        "tokenizer.chat_template": TEMPLATE,
        **dict(settings),
    }
    writer = GGUFWriter(path, values.pop("general.architecture", "llama"))
    for name, value in values.items():
        if value is not None:
            add = {str: writer.add_string, list: writer.add_array, float: writer.add_float32}
            (writer.add_uint64 if type(value) is int else add[type(value)])(name, value)
    writer.add_file_type(LlamaFileType.ALL_F32)
    state = model.state_dict()
    for name, weight in state.items():
        if name in leave_out or (name == "lm_head.weight" and config.tie_word_embeddings):
            continue
        plain = permuted(name, weight.numpy(), config)
        stored = kind if plain.ndim == 2 else "F32"  # as llama.cpp keeps norms
        raw = quantize(plain, GGMLQuantizationType[stored])
        writer.add_tensor(gguf_name(name), raw, raw_dtype=GGMLQuantizationType[stored])
        rounded = torch.from_numpy(dequantize(raw, GGMLQuantizationType[stored]).astype(np.float32))
        state[name].copy_(unpermuted(name, rounded, config))
    for name, weight in dict(tensors).items():
        writer.add_tensor(name, weight)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def unpermuted(name, weight, config):
    """The inverse of `permuted`."""
    heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}
    count = next((heads[part] for part in heads if part in name), None)
    if count is None:
        return weight
    return weight.reshape(count, -1, 2, weight.shape[1]).swapaxes(1, 2).reshape(weight.shape)
