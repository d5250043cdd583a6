"""The promises of the repository's front page, and of its house rules."""

from __future__ import annotations

import inspect
import json
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.repo.code_lines import code_lines, count, everything, fast_kernels, request_path
from tinysrt.server_args import ATTENTION_FLAGS, ServerArgs, flags

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")


def run(*command: str, cwd: Path = ROOT) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, cwd=cwd, capture_output=True, text=True, stdin=subprocess.DEVNULL, timeout=120)


def tinysrt(*arguments: str) -> subprocess.CompletedProcess[str]:
    return run(sys.executable, "-m", "tinysrt.cli", *arguments)


# ---- the import rows -------------------------------------------------------------------------------


def lint_imports(root: Path) -> subprocess.CompletedProcess[str]:
    return run(
        sys.executable,
        "-c",
        "from importlinter.cli import lint_imports_command as main; main()",
        "--no-cache",
        cwd=root,
    )


def test_imports_point_downward_and_never_in_a_circle() -> None:
    result = lint_imports(ROOT)
    assert result.returncode == 0, result.stdout


@pytest.mark.parametrize(
    ("path", "line"),
    [
        ("tinysrt/mem_cache/allocator.py", "import tinysrt.managers.request_life"),
        (
            "tinysrt/text/stop.py",
            "if 1:\n    from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import tinysrt.ipc",
        ),
        ("tinysrt/mem_cache/prefix_cache.py", "import tinysrt.mem_cache.radix_cache"),
        ("tinysrt/nobody_placed_me.py", ""),
    ],
    ids=["upward", "upward for types only", "circle", "module in no row"],
)
def test_the_import_contract_notices(path: str, line: str, tmp_path: Path) -> None:
    shutil.copytree(ROOT / "tinysrt", tmp_path / "tinysrt", ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    with open(tmp_path / path, "a", encoding="utf-8") as file:
        file.write(f"\n{line}\n")
    assert lint_imports(tmp_path).returncode == 1


# ---- sizes -----------------------------------------------------------------------------------------


def quoted(pattern: str) -> list[int]:
    match = re.search(pattern, README)
    assert match, pattern
    return [int(number.replace(",", "")) for number in match.groups()]


def test_the_readme_quotes_the_code_as_it_is() -> None:
    lines, files = quoted(r"request path is about ([\d,]+) code lines in (\d+) files")
    assert files == len(request_path())
    assert abs(count(request_path()) - lines) <= 0.03 * lines, count(request_path())
    lines, fast = quoted(r"all of `tinysrt/` is about ([\d,]+), of them ([\d,]+) in the fast kernels")
    assert abs(count(everything()) - lines) <= 0.03 * lines, count(everything())
    assert abs(count(fast_kernels()) - fast) <= 0.03 * fast, count(fast_kernels())


def test_the_code_stays_within_its_budget() -> None:
    assert count(request_path()) < 3_900, "about 3,500: the promise"
    assert count(everything()) - count(fast_kernels()) < 11_000
    long = {path.name: lines for path in everything() if (lines := path.read_text().count("\n")) > 650}
    assert not long, "two modules in one file?"


def test_code_lines_are_lines_of_code() -> None:
    source = '"""Idea.\n\nMore."""\n\n# why\nX = """a\nb"""  # two\n\ndef f():\n    "doc"\n    return (1,\n        2)\n'
    assert code_lines(source) == 2 + 1 + 2


# ---- the front page --------------------------------------------------------------------------------


def code_blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", README, re.S)


def test_links_lead_somewhere() -> None:
    for page in ("README.md", "CONTRIBUTING.md"):
        for target in re.findall(r"\]\(([^)#:]+)\)", (ROOT / page).read_text(encoding="utf-8")):
            assert (ROOT / target).exists(), f"{page}: {target}"


def test_every_make_target_that_is_named_exists() -> None:
    makefile = (ROOT / "Makefile").read_text()
    named = set()
    for page in ("README.md", "CONTRIBUTING.md"):
        named |= set(re.findall(r"(?:^|`)make ([a-z]+)", (ROOT / page).read_text(encoding="utf-8"), re.M))
    assert {"serve", "test", "check", "help", "docs", "atlas"} <= named
    for target in named:
        assert re.search(rf"^{target}:", makefile, re.M), target


def test_every_command_of_the_readme_parses() -> None:
    lines = [line for block in code_blocks("bash") for line in block.splitlines() if line.startswith("tinysrt ")]
    assert len(lines) >= 5
    for line in lines:
        words = shlex.split(line, comments=True)
        result = tinysrt(*words[1 : 3 if words[1] == "bench" else 2], "--help")
        assert result.returncode == 0, line
        for option in (word for word in words[2:] if word.startswith("--")):
            assert option in result.stdout, line


def test_the_curl_line_is_one_and_holds_json() -> None:
    curls = [line for block in code_blocks("bash") for line in block.splitlines() if line.startswith("curl ")]
    assert len(curls) == 1
    words = shlex.split(curls[0])
    assert json.loads(words[words.index("-d") + 1])["messages"][0]["role"] == "user"


def test_the_python_of_the_readme_compiles() -> None:
    blocks = code_blocks("python")
    assert any("OpenAI(" in block for block in blocks) and any("tinysrt.Engine(" in block for block in blocks)
    for block in blocks:
        compile(block, "README.md", "exec")


def test_the_mermaid_picture_names_the_processes() -> None:
    (picture,) = code_blocks("mermaid")
    for name in ("TokenizerManager", "Scheduler", "ModelRunner", "DetokenizerManager"):
        assert name in picture


# ---- the command -----------------------------------------------------------------------------------


def test_help_lists_the_commands_without_loading_pytorch() -> None:
    result = tinysrt("--help")
    assert result.returncode == 0
    for command in ("serve", "generate", "chat", "bench", "trace", "demo-model"):
        assert command in result.stdout
    heavy = "torch", "transformers", "zmq"
    probe = f"import sys, tinysrt.cli, tinysrt.server_args_cli; print([m for m in {heavy} if m in sys.modules])"
    assert run(sys.executable, "-c", probe).stdout.strip() == "[]", "importing tinysrt stays cheap"


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        ((), 2, "the following arguments are required: COMMAND"),
        (("frobnicate",), 2, "invalid choice: 'frobnicate'"),
        (("serve", "--context-length", "8K"), 2, "'8K' is not a number such as"),
        (
            ("serve", "--speculative-algorithm", "NGRAM"),
            1,
            "tinysrt: error: --speculative-algorithm NGRAM is not supported: it arrives with speculative decoding",
        ),
        (("serve", "--config", "/no/such.yaml"), 1, "tinysrt: error: --config /no/such.yaml: No such file"),
        (("generate", "x", "--page-size", "0"), 1, "tinysrt: error: --page-size must be at least 1, not 0"),
        (("generate", "x", "--url", "http://127.0.0.1:9"), 1, "tinysrt: error: http://127.0.0.1:9: "),
        (("chat", "--url", "http://127.0.0.1:9"), 1, "tinysrt: error: no server is ready at http://127.0.0.1:9"),
        (("chat", "--url", "http://127.0.0.1:9", "--page-size", "1"), 2, "with --url there is no server to give"),
    ],
)
def test_mistakes_end_in_one_line_and_the_right_exit_code(arguments: tuple[str, ...], code: int, message: str) -> None:
    result = tinysrt(*arguments)
    assert result.returncode == code
    assert message in result.stderr and "Traceback" not in result.stderr
    assert len(result.stderr.splitlines()) <= (1 if code == 1 else 2)


def test_launch_server_is_serve() -> None:
    result = run(sys.executable, "-m", "tinysrt.launch_server", "--node-rank", "2")
    assert result.returncode == 1 and "--node-rank 2 is not below --nnodes 1" in result.stderr


# ---- flags and pages -------------------------------------------------------------------------------


def test_the_atlas_is_what_its_generator_writes() -> None:
    from tools import atlas

    assert atlas.PAGE.read_text(encoding="utf-8") == atlas.render(), "run `make atlas`"


def test_no_flag_is_accepted_and_ignored() -> None:
    own = {ROOT / "tinysrt" / "server_args.py", ROOT / "tinysrt" / "server_args_cli.py"}
    code = "\n".join(path.read_text(encoding="utf-8") for path in (ROOT / "tinysrt").rglob("*.py") if path not in own)
    # Two groups are read in one place for all: see `attention/registry.py`, and what decides `graph_capture`.
    code += "".join(f"args.{name} " for name in ATTENTION_FLAGS)
    code += inspect.getsource(ServerArgs._graph_capture).replace("self.", "args.")
    unread = [name for name, flag in flags().items() if flag.later is None and not re.search(rf"args\.{name}\b", code)]
    assert unread == [], "each of these must be read somewhere, or be refused with `later=`"


def test_no_file_names_the_machine_it_was_written_on() -> None:
    listed = run("git", "ls-files", "-z").stdout.split("\0")
    texts = [
        ROOT / name
        for name in listed
        if Path(name).suffix in {".py", ".md", ".toml", ".txt", ".yml", ".mmd", ".ipynb", ""}
    ]
    pattern = re.compile("/(?:" + "work|root|home" + r")/\w|/opt/" + "pypi")
    for path in texts:
        if path.is_file():
            assert not pattern.search(path.read_text(encoding="utf-8", errors="replace")), path


def test_constraints_are_exact_pins_of_every_requirement() -> None:
    import tomllib

    pins = dict(line.split("==") for line in (ROOT / "constraints.txt").read_text().splitlines() if "==" in line)
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    wanted = [
        *project["dependencies"],
        *project["optional-dependencies"]["dev"],
        *project["optional-dependencies"]["docs"],
    ]
    names = {re.split(r"[\[<>=; ]", requirement)[0] for requirement in wanted}
    assert names <= pins.keys(), names - pins.keys()
    assert pins["torch"] == "2.13.0"
