"""What a reader would paste from README.md and docs/ runs: each page from top to bottom, in a folder like a clone.

    python   a block that begins with `# name.py` is saved under that name; any other is executed, and knows the names
             that the blocks above it have defined
    bash     runs as it stands, with the commands of this Python's environment on the path; a block with a line that
             begins like one of LONG takes minutes and runs only with the tests marked `full`, in `make test-full`
    toml     is a config that loads
    text     is shown, not pasted

README.md runs at every change, and so do pages without WHOLE_RUNS; the others with the tests marked `full`.
One line is replaced: `make test` would run these tests again, so make is asked what it would do.
"""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import pytest
import torch

from megalite.config_file import load
from megalite.model.presets import PRESETS

ROOT = Path(__file__).parents[1]
PAGES = ["README.md", *sorted(f"docs/{page.name}" for page in (ROOT / "docs").glob("*.md"))]
FOLDERS = ["configs", "docs", "examples", "megalite"]
FILES = ["LICENSE", "Makefile", "README.md", "constraints.txt", "pyproject.toml"]
LONG = ("make", "torchrun")
WHOLE_RUNS = ("megalite train", "megalite verify", "pytest")
REPLACED = {"make test": "make -n test"}


class Block(NamedTuple):
    page: str
    line: int
    language: str
    text: str

    @property
    def long(self) -> bool:
        return self.language == "bash" and any(line.startswith(LONG) for line in self.text.splitlines())


def blocks(page: str) -> list[Block]:
    text = (ROOT / page).read_text(encoding="utf-8")
    found = re.finditer(r"^```(\w*)\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    return [Block(page, text.count("\n", 0, match.start()) + 1, match[1], match[2]) for match in found]


def clone(folder: Path) -> Path:
    """The files of a clone that pages speak of."""
    for name in FOLDERS:
        shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in FILES:
        shutil.copy2(ROOT / name, folder / name)
    return folder


def run_page(blocks: list[Block], folder: Path) -> None:
    names: dict[str, object] = {"__name__": "pasted"}
    for block in blocks:
        if block.language == "bash":
            run_bash(block, folder)
        elif block.language == "python":
            run_python(block, folder, names)
        elif block.language == "toml":
            (folder / "pasted.toml").write_text(block.text, encoding="utf-8")
            load(folder / "pasted.toml", presets=PRESETS)


def run_bash(block: Block, folder: Path) -> None:
    lines = [REPLACED.get(line, line) for line in block.text.splitlines()]
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    done = subprocess.run(
        ["bash", "-e", "-o", "pipefail", "-c", "\n".join(lines)],
        cwd=folder,
        env={**os.environ, "PATH": path},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=900,
    )
    assert done.returncode == 0, f"{block.page}:{block.line} ended with {done.returncode}:\n{done.stdout[-4000:]}"


def run_python(block: Block, folder: Path, names: dict[str, object]) -> None:
    if name := re.match(r"# (\w+\.py)\n", block.text):
        (folder / name[1]).write_text(block.text, encoding="utf-8")
        return
    source = "\n" * block.line + block.text  # tracebacks then show the page's lines
    exec(compile(source, block.page, "exec"), names)


def at_every_change(page: str) -> bool:
    lines = [line for block in blocks(page) if block.language == "bash" for line in block.text.splitlines()]
    return page == "README.md" or not any(line.startswith(WHOLE_RUNS) for line in lines)


@pytest.fixture(autouse=True)
def _same_dtype():
    """A page may set the default dtype, and its blocks are executed in this process."""
    dtype = torch.get_default_dtype()
    yield
    torch.set_default_dtype(dtype)


@pytest.mark.parametrize(
    "page",
    [
        pytest.param(page, marks=() if at_every_change(page) else pytest.mark.full)
        for page in PAGES
        if any(not block.long for block in blocks(page))
    ],
)
def test_page(page, tmp_path, monkeypatch):
    monkeypatch.chdir(clone(tmp_path))
    run_page([block for block in blocks(page) if not block.long], tmp_path)


@pytest.mark.full
@pytest.mark.parametrize("page", [page for page in PAGES if any(block.long for block in blocks(page))])
def test_page_with_its_long_blocks(page, tmp_path, monkeypatch):
    monkeypatch.chdir(clone(tmp_path))
    run_page(blocks(page), tmp_path)


@pytest.mark.parametrize("page", PAGES)
def test_every_block_says_what_it_is(page):
    fences = re.findall(r"^```(.*)$", (ROOT / page).read_text(encoding="utf-8"), re.MULTILINE)
    assert set(fences[::2]) <= {"bash", "python", "toml", "text"}
    assert set(fences[1::2]) <= {""}


def test_make_targets_that_the_readme_names_exist():
    for block in blocks("README.md"):
        for line in block.text.splitlines():
            if line.startswith("make "):
                assert not subprocess.run(
                    ["make", "-n", *line.split()[1:]], cwd=ROOT, stdout=subprocess.DEVNULL
                ).returncode


EXAMPLE = ROOT / "examples" / "pretrain_gpt.py"


def test_the_example_is_short():
    assert len(EXAMPLE.read_text(encoding="utf-8").splitlines()) < 80


@pytest.mark.parametrize(
    ("override", "line"),
    [
        ("mesh.tpp=2", "pretrain_gpt: error: mesh.tpp: no such setting; did you mean 'tp'?"),
        ("mesh.tp=2", "pretrain_gpt: error: RANK is not set: start this with torchrun"),
    ],
)
def test_a_mistake_at_the_example_is_a_line_and_a_code(override, line):
    environment = {name: value for name, value in os.environ.items() if name not in ("RANK", "LOCAL_RANK")}
    done = subprocess.run([sys.executable, EXAMPLE, override], env=environment, capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr.strip()) == (78, "", line)
