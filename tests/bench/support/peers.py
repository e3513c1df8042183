"""Lightning Fabric and Accelerate, installed for one benchmark into a folder that is thrown away.

The folder is a virtual environment that sees what is installed here, so pip takes torch from there and adds only what
is missing; the environment of the repository stays as it is. Not for: running them (`training_loops`).
"""

from __future__ import annotations

import subprocess
import sys
import sysconfig
import time
import venv
from pathlib import Path
from typing import Final

REQUIREMENTS: Final = ("accelerate==1.15.0", "lightning-fabric==2.6.6")
INSTALL_SECONDS: Final = 300.0


def install_peers(folder: Path) -> Path:
    """Make the environment in `folder`; returns the folder of its packages, for PYTHONPATH. Downloads some 15 MB.

    Raises RuntimeError with the end of pip's output when it fails, `subprocess.TimeoutExpired` after five minutes.
    """
    print(f"installing {' and '.join(REQUIREMENTS)} into {folder} for this run ... ", end="", flush=True)
    began_at = time.monotonic()
    venv.create(folder, with_pip=False, symlinks=True)
    python = folder / "bin" / "python"
    packages = folder / "lib" / f"python{sys.version_info.major}.{sys.version_info.minor}" / "site-packages"
    # pip finds here what need not be installed again; it never touches what lies outside its own environment.
    (packages / "installed_here.pth").write_text(sysconfig.get_path("purelib") + "\n", encoding="utf-8")
    command = [str(python), "-m", "pip", "install", "-q", "--disable-pip-version-check", *REQUIREMENTS]
    done = subprocess.run(command, capture_output=True, text=True, timeout=INSTALL_SECONDS, check=False)
    if done.returncode != 0:
        raise RuntimeError(f"pip could not install {', '.join(REQUIREMENTS)}:\n{(done.stdout + done.stderr)[-2000:]}")
    if (packages / "torch").exists():
        raise RuntimeError(f"pip installed another torch into {packages}, so it would be no comparison: see {command}")
    print(f"done in {time.monotonic() - began_at:.0f} s", flush=True)
    return packages
