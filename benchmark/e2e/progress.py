"""One progress bar for everything that a program runs."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn
from tqdm import tqdm


class Progress:
    """Counts the chunks of all runs. ``run_chunks`` are those of a run on the whole batch, which has ``samples``."""

    def __init__(self, run_chunks: int, samples: int) -> None:
        self.run_chunks = run_chunks
        self.samples = samples
        self._bar: tqdm[None] | None = None

    @contextmanager
    def over(self, runs: int) -> Iterator[None]:
        """Show the bar for ``runs`` runs on the whole batch."""
        with tqdm(total=runs * self.run_chunks, unit="chunk", leave=False) as self._bar:
            yield
        self._bar = None

    @contextmanager
    def during(self, name: str, part: nn.Module | None = None) -> Iterator[None]:
        """One run on the whole batch, whole or sample by sample.

        The bar moves with every sample of every chunk if ``part``, which is called once a chunk, is given; otherwise
        at the end. A module that ``torch.compile`` sees must not be given.
        """
        if self._bar is None:
            yield
            return
        bar = self._bar
        bar.set_description(name)
        end = bar.n + self.run_chunks
        hook = (
            part.register_forward_hook(lambda _, arguments, __: bar.update(len(arguments[0])) and None)
            if part
            else None
        )
        try:
            yield
        finally:
            if hook is not None:
                hook.remove()
        bar.update(end - bar.n)

    def turn(self, name: str) -> None:
        """One run on the whole batch is done."""
        with self.during(name):
            pass
