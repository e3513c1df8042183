"""Command groups that import a command's module only when it runs, and list all of them without importing any.

Not for: the list itself (`gangline.cli.main` and the groups' own modules).
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import click

from gangline.client.errors import GanglineError

PLUGIN_GROUP = "gangline.commands"
PLUGIN_HELP = {
    "replay": "Compare scheduling policies on a trace.",
    "up": "Run server, scheduler and nodes on this machine.",
}
"""Short help of commands that other parts bring in; reading their own would import them."""
ALIASES = {"list": "ls"}
"""Words that people type for a command; not shown, so that each command has one name."""
PLUGIN_EXTRA = {"up": "server"}


@dataclass(frozen=True, kw_only=True)
class LazyCommand:
    """Where a command is (`module:attribute`), what the list says of it, and under which heading."""

    target: str
    help: str
    section: str = "Commands"


class LazyGroup(click.Group):
    """A group over a table of `LazyCommand`s; with `plugins`, also over the entry points of `gangline.commands`."""

    def __init__(
        self, *args: Any, lazy_commands: Mapping[str, LazyCommand], plugins: bool = False, **kwargs: Any
    ) -> None:
        super().__init__(*args, **kwargs)
        self.lazy_commands = lazy_commands
        self.plugins = plugins

    def list_commands(self, ctx: click.Context) -> list[str]:
        """All names, in the order of the table."""
        return [*self.lazy_commands, *self._plugins()]

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Import one command."""
        lazy = self.lazy_commands.get(ALIASES.get(cmd_name, cmd_name))
        if lazy is not None:
            module, _, attribute = lazy.target.partition(":")
            command: click.Command = getattr(importlib.import_module(module), attribute)
            return command
        plugin = self._plugins().get(cmd_name)
        return None if plugin is None else _load_plugin(cmd_name, plugin)

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """As click does; an unknown word is answered with the nearest command."""
        name = args[0]
        if not name.startswith("-") and self.get_command(ctx, name) is None:
            import difflib

            near = difflib.get_close_matches(name, self.list_commands(ctx), n=1)
            hint = f" Did you mean {ctx.command_path} {near[0]}?" if near else f" See {ctx.command_path} --help."
            raise click.UsageError(f"There is no command {name!r}.{hint}", ctx=None)
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """The list, by sections, from the table alone."""
        sections: dict[str, list[tuple[str, str]]] = {}
        for name, lazy in self.lazy_commands.items():
            sections.setdefault(lazy.section, []).append((name, lazy.help))
        for name, plugin in self._plugins().items():
            text = PLUGIN_HELP.get(name) or f"From {plugin.module}."
            sections.setdefault("Server", []).append((name, text))
        for heading, rows in sections.items():
            with formatter.section(heading):
                formatter.write_dl(rows)

    def _plugins(self) -> dict[str, Any]:
        if not self.plugins:
            return {}
        from importlib.metadata import entry_points

        found = {point.name: point for point in entry_points(group=PLUGIN_GROUP)}
        return {name: found[name] for name in sorted(found) if name not in self.lazy_commands}


def _load_plugin(name: str, plugin: Any) -> click.Command:
    try:
        command: click.Command = plugin.load()
    except ImportError as error:
        extra = PLUGIN_EXTRA.get(name)
        raise GanglineError(
            f"gang {name} cannot be loaded: {error}",
            code="missing_extra",
            fix=f"install its packages: pip install 'gangline[{extra}]'" if extra else "install what it needs",
        ) from error
    return command
