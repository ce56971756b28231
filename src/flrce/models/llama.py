"""A pretrained Llama, Mistral or Qwen (transformers' decoder layers), its weights fixed.

The weights are read once in a process and shared by every copy of the network: clients, workers and
seeds hold one base. They never travel; what trains is what is put beside them (models/adapters.py).
The forward pass of transformers' own model is repeated here, in a few lines, so that parameters
keep the names that run directories and settings have (layers.0.self_attn.q_proj.lora_A),
activations stay float32 over a base in bfloat16, and the last position can be computed alone.
"""

import copy
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from flrce.core.host import require_memory
from flrce.errors import BadInput, suggest_name
from flrce.formats.language import LanguageModel, locate_model, open_language_model
from flrce.formats.libraries import import_library, translate_errors
from flrce.models.adapters import share_frozen_parameters
from flrce.models.flat import FrozenParameter

WEIGHT_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
MAX_SCORES_PER_STEP = 2**26  # scores that one step of an evaluation may make: 256 MiB


class CastLinear(nn.Linear):
    """x W^T + b with the product in W's dtype and everything else in x's."""

    def forward(self, x: Tensor) -> Tensor:
        y = F.linear(x.to(self.weight.dtype), self.weight).to(x.dtype)
        return y if self.bias is None else y + self.bias.to(x.dtype)


class Llama(nn.Module):
    """Token ids (N, L) -> scores (N, L, vocabulary), or (N, vocabulary) after the last id.

    `recompute` keeps only each block's input for the backward pass and runs the block again there:
    less memory, a third more work.
    """

    chained = False  # for models/graph.py

    def __init__(self, net: Any, frequencies: Sequence[float], scale: float) -> None:
        """From a causal model of transformers and its rotary frequencies."""
        super().__init__()
        self.config = net.config
        self.tokens = FrozenParameter(net.model.embed_tokens.weight.data)
        self.layers, self.norm = net.model.layers, net.model.norm
        self.head = None if net.config.tie_word_embeddings else net.lm_head
        self.frequencies, self.scale = tuple(frequencies), scale
        self.every, self.recompute = True, False
        self.provision = 0  # bytes of the file that each device is given once

    @property
    def vocabulary(self) -> int:
        return len(self.tokens)

    @property
    def context(self) -> int:
        """Positions that the model was made for."""
        return int(self.config.max_position_embeddings)

    def forward(self, ids: Tensor) -> Tensor:
        x = F.embedding(ids, self.tokens).float()
        L = ids.shape[1]
        turn = compute_rotary_table(L, self.frequencies, self.scale, ids.device)
        again = self.recompute and self.training and torch.is_grad_enabled()
        for layer in self.layers:
            mask = make_causal_mask(L, _get_window(layer, self.config), ids.device)
            if again:
                # a block draws no random numbers, so no state of a generator has to be kept
                x = checkpoint(
                    layer, x, mask, position_embeddings=turn,
                    use_reentrant=False, preserve_rng_state=False,
                )  # fmt: skip
            else:
                x = layer(x, mask, position_embeddings=turn)
        x = self.norm(x if self.every else x[:, -1:])
        if self.head is None:
            scores: Tensor = F.linear(x.to(self.tokens.dtype), self.tokens).float()
        else:
            scores = self.head(x)
        return scores if self.every else scores[:, 0]

    def max_samples_per_pass(self, shape: tuple[int, ...]) -> int:
        """Samples of this shape to judge at once, so that their scores fit into memory."""
        return max(1, MAX_SCORES_PER_STEP // (self.vocabulary * (shape[0] if self.every else 1)))


def _get_window(layer: Any, config: Any) -> int:
    """Positions that each sees in this layer, itself among them; 0: all before it."""
    default = config.sliding_window if config.model_type == "mistral" else None
    return int(getattr(layer.self_attn, "sliding_window", default) or 0)


@lru_cache(maxsize=16)
def make_causal_mask(L: int, window: int, device: torch.device) -> Tensor:
    """(1, 1, L, L), added to attention scores: 0 for positions that are seen."""
    with torch.inference_mode(False):
        hidden = torch.ones(L, L, dtype=torch.bool, device=device).triu(1)
        if window:
            hidden = hidden | hidden.new_ones(L, L).tril(-window)
        mask = torch.zeros(L, L, device=device).masked_fill(hidden, float("-inf"))
        return mask[None, None]


@lru_cache(maxsize=16)
def compute_rotary_table(
    L: int, frequencies: tuple[float, ...], scale: float, device: torch.device
) -> tuple[Tensor, Tensor]:
    """(1, L, head) cosines and sines of position times frequency (Su et al. 2021)."""
    with torch.inference_mode(False):
        turns = torch.tensor(frequencies + frequencies, device=device)
        angle = torch.arange(L, dtype=torch.float32, device=device)[:, None] * turns
        return (angle.cos() * scale)[None], (angle.sin() * scale)[None]


def load_llama(
    path: Path | str, dtype: str = "float32", every: bool = True, recompute: bool = False
) -> Llama:
    """The network of a file or folder. Its weights are read once and shared."""
    if dtype not in WEIGHT_DTYPES:
        raise BadInput(f"dtype = {dtype!r}: {suggest_name(str(dtype), WEIGHT_DTYPES)}")
    where = locate_model(path)
    stamp = max(
        (file.stat().st_mtime_ns for file in (where, *where.glob("*.*")) if file.exists()),
        default=0,
    )
    net = copy.deepcopy(_load_network(where, stamp, dtype))
    net.every, net.recompute = every, recompute
    return net


@lru_cache(maxsize=2)
def _load_network(path: Path, stamp: int, dtype: str) -> Llama:
    language = open_language_model(path)
    net = _build_without_weights(language)
    shapes = {name: tuple(p.shape) for name, p in net.state_dict().items()}
    if language.config.tie_word_embeddings:
        del shapes["lm_head.weight"]
    need = sum(torch.Size(shape).numel() for shape in shapes.values())
    remedy = "set model.options.dtype = 'bfloat16', or give a smaller one"
    if dtype == "bfloat16":
        remedy = "give a smaller model"
    require_memory(need * WEIGHT_DTYPES[dtype].itemsize, f"{path} in {dtype}", remedy)
    weights = {
        name: _read_weight(language, name, shape).to(WEIGHT_DTYPES[dtype])
        for name, shape in shapes.items()
    }
    net.load_state_dict(weights, strict=False, assign=True)
    for module in list(net.modules()):
        if dtype == "bfloat16" and type(module) is nn.Linear:
            module.__class__ = CastLinear
    network = Llama(net.requires_grad_(False), *_compute_rotary_frequencies(language, net))
    network.provision = language.nbytes
    share_frozen_parameters(network)
    return network


def _build_without_weights(language: LanguageModel) -> Any:
    """The causal model of transformers on the device "meta"."""
    transformers = import_library("transformers")
    config = copy.deepcopy(language.config)
    config.attention_dropout = 0.0  # nothing in the base is random
    problem = f"{language.path} has an invalid configuration"
    with translate_errors(problem), torch.device("meta"):
        return transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager")


def _read_weight(language: LanguageModel, name: str, shape: tuple[int, ...]) -> Tensor:
    """A tensor of the file in float32, or BadInput."""
    try:
        weight = language.tensor(name)
    except KeyError:
        raise BadInput(f"{language.path}: tensor {name} is missing; download it again") from None
    if tuple(weight.shape) != shape:
        raise BadInput(
            f"{language.path}: tensor {name} has shape {tuple(weight.shape)}, not {shape};"
            " download it again"
        )
    if not weight.isfinite().all():  # one of them would make every loss NaN
        raise BadInput(f"{language.path}: tensor {name} holds NaN or infinity; download it again")
    return weight


def _compute_rotary_frequencies(language: LanguageModel, net: Any) -> tuple[list[float], float]:
    """The frequency of each pair of a head's numbers, and what cosines and sines are times."""
    rotary = type(net.model.rotary_emb)(net.config)
    frequencies = rotary.inv_freq.float()
    divisors = torch.tensor(language.rotary_divisors or (1.0,))
    if len(divisors) not in (1, len(frequencies)) or not (divisors > 0).all():
        raise BadInput(
            f"{language.path} has factors of rotary positions that do not fit its heads; download"
            " it again"
        )
    return (frequencies / divisors).tolist(), float(rotary.attention_scaling)
