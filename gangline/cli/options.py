"""Building commands: the options every command has, and types of arguments.

Each may also stand before the command (`gang --server URL ls`). Not for: what any command does.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from typing import Any

import click

from gangline.cli.session import Session

COMMON_NAMES = ("output", "server", "timeout_seconds", "no_color", "debug")
_MY_LAST = re.compile(r"-[1-9][0-9]{0,2}")
_MARK = "\0"
"""Before a word that is not to be read as an option. No word of a command line can hold it."""


class DurationType(click.ParamType):
    """A length of time, as seconds."""

    name = "duration"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        """Seconds of `90s`, `5m`, `1h30m`."""
        if isinstance(value, int | float):
            return float(value)
        from gangline.cli.words import parse_duration

        try:
            return parse_duration(value)
        except ValueError as error:
            self.fail(f"{error}.", param, ctx)


DURATION = DurationType()


def common_options() -> list[click.Option]:
    """The options that every command has."""
    return [
        click.Option(
            ["-o", "--output", "output"], type=click.Choice(["table", "json"]), help="table (default) or json."
        ),
        click.Option(["--server", "server"], metavar="URL", help="Server to talk to, instead of the stored one."),
        click.Option(
            ["--timeout", "timeout_seconds"], type=DURATION, metavar="TIME", help="Give up after this long: 30s, 12h."
        ),
        click.Option(["--no-color", "no_color"], is_flag=True, default=None, help="No colours; so does NO_COLOR."),
        click.Option(["--debug", "debug"], is_flag=True, default=None, help="Show each request as a curl command."),
    ]


class GangCommand(click.Command):
    """A command with the common options in a section of their own, and `-1` never taken for an option."""

    def make_parser(self, ctx: click.Context) -> Any:
        """As click does; the parser sees `-1` (my last job, a number below zero) marked, and nobody else does."""
        parser = super().make_parser(ctx)
        parse = parser.parse_args

        def parse_marked(args: list[str]) -> Any:
            found, rest, order = parse([f"{_MARK}{word}" if _MY_LAST.fullmatch(word) else word for word in args])
            return {name: _unmarked(value) for name, value in found.items()}, _unmarked(rest), order

        parser.parse_args = parse_marked  # type: ignore[method-assign]  # click has no other way in
        return parser

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Own options first, common ones after."""
        own: list[tuple[str, str]] = []
        common: list[tuple[str, str]] = []
        for param in self.get_params(ctx):
            # Arguments stand in the usage line and are explained in the text.
            record = None if isinstance(param, click.Argument) else param.get_help_record(ctx)
            if record is not None:
                (common if param.name in (*COMMON_NAMES, "help") else own).append(record)
        for heading, records in (("Options", own), ("Common options", common)):
            if records:
                with formatter.section(heading):
                    formatter.write_dl(records)


def _unmarked(value: Any) -> Any:
    """What was typed, in the shape in which click's parser gives it."""
    if isinstance(value, str):
        return value.removeprefix(_MARK)
    if isinstance(value, list | tuple):
        return type(value)(_unmarked(item) for item in value)
    return value


def gang_command(**attributes: Any) -> Callable[[Callable[..., Any]], GangCommand]:
    """Make a function a command. Its first argument is the Session; what it returns is the exit code (None: 0)."""

    def wrap(function: Callable[..., Any]) -> GangCommand:
        own_params = list(reversed(getattr(function, "__click_params__", [])))
        taken = {name for param in own_params for name in param.opts}
        params = own_params + [option for option in common_options() if not taken.intersection(option.opts)]
        text = attributes.pop("help", None) or (function.__doc__ or "").strip()
        name = attributes.pop("name", None) or function.__name__.removesuffix("_command").replace("_", "-")

        def callback(**values: Any) -> Any:
            session = build_session(click.get_current_context(), values)
            try:
                return function(session, **values)
            finally:
                session.close()

        return GangCommand(name=name, callback=callback, params=params, help=text, **attributes)

    return wrap


def build_session(ctx: click.Context, values: dict[str, Any]) -> Session:
    """Take the common options out of `values`, fill in what stood before the command, and make the session."""
    before: dict[str, Any] = ctx.find_root().params if ctx.find_root() is not ctx else {}
    chosen = {}
    for name in COMMON_NAMES:
        value = values.pop(name, None)
        chosen[name] = before.get(name) if value is None else value
    session = Session(
        output=chosen["output"] or "table",
        server=chosen["server"],
        timeout_seconds=chosen["timeout_seconds"],
        no_color=bool(chosen["no_color"]) or bool(os.environ.get("NO_COLOR")),
        debug=bool(chosen["debug"]),
    )
    ctx.find_root().obj = session
    return session


job_argument = click.argument("job", metavar="JOB")
"""`12`, a name (the latest of mine), or `-1` (my last)."""

set_option = click.option(
    "--set",
    "overrides",
    multiple=True,
    metavar="KEY=VALUE",
    help="Override a key of the file, such as resources.gpus=4.",
)


def parse_overrides(words: tuple[str, ...]) -> tuple[tuple[str, str], ...]:
    """`--set` words as pairs. Raises a usage error for one without `=`."""
    pairs = []
    for word in words:
        key, equals, value = word.partition("=")
        if not equals or not key.strip():
            raise click.BadParameter(f"{word!r} is not KEY=VALUE, such as resources.gpus=4.", param_hint="--set")
        pairs.append((key.strip(), value))
    return tuple(pairs)
