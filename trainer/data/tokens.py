"""Language modelling data: windows of a text file's bytes or of a token file, read from disk as they are needed.

Sample i is (x, y), two int64 tensors of T tokens, y one token further on than x. Windows follow each other: the last
token of one is the first of the next, so each token is predicted once. Not for: making tokens of text.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import torch

from trainer.data.rows import Pair

Tokens = npt.NDArray[Any]
_INTEGER_KINDS: Final = "iu"


class TokenWindows:
    """The windows of some tokens, a stretch of them."""

    draws_random = False

    def __init__(
        self, tokens: Tokens, *, tokens_per_sample: int, vocab_size: int, windows: tuple[int, int] | None = None
    ) -> None:
        """Windows number `windows[0]` up to, not including, `windows[1]`; None: all.

        Raises ValueError when there are too few tokens for one.
        """
        self._tokens, self._tokens_per_sample, self._vocab_size = tokens, tokens_per_sample, vocab_size
        num_windows = max(0, len(tokens) - 1) // tokens_per_sample
        self._first, self._last = (0, num_windows) if windows is None else windows
        if self._last <= self._first:
            raise ValueError(
                f"{len(tokens)} tokens are too few: a sample needs {tokens_per_sample} and the one after them, and "
                "training and evaluation need at least one sample each. Use more text or fewer tokens_per_sample."
            )

    def __len__(self) -> int:
        return self._last - self._first

    def __getitem__(self, index: int) -> Pair:
        """Raises IndexError beyond the end, ValueError for a token that is not in the vocabulary."""
        if not 0 <= index < len(self):
            raise IndexError(f"window {index} of {len(self)}")
        begin = (self._first + index) * self._tokens_per_sample
        window = torch.from_numpy(self._tokens[begin : begin + self._tokens_per_sample + 1].astype(np.int64))
        largest = int(window.max())
        if largest >= self._vocab_size:
            raise ValueError(
                f"token {largest} stands between places {begin} and {begin + len(window)} of the token file, but "
                f"vocab_size is {self._vocab_size}. Set it to the tokenizer's size, and check token_dtype."
            )
        return window[:-1], window[1:]

    def split(self, eval_fraction: float) -> tuple[TokenWindows, TokenWindows]:
        """Training and held-out windows: the last `eval_fraction` of them (rounded, at least one) are held out.

        Raises ValueError when there are fewer than two.
        """
        num_held_out = max(1, round(eval_fraction * len(self)))
        middle = self._last - num_held_out
        return self._part(self._first, middle), self._part(middle, self._last)

    def _part(self, first: int, last: int) -> TokenWindows:
        return TokenWindows(
            self._tokens,
            tokens_per_sample=self._tokens_per_sample,
            vocab_size=self._vocab_size,
            windows=(first, last),
        )


def text_tokens(path: Path) -> Tokens:
    """The bytes of a file, mapped into memory. Raises FileNotFoundError, ValueError for an empty one."""
    return np.memmap(_existing(path), dtype=np.uint8, mode="r")


def token_file(path: Path, dtype: str) -> Tokens:
    """The tokens of a .npy file, or of a .bin file of `dtype` numbers (little-endian), mapped into memory.

    Raises FileNotFoundError, ValueError for a file that is empty or holds something else.
    """
    if _existing(path).suffix == ".npy":
        tokens: Tokens = np.load(path, mmap_mode="r", allow_pickle=False)
        if tokens.dtype.kind not in _INTEGER_KINDS or tokens.ndim != 1:
            raise ValueError(
                f"{path} holds {tokens.ndim} axes of {tokens.dtype}; tokens are one axis of whole numbers."
            )
        return tokens
    numbers = np.dtype(dtype).newbyteorder("<")
    size = path.stat().st_size
    if size % numbers.itemsize:
        raise ValueError(f"{path} has {size} bytes, which {dtype} numbers do not divide. Check token_dtype.")
    return np.memmap(path, dtype=numbers, mode="r")


def topics_tokens() -> Tokens:
    """The bytes of the help topics that come with Python: about 0.5 MB, the same for one version of Python."""
    from pydoc_data.topics import topics

    text = "\n\n".join(topics[name] for name in sorted(topics))
    return np.frombuffer(text.encode("utf-8"), dtype=np.uint8)


def _existing(path: Path) -> Path:
    if not path.is_file():
        raise FileNotFoundError(
            f"{path} is no file here (the working folder is {Path.cwd()}). Give a path that every node sees."
        )
    if path.stat().st_size == 0:
        raise ValueError(f"{path} is empty.")
    return path
