"""A Llama network (Touvron et al. 2023) in plain torch, its weights from a file and fixed.

The weights are read once in a process and shared by every copy of the network: clients, workers and
seeds hold one base. They never travel; what trains is what is put beside them (models/adapters.py).
"""

import math
from functools import lru_cache
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from flrce.core.host import require_memory
from flrce.errors import BadInput, suggest_name
from flrce.formats.language import locate_model, open_language_model
from flrce.formats.sizes import LlamaSizes
from flrce.models.flat import FrozenParameter

WEIGHT_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
MAX_SCORES_PER_STEP = 2**26  # scores that one step of an evaluation may make: 256 MiB


class FrozenLinear(nn.Module):
    """x W^T with a fixed W (out, in), computed in W's dtype, and a fixed bias (out,) where there is
    one.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        super().__init__()
        self.weight = FrozenParameter(weight)
        self.bias = None if bias is None else FrozenParameter(bias)
        self.out_features, self.in_features = weight.shape

    def forward(self, x: Tensor) -> Tensor:
        found = F.linear(x.to(self.weight.dtype), self.weight).to(x.dtype)
        return found if self.bias is None else found + self.bias.to(x.dtype)


class RMSNorm(nn.Module):
    """x / sqrt(mean(x^2) + eps) * weight (Zhang & Sennrich 2019)."""

    def __init__(self, weight: Tensor, eps: float) -> None:
        super().__init__()
        self.weight, self.eps = FrozenParameter(weight), eps

    def forward(self, x: Tensor) -> Tensor:
        return (
            x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.eps) * self.weight.to(x.dtype)
        )


class LlamaAttention(nn.Module):
    """Causal attention with rotary positions; groups of heads share keys and values."""

    def __init__(self, sizes: LlamaSizes, weights: dict[str, Tensor]) -> None:
        super().__init__()
        self.heads, self.kv_heads, self.head = sizes.heads, sizes.kv_heads, sizes.head
        self.window = sizes.window
        self.theta, self.slowed, self.sharper = sizes.theta, sizes.slowed, sizes.sharper
        self.q_proj, self.k_proj, self.v_proj, self.o_proj = (
            FrozenLinear(
                weights[f"self_attn.{name}_proj.weight"], weights.get(f"self_attn.{name}_proj.bias")
            )
            for name in "qkvo"
        )

    def forward(self, x: Tensor) -> Tensor:
        N, L, _ = x.shape
        turn = compute_rotary_table(L, self.head, self.theta, x.device, self.slowed, self.sharper)
        q = apply_rotary(self.q_proj(x).view(N, L, self.heads, self.head), turn)
        k = apply_rotary(self.k_proj(x).view(N, L, self.kv_heads, self.head), turn)
        v = self.v_proj(x).view(N, L, self.kv_heads, self.head)
        k, v = (
            each.repeat_interleave(self.heads // self.kv_heads, 2).transpose(1, 2)
            for each in (k, v)
        )
        scores = q.transpose(1, 2) @ k.transpose(2, 3) * self.head**-0.5  # (N, heads, L, L)
        hidden = torch.ones(L, L, dtype=torch.bool, device=x.device).triu(1)
        if self.window:
            hidden = hidden | hidden.new_ones(L, L).tril(-self.window)
        seen = scores.masked_fill(hidden, float("-inf")).softmax(-1) @ v
        mixed: Tensor = self.o_proj(seen.transpose(1, 2).reshape(N, L, self.heads * self.head))
        return mixed


class SwiGLU(nn.Module):
    """down(silu(gate x) * up x) (Shazeer 2020)."""

    def __init__(self, weights: dict[str, Tensor]) -> None:
        super().__init__()
        self.gate_proj, self.up_proj, self.down_proj = (
            FrozenLinear(weights[f"mlp.{name}_proj.weight"], weights.get(f"mlp.{name}_proj.bias"))
            for name in ("gate", "up", "down")
        )

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))
        return found


class LlamaBlock(nn.Module):
    """Attention, then SwiGLU; each normalises its input and adds to it."""

    def __init__(self, sizes: LlamaSizes, weights: dict[str, Tensor]) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(weights["input_layernorm.weight"], sizes.eps)
        self.self_attn = LlamaAttention(sizes, weights)
        self.post_attention_layernorm = RMSNorm(
            weights["post_attention_layernorm.weight"], sizes.eps
        )
        self.mlp = SwiGLU(weights)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x))
        added: Tensor = self.mlp(self.post_attention_layernorm(x))
        return x + added


class Llama(nn.Module):
    """Token ids (N, L) -> scores (N, L, vocabulary) after every id, or (N, vocabulary) after the
    last.

    `recompute` keeps only each block's input for the backward pass and runs the block again there:
    less memory, a third more work.
    """

    chained = False  # for models/chain.py

    def __init__(
        self,
        sizes: LlamaSizes,
        weights: dict[str, Tensor],
        every: bool = True,
        recompute: bool = False,
    ) -> None:
        super().__init__()
        self.sizes, self.every, self.recompute = sizes, every, recompute
        self.tokens = FrozenParameter(weights["model.embed_tokens.weight"])
        self.layers = nn.ModuleList(
            LlamaBlock(sizes, select_prefix(weights, f"model.layers.{i}."))
            for i in range(sizes.layers)
        )
        self.norm = RMSNorm(weights["model.norm.weight"], sizes.eps)
        self.head = None if sizes.tied else FrozenLinear(weights["lm_head.weight"])
        self.provision = 0  # bytes of the file that each device is given once

    def forward(self, ids: Tensor) -> Tensor:
        x = F.embedding(ids, self.tokens).float()
        for layer in self.layers:
            again = self.recompute and self.training and torch.is_grad_enabled()
            # a block draws no random numbers: no state of a generator to keep, which no recording
            # could
            x = (
                checkpoint(layer, x, use_reentrant=False, preserve_rng_state=False)
                if again
                else layer(x)
            )
        x = self.norm(x if self.every else x[:, -1:])
        table = self.tokens if self.head is None else None
        scores: Tensor = (
            F.linear(x.to(table.dtype), table).float() if table is not None else self.head(x)  # type: ignore[misc]
        )
        return scores if self.every else scores[:, 0]

    def max_samples_per_pass(self, shape: tuple[int, ...]) -> int:
        """Samples of this shape to judge at once, so that their scores fit into memory."""
        return max(
            1, MAX_SCORES_PER_STEP // (self.sizes.vocabulary * (shape[0] if self.every else 1))
        )


def select_prefix(weights: dict[str, Tensor], prefix: str) -> dict[str, Tensor]:
    """The tensors below a prefix, without it."""
    return {
        name.removeprefix(prefix): value
        for name, value in weights.items()
        if name.startswith(prefix)
    }


@lru_cache(maxsize=16)
def compute_rotary_table(
    L: int,
    head: int,
    theta: float,
    device: torch.device,
    slowed: tuple[float, ...] = (),
    sharper: float = 1.0,
) -> tuple[Tensor, Tensor]:
    """(L, 1, head) cosines and sines of position times frequency (Su et al. 2021), as HuggingFace
    lays them out.
    """
    with torch.inference_mode(False):
        frequency = theta ** (-torch.arange(0, head, 2, dtype=torch.float32, device=device) / head)
        if slowed:
            frequency = frequency / torch.tensor(slowed, device=device)
        angle = torch.arange(L, dtype=torch.float32, device=device)[:, None] * frequency
        angle = torch.cat([angle, angle], -1)[:, None]
        return angle.cos() * sharper, angle.sin() * sharper


def apply_rotary(x: Tensor, turn: tuple[Tensor, Tensor]) -> Tensor:
    """x (N, L, heads, head) with each pair (i, i + head / 2) turned by its position."""
    cos, sin = turn
    first, second = x.chunk(2, -1)
    return x * cos + torch.cat([-second, first], -1) * sin


def load_llama(
    path: Path | str, dtype: str = "float32", every: bool = True, recompute: bool = False
) -> Llama:
    """The network of a file or folder; its weights are read once and shared by all that load
    them.
    """
    if dtype not in WEIGHT_DTYPES:
        raise BadInput(f"dtype = {dtype!r}: {suggest_name(str(dtype), WEIGHT_DTYPES)}")
    where = locate_model(path)
    stamp = max(
        (file.stat().st_mtime_ns for file in (where, *where.glob("*.*")) if file.exists()),
        default=0,
    )
    sizes, weights, size = _load_weights(where, stamp, dtype)
    net = Llama(sizes, weights, every, recompute)
    net.provision = size
    return net


@lru_cache(maxsize=2)
def _load_weights(path: Path, stamp: int, dtype: str) -> tuple[LlamaSizes, dict[str, Tensor], int]:
    language = open_language_model(path)
    shapes = language.sizes.list_tensor_shapes()
    need = sum(map(math.prod, shapes.values())) * WEIGHT_DTYPES[dtype].itemsize
    remedy = (
        "give a smaller model"
        if dtype == "bfloat16"
        else "set model.options.dtype = 'bfloat16', or give a smaller one"
    )
    require_memory(need, f"{path} in {dtype}", remedy)
    weights = {
        name: _require_finite(language.tensor(name), name, path).to(WEIGHT_DTYPES[dtype])
        for name in shapes
    }
    return language.sizes, weights, language.nbytes


def _require_finite(weight: Tensor, name: str, path: Path) -> Tensor:
    """One number that is none would make every loss one."""
    if not weight.isfinite().all():
        raise BadInput(f"{path}: tensor {name} holds NaN or infinity; download it again")
    return weight
