"""Load while a cluster changes: readers that read what all have stored, over and over."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Sequence

Read = Callable[[Sequence[str]], list[object]]
"""Reads a batch: for each key whether it was a hit; "wrong" for a hit with other bytes."""

BATCH = 8


class Load:
    """One thread that reads a random batch through a random reader, until the block ends."""

    def __init__(self, readers: Sequence[Read], keys: Sequence[str]) -> None:
        """Begin with the block. A reader may raise nothing."""
        self._readers, self._keys = readers, list(keys)
        self.asked = self.hits = self.wrong = 0
        self.failed: BaseException | None = None
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._run)

    def __enter__(self) -> Load:
        """Begin."""
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        """End, after the batch that is under way."""
        self._is_over.set()
        self._thread.join()

    @property
    def hit_rate(self) -> float:
        """The share of the keys that were hits."""
        return self.hits / self.asked

    def _run(self) -> None:
        rng = random.Random(1)
        try:
            while not self._is_over.wait(0.01):
                answers = rng.choice(self._readers)(rng.sample(self._keys, BATCH))
                self.asked += BATCH
                self.hits += answers.count(True)
                self.wrong += answers.count("wrong")
        except BaseException as error:
            self.failed = error
