"""Layout: tables that fit, text cut by its width on screen, curves in braille, numbers in words."""

from __future__ import annotations

import math
from datetime import UTC, datetime

import pytest

from gangline.cli.plot import Curve, draw
from gangline.cli.table import Column, Row, render
from gangline.cli.text_width import cut, pad, width_of
from gangline.cli.words import bar, compact_number, count, duration, local_time, parse_duration, size

COLUMNS = (
    Column(header="ID", right=True, keep=True),
    Column(header="STATE", keep=True),
    Column(header="NAME", keep=True, shrinks=True),
    Column(header="OWNER"),
    Column(header="LOSS", right=True),
)
ROWS = [
    Row(cells=("10522", "waiting", "gpt-1b-longctx", "priya"), note="needs 16 GPUs, 13 are free"),
    Row(cells=("7", "running", "bert", "jun", "1.108")),
]


def test_columns_line_up() -> None:
    assert render(COLUMNS, ROWS, width=None) == [
        "   ID  STATE    NAME            OWNER   LOSS",
        "10522  waiting  gpt-1b-longctx  priya  needs 16 GPUs, 13 are free",
        "    7  running  bert            jun    1.108",
    ]


@pytest.mark.parametrize("width", [120, 60, 44, 40, 33, 28])
def test_a_table_fits_its_width_and_keeps_ids(width: int) -> None:
    lines = render(COLUMNS, ROWS, width=width)

    assert all(width_of(line) <= width for line in lines), lines
    assert lines[1].startswith("10522  waiting")
    assert lines[2].startswith("    7  running")


def test_columns_go_from_the_right() -> None:
    assert "LOSS" not in render(COLUMNS, ROWS[1:], width=30)[0]
    assert "OWNER" in render(COLUMNS, ROWS[1:], width=30)[0]


def test_names_shrink_before_columns_go() -> None:
    lines = render(COLUMNS, ROWS, width=42)
    assert "LOSS" in lines[0]
    assert "gpt-1b-long…" in lines[1]


def test_wide_characters_take_two_columns() -> None:
    lines = render(COLUMNS[:4], [Row(cells=("1", "s", "漢字", "x")), Row(cells=("2", "s", "abcd", "x"))], width=None)
    assert width_of(lines[1]) == width_of(lines[2])


def test_escapes_in_cells_are_taken_out_before_widths_are_counted() -> None:
    lines = render(COLUMNS, [Row(cells=("1", "s", "\x1b[31mab\nc\x1b[0m", "x", "1"), note="")], width=None)
    assert lines[1] == " 1  s      ab c  x         1"


@pytest.mark.parametrize(
    ("text", "width", "shown"),
    [("abcdef", 6, "abcdef"), ("abcdef", 4, "abc…"), ("漢字漢字", 5, "漢字…"), ("漢字", 2, "…"), ("abc", 0, "")],
)
def test_text_is_cut_to_columns(text: str, width: int, shown: str) -> None:
    assert cut(text, width) == shown
    assert width_of(cut(text, width)) <= max(width, 0)
    assert width_of(pad(cut(text, width), 8)) == 8


# --- Plots ---------------------------------------------------------------------------------------------------------


def dots(curve: Curve, width: int = 10, height: int = 4, log: bool | None = False) -> list[str]:
    drawing = draw([curve], width=width, height=height, log=log)
    assert drawing is not None
    return ["".join(cell.character for cell in row) for row in drawing.rows]


def test_a_rising_line_goes_from_corner_to_corner() -> None:
    rows = dots(Curve(steps=[0, 1], values=[0, 1]))
    assert rows[0][-1] != "\u2800"
    assert rows[-1][0] != "\u2800"
    assert rows[0][0] == rows[-1][-1] == "\u2800"
    assert all(any(character != "\u2800" for character in row) for row in rows), "no holes"


def test_what_is_not_finite_breaks_the_line_and_nothing_else() -> None:
    rows = dots(Curve(steps=[0, 1, 2, 3, 4], values=[1.0, 1.0, math.nan, math.inf, 1.0]), width=20, height=1)
    assert "\u2800" in rows[0][5:15]
    assert rows[0][0] != "\u2800"
    assert rows[0][-1] != "\u2800"
    assert draw([Curve(steps=[1], values=[math.nan])], width=10, height=4) is None
    assert draw([Curve(steps=[], values=[])], width=10, height=4) is None


@pytest.mark.parametrize("values", [[5.0], [5.0, 5.0], [0.0], [-1e300, 1e300], [1e-320, 1e300]])
def test_odd_ranges_are_drawn(values: list[float]) -> None:
    drawing = draw([Curve(steps=list(range(len(values))), values=values)], width=10, height=4)
    assert drawing is not None
    assert any(cell.curve == 0 for row in drawing.rows for cell in row)


def test_labels_carry_the_ends_of_the_range_and_line_up() -> None:
    drawing = draw([Curve(steps=[0, 10], values=[0.5, 2.5])], width=10, height=5)
    assert drawing is not None
    assert drawing.labels[0].strip() == "2.5"
    assert drawing.labels[-1].strip() == "0.5"
    assert len({len(label) for label in drawing.labels}) == 1


def test_a_loss_that_falls_by_orders_gets_a_logarithmic_axis() -> None:
    drawing = draw([Curve(steps=[0, 1], values=[100.0, 0.01])], width=10, height=5)
    assert drawing is not None
    assert drawing.labels[2].strip() in ("", "1")
    assert draw([Curve(steps=[0, 1], values=[100.0, -1])], width=10, height=5) is not None


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        (1.108, "1.108"),
        (23_900, "23.9k"),
        (9_999, "9999"),
        (1_500_000, "1.5M"),
        (0.000021, "2.1e-05"),
        (0, "0"),
        (-3.5, "-3.5"),
        (math.nan, "NaN"),
        (math.inf, "∞"),
    ],
)
def test_numbers_are_short(value: float, shown: str) -> None:
    assert compact_number(value) == shown


# --- Words ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "seconds"), [("90", 90), ("90s", 90), ("5m", 300), ("1h30m", 5400), ("2d", 172800), ("0.3s", 0.3)]
)
def test_durations_are_read(text: str, seconds: float) -> None:
    assert parse_duration(text) == seconds


@pytest.mark.parametrize("text", ["", "soon", "-5s", "5x", "1h-", "m", "٣s"])
def test_what_is_no_duration_is_refused_with_an_example(text: str) -> None:
    with pytest.raises(ValueError, match="1h30m"):
        parse_duration(text)


def test_durations_are_said() -> None:
    assert [duration(value) for value in (0, 42.4, 185, 25_380, 180_000)] == ["0s", "42s", "3m05s", "7h03m", "2d02h"]


def test_bars_have_one_width() -> None:
    assert bar(0.4) == "███▋·····"
    assert {len(bar(step / 50)) for step in range(-5, 60)} == {9}


def test_times_are_in_the_zone_of_whoever_looks() -> None:
    now = datetime(2026, 1, 5, 12, tzinfo=UTC)
    assert local_time(datetime(2026, 1, 5, 10, 0, 4, tzinfo=UTC), now) == "10:00:04"
    assert local_time(datetime(2026, 1, 4, 10, 0, 4, tzinfo=UTC), now) == "2026-01-04 10:00"
    assert local_time(None, now) == "–"


def test_sizes_and_counts() -> None:
    assert [size(value) for value in (None, 512, 2**20, 33_607_188_480)] == ["–", "512 B", "1 MiB", "31.3 GiB"]
    assert [count(1, "node"), count(2, "node")] == ["1 node", "2 nodes"]
