"""Where the client finds its server and token: arguments, then environment, then the config file.

The file is `$GANGLINE_CONFIG_FOLDER/config.json`, by default `~/.config/gangline/config.json`, readable by its owner
alone. Not for: the agent's credential, which lies in the agent's own data folder.
"""

from __future__ import annotations

import json
import os
import stat
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

from gangline.client.errors import GanglineError, NotAllowed
from gangline.protocol.names import ENV_CONFIG_FOLDER, ENV_TOKEN, ENV_URL

CONFIG_FILE = "config.json"


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Server address (no trailing slash) and bearer token, and where each came from, for messages."""

    url: str
    token: str | None
    url_source: str
    token_source: str


@dataclass(frozen=True, kw_only=True)
class StoredConfig:
    """What the config file holds."""

    url: str | None = None
    token: str | None = None


def config_folder(environ: Mapping[str, str]) -> Path:
    """The folder of the config file."""
    chosen = environ.get(ENV_CONFIG_FOLDER)
    if chosen:
        return Path(chosen)
    base = environ.get("XDG_CONFIG_HOME")
    return (Path(base) if base else Path.home() / ".config") / "gangline"


def read_config(folder: Path) -> StoredConfig:
    """The stored config, empty when there is none. Raises GanglineError when the file is damaged."""
    path = folder / CONFIG_FILE
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return StoredConfig()
    except (OSError, ValueError) as error:
        raise GanglineError(
            f"cannot read {path}: {error}", code="bad_config", fix=f"remove {path} and run `gang login` again"
        ) from error
    if not isinstance(data, dict):
        raise GanglineError(f"{path} is not a JSON object", code="bad_config", fix="run `gang login` again")
    url, token = data.get("url"), data.get("token")
    return StoredConfig(
        url=url if isinstance(url, str) and url else None, token=token if isinstance(token, str) and token else None
    )


def write_config(folder: Path, config: StoredConfig) -> Path:
    """Store the config in one step, never readable by others, not even for a moment. Returns the file's path."""
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    path = folder / CONFIG_FILE
    descriptor, temporary = tempfile.mkstemp(dir=folder, prefix=".config-")  # mkstemp makes it 0600
    try:
        with os.fdopen(descriptor, "w", encoding="utf-8") as file:
            json.dump({"url": config.url, "token": config.token}, file, indent=2)
            file.write("\n")
        os.replace(temporary, path)  # noqa: PTH105  # both are plain strings and paths of one folder
    except OSError:
        Path(temporary).unlink(missing_ok=True)
        raise
    return path


def is_readable_by_others(folder: Path) -> bool:
    """Whether somebody else on this machine could read the stored token."""
    try:
        mode = (folder / CONFIG_FILE).stat().st_mode
    except FileNotFoundError:
        return False
    return bool(mode & (stat.S_IRGRP | stat.S_IROTH))


def resolve(url: str | None, token: str | None, environ: Mapping[str, str]) -> Settings:
    """The settings to use: arguments win over the environment, that over the file.

    The stored token belongs to the stored address: it is never sent to another one. Raises NotAllowed when no server
    is known at all.
    """
    is_complete = bool((url or environ.get(ENV_URL)) and (token or environ.get(ENV_TOKEN)))
    stored = StoredConfig() if is_complete else read_config(config_folder(environ))
    chosen_url, url_source = _first((url, "--server"), (environ.get(ENV_URL), ENV_URL), (stored.url, "config file"))
    if chosen_url is None:
        raise NotAllowed(
            "no server is known",
            code="not_logged_in",
            fix=f"run `gang login URL`, or set {ENV_URL} and {ENV_TOKEN}; `gang up` starts a server on this machine",
        )
    chosen_url = normalise_url(chosen_url)
    is_stored_server = stored.url is not None and normalise_url(stored.url) == chosen_url
    chosen_token, token_source = _first(
        (token, "argument"),
        (environ.get(ENV_TOKEN), ENV_TOKEN),
        (stored.token if is_stored_server else None, "config file"),
    )
    return Settings(url=chosen_url, token=chosen_token, url_source=url_source, token_source=token_source)


def normalise_url(url: str) -> str:
    """A server address as `scheme://host[:port][/path]` without a trailing slash. GanglineError when it is none."""
    text = url.strip()
    text = (text if "://" in text else f"http://{text}").rstrip("/")
    try:
        parts = urlsplit(text)
        is_valid = parts.scheme in ("http", "https") and bool(parts.hostname) and (parts.port is None or parts.port > 0)
    except ValueError:
        is_valid = False
    if not is_valid or not text.isprintable() or " " in text or "@" in urlsplit(text).netloc:
        raise GanglineError(
            f"{url!r} is not a server address",
            code="bad_url",
            fix="use http://HOST:PORT or https://HOST; the token goes into its own setting",
        )
    return text


def is_loopback(url: str) -> bool:
    """Whether the server is this very machine."""
    host = urlsplit(url).hostname or ""
    return host in ("localhost", "::1") or host.startswith("127.")


def _first(*candidates: tuple[str | None, str]) -> tuple[str | None, str]:
    return next(((value, source) for value, source in candidates if value), (None, ""))
