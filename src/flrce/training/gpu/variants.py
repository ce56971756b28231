"""The variants of training a client batch on one device, where each client is one lane.

chain    a plain chain of layers; runs of convolution, BatchNorm, ReLU and max-pool are fused by
         Triton kernels (layers.py)
columns  any network with its lanes folded into the batch; a convolution is one matrix product per
         lane, without Triton (folded.py)
direct   the same network with Triton kernels for convolutions, and for linear layers with many rows
loop     no client batch: the torch trainer, one client after another
"""

from enum import StrEnum

from torch import nn

CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.ConvTranspose1d, nn.ConvTranspose2d)
#: layers that multiply one row per position of a sample, so that a lane has many rows
MATRIX_PRODUCT_LAYERS = (nn.Linear, nn.MultiheadAttention, nn.RNNBase)


class Variant(StrEnum):
    CHAIN = "chain"
    COLUMNS = "columns"
    DIRECT = "direct"
    LOOP = "loop"


def parse_variant(text: object) -> Variant | None:
    """The variant of this name; None for names that no variant has, such as removed ones.

    Run directories written before 0.2 call two of them "folded:columns" and "folded:direct".
    """
    name = text.removeprefix("folded:") if isinstance(text, str) else text
    return next((variant for variant in Variant if variant.value == name), None)


def list_candidate_variants(net: nn.Module, is_chain: bool, has_triton: bool) -> list[Variant]:
    """The variants that may suit a network, in order of preference."""
    variants = [Variant.CHAIN] if is_chain else []
    variants.append(Variant.COLUMNS)
    # a chain's linear layers see one row per sample: too few for the kernel's tiles
    suited = CONVOLUTIONS if is_chain else (*CONVOLUTIONS, *MATRIX_PRODUCT_LAYERS)
    if has_triton and any(isinstance(layer, suited) for layer in net.modules()):
        variants.append(Variant.DIRECT)
    return variants
