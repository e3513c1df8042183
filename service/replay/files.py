"""Reads a trace from a file, plain or gzipped.

Not for: what its lines mean (`service.replay.traces`).
"""

from __future__ import annotations

import gzip
import zlib
from pathlib import Path

from service.replay.traces import Trace, TraceFaults, parse_trace

GZIP_MAGIC = b"\x1f\x8b"


def read_trace(path: Path) -> Trace:
    """The trace in a CSV file. Raises TraceFaults when it cannot be read, or with every fault of its lines."""
    try:
        data = path.read_bytes()
        text = (gzip.decompress(data) if data.startswith(GZIP_MAGIC) else data).decode("utf-8-sig")
    except FileNotFoundError as error:
        raise TraceFaults(str(path), ["there is no such file"], "check the path") from error
    except OSError as error:  # gzip's own complaints are among them
        raise TraceFaults(str(path), [f"cannot be read: {error.strerror or error}"], "check the file") from error
    except (UnicodeDecodeError, EOFError, zlib.error) as error:
        raise TraceFaults(str(path), [f"is no CSV text: {error}"], "give a .csv or .csv.gz file") from error
    return parse_trace(path.name, text.splitlines())
