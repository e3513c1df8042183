"""A checkpoint's weights as one safetensors file, which other programs read. One process, no process group.

Not for: resuming (that needs the optimizer too, which stays in the checkpoint).
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file

from trainer.checkpoint.layout import sync_folder, verify
from trainer.checkpoint.restoring import load_state
from trainer.checkpoint.state import MODEL


def export_checkpoint(folder: Path, target: Path) -> dict[str, Any]:
    """Write the weights of the checkpoint `folder` to the file `target`, atomically, in place of one that is there.

    A weight with several names (tied layers) is written under each, so that the file loads strictly; safetensors
    refuses shared memory, which what is loaded here never has. Returns step, samples_seen, num_tensors, num_bytes of
    the file and `skipped`: names of what is not a tensor. Reads the checkpoint twice (checksums, then the weights);
    costs the weights in memory. Raises BrokenCheckpoint and OSError.
    """
    if not target.parent.is_dir():
        raise FileNotFoundError(f"{target} cannot be written: {target.parent} is no folder. Make it first.")
    manifest = verify(folder)
    state = {key.removeprefix(MODEL): value for key, value in load_state(folder, prefix=MODEL).items()}
    tensors = {name: value.contiguous() for name, value in state.items() if isinstance(value, torch.Tensor)}
    position = manifest.position
    metadata = {"format": "pt", "step": str(position.step), "samples_seen": str(position.samples_seen)}
    temporary = target.with_name(f".tmp-{os.getpid()}-{target.name}")
    try:
        save_file(tensors, temporary, metadata=metadata)
        with open(temporary, "rb") as file:
            os.fsync(file.fileno())
        temporary.replace(target)
    except SafetensorError as error:
        raise OSError(f"{target} cannot be written: {error}") from error
    finally:
        temporary.unlink(missing_ok=True)
    sync_folder(target.parent)
    return {
        "step": position.step,
        "samples_seen": position.samples_seen,
        "num_tensors": len(tensors),
        "num_bytes": target.stat().st_size,
        "skipped": sorted(state.keys() - tensors.keys()),
    }
