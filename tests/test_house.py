"""The house keeps its shape: rooms import downwards, without circles, and private torch stays in `stepgraph.compat`.

Imports are read from the source, so that those inside functions and under ``TYPE_CHECKING`` count too.
"""

import ast
import functools
import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).parents[1]
#: From the top down; a room imports from those below it. A file next to the rooms is a room of its own.
ROOMS = (
    *(
        "__main__",
        "cli",
        "train",
        "bench",
        "inspect",
        "integrations",
        "config",
        "step",
        "verify",
        "lower",
        "run",
        "passes",
        "parallel",
        "capture",
    ),
    *("costs", "inductor", "graph", "models", "kernels", "compat", "regions", "cache", "options", "errors"),
)
#: What torch has no public name for and keeps from version to version: the foreach functions, and the classes of what
#: a node of a graph calls. Operators (``torch.ops.aten._to_copy``) are public by their schema.
PUBLIC_BY_USE = ("torch.ops.", "torch._foreach_", "torch._ops.OpOverload", "torch._ops.HigherOrderOperator")
#: Lines of Python in stepgraph/, all together. It only falls, but for what an issue asks for.
BUDGET = 77_285
#: Decorators of functions whose types their operator's schema has, or that Triton compiles.
TYPED_ELSEWHERE = ("triton.", "torch.library.", "register_sharding", "rnn_layer.register_fake")

#: What no sentence of stepgraph/, docs/ or README.md says, and what it says instead.
IDIOMS = {
    r"\banew\b|\b(is|was) made new\b": "again, from scratch",
    r"(?<!if) beside (?!is )\w": "next to, compared with",
    r"\bso many(?! as| that)\b": "this many, N",
    r"\bst(and|ands|ood) for\b": "is, replaces, is represented by",
    r"\bgo(es|ing)? on\b|\bwent on\b": "continues",
    r"\b(is|are|was|were|be) told\b|\btells? (which|what|whether|how|apart|of)\b": "reports, says, shows",
    r"\bmend(s|ed)?\b": "fix",
    r"\blikeliest\b": "most likely",
    r"\bof (now|then)\b": "current, earlier",
    r"\b(one|once|twice|times|copy) a (step|rank|device|row|token|block|layer|GPU|process)\b": "per",
    r'(#:?|""") *Of (a|an|the|its|each|all|one|two|what|which|those|these|several|every)\b': "a sentence with a verb",
}


class Import(NamedTuple):
    """``module`` imports ``target``, both modules of stepgraph; ``where``: file, line and source."""

    module: str
    target: str
    where: str


def modules(root: Path) -> dict[str, Path]:
    """Every module of stepgraph under ``root``, by its name."""
    files = sorted((root / "stepgraph").rglob("*.py"))
    names = [".".join(file.relative_to(root).with_suffix("").parts).removesuffix(".__init__") for file in files]
    return dict(zip(names, files, strict=True))


@functools.cache
def nodes(source: str) -> list[ast.AST]:
    """The whole tree of a file, in ``ast.walk``'s order; each is parsed once for all rules."""
    return list(ast.walk(ast.parse(source)))


@functools.cache
def lines(source: str) -> list[str]:
    return source.splitlines()


def quoted(root: Path, file: Path, line: int) -> str:
    return f"{file.relative_to(root)}:{line}: {lines(file.read_text())[line - 1].strip()}"


def absolute(node: ast.ImportFrom, module: str, file: Path) -> str:
    """The module that ``from ... import`` names, dots in front resolved."""
    if not node.level:
        return node.module
    package = module.split(".") if file.name == "__init__.py" else module.split(".")[:-1]
    above = package[: len(package) - node.level + 1]
    return ".".join([*above, *filter(None, [node.module])])


def imports(root: Path) -> Iterator[Import]:
    """Every import of one module of stepgraph by another."""
    known = modules(root)
    for module, file in known.items():
        for node in nodes(file.read_text()):
            if isinstance(node, ast.ImportFrom):
                base = absolute(node, module, file)
                names = [f"{base}.{a.name}" if f"{base}.{a.name}" in known else base for a in node.names]
            elif isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            else:
                continue
            for name in dict.fromkeys(names):
                if name.split(".")[0] == "stepgraph" and name != module:
                    yield Import(module, name, quoted(root, file, node.lineno))


def room(module: str) -> str:
    """``stepgraph`` itself is the public entry, at the height of step.py."""
    return module.split(".")[1] if "." in module else "step"


def upward_imports(root: Path) -> list[str]:
    unlisted = sorted({room(module) for module in modules(root)} - set(ROOMS))
    problems = [f"stepgraph/{name}: no room of ROOMS" for name in unlisted]
    for module, target, where in imports(root):
        if module == "stepgraph":  # it names what is public, of any room
            continue
        above, below = room(module), room(target)
        if not {above, below} & set(unlisted) and ROOMS.index(below) < ROOMS.index(above):
            problems.append(f"{where}: {above} may not import from {below}, which is above it")
    return problems


def circles(root: Path) -> list[str]:
    """The imports that lead from a module back to itself, by way of others."""
    edges: dict[str, dict[str, str]] = {module: {} for module in modules(root)}
    for module, target, where in imports(root):
        edges[module].setdefault(target, where)

    def reachable(start: str) -> set[str]:
        found, pending = set(), [start]
        while pending:
            for target in edges.get(pending.pop(), ()):
                if target not in found:
                    found.add(target)
                    pending.append(target)
        return found

    reach = {module: reachable(module) for module in edges}
    return [
        f"{where}: {target} imports {module} in turn, perhaps by way of others"
        for module, targets in edges.items()
        for target, where in targets.items()
        if module in reach.get(target, ())
    ]


def imports_between_passes(root: Path) -> list[str]:
    """Folders of passes/ that import each other, and passes that import the order that names them."""

    def folder(module: str) -> str | None:
        parts = module.split(".")
        inside = len(parts) > 2 and parts[1] == "passes" and (root / Path(*parts[:3])).is_dir()
        return parts[2] if inside else None

    problems = []
    for module, target, where in imports(root):
        if folder(module) is None:
            continue
        if target == "stepgraph.passes.order":
            problems.append(f"{where}: a pass may not import the order of passes")
        elif folder(target) not in (None, folder(module)):
            problems.append(f"{where}: passes/{folder(module)} may not import from passes/{folder(target)}")
    return problems


def private_torch(root: Path) -> list[str]:
    """Names of torch with an underscore in front, imported or read, and comparisons of its version, outside compat."""
    problems = []
    for module, file in modules(root).items():
        if room(module) == "compat":
            continue
        for name, line in sorted(torch_names(nodes(file.read_text())), key=lambda found: found[1]):
            private = any(part.startswith("_") and not part.startswith("__") for part in name.split("."))
            if private and not name.startswith(PUBLIC_BY_USE):
                problems.append(
                    f"{quoted(root, file, line)}: {name} is private to torch: read it from stepgraph.compat"
                )
        for node in nodes(file.read_text()):
            if isinstance(node, ast.Attribute) and node.attr == "TORCH":
                line = quoted(root, file, node.lineno)
                problems.append(f"{line}: compare torch's version in stepgraph.compat: name there what differs")
    return problems


def torch_names(tree: list[ast.AST]) -> set[tuple[str, int]]:
    """(name in full, line) of whatever a file imports or reads of torch, whatever it calls torch's modules."""
    bound, found = {"torch": "torch"}, set()
    for node in tree:
        if isinstance(node, ast.Import):
            names = {alias.asname or alias.name.split(".")[0]: alias for alias in node.names}
            bound |= {name: alias.name if alias.asname else name for name, alias in names.items()}
            found |= {(alias.name, node.lineno) for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            bound |= {alias.asname or alias.name: f"{node.module}.{alias.name}" for alias in node.names}
            found |= {(f"{node.module}.{alias.name}", node.lineno) for alias in node.names}
    inner = {id(node.value) for node in tree if isinstance(node, ast.Attribute)}
    for node in tree:
        if isinstance(node, ast.Attribute) and id(node) not in inner:
            line, parts = node.lineno, []
            while isinstance(node, ast.Attribute):
                parts.append(node.attr)
                node = node.value
            if isinstance(node, ast.Name) and node.id in bound:
                found.add((".".join([bound[node.id], *reversed(parts)]), line))
    return {(name, line) for name, line in found if name.split(".")[0] == "torch"}


#: What traces a step or rewrites its graphs, with the rooms that may call it: their own and `lower`, which everybody
#: else calls.
LOWERING = {"trace_step": ("capture", "lower"), "run_passes": ("passes", "lower")}


def lowering_elsewhere(root: Path) -> list[str]:
    """Uses of what traces a step or rewrites its graphs outside the one room for it."""
    problems = []
    for module, file in modules(root).items():
        for node in nodes(file.read_text()):
            if isinstance(node, ast.ImportFrom):
                names = [alias.name for alias in node.names]
            else:
                names = (
                    [node.id] if isinstance(node, ast.Name) else [node.attr] if isinstance(node, ast.Attribute) else []
                )
            problems += [
                f"{quoted(root, file, node.lineno)}: only stepgraph.lower calls {name}: call `lower` with a StepSpec"
                for name in names
                if name in LOWERING and room(module) not in LOWERING[name]
            ]
    return problems


def over_budget(root: Path) -> list[str]:
    count = sum(len(lines(file.read_text())) for file in modules(root).values())
    print(f"stepgraph/: {count:,} lines of a budget of {BUDGET:,}")
    return [f"stepgraph/ has {count:,} lines, more than its budget of {BUDGET:,}"] if count > BUDGET else []


def untyped(root: Path) -> list[str]:
    """Functions with a parameter or a result that has no annotation."""
    return [
        f"{quoted(root, file, node.lineno)}: annotate every parameter and the result"
        for file in modules(root).values()
        for node in nodes(file.read_text())
        if isinstance(node, ast.FunctionDef) and _is_untyped(node)
    ]


def _is_untyped(node: ast.FunctionDef) -> bool:
    if any(ast.unparse(decorator).startswith(TYPED_ELSEWHERE) for decorator in node.decorator_list):
        return False
    given = node.args
    arguments = [*given.posonlyargs, *given.args, *given.kwonlyargs, given.vararg, given.kwarg]
    named = [one for one in arguments if one is not None and one.arg not in ("self", "cls", "_")]
    return (node.returns is None and node.name != "__init__") or any(one.annotation is None for one in named)


def idioms(root: Path) -> list[str]:
    """Phrases that a hurried reader stumbles over."""
    any_of, problems = re.compile("|".join(f"(?:{idiom})" for idiom in IDIOMS)), []
    for file in [*modules(root).values(), *(root / "docs").glob("*.md"), *root.glob("README.md")]:
        for number, line in enumerate(file.read_text().splitlines(), 1):
            if found := any_of.search(line):
                better = next(words for idiom, words in IDIOMS.items() if re.search(idiom, line))
                problems.append(f"{file.relative_to(root)}:{number}: {found[0].strip()!r}; say: {better}")
    return problems


def hidden_in_compat(root: Path) -> list[str]:
    """Names that two files of compat bind to different things: ``compat.NAME`` has every public name of its files."""
    homes: dict[str, set[str]] = {}
    for module, file in modules(root).items():
        if room(module) == "compat" and module.count(".") == 2:
            for node in ast.parse(file.read_text()).body:
                for name, home in _bound(node, module):
                    homes.setdefault(name, set()).add(home)
    defined = {name for name, found in homes.items() if any(home.startswith("stepgraph.") for home in found)}
    return [
        f"compat.{n} is {' or '.join(sorted(homes[n]))}" for n in sorted(defined) if len(homes[n]) > 1 and n[0] != "_"
    ]


def _bound(node: ast.AST, module: str) -> Iterator[tuple[str, str]]:
    """(name, what it is in full) of each name that a line of ``module`` binds."""
    if isinstance(node, ast.ImportFrom):
        yield from ((a.asname or a.name, f"{node.module}.{a.name}") for a in node.names)
    elif isinstance(node, ast.Import):
        yield from ((a.asname or a.name.split(".")[0], a.name) for a in node.names)
    elif isinstance(node, ast.FunctionDef | ast.ClassDef):
        yield node.name, f"{module}.{node.name}"
    elif isinstance(node, ast.Assign | ast.AnnAssign):
        targets = node.targets if isinstance(node, ast.Assign) else [node.target]
        yield from (
            (name.id, f"{module}.{name.id}") for t in targets for name in ast.walk(t) if isinstance(name, ast.Name)
        )


RULES = (
    *(upward_imports, circles, imports_between_passes, private_torch, lowering_elsewhere, over_budget, untyped),
    *(idioms, hidden_in_compat),
)


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
def test_the_house_keeps(rule):
    problems = rule(ROOT)
    assert not problems, "\n" + "\n".join(problems)


def test_every_import_is_seen():
    """What the rules say of this tree rests on imports that are found at all."""
    found = {(i.module, i.target) for i in imports(ROOT)}
    assert ("stepgraph.capture.recorder", "stepgraph.compat") in found  # from stepgraph import compat
    assert ("stepgraph.cli", "stepgraph.train.trainer") in found  # inside a function
    assert len(modules(ROOT)) > 150 and len(found) > 500


# ---- each rule fails where it should, on trees made up for it ----


def tree(root: Path, **files: str) -> Path:
    """A house of ``files``; in their names two underscores are a folder's slash."""
    for name, text in files.items():
        file = root / "stepgraph" / f"{name.replace('__', '/')}.py"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
        for folder in file.relative_to(root).parents:
            if folder != Path("."):
                (root / folder / "__init__.py").touch()
    return root


@pytest.mark.parametrize(
    "text",
    [
        "from stepgraph.passes.order import default",
        "from stepgraph.passes import order",
        "import stepgraph.passes.order",
        "from ..passes import order",
        "def f():\n    from stepgraph.passes import order",
        "if TYPE_CHECKING:\n    from stepgraph.passes.order import default",
        "import stepgraph",
    ],
)
def test_an_import_of_a_room_above_is_refused(text, tmp_path):
    root = tree(tmp_path, graph__facts=text, passes__order="")
    (problem,) = upward_imports(root)
    assert (
        f"facts.py:{len(text.splitlines())}: {text.splitlines()[-1].strip()}" in problem and "graph may not" in problem
    )


def test_imports_of_rooms_below_and_of_ones_own_are_welcome(tmp_path):
    text = "import stepgraph\nfrom stepgraph import compat\nfrom stepgraph.bench.rows import align"
    root = tree(tmp_path, bench__step__command=text, bench__rows="align = 1", compat__fake="", errors="")
    assert [rule(root) for rule in RULES] == [[]] * len(RULES)


def test_a_room_that_is_not_listed_is_refused(tmp_path):
    assert upward_imports(tree(tmp_path, attic__trunk="")) == ["stepgraph/attic: no room of ROOMS"]


@pytest.mark.parametrize(
    "back", ["from stepgraph.graph import a", "def f():\n    from stepgraph.graph.a import x", "from .a import x"]
)
def test_a_circle_is_refused(back, tmp_path):
    root = tree(
        tmp_path, graph__a="from stepgraph.graph.b import y", graph__b="import stepgraph.graph.c", graph__c=back
    )
    problems = circles(root)
    assert len(problems) == 3 and "graph/a.py:1: from stepgraph.graph.b import y" in problems[0]
    (root / "stepgraph/graph/c.py").write_text("")
    assert circles(root) == []


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("from stepgraph.passes.memory.recompute import x", "norm may not import from passes/memory"),
        (
            "def f():\n    from stepgraph.passes.memory import recompute",
            "norm may not import from passes/memory",
        ),
        ("from stepgraph.passes import order", "a pass may not import the order"),
        ("from stepgraph.passes.contract import register\nfrom stepgraph.passes.norm.match import y", None),
    ],
)
def test_folders_of_passes_do_not_know_each_other(text, why, tmp_path):
    files = {"passes__norm__match": "", "passes__memory__recompute": "", "passes__order": "", "passes__contract": ""}
    problems = imports_between_passes(tree(tmp_path, **files | {"passes__norm__fuse": text}))
    assert [why in problem for problem in problems] == ([True] if why else [])


@pytest.mark.parametrize(
    "text",
    [
        "import torch._dynamo",
        "from torch._inductor import config",
        "from torch import _inductor",
        "from torch.utils import _pytree as pytree",
        "from torch.testing._internal.common import x",
        "import torch\nx = torch._C._len_torch_dispatch_stack()",
        "import torch.distributed as dist\nx = dist._resolve(1)",
        "from torch import fx\nx = fx.graph._Namespace",
        "from stepgraph import compat\nx = compat.TORCH < (2, 13)",
    ],
)
def test_private_torch_is_for_compat_alone(text, tmp_path):
    (problem,) = private_torch(tree(tmp_path, graph__facts=text))
    assert text.splitlines()[-1] in problem
    assert private_torch(tree(tmp_path, graph__facts="", compat__fake=text)) == []


def test_a_name_of_compat_that_another_file_hides_is_refused(tmp_path):
    root = tree(tmp_path, compat__fake="def fake(): ...", compat__tracing="from torch._subclasses import fake")
    (problem,) = hidden_in_compat(root)
    assert problem == "compat.fake is stepgraph.compat.fake.fake or torch._subclasses.fake"


@pytest.mark.parametrize(
    "text",
    [
        "import torch\nx = torch.__version__, torch._foreach_norm, torch.ops.aten._to_copy.default",
        "import torch\nisinstance(x, torch._ops.OpOverload)",
        "import other\nx = other._private",
    ],
)
def test_what_is_public_by_use_is_allowed(text, tmp_path):
    assert private_torch(tree(tmp_path, graph__facts=text)) == []


@pytest.mark.parametrize(
    "text", ["from stepgraph.capture import trace_step", "x = trace_step(1)", "f = passes.run_passes"]
)
def test_only_lower_traces_and_rewrites(text, tmp_path):
    (problem,) = lowering_elsewhere(tree(tmp_path, verify__locate=text))
    assert text in problem and "only stepgraph.lower calls" in problem
    assert lowering_elsewhere(tree(tmp_path / "allowed", lower__lowering=text)) == []


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("def f(x: int, *_) -> int: ...\nclass A:\n    def __init__(self, x: int): ...", 0),
        ("@triton.jit\ndef f(x): ...\n@torch.library.register_fake('a::b')\ndef g(x): ...", 0),
        ("def f(x) -> int: ...\ndef g(x: int): ...\ndef h(*args) -> int: ...", 3),
    ],
)
def test_functions_without_types_are_refused(text, count, tmp_path):
    assert len(untyped(tree(tmp_path, costs__table=text))) == count


def test_lines_over_budget_are_refused(tmp_path):
    root = tree(tmp_path, costs__table="x = 1\n" * BUDGET)
    assert over_budget(root) == []
    tree(root, costs__table="x = 1\n" * (BUDGET + 1))
    assert f"{BUDGET + 1:,} lines" in over_budget(root)[0]


@pytest.mark.parametrize(
    "text",
    [
        '"""Of each lane: where it begins."""',
        "x = 1  # once a step",
        "raise ValueError(f'{x} stands for nothing')",
        "#: What is told\nx = 1",
    ],
)
def test_idioms_are_refused(text, tmp_path):
    (problem,) = idioms(tree(tmp_path, costs__table=text))
    assert problem.startswith("stepgraph/costs/table.py:1: ") and "; say: " in problem
    assert idioms(tree(tmp_path, costs__table="stands_for = told = 1  # often, next to it")) == []
