"""`python -m trainer`. Listens for signals and shows its pulse before torch is imported, which takes seconds."""

import faulthandler
import os
import signal
import sys
from pathlib import Path

from gangline.protocol.names import ENV_PULSE_FILE
from gangline.protocol.pulse import Phase, Pulse
from trainer.stop import StopFlag

IMPORT_SECONDS = 600.0
"""Importing torch from a busy shared folder may take minutes."""

if __name__ == "__main__":
    flag = StopFlag(os.environ)
    flag.install()
    # A hung rank is asked for the stacks of all its threads; they go to its log.
    faulthandler.register(signal.SIGUSR2, all_threads=True, chain=False)
    path = os.environ.get(ENV_PULSE_FILE)
    pulse = Pulse(Path(path) if path else None)
    pulse.enter(Phase.STARTING, IMPORT_SECONDS)

    from trainer.main import main

    sys.exit(main(sys.argv[1:], flag, pulse))
