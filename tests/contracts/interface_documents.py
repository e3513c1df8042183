"""Pages of `deploy/docs` about what users type and send: commands, keys of a job file, routes. Made from the code.

Not for: writing them (`python -m tests.contracts.documents`) or the pages about the inside.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import click
from fastapi.routing import APIRoute

from gangline.cli.main import gang
from service.api.deps import node_caller, part_caller
from service.app import ROUTERS
from service.auth.permissions import Action
from service.schemas.job_spec import job_schema

CALLERS: dict[Any, str] = {node_caller: "node", part_caller: "claim token"}


def command_rows() -> list[tuple[str, str]]:
    """Each command as typed, and its one-line help."""
    return [
        (f"`{path}{_arguments(command)}`", command.get_short_help_str(200)) for path, command in _commands(gang, "gang")
    ]


def _commands(group: click.Group, path: str) -> Iterator[tuple[str, click.Command]]:
    context = click.Context(group)
    for name in group.list_commands(context):
        command = group.get_command(context, name)
        assert command is not None, f"{path} {name} is listed and cannot be loaded"
        if isinstance(command, click.Group):
            yield from _commands(command, f"{path} {name}")
        else:
            yield f"{path} {name}", command


def _arguments(command: click.Command) -> str:
    words = [p.make_metavar(click.Context(command)) for p in command.params if isinstance(p, click.Argument)]
    return "".join(f" {word}" for word in words)


def job_file_rows() -> list[tuple[str, str]]:
    """Each key of a job file by its path, and its description in the schema."""
    schema = job_schema()
    return list(_keys(schema, schema["$defs"], ""))


def _keys(schema: dict[str, Any], definitions: dict[str, Any], prefix: str) -> Iterator[tuple[str, str]]:
    for name, facts in schema["properties"].items():
        description = facts.get("description", "")
        assert description, f"the key {prefix}{name} has no description"
        yield f"`{prefix}{name}`", description
        for option in [facts, *facts.get("anyOf", [])]:
            reference = option.get("$ref", "").rpartition("/")[2]
            inner = definitions[reference] if reference else option
            if "properties" in inner:
                yield from _keys(inner, definitions, f"{prefix}{name}.")
            for element in inner.get("items", {}).get("anyOf", []):
                if "properties" in element:
                    yield from _keys(element, definitions, f"{prefix}{name}[].")


def route_rows() -> list[tuple[str, str, str, str]]:
    """Method, path, who may call it and what it does, for every route."""
    rows = []
    for route in (route for router in ROUTERS for route in router.routes if isinstance(route, APIRoute)):
        path = route.path
        for method in sorted(route.methods or ()):
            meaning = (route.endpoint.__doc__ or "").strip().split("\n")[0]
            assert meaning, f"{method} {path} does not say what it does"
            rows.append((method, f"`{path}`", _caller(route), meaning))
    return sorted(rows, key=lambda row: (row[1], row[0]))


def _caller(route: APIRoute) -> str:
    for dependency in route.dependant.dependencies:
        action = getattr(dependency.call, "gangline_action", None)
        if isinstance(action, Action):
            return f"user: {action}"
        if dependency.call in CALLERS:
            return CALLERS[dependency.call]
    return "anybody"
