"""`gang login`: store the server's address and the user's token, once they are known to work.

Not for: making tokens (`gang admin token create`).
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import click

from gangline.cli.options import gang_command
from gangline.cli.sanitise import clean_inline
from gangline.cli.session import Session
from gangline.client.config import (
    StoredConfig,
    config_folder,
    is_loopback,
    normalise_url,
    read_config,
    write_config,
)
from gangline.client.errors import GanglineError
from gangline.protocol.names import ENV_TOKEN, ENV_URL


@gang_command()
@click.argument("url", required=False)
@click.option("--token-file", metavar="FILE", help="Read the token from a file, or from stdin with `-`.")
def login(session: Session, url: str | None, token_file: str | None) -> None:
    """Store the server's address and your token, after trying them.

    Asks for what is not given. The token is never taken from the command line, where others could see it.
    """
    folder = config_folder(os.environ)
    address = normalise_url(url or session.server or _ask_url(read_config(folder).url))
    token = _read_token(token_file)
    if not address.startswith("https://") and not is_loopback(address):
        session.note(f"Note: {address} is not encrypted; whoever sees the network traffic sees your token.")
    with session.busy(f"Asking {address}"), session.new_client(url=address, token=token) as client:
        me = client.me()
    path = write_config(folder, StoredConfig(url=address, token=token))
    if session.is_json:
        session.json(me.raw)
        return
    teams = f" ({', '.join(me.teams)})" if me.teams else ""
    session.out(f"Logged in to {address} as {clean_inline(me.name)}{clean_inline(teams)}.")
    session.note(f"Stored in {path}.")
    for name in (ENV_URL, ENV_TOKEN):
        if os.environ.get(name):
            session.note(f"Note: {name} is set and goes before what was stored.")


def _ask_url(stored: str | None) -> str:
    if not sys.stdin.isatty():
        raise GanglineError("no server address is given", code="usage", fix="gang login URL --token-file FILE")
    answer: str = click.prompt("Server address", default=stored, err=True)
    return answer


def _read_token(token_file: str | None) -> str:
    if token_file == "-":
        token = sys.stdin.readline()
    elif token_file is not None:
        try:
            token = Path(token_file).expanduser().read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise GanglineError(f"cannot read {token_file}: {error}", code="usage", fix="check the path") from error
    elif sys.stdin.isatty():
        token = click.prompt("Token", hide_input=True, err=True)
    else:
        raise GanglineError("no token is given", code="usage", fix="use --token-file FILE, or --token-file - for stdin")
    token = token.strip()
    if not token or not token.isascii() or not token.isprintable() or " " in token:
        raise GanglineError("that is not a token", code="usage", fix="a token is one word that begins with glu_")
    return token
