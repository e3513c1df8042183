"""`gang init`: write a first job file that explains itself.

Talks to no server. Not for: checking it (`gang check`).
"""

from __future__ import annotations

import os
import re
import shlex
from pathlib import Path

import click

from gangline.cli.options import gang_command
from gangline.cli.session import Session
from gangline.client.config import config_folder, normalise_url, read_config
from gangline.client.errors import GanglineError, Refused
from gangline.protocol.names import API_PREFIX, ENV_URL

TEMPLATES = ("script", "ddp", "command", "recipe", "entry")
COMMON_SCRIPTS = ("train.py", "main.py", "run.py")


@gang_command()
@click.argument("file", default="job.yaml")
@click.option(
    "--template", type=click.Choice(TEMPLATES), default="script", show_default=True, help="What to begin with."
)
@click.option("--script", metavar="FILE", help="Your training script; by default train.py or the like, if it is there.")
@click.option("--force", is_flag=True, help="Replace the file if it exists.")
def init(session: Session, file: str, template: str, script: str | None, force: bool) -> None:
    """Write a commented job file.

    `script` runs one process on one GPU, `ddp` one process per GPU on several, `command` any program once per node.
    `recipe` and `entry` train with Gangline's own loop: a built-in model, or yours.
    """
    path = Path(file)
    text = (Path(__file__).parent.parent / "templates" / f"{template}.yaml").read_text(encoding="utf-8")
    folder = path.parent.resolve()
    chosen = script or _script_in(folder)
    values = {
        "NAME": _name_of(folder),
        "SCRIPT": chosen,
        "MODULE": chosen.removesuffix(".py").replace("/", "."),
        "SCHEMA": _schema_line(),
    }
    for name, value in values.items():
        text = text.replace(f"@{name}@", value)
    text = text.lstrip("\n")
    try:
        with open(path, "w" if force else "x", encoding="utf-8") as target:
            target.write(text)
    except FileExistsError as error:
        raise Refused(f"{path} exists", fix="give another name, or --force to replace it") from error
    except OSError as error:
        raise GanglineError(f"cannot write {path}: {error.strerror}", code="usage", fix="check the path") from error
    if session.is_json:
        session.json({"file": str(path)})
        return
    session.out(f"Wrote {path}.")
    name = shlex.quote(str(path))
    session.note(f"  check   gang check {name}\n  submit  gang submit {name}")


def _script_in(folder: Path) -> str:
    """The training script, when the folder leaves no doubt about it."""
    for name in COMMON_SCRIPTS:
        if (folder / name).is_file():
            return name
    scripts = sorted(path.name for path in folder.glob("*.py"))
    return scripts[0] if len(scripts) == 1 else "train.py"


def _name_of(folder: Path) -> str:
    """A job name from the folder's name: plain characters, so that it needs no quotes."""
    return re.sub(r"[^A-Za-z0-9_-]+", "-", folder.name).strip("-") or "my-job"


def _schema_line() -> str:
    """The line by which editors find the schema, when a server is known."""
    try:
        url = os.environ.get(ENV_URL) or read_config(config_folder(os.environ)).url
        return f"# yaml-language-server: $schema={normalise_url(url)}{API_PREFIX}/schemas/job.json\n" if url else ""
    except GanglineError:
        return ""  # a damaged config is no reason not to write a file; `gang check` will say it
