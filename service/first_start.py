"""The first start of a pool: an admin with a team, and the token files (0600) that `gang up` points to."""

from __future__ import annotations

import os
from pathlib import Path

from sqlalchemy import func, select

from service.db.session import Database
from service.db.tables import users
from service.operations.manage_identity import add_member, create_team, create_token, create_user

ADMIN = "admin"
FIRST_TEAM = "main"
ADMIN_TOKEN_FILE = "admin.token"
ENROLMENT_TOKEN_FILE = "enrolment.token"


def make_first_admin(database: Database, data_folder: Path) -> None:
    """On an empty database: user, team, and both token files. Else nothing."""
    with database.read() as connection:
        num_users = connection.execute(select(func.count()).select_from(users)).scalar_one()
    if num_users:
        return
    create_user(database, name=ADMIN, is_admin=True, actor="first start")
    create_team(database, name=FIRST_TEAM, actor="first start")
    add_member(database, team=FIRST_TEAM, user=ADMIN, actor="first start")
    for kind, name in (("user", ADMIN_TOKEN_FILE), ("enrolment", ENROLMENT_TOKEN_FILE)):
        secret, _ = create_token(
            database, user=ADMIN, label="first start", kind=kind, expires_in_seconds=None, actor="first start"
        )
        write_private(data_folder / name, secret + "\n")


def write_private(path: Path, text: str) -> None:
    """Write a file of mode 0600, whole or not at all."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    with os.fdopen(descriptor, "w") as handle:
        handle.write(text)
    temporary.replace(path)
