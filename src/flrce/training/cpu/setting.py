"""One stage among the others, and how its C text names things."""

from dataclasses import dataclass
from math import prod

from flrce.core.c_compiler import Processor
from flrce.training.cpu import convolution
from flrce.training.cpu.frames import Frame, Place, make_input_frame, make_tight_frame
from flrce.training.cpu.joints import Flow
from flrce.training.cpu.plan import Group, Stage


@dataclass(frozen=True)
class Setting:
    """A stage's surroundings: its number, the frames it reads and writes, its ways back, and the
    tensors by name.
    """

    s: int
    stage: Stage
    origins: tuple[Frame, ...]  # of its sources' outputs
    target: Frame  # of its output; tight at the end
    flows: tuple[Flow, ...]
    places: dict[str, Place]
    machine: Processor

    @property
    def has_input_gradient(self) -> bool:
        """Whether any stage that it depends on learns."""
        return any(flow.learns for flow in self.flows)

    @property
    def adds_to_gradient(self) -> bool:
        """Whether its input's gradient is added to another's."""
        return self.has_input_gradient and self.flows[0].adds

    @property
    def needs_scratch(self) -> bool:
        """Whether its input's gradient is made aside first: its code writes, and cannot add."""
        return self.adds_to_gradient and self.stage.op not in ("conv", "linear", "sum")

    def address(self, name: str, base: str = "n->p") -> str:
        """A tensor's address, or 0 where the stage has none."""
        return f"({base} + {self.places[name].inner})" if name else "0"

    def pull(self, name: str) -> str:
        return f"step->pull[{list(self.places).index(name)}]"

    @property
    def has_norm(self) -> int:
        return int(self.stage.norm is not None)

    @property
    def group(self) -> Group:
        assert self.stage.group is not None
        return self.stage.group

    @property
    def moments(self) -> str:
        """Tile t's mean and inverse deviation of each group."""
        return f"(n->m{self.s} + t * {2 * self.group.groups})"

    @property
    def has_pool(self) -> bool:
        return self.stage.pool != (1, 1)

    @property
    def product_is_output(self) -> bool:
        """Whether the product's output is the stage's, where it is wanted: a convolution before
        GroupNorm, say.
        """
        stage = self.stage
        bare = stage.op == "conv" and not stage.norm and stage.act == "PLAIN" and not self.has_pool
        return bare and self.target == make_tight_frame(stage.out)

    @property
    def gradient_frame(self) -> Frame:
        """Where a convolution's output gradient goes: a whole tile, or the rows in use if no stage
        below needs it.
        """
        if self.has_input_gradient:
            return convolution.gradient_frame(self.stage)
        return Frame(self.stage.middle[0], convolution.row_group(self.stage), self.stage.middle[2])

    @property
    def target_strides(self) -> tuple[int, int]:
        """How far apart channels and rows lie in the target: as in y's own planes where the next
        stage flattens.
        """
        _, H, W = self.stage.out
        return (
            (self.target.plane, self.target.pitch)
            if self.target.channels == self.stage.out[0]
            else (H * W, W)
        )

    @property
    def inside_size(self) -> int:
        return prod(self.stage.inside)

    @property
    def middle_size(self) -> int:
        return prod(self.stage.middle)

    @property
    def out_size(self) -> int:
        return prod(self.stage.out)

    @property
    def input_tile(self) -> str:
        """Tile t of the input. A net's first convolution keeps one tile only, and reads the samples
        anew (see load).
        """
        once = self.s == 0 and self.stage.op == "conv"
        if once:
            return f"n->in{self.s}"
        own, there = make_input_frame(self.stage), self.origins[0]
        skipped = (
            there.origin - (own.top * there.pitch + own.left) if self.stage.op == "conv" else 0
        )
        more = f" + {skipped}" if skipped else ""  # padding that only others need
        return f"(n->in{self.stage.sources[0] + 1} + t * {there.size}{more})"

    def list_sum_inputs(self) -> list[tuple[str, int, int]]:
        """Tile t of each source of a sum, and how far apart its channels and rows lie."""
        _, H, W = self.stage.inside
        found = []
        for v, there in zip(self.stage.sources, self.origins, strict=True):
            whole = there.channels == self.stage.inside[0]
            plane, pitch = (there.plane, there.pitch) if whole else (H * W, W)
            found.append((f"(n->in{v + 1} + t * {there.size} + {there.origin})", plane, pitch))
        return found

    @property
    def all_inputs(self) -> str:
        """The input, of all tiles."""
        return f"n->in{self.stage.sources[0] + 1}"

    @property
    def product(self) -> str:
        """The product's output, of all tiles."""
        if self.product_is_output:
            return f"n->in{self.s + 1}"
        return self.all_inputs if self.stage.op == "none" else f"n->y{self.s}"

    @property
    def gradient_tile(self) -> str:
        """Tile t of the output's gradient."""
        return f"(n->d{self.s} + t * {self.out_size})"

    @property
    def input_gradient_tile(self) -> str:
        """Tile t of the input's gradient."""
        return f"(n->d{self.stage.sources[0]} + t * {self.inside_size})"

    @property
    def output_tile(self) -> str:
        """Tile t of the next stage's input."""
        return f"(n->in{self.s + 1} + t * {self.target.size} + {self.target.origin})"

    @property
    def load_samples(self) -> str:
        """The first stage reads samples: bytes, so reading them again costs less than keeping
        floats.
        """
        return (
            f"load_tile(b, t, {self.input_tile}, place, {self.inside_size});" if self.s == 0 else ""
        )
