"""The layout of docs/architecture.md, held: who imports whom, who may do without PyTorch, how long a file may be.

Imports are read from the source, also those inside functions.
"""

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "megalite"
FILES = sorted(PACKAGE.rglob("*.py"))
FOLDERS = sorted({path.parent for path in FILES})
LONGEST = 300  # lines; a file that needs more stands here with the reason
LONGER: dict[str, str] = {}


def module_of(path: Path) -> str:
    """`megalite.data.tokens` of megalite/data/tokens.py, `megalite.data` of its __init__.py."""
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {module_of(path): path for path in FILES}
TREES = {name: ast.parse(path.read_text(encoding="utf-8")) for name, path in MODULES.items()}


def imports(module: str) -> set[tuple[str, int]]:
    """What of megalite a module imports, as (module, line)."""
    found = set()
    for node in ast.walk(TREES[module]):
        if isinstance(node, ast.Import):
            found |= {(alias.name, node.lineno) for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, f"{MODULES[module]}:{node.lineno} imports relatively"
            for alias in node.names:
                inner = f"{node.module}.{alias.name}"
                found.add((inner if inner in MODULES else node.module or "", node.lineno))
    return {(name, line) for name, line in found if name.partition(".")[0] == "megalite"}


def part_of(module: str) -> str:
    """The folder, or the file where it lies in megalite itself."""
    return module.split(".")[1] if "." in module else "__init__"


CONFIG = {"config", "config_sections", "config_file", "errors"}
TESTING = {"testing", "dense_twin", "rank_pool", "pytest_plugin"}
MAY_IMPORT = {
    "__init__": set(),
    "errors": set(),
    "config_sections": {"errors"},
    "config": {"config_sections", "errors"},
    "config_file": {"config", "errors"},
    "parallel": {"parallel"},
    "model": {"model", "config", "parallel", "checkpoint", "errors"},
    "data": {"data", *CONFIG},
    "plan": {"plan", "parallel", *CONFIG},
    "checkpoint": {"checkpoint", "parallel", "errors"},
    "train": {"__init__", "train", "checkpoint", "plan", "parallel", "model", "data", *CONFIG},
    "launch": {"launch", "train", "checkpoint", "plan", "parallel", "model", "data", *CONFIG},
    "__main__": {"launch"},
    **{part: {"parallel", *TESTING} for part in TESTING},
}


@pytest.mark.parametrize("module", MODULES)
def test_imports_go_one_way(module):
    part = part_of(module)
    wrong = [
        f"{MODULES[module].relative_to(ROOT)}:{line}: {name}"
        for name, line in sorted(imports(module))
        if part_of(name) not in MAY_IMPORT[part]
    ]
    assert wrong == [], f"{part} may import {sorted(MAY_IMPORT[part])}"


def among(folder: str, module: str) -> set[str]:
    """Which files of a folder a module imports, by their bare names."""
    prefix = f"megalite.{folder}."
    return {name.removeprefix(prefix) for name, _ in imports(module) if name.startswith(prefix)}


def test_the_model_takes_from_parallel_only_what_layers_are_made_of():
    layers = {"mesh", "collectives", "in_flight", "sharding", "parameters", "tensor", "vocab", "sequence"}
    layers |= {"layout", "lookup", "ring", "ulysses"}
    for module in MODULES:
        if part_of(module) == "model":
            assert among("parallel", module) <= layers, module


AXIS_FILES = {"tensor", "vocab", "sequence", "ring", "ulysses", "ddp", "zero"}


PIPELINE = ["pipeline.schedule", "pipeline.replay", "pipeline.check", "pipeline.generators", "pipeline.files"]
PIPELINE += ["pipeline.timeline", "pipeline.simulate", "pipeline.saved", "pipeline.measured"]
PIPELINE += ["pipeline.draw", "pipeline.svg"]  # each knows those before it


def test_plan_takes_from_parallel_only_plain_values():
    for module in MODULES:
        if part_of(module) == "plan":
            assert among("parallel", module) <= {"sharding", "layout", *PIPELINE}, module


def test_mesh_then_collectives_then_the_axis_files():
    below = {
        "mesh": set(),
        "in_flight": {"mesh", "traffic"},
        "collectives": {"mesh", "in_flight"},
        "sharding": set(),
        "traffic": set(),
        "layout": set(),
        "tiles": set(),
        "lookup": set(),
        "kernels": set(),
        "local_attention": {"kernels", "tiles"},
        **{name: PIPELINE[:i] for i, name in enumerate(PIPELINE)},
    }
    for name, allowed in below.items():
        assert among("parallel", f"megalite.parallel.{name}") <= set(allowed), name
    for name in AXIS_FILES:
        assert not among("parallel", f"megalite.parallel.{name}") & AXIS_FILES, name
    for name in ("parameters", "compare", "world"):
        assert not among("parallel", f"megalite.parallel.{name}") & AXIS_FILES, name


WITHOUT_TORCH = [
    "megalite.config",
    "megalite.config_sections",
    "megalite.config_file",
    "megalite.errors",
    "megalite.model.presets",
    "megalite.parallel.sharding",
    "megalite.parallel.traffic",
    "megalite.parallel.layout",
    "megalite.parallel.tiles",
    *(f"megalite.parallel.{name}" for name in ("pipeline", *PIPELINE)),
    "megalite.plan",
    "megalite.plan.stages",
    "megalite.plan.memory",
    "megalite.plan.rank_memory",
    "megalite.plan.measured_division",
    *(f"megalite.checkpoint.{name}" for name in ("boxes", "tensor_file", "index", "folder")),
    "megalite.launch.cli",
    "megalite.pytest_plugin",
]


def test_some_import_no_torch_by_whatever_way():
    script = (
        "import importlib, sys\n"
        f"for name in {WITHOUT_TORCH}:\n"
        "    importlib.import_module(name)\n"
        "    assert 'torch' not in sys.modules, name\n"
    )
    done = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True)
    assert not done.returncode, done.stderr


def test_config_imports_the_standard_library_only():
    for module in ("megalite.config", "megalite.config_sections", "megalite.config_file", "megalite.errors"):
        for node in ast.walk(TREES[module]):
            names = [a.name for a in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            for name in (name.partition(".")[0] for name in names):
                assert name == "megalite" or name in sys.stdlib_module_names, f"{module} imports {name}"


def test_only_torchrun_reads_the_environment():
    for module, tree in TREES.items():
        for node in ast.walk(tree):
            name = node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""
            if name in ("environ", "environb", "getenv", "getenvb"):
                assert module == "megalite.launch.torchrun", f"{MODULES[module].relative_to(ROOT)}:{node.lineno}"


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_no_file_is_long(path):
    lines = len(path.read_text(encoding="utf-8").splitlines())
    assert lines <= LONGEST or str(path.relative_to(ROOT)) in LONGER, f"{lines} lines"


def test_what_is_public_in_parallel_has_a_docstring():
    lacking = [
        f"{MODULES[module].relative_to(ROOT)}:{node.lineno}: {node.name}"
        for module, tree in TREES.items()
        if part_of(module) == "parallel"
        for node in tree.body
        if isinstance(node, ast.FunctionDef | ast.ClassDef)
        and not node.name.startswith("_")
        and not ast.get_docstring(node)
    ]
    assert lacking == []


@pytest.mark.parametrize("path", [path for path in FILES if path.name != "__main__.py"], ids=lambda path: path.stem)
def test_every_file_opens_with_its_idea(path):
    assert ast.get_docstring(TREES[module_of(path)])


PARTS_OF_OTHERS = {"config_sections", "config_file", "errors"}  # no entries of their own
PARTS_OF_OTHERS |= {"dense_twin", "rank_pool", "pytest_plugin"}


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda folder: str(folder.relative_to(ROOT)))
def test_a_folder_names_its_files_and_no_others(folder):
    lines = (ast.get_docstring(TREES[module_of(folder / "__init__.py")]) or "").splitlines()
    cells = [cell for line in lines for cell in re.split(r"\s{2,}", line.strip())[::2]]  # name, what it is, name, ...
    named = {cell.removesuffix(".py") for cell in cells if re.fullmatch(r"[a-z_]+(\.py)?", cell)}
    there = {path.stem for path in folder.glob("*.py") if not path.stem.startswith("__")}
    there |= {path.parent.name for path in folder.glob("*/__init__.py")}
    assert named == there - PARTS_OF_OTHERS
