"""Where a stage's numbers lie: padded planes, the outputs that see any input, and the tensors
inside a trainer.
"""

from dataclasses import dataclass

from flrce.models.flat import TensorSlot
from flrce.training.cpu.plan import Shape, Stage


@dataclass(frozen=True)
class Frame:
    """A tile's activation [channels][rows][pitch] of vectors, the data starting at (top, left)."""

    channels: int
    rows: int
    pitch: int
    top: int = 0
    left: int = 0

    @property
    def plane(self) -> int:
        return self.rows * self.pitch

    @property
    def size(self) -> int:
        return self.channels * self.plane

    @property
    def origin(self) -> int:
        return self.top * self.pitch + self.left


def make_tight_frame(shape: Shape) -> Frame:
    """No padding: what flattening reads in order."""
    return Frame(*shape)


@dataclass(frozen=True)
class ConvolutionAxis:
    """One axis of a convolution: outputs [live, dead) see at least one input, the others padding
    only.
    """

    size: int
    out: int
    kernel: int
    stride: int
    padding: int

    @property
    def live(self) -> int:
        seen = (o for o in range(self.out) if o * self.stride - self.padding + self.kernel > 0)
        return next(seen, self.out)

    @property
    def dead(self) -> int:
        outputs = range(self.live, self.out)
        beyond = (o for o in outputs if o * self.stride - self.padding >= self.size)
        return next(beyond, self.out)

    @property
    def before(self) -> int:
        """Zeros needed in front of the input."""
        return max(0, self.padding - self.live * self.stride)

    @property
    def after(self) -> int:
        return max(0, (self.dead - 1) * self.stride - self.padding + self.kernel - self.size)

    @property
    def reach(self) -> tuple[int, int]:
        """Zeros needed in front of and behind the output's gradient, for the input's gradient to
        gather from.
        """
        ends = [self.gather(i, k) for i in range(self.size) for k in self.taps(i % self.stride)]
        return max(0, -min(ends, default=0)), max(0, max(ends, default=0) - self.out + 1)

    def taps(self, phase: int) -> list[int]:
        """The kernel positions that touch inputs i with i mod stride = phase."""
        return [k for k in range(self.kernel) if (phase + self.padding - k) % self.stride == 0]

    def gather(self, i: int, k: int) -> int:
        """The output that input i reaches through kernel position k."""
        return (i + self.padding - k) // self.stride

    def position(self, out: int) -> int:
        """Where the window of an output starts in the padded input."""
        return out * self.stride - self.padding + self.before


def get_axes(stage: Stage) -> tuple[ConvolutionAxis, ConvolutionAxis]:
    """A convolution's rows and columns."""
    windows = (stage.inside[1:], stage.middle[1:], stage.kernel, stage.stride, stage.padding)
    h, w = (ConvolutionAxis(*sizes) for sizes in zip(*windows, strict=True))
    return h, w


def make_input_frame(stage: Stage) -> Frame:
    """The frame of a stage's input."""
    if stage.op != "conv":
        return make_tight_frame(stage.inside)
    h, w = get_axes(stage)
    rows, pitch = (axis.before + axis.size + axis.after for axis in (h, w))
    return Frame(stage.inside[0], rows, pitch, h.before, w.before)


@dataclass(frozen=True)
class Place:
    """A tensor inside a trainer: rows of `cols` floats, `pitch` apart, from float `inner` on."""

    slot: TensorSlot
    inner: int
    rows: int
    cols: int
    pitch: int


def place_tensors(
    slots: tuple[TensorSlot, ...], linear: set[str], lanes: int
) -> tuple[dict[str, Place], int]:
    """Every tensor padded to whole vectors, linear weights row by row; and the floats needed in
    all.
    """
    found, at = {}, 0
    for slot in slots:
        rows, cols = (slot.shape[0], slot.shape[1]) if slot.name in linear else (1, slot.size)
        pitch = -(-cols // (2 * lanes)) * 2 * lanes
        if rows > 1 and pitch % 256 == 0:
            pitch += 2 * lanes  # rows a multiple of 1 KiB apart would fight for the same cache sets
        found[slot.name] = Place(slot, at, rows, cols, pitch)
        at += rows * pitch
    return found, at
