"""No text of others acts on a terminal (O-55, the client's half)."""

from __future__ import annotations

import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gangline.cli.sanitise import clean, clean_inline, clean_log, fold_carriage_returns

ESC, C1_CSI, C1_OSC, C1_ST, BEL = "\x1b", "\x9b", "\x9d", "\x9c", "\x07"


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("plain text, Ünï/côdé 漢字 🚀", "plain text, Ünï/côdé 漢字 🚀"),
        ("tab\tand\nline", "tab\tand\nline"),
        (f"{ESC}[31mred{ESC}[0m", "red"),
        (f"{C1_CSI}31mred", "red"),
        (f"{ESC}[2J{ESC}[1;1H{ESC}[?1049h", ""),
        (f"{ESC}]0;title{BEL}x", "x"),
        (f"{ESC}]0;title{ESC}\\x", "x"),
        (f"{C1_OSC}52;c;cm0gLXJm{C1_ST}x", "x"),
        (f"{ESC}]8;;http://evil{ESC}\\link{ESC}]8;;{ESC}\\", "link"),
        (f"{ESC}P1;2|payload{ESC}\\x", "x"),
        (f"{ESC}_apc{ESC}\\{ESC}^pm{ESC}\\{ESC}Xsos{ESC}\\x", "x"),
        (f"{ESC}]0;no end, but a line\nnext", "0;no end, but a line\nnext"),
        (f"{ESC}[31", ""),
        (f"{ESC}c{ESC}(B{ESC}#8{ESC}", ""),
        (f"{ESC}{ESC}[31m[2J", "[2J"),
        ("a\x00b\x08c\x7fd\x85e\re\x0bf\x0cg", "abcdeefg"),
        ("abc\u202edef\u2066ghi\u200f", "abcdefghi"),
        ("half \ud800 character", "half  character"),
    ],
)
def test_o55_what_acts_is_taken_out_and_what_is_read_stays(text: str, shown: str) -> None:
    assert clean(text) == shown


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        (f"{ESC}[31mred", f"{ESC}[31mred{ESC}[0m"),
        (f"{ESC}[1;38;5;8mshade", f"{ESC}[1;38;5;8mshade{ESC}[0m"),
        (f"{C1_CSI}32mgreen", f"{ESC}[32mgreen{ESC}[0m"),
        (f"{ESC}[8mhidden{ESC}[5mblinking", "hiddenblinking"),
        (f"{ESC}[2K{ESC}[31mred{ESC}[H", f"{ESC}[31mred{ESC}[0m"),
        (f"{ESC}[31;?1mx{ESC}[>4;2mx", "xx"),
        (f"{ESC}[31ma\nb", f"{ESC}[31ma{ESC}[0m\nb"),
        ("no colour", "no colour"),
    ],
)
def test_logs_keep_colours_that_end_with_their_line(text: str, shown: str) -> None:
    assert clean_log(text, colour=True) == shown
    assert ESC not in clean_log(text, colour=False)


def test_a_cell_is_one_line() -> None:
    assert clean_inline("a\nb\r\nc\td\u2028e\x85f") == "a b c d e f"


@given(st.text(alphabet=f"{ESC}{C1_CSI}{C1_OSC}{C1_ST}{BEL}\r\n\t\x00\x08\u202e\ud800[]P\\;:?0189mHJ ab", max_size=60))
def test_o55_whatever_is_mixed_nothing_that_acts_is_left(text: str) -> None:
    cleaned = clean(text)
    assert not [character for character in cleaned if ord(character) < 32 and character not in "\t\n"]
    assert not [character for character in cleaned if 0x7F <= ord(character) <= 0x9F]
    assert "\u202e" not in cleaned
    assert clean(cleaned) == cleaned

    coloured = clean_log(text, colour=True)
    for piece in coloured.split(ESC)[1:]:
        assert piece.startswith("[")
        assert piece[1:].partition("m")[0].strip("0123456789;:") == ""
    assert C1_CSI not in coloured


@given(st.text(alphabet=st.characters(min_codepoint=32, exclude_categories=["Cc", "Cf", "Cs"])))
def test_ordinary_text_stays_as_it_is(text: str) -> None:
    assert clean(text) == text
    assert clean_log(text, colour=True) == text


@pytest.mark.parametrize("piece", [f"{ESC}[", f"{ESC}]", f"{C1_OSC}a", f"{ESC}]0;a", f"{ESC}P", "\r", f"{ESC}[3;", ESC])
def test_a_megabyte_of_escapes_takes_no_time(piece: str) -> None:
    text = piece * (1_000_000 // len(piece))
    started = time.thread_time()

    assert ESC not in clean(text)
    clean_log(text, colour=True)
    fold_carriage_returns(text)

    assert time.thread_time() - started < 5


@pytest.mark.parametrize(
    ("line", "shown"),
    [
        ("plain\n", "plain\n"),
        ("windows\r\n", "windows\n"),
        (" 10%\r 20%\r 30%\n", " 30%\n"),
        ("10%\r20%\r", "20%"),
        ("\r\r\n", "\n"),
        ("no end\rover", "over"),
    ],
)
def test_a_progress_bar_shows_its_last_state(line: str, shown: str) -> None:
    assert fold_carriage_returns(line) == shown
