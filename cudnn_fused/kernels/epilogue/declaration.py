"""What happens to the rows of a convolution or of a tensor: the steps, and where they go.

Nothing here needs the DSL.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from functools import cached_property

import torch

from cudnn_fused.kernels.epilogue.steps import Operands, Save, Step
from cudnn_fused.kernels.epilogue.stores import Contiguous, Store

CONTIGUOUS = Contiguous()


@dataclass(frozen=True)
class Epilogue:
    """``steps`` on rows of ``channels``, in their order, then ``store``. Fixed when a kernel is compiled.

    At most one step has a statistic, and at most one saves the value: before that step, or at the end where there is
    none. Raises ValueError otherwise.
    """

    channels: int
    steps: tuple[Step, ...] = ()
    store: Store = CONTIGUOUS

    def __post_init__(self) -> None:
        statistics = [index for index, step in enumerate(self.steps) if step.sums]
        saves = [index for index, step in enumerate(self.steps) if isinstance(step, Save)]
        if len(statistics) > 1 or len(saves) > 1:
            raise ValueError(f"an epilogue has at most one statistic and one saved value, got {self.steps}")
        if saves and saves[0] + 1 not in (*statistics, len(self.steps)):
            raise ValueError(f"a value is saved before the statistic or at the end, got {self.steps}")

    @classmethod
    def of(
        cls,
        channels: int,
        steps: tuple[Step, ...],
        store: Store,
        present: Collection[str],
        extents: Mapping[str, int],
        options: Mapping[str, int],
    ) -> Epilogue:
        """What is left of ``steps`` and ``store`` with the operands, extents and options of a call."""
        happening = (step.given(present) for step in steps)
        return cls(
            channels, tuple(step for step in happening if step is not None), store.given(present, extents, options)
        )

    def into(self, output: str) -> Epilogue:
        """No steps: the bare rows into ``output``."""
        return replace(self, steps=(), store=Contiguous(output))

    @cached_property
    def statistic(self) -> Step | None:
        """The step that needs the whole row first."""
        return next((step for step in self.steps if step.sums), None)

    @cached_property
    def saved(self) -> str | None:
        """The output that gets the value before the statistic."""
        return next((step.output for step in self.steps if isinstance(step, Save)), None)

    @cached_property
    def before(self) -> tuple[Step, ...]:
        """The steps up to the statistic; all of them where there is none."""
        end = self.steps.index(self.statistic) if self.statistic else len(self.steps)
        return tuple(step for step in self.steps[:end] if not isinstance(step, Save))

    @cached_property
    def after(self) -> tuple[Step, ...]:
        """The statistic's step and those that follow."""
        return self.steps[self.steps.index(self.statistic) :] if self.statistic else ()

    @cached_property
    def row_operands(self) -> tuple[str, ...]:
        """Operands that are read row by row."""
        return tuple(name for step in self.steps for name in step.rows)

    @cached_property
    def operands(self) -> tuple[str, ...]:
        """All tensors that rows meet, in the order in which kernels take their addresses."""
        read = (name for step in self.steps for name in (*step.vectors, *step.rows))
        saved = (self.saved,) if self.saved else ()
        return (*read, *self.store.operands, *saved)

    def reference(self, value: torch.Tensor, operands: Operands) -> None:
        """Finish rows ``[N, T, H, W, C]`` in plain PyTorch."""
        for step in self.steps:
            value = step.reference(value, operands)
        self.store.reference(value, operands)
