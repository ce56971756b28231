"""A small causal transformer, as in GPT-2 (pre-norm, learned positions), for token ids."""

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class GPTBlock(nn.Module):
    """Causal self-attention, then a two-layer perceptron, each with norm and skip."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.mix = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        N, L, width = x.shape
        # (N, L, 3 width) -> three of (N, heads, L, width / heads)
        q, k, v = self.qkv(self.norm1(x)).view(N, L, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        seen = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.mix(seen.transpose(1, 2).reshape(N, L, width))
        added: Tensor = self.down(F.gelu(self.up(self.norm2(x))))
        return x + added


class GPT(nn.Module):
    """Token ids (N, L) -> scores (N, L, outputs) after every id, or (N, outputs) after the last."""

    def __init__(
        self,
        vocabulary: int,
        outputs: int,
        length: int,
        every: bool = False,
        layers: int = 2,
        width: int = 64,
        heads: int = 4,
    ) -> None:
        super().__init__()
        if width % heads:
            raise ValueError(f"width = {width} must be a multiple of heads = {heads}")
        self.every, self.length = every, length
        self.tokens, self.places = nn.Embedding(vocabulary, width), nn.Embedding(length, width)
        self.layers = nn.Sequential(*[GPTBlock(width, heads) for _ in range(layers)])
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, outputs, bias=False)
        for name, p in self.named_parameters():
            if p.ndim == 2:  # GPT-2's: what adds to the stream is scaled by the number of additions
                adds = name.endswith(("mix.weight", "down.weight"))
                nn.init.normal_(p, std=0.02 / (2 * layers) ** 0.5 if adds else 0.02)
            elif name.endswith("bias"):
                nn.init.zeros_(p)

    def forward(self, ids: Tensor) -> Tensor:
        places = torch.arange(ids.shape[1], device=ids.device)
        x = self.norm(self.layers(self.tokens(ids) + self.places(places)))
        scores: Tensor = self.head(x if self.every else x[:, -1])
        return scores
