"""A tiny Llama on disk, in both public forms, with the same weights."""

import json
import struct
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

for library in ("transformers", "tokenizers", "sentencepiece", "gguf"):
    pytest.importorskip(library, reason="needs flrce[llm]")

SIZES = {"vocabulary": 288, "width": 64, "layers": 2, "heads": 4, "kv_heads": 2, "hidden": 96}
THETA, EPS = 10000.0, 1e-5
MERGES = ("t h", "th e", "Ġ the", "Ġ a", "i n", "o n", "e r", "a n")
MARKS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
BYTE_LEVEL = {
    "type": "ByteLevel",
    "add_prefix_space": True,
    "trim_offsets": True,
    "use_regex": True,
}
GGUF_NAMES = {
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


def alphabet() -> list[str]:
    """GPT-2's letters for bytes, written from its definition: printable ones first."""
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    letters = {b: chr(b) for b in plain}
    n = 0
    for b in range(256):
        if b not in letters:
            letters[b] = chr(256 + n)
            n += 1
    return [letters[b] for b in range(256)]


def tokens() -> list[str]:
    found = [*MARKS, *alphabet(), *(merge.replace(" ", "") for merge in MERGES)]
    return found + [f"<unused{i}>" for i in range(SIZES["vocabulary"] - len(found))]


def weights(seed: int = 0, **sizes: int) -> dict[str, torch.Tensor]:
    s, rng = {**SIZES, **sizes}, torch.Generator().manual_seed(seed)
    head = s["width"] // s["heads"]
    shapes = {
        "model.embed_tokens.weight": (s["vocabulary"], s["width"]),
        "model.norm.weight": (s["width"],),
    }
    for i in range(s["layers"]):
        block = {
            "input_layernorm": (s["width"],),
            "post_attention_layernorm": (s["width"],),
            "self_attn.q_proj": (s["width"], s["width"]),
            "self_attn.k_proj": (s["kv_heads"] * head, s["width"]),
            "self_attn.v_proj": (s["kv_heads"] * head, s["width"]),
            "self_attn.o_proj": (s["width"], s["width"]),
            "mlp.gate_proj": (s["hidden"], s["width"]),
            "mlp.up_proj": (s["hidden"], s["width"]),
            "mlp.down_proj": (s["width"], s["hidden"]),
        }
        shapes |= {f"model.layers.{i}.{name}.weight": shape for name, shape in block.items()}
    return {
        name: 1 + 0.1 * torch.randn(shape, generator=rng)
        if len(shape) == 1
        else 0.2 * torch.randn(shape, generator=rng)
        for name, shape in shapes.items()
    }


def write_folder(folder: Path, w: dict[str, torch.Tensor]) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    save_file(w, folder / "model.safetensors")
    config = {
        "model_type": "llama",
        "vocab_size": SIZES["vocabulary"],
        "hidden_size": SIZES["width"],
        "num_hidden_layers": SIZES["layers"],
        "num_attention_heads": SIZES["heads"],
        "num_key_value_heads": SIZES["kv_heads"],
        "intermediate_size": SIZES["hidden"],
        "rope_theta": THETA,
        "rms_norm_eps": EPS,
        "tie_word_embeddings": True,
        "max_position_embeddings": 128,
    }
    (folder / "config.json").write_text(json.dumps(config))
    vocabulary = {token: i for i, token in enumerate(tokens()) if token not in MARKS}
    tokenizer = {
        "model": {"type": "BPE", "vocab": vocabulary, "merges": list(MERGES)},
        "added_tokens": [{"id": i, "content": mark} for i, mark in enumerate(MARKS)],
        "pre_tokenizer": {
            "type": "Sequence",
            "pretokenizers": [
                {"type": "Digits", "individual_digits": True},
                {**BYTE_LEVEL, "add_prefix_space": False},
            ],
        },
        "decoder": BYTE_LEVEL,
    }
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    return folder


def relative(
    folder: Path,
    w: dict[str, torch.Tensor],
    biased: tuple[str, ...] = (),
    head: int = 16,
    **config: object,
) -> dict[str, torch.Tensor]:
    """A folder of a related family: biases, heads of another size than width / heads, other keys in
    its config.
    """
    rng, w = torch.Generator().manual_seed(7), dict(w)
    for i in range(SIZES["layers"]):
        for name, heads in (("q", "heads"), ("k", "kv_heads"), ("v", "kv_heads")):
            rows = SIZES[heads] * head
            w[f"model.layers.{i}.self_attn.{name}_proj.weight"] = 0.2 * torch.randn(
                rows, 64, generator=rng
            )
        w[f"model.layers.{i}.self_attn.o_proj.weight"] = 0.2 * torch.randn(
            64, SIZES["heads"] * head, generator=rng
        )
        for name in biased:
            rows = len(w[f"model.layers.{i}.{name}.weight"])
            w[f"model.layers.{i}.{name}.bias"] = torch.randn(rows, generator=rng)
    write_folder(folder, w)
    told = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**told, **config}))
    return w


def write_gguf(path: Path, w: dict[str, torch.Tensor], **more: object) -> Path:
    """Matrices of attention in Q8_0, of the perceptron in Q4_1, the rest in float32."""
    values = {
        "general.architecture": "llama",
        "llama.block_count": SIZES["layers"],
        "llama.embedding_length": SIZES["width"],
        "llama.feed_forward_length": SIZES["hidden"],
        "llama.attention.head_count": SIZES["heads"],
        "llama.attention.head_count_kv": SIZES["kv_heads"],
        "llama.rope.freq_base": THETA,
        "llama.attention.layer_norm_rms_epsilon": EPS,
        "llama.context_length": 128,
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "smollm",
        "tokenizer.ggml.tokens": tokens(),
        "tokenizer.ggml.token_type": [3] * len(MARKS) + [1] * (SIZES["vocabulary"] - len(MARKS)),
        "tokenizer.ggml.merges": list(MERGES),
        "tokenizer.ggml.eos_token_id": 0,
        **more,
    }
    head = struct.pack("<4sIQQ", b"GGUF", 3, len(w), len(values))
    for name, value in values.items():
        head += _text(name) + _value(value)
    data = b""
    for name, tensor in w.items():
        kind, raw = _tensor(name, tensor)
        head += _text(_renamed(name)) + struct.pack("<I", tensor.dim())
        head += struct.pack(f"<{tensor.dim()}Q", *reversed(tensor.shape)) + struct.pack(
            "<IQ", kind, len(data)
        )
        data += raw + bytes(-len(raw) % 32)
    path.write_bytes(head + bytes(-len(head) % 32) + data)
    return path


def _renamed(name: str) -> str:
    outside = {
        "model.embed_tokens.weight": "token_embd.weight",
        "model.norm.weight": "output_norm.weight",
    }
    if name in outside or name == "rope_freqs.weight":
        return outside.get(name, name)
    _, _, i, rest = name.split(".", 3)
    return f"blk.{i}.{GGUF_NAMES[rest.removesuffix('.weight')]}.weight"


def _tensor(name: str, w: torch.Tensor) -> tuple[int, bytes]:
    x = w.numpy().copy()
    for part, heads in (("q_proj", SIZES["heads"]), ("k_proj", SIZES["kv_heads"])):
        if part in name:  # rows i and i + half of a head, which rotate together, lie side by side
            x = x.reshape(heads, 2, -1, x.shape[1]).swapaxes(1, 2).reshape(x.shape)
    if "self_attn" in name:
        return 8, _q8_0(x)
    return (3, _q4_1(x)) if "mlp" in name else (0, x.astype("<f4").tobytes())


def _q8_0(x: np.ndarray) -> bytes:
    out = b""
    for block in x.reshape(-1, 32):
        d = np.float16(np.abs(block).max() / 127)
        out += (
            d.tobytes() + np.round(block / np.float32(d)).clip(-127, 127).astype(np.int8).tobytes()
        )
    return out


def _q4_1(x: np.ndarray) -> bytes:
    out = b""
    for block in x.reshape(-1, 32):
        m, d = np.float16(block.min()), np.float16((block.max() - block.min()) / 15)
        levels = np.round((block - np.float32(m)) / np.float32(d)).clip(0, 15).astype(np.uint8)
        out += d.tobytes() + m.tobytes() + (levels[:16] | levels[16:] << 4).tobytes()
    return out


def _text(text: str) -> bytes:
    raw = text.encode()
    return struct.pack("<Q", len(raw)) + raw


def _value(value: object) -> bytes:
    if isinstance(value, bool):
        return struct.pack("<I?", 7, value)
    if isinstance(value, int):
        return struct.pack("<II", 4, value)
    if isinstance(value, float):
        return struct.pack("<If", 6, value)
    if isinstance(value, str):
        return struct.pack("<I", 8) + _text(value)
    assert isinstance(value, list)
    if value and isinstance(value[0], str):
        return struct.pack("<IIQ", 9, 8, len(value)) + b"".join(map(_text, value))
    kind, how = (6, "f") if value and isinstance(value[0], float) else (5, "i")
    return struct.pack("<IIQ", 9, kind, len(value)) + struct.pack(f"<{len(value)}{how}", *value)
