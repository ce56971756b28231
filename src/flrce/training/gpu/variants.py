"""The variants of training a client batch on one device, where each client is one lane.

chain    a plain chain of layers; runs of convolution, BatchNorm, ReLU and max-pool are fused by
         Triton kernels (chain_net.py)
direct   any network, with Triton kernels for convolutions, norms, and linear layers with many rows
columns  the same network without Triton; a convolution is one matrix product per lane

Rules choose among them, from measurements on an H200 (research/docs/gpu.md): the chain where it is
fused throughout or has no convolutions, else `direct` where Triton runs, else `columns`.
"""

from enum import StrEnum

from torch import nn

CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.ConvTranspose1d, nn.ConvTranspose2d)
#: layers that multiply one row per position of a sample, so that a lane has many rows
MATRIX_PRODUCT_LAYERS = (nn.Linear, nn.MultiheadAttention, nn.RNNBase)


class Variant(StrEnum):
    CHAIN = "chain"
    DIRECT = "direct"
    COLUMNS = "columns"


def list_candidate_variants(net: nn.Module, is_chain: bool, has_triton: bool) -> list[Variant]:
    """The variants that may suit a network, the fastest first."""
    variants = [Variant.CHAIN] if is_chain else []
    # a chain's linear layers see one row per sample: too few for the kernel's tiles
    suited = CONVOLUTIONS if is_chain else (*CONVOLUTIONS, *MATRIX_PRODUCT_LAYERS)
    if has_triton and any(isinstance(layer, suited) for layer in net.modules()):
        variants.append(Variant.DIRECT)
    return [*variants, Variant.COLUMNS]
