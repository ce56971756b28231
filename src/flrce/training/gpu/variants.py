"""How lanes can be trained on one device, by name: which network of many lanes, how many at once,
on how many streams.

chain            a plain chain of layers, fused where the device has Triton
folded:HOW       any network, lanes folded into the batch. Its convolutions: `columns`, one
                 product a lane; `rows`, the same with channels last; `direct`, by Triton with
                 channels last, linear layers of many rows too; `grouped`, one grouped
                 convolution; `each`, lane by lane
folded:HOW:S     the same in S groups of lanes, side by side
mapped           torch.func's vmap
single:S         one lane after another, S of them side by side, each step recorded
"""

from dataclasses import dataclass
from typing import Literal, cast, get_args

from torch import nn

from flrce.errors import BadInput
from flrce.training.gpu.batched import ConvolutionMethod

VariantKind = Literal["chain", "folded", "mapped", "single"]
STREAM_COUNTS = (1, 4, 16)  # streams that are tried
MATRIX_PRODUCT_LAYERS = (
    nn.Linear,
    nn.MultiheadAttention,
    nn.RNNBase,
)  # where they see positions of samples, their rows are many


@dataclass(frozen=True)
class Variant:
    kind: VariantKind
    convolving: ConvolutionMethod = "columns"
    streams: int = 1

    def __str__(self) -> str:
        more = {"folded": f":{self.convolving}", "single": f":{self.streams}"}
        side = f":{self.streams}" if self.kind == "folded" and self.streams > 1 else ""
        return self.kind + more.get(self.kind, "") + side

    def plan_groups(self, lanes: int, fits: int) -> tuple[int, int]:
        """(lanes of a group, groups side by side) for so many lanes, of which `fits` can be trained
        at once.
        """
        side = min(self.streams, fits)
        if self.kind == "single":
            return 1, side
        if side == 1:
            return fits, 1
        return max(1, min(-(-lanes // side), fits // side)), side

    @staticmethod
    def from_text(text: str) -> "Variant":
        kind, _, rest = text.partition(":")
        if kind == "single" and rest.isdecimal() and 1 <= int(rest) <= 64:
            return Variant("single", streams=int(rest))
        how, _, side = rest.partition(":")
        if kind == "folded" and how in get_args(ConvolutionMethod) and side in ("", "2", "4"):
            return Variant("folded", cast(ConvolutionMethod, how), int(side or 1))
        if text in ("chain", "mapped"):
            return Variant(cast(VariantKind, text))
        raise BadInput(
            f"{text[:60]!r} is no way to train lanes; chain, folded:columns, mapped, single:1, ..."
        )


def list_candidate_variants(net: nn.Module, chained: bool, triton: bool = False) -> list[Variant]:
    """What may be tried for a network, in the order of preference; `triton`: whether the device has
    it.
    """
    ways: list[Variant] = [Variant("chain")] if chained else []
    ways.append(Variant("folded"))
    convolving = nn.Conv1d | nn.Conv2d | nn.ConvTranspose1d | nn.ConvTranspose2d
    if any(isinstance(layer, convolving) for layer in net.modules()):
        last: tuple[ConvolutionMethod, ...] = ("rows", "direct") if triton else ("rows",)
        ways += [Variant("folded", how, many) for how in last for many in (1, 2)]
        ways += [Variant("folded", "grouped"), Variant("folded", "each")]
    elif (
        triton
        and not chained
        and any(isinstance(layer, MATRIX_PRODUCT_LAYERS) for layer in net.modules())
    ):
        ways.append(Variant("folded", "direct"))
    return [*ways, Variant("mapped"), *(Variant("single", "each", many) for many in STREAM_COUNTS)]
