"""Code bundles in files named by their content: `<data>/bundles/<hex>`. Written whole or not at all."""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import tempfile
from pathlib import Path

from gangline.protocol.bundles import BundleFacts, UnsafeBundle, inspect_bundle
from service.errors import InvalidRequest, StorageFull, UnsafeArchive


class BundleFiles:
    """Store and find bundles by digest `sha256:<hex>`."""

    def __init__(self, data_folder: Path):
        self._folder = data_folder / "bundles"

    def path(self, digest: str) -> Path:
        """Where a bundle lies. Raises InvalidRequest when the digest is not one."""
        algorithm, _, hexadecimal = digest.partition(":")
        if algorithm != "sha256" or len(hexadecimal) != 64 or not set(hexadecimal) <= set("0123456789abcdef"):
            raise InvalidRequest(f"{digest!r} is not a digest", fix="Use sha256:<64 hexadecimal digits>.")
        return self._folder / hexadecimal

    def hides_trainer(self, digest: str) -> bool:
        """Whether a stored bundle, put first on the path, would hide the trainer package. Reads it through."""
        return _hides_trainer(inspect_bundle(self.path(digest)))

    def begin(self) -> BundleUpload:
        """Start receiving a bundle into a temporary file."""
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            descriptor, name = tempfile.mkstemp(dir=self._folder, prefix="incoming-")
        except OSError as error:
            raise StorageFull(f"cannot store the bundle: {error.strerror}") from error
        return BundleUpload(self, descriptor, Path(name))


_TRAINER_MODULE = re.compile(r"trainer(\.pyc?|\..*\.so|\.so)?")
"""A folder, a module, a compiled one, an extension."""


def _hides_trainer(facts: BundleFacts) -> bool:
    return any(_TRAINER_MODULE.fullmatch(name) for name in facts.top_level)


class BundleUpload:
    """One upload in progress; `keep` or `drop` ends it."""

    def __init__(self, files: BundleFiles, descriptor: int, path: Path):
        self._files = files
        self._file = os.fdopen(descriptor, "wb")
        self._path = path
        self._hash = hashlib.sha256()
        self.num_bytes = 0

    def write(self, data: bytes) -> None:
        """Append received bytes."""
        try:
            self._file.write(data)
        except OSError as error:
            raise StorageFull(f"cannot store the bundle: {error.strerror}") from error
        self._hash.update(data)
        self.num_bytes += len(data)

    def keep(self, digest: str) -> bool:
        """Check content and members, then give the file its name; returns whether it would hide the trainer package.

        Raises InvalidRequest, UnsafeArchive.
        """
        target = self._files.path(digest)
        try:
            self._file.flush()
            os.fsync(self._file.fileno())
        except OSError as error:
            raise StorageFull(f"cannot store the bundle: {error.strerror}") from error
        actual = f"sha256:{self._hash.hexdigest()}"
        if actual != digest:
            raise InvalidRequest(f"the body has digest {actual}, not {digest}", fix="Send the bytes again.")
        try:
            facts = inspect_bundle(self._path)
        except UnsafeBundle as error:
            raise UnsafeArchive(error.reason, fix=error.fix) from error
        self._path.replace(target)
        return _hides_trainer(facts)

    def drop(self) -> None:
        """Remove what is left of the upload; harmless after `keep`."""
        with contextlib.suppress(OSError):
            self._file.close()  # on a full disk it tries once more to write what is being removed
        self._path.unlink(missing_ok=True)
