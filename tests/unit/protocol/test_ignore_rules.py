"""`.ganglineignore` follows the rules of gitignore."""

from __future__ import annotations

import pytest

from gangline.protocol.ignore import IgnoreRules, rules_of_text


@pytest.mark.parametrize(
    ("lines", "path", "is_folder", "is_ignored"),
    [
        (["*.log"], "a.log", False, True),
        (["*.log"], "deep/in/a.log", False, True),
        (["*.log"], "a.logs", False, False),
        (["data"], "data", True, True),
        (["data"], "src/data", False, True),
        (["data/"], "data", True, True),
        (["data/"], "data", False, False),
        (["/data"], "data", True, True),
        (["/data"], "src/data", True, False),
        (["src/data"], "src/data", True, True),
        (["src/data"], "other/src/data", True, False),
        (["src/*"], "src/a", False, True),
        (["src/*"], "src/a/b", False, False),
        (["**/cache"], "cache", True, True),
        (["**/cache"], "a/b/cache", True, True),
        (["a/**/b"], "a/b", False, True),
        (["a/**/b"], "a/x/y/b", False, True),
        (["a/**"], "a/x/y", False, True),
        (["a/**"], "a", True, False),
        (["a?c"], "abc", False, True),
        (["a?c"], "a/c", False, False),
        (["file[0-9].txt"], "file7.txt", False, True),
        (["file[!0-9].txt"], "file7.txt", False, False),
        (["file[!0-9].txt"], "filex.txt", False, True),
        (["[]a]"], "]", False, True),
        (["[z-a]"], "b", False, False),
        (["[z-a"], "[z-a", False, True),
        (["*.pt", "!keep.pt"], "keep.pt", False, False),
        (["!keep.pt", "*.pt"], "keep.pt", False, True),
        (["# comment"], "# comment", False, False),
        (["\\#x"], "#x", False, True),
        (["\\!x"], "!x", False, True),
        (["a.txt   "], "a.txt", False, True),
        (["a\\ "], "a ", False, True),
        ([""], "a", False, False),
        (["/"], "a", True, False),
        (["!"], "a", False, False),
        (["a.b"], "axb", False, False),
        (["(x|y)+"], "(x|y)+", False, True),
        (["a\nb*"], "a\nbc", False, True),
    ],
)
def test_a_pattern_matches_as_gitignore_does(lines: list[str], path: str, is_folder: bool, is_ignored: bool) -> None:
    assert IgnoreRules(lines).is_ignored(path, is_folder=is_folder) is is_ignored


@pytest.mark.parametrize("name", [".git", "__pycache__", ".venv", "node_modules"])
def test_what_no_job_needs_is_left_out_without_being_asked(name: str) -> None:
    assert rules_of_text(None).is_ignored(f"deep/{name}", is_folder=True)


def test_the_ignore_file_can_bring_a_default_back() -> None:
    assert not rules_of_text("!.venv/\n").is_ignored(".venv", is_folder=True)


def test_many_stars_do_not_make_matching_slow() -> None:
    assert not IgnoreRules(["*" * 200 + "b"]).is_ignored("a" * 250, is_folder=False)
