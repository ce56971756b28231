"""The numbers of a Llama network, and the shapes of its tensors by the names of HuggingFace's
files.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flrce.errors import BadInput, format_one_line

MAX_MODEL_NUMBER = 1 << 40  # far above any number of a model
MAX_HEAD = 1 << 16
ATTENTION_LAYERS = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj")
MLP_LAYERS = ("mlp.gate_proj", "mlp.up_proj", "mlp.down_proj")


@dataclass(frozen=True)
class LlamaSizes:
    """RMSNorm, rotary positions, grouped-query attention, SwiGLU; some layers may have biases."""

    vocabulary: int
    width: int
    layers: int
    heads: int
    kv_heads: int
    hidden: int  # of the SwiGLU
    theta: float  # base of the rotary positions
    eps: float  # of RMSNorm
    tied: bool  # whether the output weights are the embedding's
    context: int
    head: int  # numbers of a head
    biases: tuple[str, ...] = ()  # layers of a block that have one
    window: int = 0  # positions that each sees, itself among them; 0: all before it
    slowed: tuple[
        float, ...
    ] = ()  # what each of the head / 2 rotary frequencies is divided by; (): nothing
    sharper: float = 1.0  # what their cosines and sines are multiplied by

    def list_tensor_shapes(self) -> dict[str, tuple[int, ...]]:
        """Every tensor by name."""
        wide, narrow = self.heads * self.head, self.kv_heads * self.head
        attention = (
            (wide, self.width),
            (narrow, self.width),
            (narrow, self.width),
            (self.width, wide),
        )
        perceptron = (
            (self.hidden, self.width),
            (self.hidden, self.width),
            (self.width, self.hidden),
        )
        matrices = dict(
            zip((*ATTENTION_LAYERS, *MLP_LAYERS), (*attention, *perceptron), strict=True)
        )
        block: dict[str, tuple[int, ...]] = {
            f"{norm}_layernorm.weight": (self.width,) for norm in ("input", "post_attention")
        }
        block |= {f"{name}.weight": shape for name, shape in matrices.items()}
        block |= {f"{name}.bias": (matrices[name][0],) for name in self.biases}
        table = (self.vocabulary, self.width)
        found = {
            f"model.layers.{i}.{name}": shape
            for i in range(self.layers)
            for name, shape in block.items()
        }
        found |= {"model.embed_tokens.weight": table, "model.norm.weight": (self.width,)}
        return found if self.tied else {**found, "lm_head.weight": table}


def validate_sizes(
    path: Path, head: Any = None, biases: tuple[str, ...] = (), **given: Any
) -> LlamaSizes:
    """The sizes, or BadInput; heads share the width unless they have a size of their own."""
    for name, value in (given if head is None else {**given, "head": head}).items():
        whole = _is_whole(name)
        fine = (
            isinstance(value, int | float)
            and 0 < value < MAX_MODEL_NUMBER
            and (not whole or int(value) == value)
        )
        if name != "tied" and (isinstance(value, bool) or not fine):
            raise BadInput(
                f"{path} says {name} = {format_one_line(value, 30)}; it must be a number above 0"
            )
    given = {name: int(value) if _is_whole(name) else value for name, value in given.items()}
    head = None if head is None else int(head)
    width, heads, kv_heads = given["width"], given["heads"], given["kv_heads"]
    own = width // heads if head is None else head
    if own > MAX_HEAD:
        raise BadInput(f"{path} has heads of {own} numbers; at most {MAX_HEAD} are read")
    if (head is None and width % heads) or heads % kv_heads or own % 2:
        raise BadInput(
            f"{path} has width {width}, {heads} heads and {kv_heads} for keys: no grouping"
        )
    return LlamaSizes(**given, head=own, biases=biases)


def _is_whole(name: str) -> bool:
    """Whether a setting is a whole number; JSON may write it as 2.0."""
    return name not in ("theta", "eps", "tied")


def validate_tensor_shapes(
    path: Path, sizes: LlamaSizes, found: Mapping[str, tuple[int, ...]]
) -> None:
    """BadInput unless every tensor is there in its shape."""
    if sizes.layers > 10_000:
        raise BadInput(f"{path} says it has {sizes.layers} layers; download it again")
    for name, shape in sizes.list_tensor_shapes().items():
        if found.get(name) != shape:
            what = f"has shape {found[name]}" if name in found else "is missing"
            raise BadInput(f"{path}: tensor {name} {what}, not {shape}; download it again")
