# SPDX-License-Identifier: Apache-2.0
"""The rules of the house that a machine can check: layering, sizes, tree, no private paths."""

import ast
import graphlib
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
ROOMS = ("fused_ops", "models", "pretrain", "tools")  # a room may import those before it
MAX_LINES, MAX_KERNEL_LINES, MAX_FUNCTION_LINES, MAX_ARGUMENTS = 500, 700, 60, 8
# (importer, imported) of imports that may close a circle: why the two cannot do without each other.
HONEST_CIRCLES: dict[tuple[str, str], str] = {}
# What fused_ops may import anywhere; other packages only inside a function of a back-end file.
FUSED_OPS_ALLOWED = {"torch", "fused_ops"} | set(sys.stdlib_module_names)
OPTIONAL = {"triton", "transformer_engine", "mamba_ssm", "causal_conv1d", "apex", "nvmath"}


def sources(*rooms: str) -> list[Path]:
    return sorted(p for room in rooms for p in (ROOT / room).rglob("*.py"))


def imports(tree: ast.AST) -> list[tuple[int, str, bool]]:
    """(line, absolute module name, is inside a function) of every import."""
    found = []

    def visit(node: ast.AST, inside: bool) -> None:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.Import):
                found.extend((child.lineno, a.name, inside) for a in child.names)
            elif isinstance(child, ast.ImportFrom):
                assert child.level == 0, f"relative import at line {child.lineno}"
                found.append((child.lineno, child.module or "", inside))
            function = isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
            visit(child, inside or function)

    visit(tree, False)
    return found


def where(path: Path, line: int) -> str:
    return f"{path.relative_to(ROOT)}:{line}"


def test_imports_flow_one_way():
    wrong = []
    for index, room in enumerate(ROOMS):
        allowed = set(ROOMS[: index + 1])
        for path in sources(room):
            for line, name, _ in imports(ast.parse(path.read_text())):
                top = name.split(".")[0]
                if top in ROOMS and top not in allowed:
                    wrong.append(f"{where(path, line)}: {room} imports {name}")
                own = path.relative_to(ROOT).parts[1]  # a tool that is a package has parts
                if top == "tools" and room == "tools" and name.split(".")[1:2] not in ([], [own]):
                    wrong.append(f"{where(path, line)}: nothing imports a tool ({name})")
    assert not wrong, "\n".join(wrong)


def imported_files(path: Path, files: dict[str, str]) -> set[str]:
    """Those of `files` (by module name) that a file names in imports, be it for types alone."""
    found: set[str | None] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {files.get(alias.name) for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            for alias in node.names:
                found.add(files.get(f"{node.module}.{alias.name}", files.get(node.module or "")))
    return {name for name in found if name} - {str(path.relative_to(ROOT))}


def circles(graph: dict[str, set[str]]) -> list[str]:
    """A circle of importers, a line each, until none is left; takes its imports from `graph`."""
    found: list[str] = []
    while True:
        try:
            graphlib.TopologicalSorter(graph).prepare()
            return found
        except graphlib.CycleError as error:
            circle = error.args[1][::-1]
            found.append(" -> ".join(circle))
            graph[circle[0]].remove(circle[1])


def test_no_file_imports_one_that_imports_it():
    paths = {str(path.relative_to(ROOT)): path for path in sources(*ROOMS)}
    files = {name.removesuffix(".py").replace("/", "."): name for name in paths}
    files |= {n.removesuffix(".__init__"): f for n, f in files.items() if n.endswith(".__init__")}
    graph = {name: imported_files(path, files) for name, path in paths.items()}
    assert sum(map(len, graph.values())) > len(graph), "imports are no longer found"
    for importer, imported in HONEST_CIRCLES:
        assert imported in graph[importer], f"{importer} no longer imports {imported}"
        graph[importer].remove(imported)
    found = circles(graph)
    assert not found, "what both need goes into a file below both:\n" + "\n".join(found)


def test_fused_ops_needs_torch_alone():
    wrong = []
    for path in sources("fused_ops"):
        for line, name, inside in imports(ast.parse(path.read_text())):
            top = name.split(".")[0]
            if top in FUSED_OPS_ALLOWED:
                continue
            back_end = path.stem.endswith(("_backend", "_kernels")) or path.stem in (
                "hopper",
                "blackwell",
            )
            if not (top in OPTIONAL and (inside or back_end)):
                wrong.append(f"{where(path, line)}: {name}")
    assert not wrong, "\n".join(wrong)
    code = (
        "import sys, fused_ops, fused_ops.linear, fused_ops.grouped_linear, fused_ops.quantize\n"
        "bad = {'megatron', 'pydantic', 'yaml', 'wandb', 'triton'} & set(sys.modules)\n"
        "assert not bad, bad"
    )
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True, timeout=400)


@pytest.mark.parametrize(
    ("package", "rooms", "only"),
    [
        ("megatron", ("models", "pretrain", "tools"), None),
        ("wandb", ("pretrain",), "pretrain/metrics.py"),
    ],
)
def test_engine_and_sinks_stay_in_their_place(package, rooms, only):
    wrong = []
    for path in sources(*ROOMS):
        relative = str(path.relative_to(ROOT))
        for line, name, _ in imports(ast.parse(path.read_text())):
            if name.split(".")[0] != package:
                continue
            if relative.split("/")[0] not in rooms or (only and relative != only):
                wrong.append(f"{where(path, line)}: {name}")
    assert not wrong, "\n".join(wrong)


def test_sizes():
    wrong = []
    for path in sources(*ROOMS, "tests"):
        text = path.read_text()
        limit = MAX_KERNEL_LINES if "_kernels" in path.stem or path.stem == "hopper" else MAX_LINES
        lines = text.count("\n")
        if lines > limit:
            wrong.append(f"{path.relative_to(ROOT)}: {lines} lines (limit {limit})")
        if path.relative_to(ROOT).parts[0] == "tests":
            continue
        for node in ast.walk(ast.parse(text)):
            if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                continue
            length = (node.end_lineno or node.lineno) - node.lineno + 1
            arguments = len(node.args.args) + len(node.args.kwonlyargs) + len(node.args.posonlyargs)
            if node.args.args and node.args.args[0].arg in ("self", "cls", "ctx"):
                arguments -= 1
            kernel = any("jit" in ast.unparse(d) for d in node.decorator_list)
            autograd = node.name in ("forward", "_forward_impl")  # signatures of others
            if length > MAX_FUNCTION_LINES and not kernel:
                wrong.append(f"{where(path, node.lineno)}: {node.name} has {length} lines")
            if arguments > MAX_ARGUMENTS and not (kernel or autograd or upstream(node)):
                wrong.append(f"{where(path, node.lineno)}: {node.name} takes {arguments}")
    assert not wrong, "\n".join(wrong)


def upstream(node: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    """Whether the docstring says that the signature is fixed by another library."""
    return "signature: " in (ast.get_docstring(node) or "").lower()


def test_every_source_has_a_licence_line_and_no_relative_paths():
    missing = [
        str(p.relative_to(ROOT))
        for p in sources(*ROOMS, "tests")
        if not p.read_text().startswith("# SPDX-License-Identifier: Apache-2.0\n")
    ]
    assert not missing, missing


def tracked() -> list[str]:
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True)
    return [f for f in listed.stdout.split("\n") if f and (ROOT / f).exists()]


def test_readme_tree_lists_every_source():
    if not tracked():
        pytest.skip("not a git checkout, so there is no list of tracked files")
    readme = (ROOT / "README.md").read_text()
    missing = [
        f
        for f in tracked()
        if f.split("/")[0] in ROOMS and f.endswith((".py", ".sh")) and "__init__" not in f
        if f"{Path(f).name}" not in readme
    ]
    assert not missing, f"not in the README's tree: {missing}"


def test_no_machine_speaks_from_the_repository():
    # Assembled so that this file does not contain what it looks for.
    private = re.compile(
        "|".join([r"(?<![\w.])/" + "work/", r"(?<![\w.])/" + "root/", "/opt/" + "pypi"])
    )
    wrong = []
    for name in tracked():
        path = ROOT / name
        if path.suffix in (".png", ".npz", ".pt", ".zst"):
            continue
        for number, line in enumerate(path.read_text(errors="replace").split("\n"), 1):
            if private.search(line):
                wrong.append(f"{name}:{number}: {line.strip()[:80]}")
    assert not wrong, "\n".join(wrong)


def test_every_skip_gives_its_reason():
    wrong = []
    for path in sources("tests"):
        for node in ast.walk(ast.parse(path.read_text())):
            if not isinstance(node, ast.Call):
                continue
            name = ast.unparse(node.func)
            if name.endswith(("mark.skip", "mark.skipif", "mark.xfail")):
                ok = any(k.arg == "reason" for k in node.keywords)
            elif name in ("pytest.skip", "pytest.xfail"):
                ok = bool(node.args or node.keywords)
            else:
                continue
            if not ok:
                wrong.append(where(path, node.lineno))
    assert not wrong, "\n".join(wrong)
