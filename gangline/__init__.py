"""What users import: `report()` and its companions for training scripts, `Client` for everything else.

A training script imports this package in the user's own interpreter, so importing it costs next to nothing and needs
the standard library alone: the client (and with it httpx) is loaded when `gangline.Client` is first used. Not for:
anything of the server, the agent or the trainer.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

# Not lazy, on purpose: `report` is a module and a function. Importing the module now, once, leaves the function as the
# attribute; a later `import gangline.report` finds the module loaded and does not put it back in the function's place.
from gangline.report import checkpoint_dir, report, should_stop, stop_reason

if TYPE_CHECKING:
    from gangline.client import Client

    __version__: str

__all__ = ["Client", "__version__", "checkpoint_dir", "report", "should_stop", "stop_reason"]


def __getattr__(name: str) -> Any:
    if name == "Client":
        from gangline.client import Client

        return Client
    if name == "__version__":
        from importlib.metadata import PackageNotFoundError, version

        try:
            return version("gangline")
        except PackageNotFoundError:
            # The source folder alone on PYTHONPATH, as ranks see it: there is no installed distribution to ask.
            return "0+source"
    raise AttributeError(f"module 'gangline' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
