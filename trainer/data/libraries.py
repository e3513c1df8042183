"""Libraries that only some recipes need, imported when one does."""

from __future__ import annotations

import importlib
from types import ModuleType
from typing import Final

_PACKAGES: Final = {"sklearn": "scikit-learn", "PIL": "pillow"}


def library(module: str) -> ModuleType:
    """The module, such as `sklearn.datasets`. Raises ImportError that says what to install."""
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        package = _PACKAGES[module.partition(".")[0]]
        raise ImportError(
            f"this recipe's data needs {package}, which is not installed here: pip install 'gangline[recipes]'."
        ) from error
