"""Making text of others safe to print on a terminal. Pure.

A job's log, its name, a reason, an error's detail: whoever wrote them may have put control characters in, to move the
cursor, retitle the window, write the clipboard, hide text or turn it round. Kept are printable characters, tabs and
line ends, and in logs colours. Not for: HTML, or bytes (decode first).
"""

from __future__ import annotations

import re

RESET = "\x1b[0m"

# One pass over the text; the first alternative that fits wins. Every ESC and C1 character is consumed by one of them,
# so what is left cannot join into a new sequence. Each alternative is linear: no repeated part overlaps the next one.
_CONTROL = re.compile(
    r"""
      (?P<csi> (?:\x1b\[|\x9b) [0-?]* [ -/]* [@-~]? )                       # cursor, colour, modes; also cut short
    | (?:\x1b[\]PX^_]|[\x90\x98\x9d-\x9f]) [^\x00-\x08\x0a-\x1f\x7f-\x9f]* (?:\x07|\x1b\\|\x9c)
                                                                            # OSC, DCS, SOS, PM, APC with their text
    | \x1b[\]PX^_]                                                          # the same without an end: their text stays
    | \x1b [ -/]* [0-~]?                                                    # any other escape
    | [\x00-\x08\x0b-\x1f\x7f-\x9f]                                         # C0 but tab and line feed, DEL, C1
    | [\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069]                        # controls of text direction
    | [\ud800-\udfff]                                                       # half characters: not printable at all
    """,
    re.VERBOSE,
)
_COLOUR = re.compile(r"(?:\x1b\[|\x9b)([0-9;:]*)m")
_HIDING = frozenset({"5", "6", "8"})
"""Blink, fast blink, conceal: the SGR attributes that are not colours or weight."""
_INLINE_BREAK = re.compile(r"[\t\n\r\v\f\x85\u2028\u2029]+")


def clean(text: str) -> str:
    """`text` without any escape sequence or control character; tabs and line feeds stay."""
    return _CONTROL.sub("", text)


def clean_inline(text: str) -> str:
    """`text` safe for one line or one cell: line ends and tabs become spaces."""
    return clean(_INLINE_BREAK.sub(" ", text))


def clean_log(text: str, *, colour: bool) -> str:
    """Log text: with `colour`, colours and weights stay and are reset at the end of each line that sets one."""
    if not colour:
        return clean(text)
    kept = _CONTROL.sub(_keep_colour, text)
    if "\x1b" not in kept:
        return kept
    return "\n".join(f"{line}{RESET}" if "\x1b" in line else line for line in kept.split("\n"))


def fold_carriage_returns(line: str) -> str:
    """What a terminal would show in the end of one line whose writer went back to its start, as progress bars do."""
    if "\r" not in line:
        return line
    body, line_end = (line[:-1], "\n") if line.endswith("\n") else (line, "")
    return next((part for part in reversed(body.split("\r")) if part), "") + line_end


def _keep_colour(match: re.Match[str]) -> str:
    colour = _COLOUR.fullmatch(match.group()) if match.group("csi") else None
    if colour is None:
        return ""
    parameters = colour.group(1)
    # 38/48/58 take more numbers, among which an 8 is a shade and not "conceal": those pass as they are.
    is_extended = any(part in ("38", "48", "58") for part in re.split("[;:]", parameters))
    if not is_extended and _HIDING.intersection(part.lstrip("0") for part in re.split("[;:]", parameters)):
        return ""
    return f"\x1b[{parameters}m"
