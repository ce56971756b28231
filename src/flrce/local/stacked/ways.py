"""How lanes can be trained on one device, by name: which network of many lanes, how many at once, on how many streams.

chain            a plain chain of layers, fused where the device has Triton
folded:HOW       any network, lanes folded into the batch. Its convolutions: `columns`, one product a lane; `samples`,
                 one product a sample; `grouped`, one grouped convolution; `each`, lane by lane; `tiled`, by Triton
mapped           torch.func's vmap
single:S         one lane after another, S of them side by side, each step recorded
"""

from dataclasses import dataclass
from typing import Literal, cast

from torch import nn

from flrce.errors import BadInput
from flrce.local.stacked.batched import Convolving

Kind = Literal["chain", "folded", "mapped", "single"]
SIDE = (1, 4, 16)  # streams that are tried


@dataclass(frozen=True)
class Way:
    kind: Kind
    convolving: Convolving = "columns"
    streams: int = 1

    def __str__(self) -> str:
        more = {"folded": f":{self.convolving}", "single": f":{self.streams}"}
        return self.kind + more.get(self.kind, "")

    @staticmethod
    def of(text: str) -> "Way":
        kind, _, rest = text.partition(":")
        if kind == "single" and rest.isdecimal() and 1 <= int(rest) <= 64:
            return Way("single", streams=int(rest))
        if kind == "folded" and rest in ("tiled", "columns", "samples", "grouped", "each"):
            return Way("folded", cast(Convolving, rest))
        if text in ("chain", "mapped"):
            return Way(cast(Kind, text))
        raise BadInput(f"{text[:60]!r} is no way to train lanes; chain, folded:columns, mapped, single:1, ...")


def candidates(net: nn.Module, chained: bool, tiled: bool = False) -> list[Way]:
    """What may be tried for a network, in the order of preference."""
    ways: list[Way] = [Way("chain")] if chained else []
    convolves = any(isinstance(layer, nn.Conv1d | nn.Conv2d) for layer in net.modules())
    kinds: tuple[Convolving, ...] = ("columns", "samples", "grouped", "each") if convolves else ("columns",)
    kinds = ("tiled", *kinds) if convolves and tiled else kinds
    ways += [Way("folded", kind) for kind in kinds]
    return [*ways, Way("mapped"), *(Way("single", "each", many) for many in SIDE)]
