"""Allowed imports: lower floors inside kvjax, declared dependencies outside."""

import ast
import re
import sys
import tomllib
from collections.abc import Iterator
from functools import cache
from importlib import metadata
from pathlib import Path

import pytest

from tests.packaging.test_distribution import modules

ROOT = Path(__file__).resolve().parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())

# From the lowest floor to the highest. A module imports lower floors only, and modules of its own
# folder. A new module of kvjax needs a place here, or its folder has one. The longest name counts.
ORDER = (
    ("validation", "received"),
    ("spec", "memory", "compiling", "cache.serialize", "presets.parsing"),
    ("numerics",),
    ("ops", "sharding.context", "kernels_pallas.simt"),
    ("selectors", "stores", "sharding.placement"),
    ("evictors", "selectors.planes"),
    ("sharding.context.selectors", "sharding.context.shares", "sharding.context.stores"),
    ("policies",),
    ("cache", "call", "attention", "presets", "steps", "sharding.exchanges"),
    ("contrib", "generation", "testing", "cache.growing", "cache.saving", "recurrence"),
    ("models", "serve"),
    ("evaluate",),
    ("cli",),
    ("__main__",),
)
FLOORS = {name: floor for floor, names in enumerate(ORDER) for name in names}
SAME_FLOOR = {
    ("ops", "kernels_pallas"),  # dispatch
    ("call", "cache"),
    ("attention", "cache"),
    ("attention", "call"),
    ("steps", "cache"),
    ("steps", "call"),
}
# `import kvjax` itself: what the package's __init__ may gather, for those above the models
FACADE = FLOORS["models"] - 1
# What stands on the core. The core, all other modules, imports none of it.
BESIDE = ("contrib", "generation", "serve", "models", "testing", "evaluate", "cli", "__main__")


def sources() -> dict[str, Path]:
    """Every module of the package, by its name when installed."""
    found = {}
    for name in modules():
        parts = Path(name).with_suffix("").parts
        found[".".join(parts).removesuffix(".__init__")] = ROOT / name
    return found


SOURCES = sources()


def nodes(tree: ast.AST, types: bool) -> Iterator[ast.AST]:
    """A tree's nodes; without `types`, not what only a type checker reads."""
    yield tree
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING" and not types:
            for run in node.orelse:
                yield from nodes(run, types)
        else:
            yield from nodes(node, types)


@cache
def imports(module: str, *, types: bool = False) -> set[str]:
    """Absolute names of what a module imports, wherever in it; kvjax's own down to the module.

    With `types` also what it imports for a type checker alone.
    """
    path, found = SOURCES[module], set()
    package = module if path.name == "__init__.py" else module.rpartition(".")[0]
    for node in nodes(ast.parse(path.read_text()), types):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                above = package.split(".")[: len(package.split(".")) - node.level + 1]
                base = ".".join((*above, *filter(None, [base])))
            for alias in node.names:
                name = f"{base}.{alias.name}"
                found.add(name if name in SOURCES else base)
    return found


def part(module: str) -> str:
    """spec of kvjax.spec, selectors of kvjax.selectors.fier, and kvjax of the package itself."""
    return module.split(".")[1] if "." in module else module


def floor(module: str) -> int:
    """The floor of the longest name in FLOORS that begins the module's."""
    names = module.split(".")[1:]
    prefixes = (".".join(names[:n]) for n in range(len(names), 0, -1))
    found = next((FLOORS[p] for p in prefixes if p in FLOORS), None)
    assert found is not None, f"{module} has no floor yet; give it one in {Path(__file__).name}"
    return found


def ours(module: str) -> set[str]:
    """Modules of kvjax that a module imports when it runs."""
    return {name for name in imports(module) if name == "kvjax" or name.startswith("kvjax.")}


def typed(module: str) -> set[str]:
    """As `ours`, with those that it imports for a type checker alone."""
    found = imports(module, types=True)
    return {name for name in found if name == "kvjax" or name.startswith("kvjax.")}


def named_in_text(module: str) -> set[str]:
    """Modules of kvjax whose names are arguments of `import_module`."""
    calls = [
        node
        for node in ast.walk(ast.parse(SOURCES[module].read_text()))
        if isinstance(node, ast.Call) and ast.unparse(node.func).endswith("import_module")
    ]
    texts = [arg.value for call in calls for arg in call.args if isinstance(arg, ast.Constant)]
    return {text for text in texts if str(text).startswith("kvjax.")}


@pytest.mark.parametrize(
    "module", [m for m in SOURCES if part(m) not in ("kvjax", "kernels_pallas")]
)
def test_a_module_imports_lower_floors_only(module):
    own, package = part(module), module if SOURCES[module].name == "__init__.py" else ""
    for name in ours(module):
        target = part(name)
        inside = target == own and (package == f"kvjax.{own}" or floor(name) <= floor(module))
        if inside or (own, target) in SAME_FLOOR:
            continue
        reached = FACADE if target == "kvjax" else floor(name)
        assert reached < floor(module), (
            f"{module} (floor {floor(module)}) imports {name} (floor {reached})"
        )


CORE = [module for module in SOURCES if part(module) not in ("kvjax", *BESIDE)]


@pytest.mark.parametrize("module", CORE)
def test_core_imports_nothing_that_stands_on_it(module):
    """By an import in any function, by the name of a module in text, or for a type checker, which
    reads `kvjax.presets` alone for the presets of contrib."""
    found = ours(module) if module == "kvjax.presets" else typed(module)
    for name in {*found, *named_in_text(module)}:
        assert part(name) not in ("kvjax", *BESIDE), f"{module} imports {name}"


def test_what_stands_on_the_core_does_not_import_back():
    for module in SOURCES:
        stands = part(module) not in ("kvjax", "presets") and module not in CORE
        for name in typed(module):
            above = part(name) == "contrib" and part(module) != "contrib"
            assert not (stands and above), f"{module} imports {name}; ask kvjax.presets for it"


def test_no_modules_import_one_another_in_a_circle():
    """Nor for a type checker; the two packages that gather names for a checker are left out."""
    gathers = ("kvjax", "kvjax.presets")
    after = {
        module: {name for name in typed(module) if name in SOURCES and name not in gathers}
        for module in SOURCES
        if module not in gathers
    }
    # Modules that import none of the others, or that none of the others imports, are in no circle.
    while outside := {
        module
        for module, names in after.items()
        if not names & set(after) - {module}
        or not any(module in names for other, names in after.items() if other != module)
    }:
        for module in outside:
            del after[module]
    assert not after, f"these import one another in a circle: {sorted(after)}"


def test_kernels_import_jax_only():
    for module in SOURCES:
        if part(module) == "kernels_pallas":
            inside = {name for name in ours(module) if part(name) != "kernels_pallas"}
            outside = third_party(module)
            assert not inside, f"{module} imports {inside}"
            assert outside <= {"jax", "jaxlib"}, f"{module} imports {outside}"


def third_party(module: str) -> set[str]:
    own = {*sys.stdlib_module_names, "kvjax", "kvjax_command"}
    return {name.partition(".")[0] for name in imports(module, types=True)} - own


def normal(requirement: str) -> str:
    """The normalised name in a requirement."""
    return re.sub(r"[-_.]+", "-", re.match(r"[\w.-]+", requirement)[0]).lower()


def test_every_import_is_a_declared_dependency():
    needed, extras = (
        PROJECT["project"]["dependencies"],
        PROJECT["project"]["optional-dependencies"],
    )
    owners = metadata.packages_distributions()
    for module in SOURCES:
        own = [
            *(extras["eval"] if part(module) in ("evaluate", "cli") else ()),
            *extras.get(module.split(".")[-1], ()),
        ]
        declared = {normal(r) for r in (*needed, *own)}
        for name in third_party(module):
            distributions = {normal(d) for d in owners.get(name, [name])}
            assert distributions & declared, (
                f"{module} imports {name} of {distributions}, which is not declared"
            )


def test_every_declared_dependency_is_imported():
    owners = metadata.packages_distributions()
    used = {
        normal(d)
        for module in SOURCES
        for name in third_party(module)
        for d in owners.get(name, [name])
    }
    unseen = {
        "jinja2",  # transformers needs it for chat templates, and does not declare it
        "jaxlib",  # comes with jax; named since both are pinned together
    }
    assert {normal(r) for r in PROJECT["project"]["dependencies"]} - used <= unseen


def test_constraints_pin_what_is_declared():
    """CI tests exact versions; what the constraints miss would be whatever is newest that day."""
    extras = PROJECT["project"]["optional-dependencies"]
    named = (
        *PROJECT["project"]["dependencies"],
        *(r for e in ("test", "eval", "train", "docs", "dev") for r in extras[e]),
    )
    wanted = {normal(r) for r in named} - {"kvjax"}
    pinned = {
        normal(line)
        for line in (ROOT / "constraints.txt").read_text().splitlines()
        if line[0] != "#"
    }
    assert wanted <= pinned, "run .ci/lock.py; MAINTAINING.md says how"
