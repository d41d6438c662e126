"""The window of a convolution: how many taps it has in each direction, and what follows from that."""

from __future__ import annotations

from dataclasses import dataclass

EXTENTS = (1, 3)  # taps in one direction


@dataclass(frozen=True)
class Window:
    """``kt`` frames by ``kh`` rows by ``kw`` columns of taps, moved by ``stride`` (T, H, W) from output to output.

    The input of a convolution carries its padding, so that along each axis an output extent is
    ``(input - taps) // stride + 1``.

    Raises ValueError for extents other than 1 and 3, and strides other than 1 and 2.
    """

    kt: int = 3
    kh: int = 3
    kw: int = 3
    stride: tuple[int, int, int] = (1, 1, 1)

    def __post_init__(self) -> None:
        if any(extent not in EXTENTS for extent in self.extents):
            raise ValueError(f"a window has 1 or 3 taps in each direction, got {self.extents}")
        if len(self.stride) != 3 or any(step not in (1, 2) for step in self.stride):
            raise ValueError(f"a window moves by 1 or 2 in each direction, got {self.stride}")

    def __str__(self) -> str:
        moves = "" if self.is_dense else f" by {self.stride}"
        return f"{self.kt}x{self.kh}x{self.kw}{moves}"

    @property
    def extents(self) -> tuple[int, int, int]:
        """Taps along T, H and W."""
        return (self.kt, self.kh, self.kw)

    @property
    def taps(self) -> int:
        return self.kt * self.kh * self.kw

    @property
    def tap_rows(self) -> int:
        """Rows of taps along W, one for each ``(dt, r)``."""
        return self.kt * self.kh

    @property
    def is_dense(self) -> bool:
        """Whether every input position begins a window."""
        return self.stride == (1, 1, 1)

    @property
    def halo(self) -> tuple[int, int, int]:
        """How many frames, rows and columns a padded input has more than its output, for a dense window."""
        return (self.kt - 1, self.kh - 1, self.kw - 1)

    @property
    def history(self) -> int:
        """Frames that a causal convolution looks back."""
        return self.kt - 1

    def output_extents(self, t: int, h: int, w: int) -> tuple[int, int, int]:
        """T, H and W of the output of a padded input."""
        input_extents = (t, h, w)
        return tuple(  # type: ignore[return-value]
            (extent - taps) // step + 1
            for extent, taps, step in zip(input_extents, self.extents, self.stride, strict=True)
        )

    def shape_rule(self, channels: str = "Co") -> str:
        """The shape of the output of an input ``N, T, H, W``, in the notation of an operand table."""
        terms = [
            symbol if taps == 1 and step == 1 else f"{symbol}-{taps - 1}" if step == 1 else f"({symbol}-{taps})//2+1"
            for symbol, taps, step in zip("THW", self.extents, self.stride, strict=True)
        ]
        return ", ".join(["N", *terms, channels])


DENSE_3X3X3 = Window()
"""The window of nearly all convolutions of video VAEs."""
