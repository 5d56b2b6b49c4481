"""The pages of docs/ say what the code says: settings and defaults, exit codes, presets, links."""

import dataclasses
import re
import tomllib
from pathlib import Path

import pytest

import megalite.launch.cli
import megalite.launch.local  # noqa: F401  with the errors that it defines
from megalite.config import Config
from megalite.errors import MegaliteError
from megalite.model.presets import PRESETS

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md", *sorted((ROOT / "docs").glob("*.md"))]


def page(name: str) -> str:
    return (ROOT / "docs" / name).read_text(encoding="utf-8")


def test_configuration_has_every_setting_with_its_default_in_order():
    written = re.findall(r"^\| `(\w+\.\w+)` \| `(.*?)` \| (.+) \|$", page("configuration.md"), re.MULTILINE)
    shown = [(name, tomllib.loads(f"default = {default}")["default"]) for name, default, _ in written]
    there = []
    for section in dataclasses.fields(Config):
        for setting in dataclasses.fields(section.default_factory):
            default = setting.default
            there.append((f"{section.name}.{setting.name}", list(default) if isinstance(default, tuple) else default))
    assert shown == there
    assert [type(default) for _, default in shown] == [type(default) for _, default in there]


def test_configuration_has_every_choice_of_a_setting():
    for section in dataclasses.fields(Config):
        for setting in dataclasses.fields(section.default_factory):
            for choice in re.findall(r"'(\w+)'", setting.type if setting.type.startswith("Literal") else ""):
                row = re.search(rf"^\| `{section.name}\.{setting.name}` .*$", page("configuration.md"), re.MULTILINE)
                assert f'`"{choice}"`' in row[0]


def test_configuration_has_every_preset():
    text = page("configuration.md")
    assert [name for name in PRESETS if f"`{name}`" not in text] == []


def subclasses(cls: type) -> set[type]:
    return {cls}.union(*(subclasses(each) for each in cls.__subclasses__()))


def test_exit_codes_has_every_code():
    written = {int(code) for code in re.findall(r"^\| (\d+) \|", page("exit-codes.md"), re.MULTILINE)}
    ours = {cls.exit_code for cls in subclasses(MegaliteError) if cls.__module__.startswith("megalite")}
    assert written == ours | {0, 64, 130, 143}  # done, argparse's, Ctrl-C, SIGTERM


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.name)
def test_links_lead_somewhere(path):
    links = re.findall(r"\]\((?!https?:)([^)#]+)\)", path.read_text(encoding="utf-8"))
    assert [link for link in links if not (path.parent / link).exists()] == []


def test_the_index_has_every_page():
    text = page("index.md")
    assert [path.name for path in (ROOT / "docs").glob("*.md") if f"({path.name})" not in text] == ["index.md"]


def test_the_glossary_is_in_order():
    words = re.findall(r"^\| \*\*(.+?)\*\* \|", page("glossary.md"), re.MULTILINE)
    assert words == sorted(words, key=str.lower)
