"""What importing costs: a training script and `gang --help` load nothing heavy (checked on `sys.modules`)."""

from __future__ import annotations

import subprocess
import sys

import pytest

HEAVY = ("httpx", "click", "rich", "yaml", "pydantic", "fastapi", "torch", "numpy", "sqlalchemy", "celery", "redis")


def loaded_by(code: str) -> set[str]:
    """Which heavy packages are loaded after `code`, in a fresh interpreter."""
    script = (
        f"import sys\n{code}\nprint('', *[name for name in {HEAVY!r} if name in sys.modules], sep=' ', file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120, check=True)
    return set(done.stderr.splitlines()[-1].split())


@pytest.mark.parametrize(
    "code",
    [
        "import gangline",
        "import gangline.report",
        "from gangline import report, should_stop, stop_reason, checkpoint_dir; report(1, loss=1.0)",
        "from gangline import Client",
        "import gangline.client; gangline.client.NotFound",
        "import gangline; gangline.__version__",
    ],
)
def test_the_library_loads_nothing_heavy(code: str) -> None:
    assert loaded_by(code) == set()


def test_httpx_comes_without_its_own_command_line() -> None:
    code = "from gangline.client.http import load_httpx; load_httpx(); load_httpx()\n"
    code += "assert 'httpx._main' not in sys.modules, 'who wants it later gets it'"
    assert loaded_by(code) == {"httpx"}


def test_the_list_of_jobs_makes_no_records_but_those_of_jobs() -> None:
    code = "import gangline.client.client, gangline.cli.commands.ls\n"
    code += "records = [name for name in sys.modules if name.startswith('gangline.client') and 'models' in name]\n"
    code += "assert records == ['gangline.client.models'], records"
    assert loaded_by(code) == {"click"}


def test_every_name_that_the_client_promises_is_there() -> None:
    loaded_by("import gangline.client as client\nfor name in client.__all__: getattr(client, name)")


def test_the_cli_module_loads_click_alone() -> None:
    assert loaded_by("import gangline.cli.main") == {"click"}


@pytest.mark.parametrize(
    "words",
    [
        ["--help"],
        ["submit", "--help"],
        ["logs", "--help"],
        ["plot", "--help"],
        ["admin", "token", "create", "--help"],
        ["--version"],
        ["sumbit"],
    ],
    ids=" ".join,
)
def test_help_loads_click_alone(words: list[str]) -> None:
    assert loaded_by(f"from gangline.cli.main import run; run({words!r})") == {"click"}


def test_only_the_asked_command_is_imported() -> None:
    code = "from gangline.cli.main import run; import sys; run(['ls', '--help'])\n"
    code += "names = [name for name in sys.modules if name.startswith('gangline.cli.commands.')]\n"
    code += "assert names == ['gangline.cli.commands.ls'], names\n"
    assert loaded_by(code) == {"click"}
