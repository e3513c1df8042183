"""Images and their classes: a folder with a folder per class, or the 8×8 digits of scikit-learn.

An image is a tensor [channels, size, size] of numbers around 0. Not for: pictures that do not fit a class each.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
from torch.nn import functional

from trainer.data.libraries import library
from trainer.data.rows import Pair, Rows

_SUFFIXES: Final = (".jpg", ".jpeg", ".png", ".bmp", ".gif", ".webp", ".tif", ".tiff")
_DEEP_MODES: Final = ("I", "F")
_MEAN: Final = torch.tensor((0.485, 0.456, 0.406)).view(3, 1, 1)  # of ImageNet, as is the custom
_DEVIATION: Final = torch.tensor((0.229, 0.224, 0.225)).view(3, 1, 1)


class ImageFolder:
    """Images below `root`, one folder per class (none of them hidden); classes and images in the order of their names.

    An image is scaled so that its shorter side is `size` pixels, cropped to the middle, and normalised.
    """

    draws_random = False

    def __init__(self, root: Path, size: int, dtype: torch.dtype, classes: Sequence[str] | None = None) -> None:
        """`classes`: of the training data, for held-out data. Raises FileNotFoundError, ValueError, ImportError."""
        library("PIL.Image")
        if not root.is_dir():
            raise FileNotFoundError(f"{root} is no folder here (the working folder is {Path.cwd()}).")
        folders = [entry.name for entry in root.iterdir() if entry.is_dir() and not entry.name.startswith(".")]
        self.classes = tuple(sorted(folders))
        if classes is not None and not set(self.classes) <= set(classes):
            strange = sorted(set(self.classes) - set(classes))
            raise ValueError(f"{root} has classes that the training data lacks: {', '.join(strange)}.")
        numbers = {name: number for number, name in enumerate(classes or self.classes)}
        self._files = [
            (path, numbers[name])
            for name in self.classes
            for path in sorted((root / name).rglob("*"))
            if path.suffix.lower() in _SUFFIXES
        ]
        if not self._files:
            raise ValueError(
                f"{root} holds no images: they are looked for one level down, in a folder per class, with the endings "
                f"{', '.join(_SUFFIXES)}."
            )
        self._size, self._dtype = size, dtype

    def __len__(self) -> int:
        return len(self._files)

    def __getitem__(self, index: int) -> Pair:
        """Raises ValueError for a file that is no image."""
        path, label = self._files[index]
        return normalised(_pixels(path, self._size)).to(self._dtype), torch.tensor(label)

    @property
    def labels(self) -> list[int]:
        """The class of each image, by number."""
        return [label for _, label in self._files]


class Subset:
    """Some items of a dataset, in the order given."""

    def __init__(self, data: Any, indices: Sequence[int]) -> None:
        self._data, self._indices = data, indices
        self.draws_random = getattr(data, "draws_random", True)

    def __len__(self) -> int:
        return len(self._indices)

    def __getitem__(self, index: int) -> Any:
        return self._data[self._indices[index]]


class RandomFlip:
    """The same images, each mirrored left to right with probability 1/2, anew in each epoch."""

    def __init__(self, data: Any) -> None:
        self._data = data

    def __len__(self) -> int:
        return len(self._data)

    def __getitem__(self, index: int) -> Pair:
        image, label = self._data[index]
        return (image.flip(-1) if torch.rand(()).item() < 0.5 else image), label


def digits_images(size: int, dtype: torch.dtype) -> Rows:
    """The digits of scikit-learn as [1, size, size], scaled up from 8×8. Raises ImportError without scikit-learn."""
    bunch = library("sklearn.datasets").load_digits()
    images = torch.from_numpy(np.asarray(bunch.images)).unsqueeze(1).to(dtype) / 8 - 1
    if size != images.shape[-1]:
        images = functional.interpolate(images, size=(size, size), mode="bilinear", align_corners=False)
    return Rows(images, torch.from_numpy(np.asarray(bunch.target, dtype=np.int64)))


def normalised(pixels: torch.Tensor) -> torch.Tensor:
    """uint8 [3, height, width] to numbers around 0."""
    return (pixels.float() / 255 - _MEAN) / _DEVIATION


def _pixels(path: Path, size: int) -> torch.Tensor:
    from PIL import Image, ImageOps, UnidentifiedImageError

    try:
        with Image.open(path) as file:
            if file.mode.startswith(_DEEP_MODES):
                raise ValueError(
                    f"{path} has pixels of 16 or 32 bits (mode {file.mode}), which would be cut off at 255: white, "
                    "mostly. Scale its values down to 8 bits."
                )
            picture = ImageOps.fit(file.convert("RGB"), (size, size), Image.Resampling.BILINEAR)
    except (UnidentifiedImageError, OSError) as error:
        raise ValueError(f"{path} cannot be read as an image: {error}") from error
    return torch.from_numpy(np.array(picture)).permute(2, 0, 1)
