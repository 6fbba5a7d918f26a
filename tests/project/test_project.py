"""What holds for the project as a whole: imports, sizes, documentation, the tested set."""

from __future__ import annotations

import ast
import dataclasses
import inspect
import re
import sys
import tomllib
from collections import Counter
from collections.abc import Iterator
from functools import cache
from graphlib import TopologicalSorter
from importlib import import_module
from operator import attrgetter
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from scio_recorder.errors import MissingPackageError
from scio_recorder.recording.options import CollectKeywords, CollectOptions
from tests.project import stand_ins
from tests.project.pages import BLOCK, run_page

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "scio_recorder"

# The house, from the roof down: a room imports from its own row and from those below.
UPPER_STOREY = (
    "__main__",
    "command_line",
    "__init__",
    "integrations",
    "analysis events recompute testing workers",
)
CORE = (
    "lowlevel",
    "recorder",
    "recording",
    "stores",
    "capture reductions",
    "postprocessors",
    "nets",
    "display",
    "layer",
    "tensors",
    "errors",
    "interpreter",
)
HOUSE = UPPER_STOREY + CORE
# The only files of the core that import from above, inside their functions.
FRONT_DOORS = {"recorder.collecting", "recording.readable"}
ROWS = {room: row for row, rooms in enumerate(HOUSE) for room in rooms.split()}

# Rooms that an upper room imports from beside `lowlevel` and public modules. It can't be left out
# of a copy of the package that has these others.
STANDS_ON = {
    "__main__": {"command_line"},
    "command_line": {"analysis", "workers"},
    "integrations": {"analysis", "events", "workers"},
}

# Installed by extras only, so imported inside the functions that use them.
OPTIONAL = {
    "IPython",
    "datasets",
    "lightning",
    "matplotlib",
    "obstore",
    "pandas",
    "psutil",
    "pyarrow",
    "ray",
    "sklearn",
    "tensorboard",
    "transformers",
    "zarr",
}

PUBLIC = (
    "scio_recorder",
    "scio_recorder.analysis.scores",
    "scio_recorder.errors",
    "scio_recorder.events",
    "scio_recorder.integrations.hidden_states",
    "scio_recorder.integrations.lightning",
    "scio_recorder.integrations.ray",
    "scio_recorder.integrations.tensorboard",
    "scio_recorder.integrations.transformers",
    "scio_recorder.integrations.vllm",
    "scio_recorder.postprocessors",
    "scio_recorder.reductions",
    "scio_recorder.stores",
    "scio_recorder.testing",
)

# For those who build on the library; parameters that say all by their names need no text there.
FOR_BUILDERS = (
    "scio_recorder.display.figure",
    "scio_recorder.display.outline",
    "scio_recorder.display.page",
    "scio_recorder.display.progress",
    "scio_recorder.layer",
    "scio_recorder.lowlevel",
    "scio_recorder.stores.files",
    "scio_recorder.tensors",
)
# Stores are chosen by a word; who writes one of their own looks into the reference.
OF_THE_REFERENCE = "scio_recorder.stores."

MAX_FUNCTION_LINES = 40
MOST_NAMES = 70  # of lowlevel

FILES = sorted(PACKAGE.rglob("*.py"))
HOW_TO = sorted((ROOT / "docs" / "how-to").glob("*.md"))
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
# The reference of the interface is made from docstrings, which run as such.
PAGES += sorted((ROOT / "docs").glob("[!_]*/*.md"))


def name_of(file: Path) -> str:
    parts = file.relative_to(PACKAGE).with_suffix("").parts
    return ".".join(parts[:-1] if len(parts) > 1 and parts[-1] == "__init__" else parts)


MODULES = {name_of(file) for file in FILES}


@cache
def tree_of(file: Path) -> ast.Module:
    return ast.parse(file.read_text(encoding="utf-8"))


def imported(file: Path) -> Iterator[tuple[str, str, int]]:
    """Yield module, name in it (or nothing) and line of every import, wherever it stands."""
    for node in ast.walk(tree_of(file)):
        if isinstance(node, ast.Import):
            yield from ((alias.name, "", node.lineno) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{file}:{node.lineno}: write imports from scio_recorder on"
            yield from ((node.module or "", alias.name, node.lineno) for alias in node.names)


def own_imports(file: Path) -> Iterator[tuple[str, int]]:
    """Yield the modules of this package that a file imports, by their names inside it."""
    for module, name, line in imported(file):
        if module.partition(".")[0] == "scio_recorder":
            # A public name is imported from where it is defined, not by way of all others.
            inside = module.partition(".")[2] or public_names_at_the_top().get(name, "")
            inside = ".".join(filter(None, [inside, name]))
            while inside and inside not in MODULES:
                inside = inside.rpartition(".")[0]
            yield inside or "__init__", line


def public_names_at_the_top() -> dict[str, str]:
    return vars(import_module("scio_recorder"))["_MODULE_OF"]


def room(module: str) -> str:
    return module.partition(".")[0]


def test_every_room_has_its_row() -> None:
    missing = {room(module) for module in MODULES} - set(ROWS)
    assert not missing, f"give {sorted(missing)} a row in HOUSE"


def lines_of_functions(file: Path) -> set[int]:
    """Return the lines of a file that run only when a function is called."""
    functions = (ast.FunctionDef, ast.AsyncFunctionDef)
    bodies = (node.body for node in ast.walk(tree_of(file)) if isinstance(node, functions))
    return {
        line
        for body in bodies
        for statement in body
        for line in range(statement.lineno, (statement.end_lineno or 0) + 1)
    }


def lines_for_type_checkers(file: Path) -> set[int]:
    """Return the lines of a file under ``if TYPE_CHECKING:``."""
    return {
        inner.lineno
        for node in tree_of(file).body
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"
        for inner in ast.walk(node)
        if isinstance(inner, ast.Import | ast.ImportFrom)
    }


def upward_imports(file: Path) -> list[str]:
    """Return the imports of a file from rooms above its own, except those of a front door."""
    here, allowed = ROWS[room(name_of(file))], set[int]()
    if name_of(file) in FRONT_DOORS:
        allowed = lines_of_functions(file) | lines_for_type_checkers(file)
    return [
        f"{file.name}:{line} imports {module}"
        for module, line in own_imports(file)
        if ROWS[room(module)] < here and line not in allowed
    ]


def test_imports_run_downward() -> None:
    assert not [found for file in FILES for found in upward_imports(file)]


def is_above_the_wall(module: str) -> bool:
    return ROWS[room(module)] < len(UPPER_STOREY)


def imports_past_the_seam(file: Path) -> list[str]:
    """Return what a file of the upper storey imports past `lowlevel` and public modules."""
    here = room(name_of(file))
    others = STANDS_ON.get(here, set()) | {here}
    return [
        f"{file.name}:{line} imports {name} from {module}"
        for module, name, line in imported(file)
        if module.partition(".")[0] == "scio_recorder"
        and not (module == "scio_recorder" and name in others)
        and room(module.partition(".")[2]) not in others
        and name not in public_names_of(module)
    ]


def public_names_of(module: str) -> set[str]:
    return set(import_module(module).__all__) if module in {*PUBLIC, *FOR_BUILDERS} else set()


def uses_of_private_names(file: Path) -> list[str]:
    allowed = names_defined_in(file) | DE_FACTO_PUBLIC | OTHERS.get(file.name, set())
    return [
        f"{file.name}:{node.lineno} uses {ast.unparse(node)}"
        for node in ast.walk(tree_of(file))
        if isinstance(node, ast.Attribute)
        and re.match(r"_[a-z]", node.attr)
        and node.attr not in allowed
    ]


def test_the_upper_storey_builds_on_lowlevel_and_public_modules() -> None:
    above = [file for file in FILES if is_above_the_wall(name_of(file))]
    assert not [use for file in above for use in uses_of_private_names(file)]
    rooms = [file for file in above if room(name_of(file)) != "__init__"]
    assert not [use for file in rooms for use in imports_past_the_seam(file)]


def test_lowlevel_is_small() -> None:
    assert len(public_names_of("scio_recorder.lowlevel")) <= MOST_NAMES


def test_benchmarks_use_what_exists() -> None:
    imported = [
        (node.module, alias.name)
        for path in sorted((ROOT / "benchmarks").glob("*.py"))
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("scio_recorder")
        for alias in node.names
    ]
    assert len(imported) > 20
    for module, name in imported:
        if not hasattr(import_module(module), name):
            import_module(f"{module}.{name}")


@pytest.mark.parametrize("module", sorted({*FOR_BUILDERS} - {"scio_recorder.layer"}))
def test_each_name_for_builders_has_a_line_that_says_what_it_is_for(module: str) -> None:
    page = (ROOT / "docs" / "reference" / "api" / "lowlevel.md").read_text(encoding="utf-8")
    section = page.partition(f"## `{module}`\n")[2].partition("\n## ")[0]
    lines = re.findall(r"^\| `(\w+)` \| .{5,} \|$", section, re.MULTILINE)
    assert sorted(lines) == sorted(public_names_of(module))


@pytest.mark.parametrize(
    ("name", "text", "check"),
    [
        ("capture/x.py", "def f():\n    from scio_recorder.analysis import scores", "upward"),
        ("capture/x.py", "from scio_recorder.lowlevel import Capture", "upward"),
        ("events/x.py", "from scio_recorder.capture.engine import Capture", "seam"),
        ("events/x.py", "from scio_recorder.lowlevel import Program", "seam"),
        ("events/x.py", "from scio_recorder.workers.parts import collect_parts", "seam"),
        ("events/x.py", "from scio_recorder import recording", "seam"),
        ("events/x.py", "def f(recorder):\n    return recorder._capture", "names"),
    ],
)
def test_imports_through_the_wall_are_found(
    name: str, text: str, check: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / name
    file.parent.mkdir()
    file.write_text(text)
    monkeypatch.setitem(globals(), "PACKAGE", tmp_path)
    kinds = {
        "upward": upward_imports,
        "seam": imports_past_the_seam,
        "names": uses_of_private_names,
    }
    assert kinds[check](file)
    file.write_text("from scio_recorder import Recorder\nfrom scio_recorder.errors import warn")
    tree_of.cache_clear()
    assert bool(imports_past_the_seam(file))
    file.write_text("from scio_recorder.lowlevel import Capture\nfrom scio_recorder import Layer")
    tree_of.cache_clear()
    assert not imports_past_the_seam(file)
    assert not uses_of_private_names(file)


def imports_beyond_the_format(file: Path) -> list[str]:
    return [
        f"{file.name}:{line} imports {module}"
        for module, line in own_imports(file)
        if not module.startswith("stores.disk_format")
    ]


def test_the_disk_format_imports_nothing_else_of_the_package(tmp_path: Path) -> None:
    files = list((PACKAGE / "stores" / "disk_format").glob("*.py"))
    assert len(files) > 5
    assert not [found for file in files for found in imports_beyond_the_format(file)]
    file = tmp_path / "reader.py"
    file.write_text("def f():\n    from scio_recorder.errors import RecordingError")
    assert imports_beyond_the_format(file) == ["reader.py:2 imports errors"]


def test_the_errors_of_the_disk_format_are_raised_again_in_one_place() -> None:
    uses = {
        name_of(file)
        for file in FILES
        for module, name, _ in imported(file)
        if name in ("FormatError", "ContentError")
        or (
            name in ("RunReader", "RunWriter", "accessing", "parsing", "medium_at", "scan")
            and ".disk_format" in module
        )
    }
    assert {name for name in uses if ".disk_format." not in name} == {"stores.files"}


def test_no_import_leads_back() -> None:
    graph = {
        name_of(file): {
            module
            for module, line in own_imports(file)
            if name_of(file) not in FRONT_DOORS
            or line not in lines_of_functions(file) | lines_for_type_checkers(file)
        }
        - {name_of(file)}
        for file in FILES
    }
    # Raises CycleError, which shows the cycle.
    TopologicalSorter(graph).prepare()


def test_optional_packages_are_imported_where_used() -> None:
    found = {
        f"{name_of(file)} imports {name}"
        for file in FILES
        for node in tree_of(file).body
        for name in names_imported_by(node)
        if name.partition(".")[0] in OPTIONAL
    }
    assert not found


def names_imported_by(node: ast.stmt) -> list[str]:
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    return [node.module or ""] if isinstance(node, ast.ImportFrom) else []


def test_functions_are_short() -> None:
    long = [
        f"{name_of(file)}: {node.name} ({length} lines)"
        for file in FILES
        for node in ast.walk(tree_of(file))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        and (length := body_lines(node)) > MAX_FUNCTION_LINES
    ]
    assert not long


OPTIONS = dataclasses.fields(CollectOptions)


@pytest.mark.parametrize(
    ("module", "path", "left_out"),
    [
        ("scio_recorder", "Recorder.collect", set()),
        # Others run the passes there.
        ("scio_recorder", "Recorder.collecting", {"to_inputs", "stop_early"}),
        # A part always goes on with what is durable.
        ("scio_recorder", "Recorder.collect_parts", {"resume"}),
        ("scio_recorder.integrations.ray", "collect_parts", {"resume"}),
    ],
)
def test_options_of_collect_are_offered(module: str, path: str, left_out: set[str]) -> None:
    function = attrgetter(path)(public_module(module))
    parameters = inspect.signature(function).parameters
    assert {field.name for field in OPTIONS} - parameters.keys() == left_out
    assert not missing_parameters(function)
    # Trainers have bars of their own, and parts a place that all processes see.
    differ = {("collecting", "progress"), ("collect_parts", "store")}
    for field in OPTIONS:
        if field.name in parameters and (function.__name__, field.name) not in differ:
            assert parameters[field.name].default == field.default


def test_type_checkers_know_the_options_of_collect() -> None:
    kinds = {name: kind.__forward_arg__ for name, kind in CollectKeywords.__annotations__.items()}
    assert kinds == {field.name: field.type for field in OPTIONS}


def test_no_file_name_stands_twice() -> None:
    names = Counter(file.name for file in FILES if file.name != "__init__.py")
    assert not [name for name, number in names.items() if number > 1]


# What others document or read as well, and what belongs to neither torch nor the interpreter.
DE_FACTO_PUBLIC = {"_parameters", "_buffers", "_modules", "_version", "_make", "_replace", "_exit"}
ATEN = {"_local_scalar_dense"}  # an operator, not a name of the library around it
OTHERS = {"lightning.py": {"_batches_that_stepped"}, "torchinfo.py": {"_cached_forward_pass"}}
PRIVATE = {PACKAGE / "interpreter.py", PACKAGE / "tensors" / "private.py"}
# What looks into the interpreter: attributes, functions and modules.
FRAMES = re.compile(r"(f|tb|gi|cr|ag)_(back|builtins|code|frame|globals|lasti|lineno|locals|next)")
INTERPRETER = {
    *("dis", "gc.get_objects", "gc.get_referents", "gc.get_referrers", "inspect.currentframe"),
    *("inspect.stack", "inspect.trace", "sys.getrefcount", "sys.setprofile", "sys.settrace"),
    *("traceback.walk_stack", "traceback.walk_tb"),
}


@cache
def names_defined_in(file: Path) -> set[str]:
    """Return what a file defines or assigns, anywhere."""
    names = set()
    for node in ast.walk(tree_of(file)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            names.add(node.name)
        elif isinstance(node, ast.Attribute | ast.Name) and isinstance(node.ctx, ast.Store):
            names.add(node.attr if isinstance(node, ast.Attribute) else node.id)
    return names


@cache
def own_names() -> set[str]:
    return set[str]().union(*map(names_defined_in, set(FILES) - PRIVATE))


def is_private(node: ast.Attribute, own: set[str]) -> bool:
    is_of_frames = FRAMES.fullmatch(node.attr) or ast.unparse(node) in INTERPRETER
    return bool(is_of_frames or (re.match(r"_[a-zA-Z]", node.attr) and node.attr not in own))


def private_names_of_others(file: Path) -> list[str]:
    own = own_names() | DE_FACTO_PUBLIC | ATEN | OTHERS.get(file.name, set())
    attributes = [
        f"{name_of(file)}:{node.lineno}: {ast.unparse(node)}"
        for node in ast.walk(tree_of(file))
        if isinstance(node, ast.Attribute) and is_private(node, own)
    ]
    return attributes + [
        f"{name_of(file)}:{line}: {module}.{name}"
        for module, name, line in imported(file)
        if module.partition(".")[0] != "scio_recorder"
        and (
            re.search(r"\._[a-z]", f"{module}.{name}") or {module, f"{module}.{name}"} & INTERPRETER
        )
    ]


def test_private_names_of_others_are_in_one_file() -> None:
    others = set(FILES) - PRIVATE
    found = [name for file in others for name in private_names_of_others(file)]
    assert not found, "give these a function in tensors/private.py or interpreter.py"


@pytest.mark.parametrize(
    "line",
    [
        "import dis",
        "from gc import get_referrers",
        "import sys; sys._getframe(1)",
        "import sys; sys.getrefcount(3)",
        "from inspect import currentframe",
        "import inspect; inspect.stack()",
        "import traceback; traceback.walk_stack(None)",
        "import gc; gc.get_objects()",
        *(f"frame.{name}" for name in ("f_back", "f_code", "f_lasti", "f_locals", "f_globals")),
        "error.__traceback__.tb_frame",
        "f().x.f_back",
        "import torch._dynamo",
        "tensor._use_count()",
    ],
)
def test_private_names_are_found(
    line: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(globals(), "PACKAGE", tmp_path)
    (tmp_path / "planted.py").write_text(line)
    assert private_names_of_others(tmp_path / "planted.py")


def body_lines(function: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    """Count from the first statement on: a docstring may take the room that it needs."""
    body = function.body[1:] if ast.get_docstring(function) else function.body
    return (function.end_lineno or 0) - body[0].lineno + 1 if body else 0


def public_module(name: str) -> ModuleType:
    """Import a public module, or skip the test where its extra is not installed."""
    module: ModuleType = pytest.importorskip(name, exc_type=MissingPackageError)
    return module


@pytest.fixture(params=PUBLIC)
def public_objects(request: pytest.FixtureRequest) -> dict[str, Any]:
    """The public names of one module, with what they stand for."""
    module = public_module(request.param)
    return {f"{request.param}.{name}": getattr(module, name) for name in module.__all__}


def documented_parts(name: str, value: Any) -> Iterator[tuple[str, Any]]:
    """Yield a public function or class, and a class's own public methods and properties."""
    if not (inspect.isclass(value) or inspect.isfunction(value)):
        return
    yield name, value
    if inspect.isclass(value):
        for attribute, member in vars(value).items():
            # Tests are called by pytest.
            if not attribute.startswith(("_", "test_")) and (
                inspect.isfunction(member) or isinstance(member, property | classmethod)
            ):
                yield f"{name}.{attribute}", member


def missing_parameters(part: Any) -> list[str]:
    # Not inspect.getdoc, which would take the docstring of a base class.
    text = part.__doc__
    assert text, part
    if isinstance(part, property | classmethod) or issubclass_of_exception(part):
        return []
    parameters = list(inspect.signature(part).parameters)
    return [name for name in parameters if name != "self" and not explained(name, text)]


def test_public_docstrings_name_every_parameter(public_objects: dict[str, Any]) -> None:
    parts = [part for item in public_objects.items() for part in documented_parts(*item)]
    missing = {name: missing_parameters(part) for name, part in parts}
    assert not {name: parameters for name, parameters in missing.items() if parameters}


def explained(parameter: str, docstring: str) -> bool:
    """Whether a line of NumPy form, ``one, other : type`` or ``*args``, introduces it."""
    line = rf"^ *([*\w]+, )*(\*+{parameter}(, [*\w]+)*$|\**{parameter}(, [*\w]+)* : )"
    return bool(re.search(line, docstring, re.MULTILINE))


def issubclass_of_exception(part: Any) -> bool:
    return inspect.isclass(part) and issubclass(part, BaseException)


def test_public_names_are_in_the_documentation(public_objects: dict[str, Any]) -> None:
    text = "\n".join(page.read_text(encoding="utf-8") for page in PAGES)
    missing = [
        name
        for name in public_objects
        if not name.startswith(OF_THE_REFERENCE)
        and not re.search(rf"\b{name.rpartition('.')[2]}\b", text)
    ]
    assert not missing


# Pages that train, generate or compile.
SLOW_PAGES = {"comparing-checkpoints.md", "compiling.md", "diffusion.md", "trainer.md"}
# Packages that pages need and no extra installs.
NEEDED = {"adapters.md": "peft", "feature-maps.md": "torchvision", "timm-features.md": "timm"}
RUN = [
    pytest.param(page, id=page.name, marks=[pytest.mark.campaign] * (page.name in SLOW_PAGES))
    for page in PAGES
    if BLOCK.search(page.read_text(encoding="utf-8"))
]


@pytest.mark.parametrize("page", RUN)
def test_code_of_the_documentation_runs_as_printed(
    page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if page.name in NEEDED:
        pytest.importorskip(NEEDED[page.name])
    monkeypatch.chdir(tmp_path)
    run_page(page, page.read_text(encoding="utf-8"))


@pytest.mark.campaign
def test_grad_cam_on_a_stand_in_for_torchvision(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for name, module in stand_ins.torchvision().items():
        monkeypatch.setitem(sys.modules, name, module)
    page, kept = ROOT / "docs" / "how-to" / "feature-maps.md", list[Any]()
    shown = run_page(page, page.read_text(encoding="utf-8"))
    # By hand, with a hook of torch's own.
    net, image = shown["net"], shown["image"]
    with net.layer4.register_forward_hook(lambda module, args, maps: kept.append(maps)):
        scores = net(image)
    (slopes,) = torch.autograd.grad(scores.amax(), kept[0])
    heat = torch.einsum("ncab,nchw->nhw", slopes, kept[0]).clamp(min=0) / slopes[0, 0].numel()
    assert heat.amax() > 0
    torch.testing.assert_close(shown["heat"][:, 0], heat)


@pytest.mark.parametrize("page", [page for page in HOW_TO if page.stem != "index"])
def test_how_to_pages_begin_with_a_short_program(page: Path) -> None:
    programs = [
        [line for line in source.splitlines() if line]
        for language, source in BLOCK.findall(page.read_text(encoding="utf-8"))
        if language == "python"
    ]
    work = [line for line in programs[0] if not line.startswith(("import ", "from "))]
    assert 0 < len(work) < 10


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_code_fits_its_column(page: Path) -> None:
    # The site's column holds 91 characters, and a narrower window fewer.
    blocks = re.sub(r"^```\{.*?^```$", "", page.read_text(encoding="utf-8"), flags=re.M | re.S)
    code = re.findall(r"^```\w.*?^```$|^ {4}[^\n]*$", blocks, re.MULTILINE | re.DOTALL)
    assert not [line for one in code for line in one.splitlines() if len(line) > 88]


def test_how_it_is_built_names_what_is_there() -> None:
    text = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    files = [f"/{file.relative_to(ROOT)}" for file in ROOT.glob("*/**/*.py")]
    named = set(re.findall(r"`([\w/]+\.py)`", text))
    assert named
    assert not [name for name in named if not any(file.endswith(f"/{name}") for file in files)]
    notes = set(re.findall(r"NOTE \[[^]]+\]", text))
    assert notes
    assert not [note for note in notes if not any(note in file.read_text() for file in FILES)]


def lost_links(page: Path) -> list[str]:
    prose = BLOCK.sub("", page.read_text(encoding="utf-8"))
    links = re.findall(r"\]\(([^)#]+?)(?:#[^)]*)?\)", prose)
    return [link for link in links if "://" not in link and not (page.parent / link).exists()]


def test_links_lead_somewhere() -> None:
    lost = {page.name: lost_links(page) for page in PAGES}
    assert not {page: links for page, links in lost.items() if links}


@cache
def project() -> dict[str, Any]:
    loaded: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    return loaded


def test_the_tested_set_covers_every_extra() -> None:
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    pins = dict(line.split("==") for line in lines if line and not line.startswith("#"))
    versions = {canonicalize_name(name): version for name, version in pins.items()}
    extras = project()["optional-dependencies"].values()
    wanted = [Requirement(line) for lines in (project()["dependencies"], *extras) for line in lines]
    for requirement in wanted:
        name = canonicalize_name(requirement.name)
        if name != project()["name"]:
            assert requirement.specifier.contains(versions[name]), requirement
    # A local version would exist on one index only; the others come with a GPU build of torch.
    assert not [name for name in versions if "+" in versions[name] or "nvidia" in name]
    assert list(versions) == sorted(versions)


def test_commands_are_the_same_everywhere() -> None:
    readme = (ROOT / "README.md").read_text()
    install = 'pip install -c constraints.txt -e ".[dev]"'
    assert f"`{install} && pytest`" in readme
    assert '`pip install -c constraints.txt -e ".[demo]" && scio-recorder demo`' in readme
    assert install.removeprefix("pip install") in (ROOT / ".ci" / "run").read_text()
    assert install in (ROOT / "CONTRIBUTING.md").read_text()


def test_version_is_the_same_everywhere() -> None:
    assert f"\n## [{project()['version']}]" in (ROOT / "CHANGELOG.md").read_text()
    citation = (ROOT / "CITATION.cff").read_text().splitlines()
    assert f"version: {project()['version']}" in citation
