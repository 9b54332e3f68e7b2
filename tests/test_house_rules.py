"""The house rules as tests: what a reviewer would otherwise have to check in every change."""

from __future__ import annotations

import ast
import configparser
import gc
import importlib
import re
import subprocess
import sys
from collections.abc import Iterable, Iterator
from functools import cache
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGES = {"kafka_marshal": ROOT / "marshal" / "kafka_marshal", "rationalizer": ROOT / "rationalizer"}

LONGEST_MODULE = 800
LONGEST_FUNCTION = 70

Function = ast.FunctionDef | ast.AsyncFunctionDef


#: Our folders in a source package; a user's own files may be beside them.
FOLDERS = (".ci", ".github", "benchmarks", "docs", "examples", "marshal", "rationalizer", "tests")
NO_FILES_OF_OURS = {"__pycache__", ".venv", "build", "dist", "out"}


def our_files(root: Path) -> list[Path]:
    """Files tracked by git; without git or a clone, those in our folders and known names at the top."""
    try:
        command = ["git", "ls-files", "-z"]
        listed = subprocess.run(command, cwd=root, capture_output=True, check=True).stdout.decode()
    except (OSError, subprocess.CalledProcessError):
        listed = ""
    if listed:
        found = [root / name for name in listed.split("\0") if name]
    else:
        found = [path for folder in FOLDERS for path in (root / folder).rglob("*")]
        found += [path for path in root.iterdir() if path.suffix in (".md", ".py", ".cfg", ".toml", ".in")]
        found += [root / name for name in ("Makefile", "LICENSE", "constraints.txt", ".gitignore", ".importlinter")]
    return sorted(
        path for path in found if path.is_file() and NO_FILES_OF_OURS.isdisjoint(path.relative_to(root).parts)
    )


OUR_FILES = our_files(ROOT)


def modules() -> dict[str, Path]:
    """Every module of the product, by its dotted name."""
    found = {}
    for package, folder in PACKAGES.items():
        for path in OUR_FILES:
            if path.suffix != ".py" or not path.is_relative_to(folder):
                continue
            parts = [package, *path.relative_to(folder).with_suffix("").parts]
            found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


MODULES = modules()
PYTHON_FILES = [path for path in OUR_FILES if path.suffix == ".py" and path.relative_to(ROOT).parts[0] in FOLDERS]


@cache  # tests/conftest.py keeps the tests that read modules in one process
def tree_of(path: Path) -> ast.Module:
    tree = ast.parse(path.read_text(encoding="utf-8"), filename=str(path))
    gc.freeze()  # to look for garbage in a million nodes takes longer than to make them
    return tree


@cache
def nodes_of(path: Path) -> tuple[ast.AST, ...]:
    """A module's nodes, as ast.walk has them."""
    return tuple(ast.walk(tree_of(path)))


@pytest.fixture(scope="session", autouse=True)
def _trees() -> Iterator[None]:
    """They are dropped at the end."""
    yield
    nodes_of.cache_clear()
    tree_of.cache_clear()
    gc.unfreeze()


def named(path: Path) -> str:
    return str(path.relative_to(ROOT))


def setup_cfg() -> configparser.ConfigParser:
    parser = configparser.ConfigParser()
    parser.read(ROOT / "setup.cfg", encoding="utf-8")
    return parser


def text_files() -> Iterator[Path]:
    """All of it but pictures."""
    for path in OUR_FILES:
        if b"\0" not in path.read_bytes()[:4096]:
            yield path


@pytest.mark.parametrize("with_git", [True, False])
def test_a_users_own_files_are_not_checked(tmp_path: Path, with_git: bool) -> None:
    """In a clone or an unpacked source package: a log of a demo, an environment, notes."""
    ours = {"README.md", "marshal/kafka_marshal/x.py", "tests/test_x.py"}
    others = {"demo.log", ".venv/lib/y.py", "out/demo/report.html", "mine/notes.py"}
    for name in ours | others:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("")
    if with_git:
        subprocess.run(["git", "init", "-q"], cwd=tmp_path, check=True)
        subprocess.run(["git", "add", *sorted(ours)], cwd=tmp_path, check=True)
    assert {str(path.relative_to(tmp_path)) for path in our_files(tmp_path)} == ours


# -- size ---------------------------------------------------------------------------------------------------------


def test_no_module_is_too_long() -> None:
    lengths = {named(path): len(path.read_text(encoding="utf-8").splitlines()) for path in PYTHON_FILES}
    assert {name: length for name, length in lengths.items() if length > LONGEST_MODULE} == {}


def length_of(function: Function) -> int:
    """Lines of a function without its docstring."""
    assert function.end_lineno is not None
    length = function.end_lineno - function.lineno + 1
    first = function.body[0]
    if ast.get_docstring(function) is not None:
        assert first.end_lineno is not None
        length -= first.end_lineno - first.lineno + 1
    return length


def test_no_function_is_too_long() -> None:
    too_long = {}
    for path in PYTHON_FILES:
        for node in nodes_of(path):
            if isinstance(node, Function) and length_of(node) > LONGEST_FUNCTION:
                too_long[f"{named(path)}:{node.name}"] = length_of(node)
    assert too_long == {}


#: Package → (modules, lines) that it may have, docstrings included. A ratchet: anybody lowers it, only an issue that
#: names the price of a feature raises it.
MOST_OF_A_PACKAGE: dict[str, tuple[int, int]] = {
    "adapters": (19, 5_609),
    "admin": (18, 7_389),
    "archive": (3, 815),
    "checkpoints": (3, 623),
    "cli": (27, 8_839),
    "client": (36, 12_593),
    "engine": (61, 19_134),
    "kafka_marshal": (14, 2_872),
    "metrics": (6, 1_624),
    "node": (17, 4_521),
    "observe": (18, 6_287),
    "pipeline": (21, 8_073),
    "rationalizer": (42, 10_212),
    "runner": (4, 650),
    "sinks": (9, 3_796),
    "snapshots": (5, 1_026),
    "testing": (44, 12_613),
    "ui": (10, 4_357),
    "watchdog": (3, 938),
}

#: A ceiling may be higher than what is there by this number of lines.
SLACK = 40

#: Of all packages together.
MOST_OF_ALL = (360, 111_971)


def sizes_of(paths: Iterable[Path]) -> dict[str, tuple[int, int]]:
    """Package → (modules, lines); what lies beside the packages counts for "kafka_marshal"."""
    found: dict[str, tuple[int, int]] = {}
    for path in paths:
        parts = path.relative_to(ROOT).parts
        package = "rationalizer" if parts[0] == "rationalizer" else parts[2] if len(parts) > 3 else "kafka_marshal"
        modules, lines = found.get(package, (0, 0))
        found[package] = modules + 1, lines + len(path.read_text(encoding="utf-8").splitlines())
    return found


def too_large(sizes: dict[str, tuple[int, int]]) -> list[str]:
    """What is over its ceiling, and what to do about it."""
    total = tuple(map(sum, zip(*sizes.values(), strict=True)))
    pairs = [(f"the package {name}", size, MOST_OF_A_PACKAGE.get(name, (0, 0))) for name, size in sizes.items()]
    return [
        f"{what} has {size[0]} modules and {size[1]} lines, and may have {most[0]} and {most[1]}. Something is there "
        "twice, or proves the product and belongs to tests/, or is used by nothing: take that out first (duplicates, "
        "git log). Only an issue that names the price of a feature raises a ceiling; the commit says what for."
        for what, size, most in [*pairs, ("the product", total, MOST_OF_ALL)]
        if size[0] > most[0] or size[1] > most[1]
    ]


def test_no_package_is_larger_than_it_may_be() -> None:
    sizes = sizes_of(MODULES.values())
    found = too_large(sizes)
    assert not found, "\n".join(found)
    assert MOST_OF_A_PACKAGE.keys() - sizes.keys() == set(), "they are gone: take them off the list"


def test_a_ceiling_that_is_higher_than_it_need_be_is_lowered() -> None:
    sizes = sizes_of(MODULES.values())
    found = {name: (each, MOST_OF_A_PACKAGE[name]) for name, each in sizes.items()}
    modules, lines = (sum(each) for each in zip(*sizes.values(), strict=True))
    found["all"] = (modules, lines), MOST_OF_ALL
    high = {name: has for name, (has, most) in found.items() if most[0] > has[0] or most[1] >= has[1] + SLACK}
    assert high == {}, "lower their ceilings to what they have"


def test_a_package_that_grows_is_named() -> None:
    sizes = sizes_of(MODULES.values())
    modules, lines = sizes["node"]
    over = MOST_OF_A_PACKAGE["node"]
    assert "the package node has" in "".join(too_large({**sizes, "node": (over[0] + 1, lines)}))
    assert "the package node has" in "".join(too_large({**sizes, "node": (modules, over[1] + 1)}))
    assert "the package new has 1 modules" in "".join(too_large({**sizes, "new": (1, 10)}))
    assert "the product has" in "".join(too_large({**sizes, "rationalizer": MOST_OF_ALL}))


# -- packages -----------------------------------------------------------------------------------------------------


def test_marshal_is_a_source_root_and_not_a_package() -> None:
    assert not (ROOT / "marshal" / "__init__.py").exists(), "CPython's built-in module marshal would win over it"


def test_the_packages_listed_are_those_in_the_tree() -> None:
    listed = setup_cfg()["options"]["packages"].split()
    in_tree = [name for name, path in MODULES.items() if path.name == "__init__.py"]
    assert listed == sorted(in_tree)
    for path in MODULES.values():
        assert (path.parent / "__init__.py").exists(), f"{named(path)} is in a folder that is no package"


def test_the_wheel_holds_no_example() -> None:
    """Examples are separate projects, only in the source package."""
    options = setup_cfg()["options"]
    assert {name.partition(".")[0] for name in options["packages"].split()} == PACKAGES.keys()
    assert set(re.findall(r"= (\S+)", options["package_dir"])) == {named(path) for path in PACKAGES.values()}
    assert not list((ROOT / "marshal").rglob("flights*"))


def test_both_packages_say_that_they_are_typed() -> None:
    for package, folder in PACKAGES.items():
        assert (folder / "py.typed").exists()
        assert setup_cfg()["options.package_data"][package].split() == ["py.typed"]


def test_every_package_and_module_has_its_layer() -> None:
    """The layers' list in .importlinter is complete, so that nothing escapes it."""
    parser = configparser.ConfigParser()
    parser.read(ROOT / ".importlinter", encoding="utf-8")
    listed = set(re.findall(r"[a-z_][a-z_.]*", parser["importlinter:contract:layers"]["layers"]))
    tops = {name for name in MODULES if name.count(".") == 1 and name.startswith("kafka_marshal.")} | {"rationalizer"}
    assert tops - listed == set()


def test_what_is_required_is_pinned() -> None:
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    pins = dict(line.lower().split("==") for line in lines if line and not line.startswith("#"))
    config = setup_cfg()
    extras = {name: text for name, text in config["options.extras_require"].items() if name != "containers"}
    for text in (config["options"]["install_requires"], *extras.values()):
        for requirement in text.split():
            name = re.split(r"[\[<>=]", requirement)[0].lower()
            assert name == "kafka-marshal" or name in pins, f"{name} has no line in constraints.txt"


def test_the_makefile_helps_with_each_of_its_targets() -> None:
    text = (ROOT / "Makefile").read_text()
    targets = set(re.findall(r"^([a-z][a-z0-9-]*):", text, re.MULTILINE))
    phony = " ".join(re.findall(r"^\.PHONY: (.*)$", text, re.MULTILINE))
    assert set(phony.split()) == targets
    shown = subprocess.run(
        ["make", "--no-print-directory"], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout
    assert set(re.findall(r"^  make ([a-z0-9-]+) ", shown, re.MULTILINE)) == targets


# -- imports ------------------------------------------------------------------------------------------------------


def imported_by(path: Path) -> set[str]:
    """Top-level names of the modules that a file imports, anywhere in it."""
    found = set()
    for node in nodes_of(path):
        if isinstance(node, ast.Import):
            found |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0 and node.module, f"{named(path)}:{node.lineno}: relative import"
            found.add(node.module.partition(".")[0])
    return found


def test_the_core_needs_the_standard_library_msgpack_and_xxhash_only() -> None:
    allowed = {*sys.stdlib_module_names, "msgpack", "xxhash", "rationalizer"}
    for name, path in MODULES.items():
        if name.partition(".")[0] == "rationalizer":
            assert imported_by(path) <= allowed, named(path)


def test_the_engine_draws_no_numbers_but_from_a_generator_it_is_given() -> None:
    for name, path in MODULES.items():
        if not name.startswith("kafka_marshal.engine"):
            continue
        for node in nodes_of(path):
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "random":
                assert node.attr == "Random", f"{named(path)}:{node.lineno}: random.{node.attr}"
            if isinstance(node, ast.ImportFrom) and node.module == "random":
                assert [alias.name for alias in node.names] == ["Random"], f"{named(path)}:{node.lineno}"


def _tested(node: ast.AST) -> Iterator[ast.expr]:
    """What is asked whether it is true."""
    if isinstance(node, ast.BoolOp):
        yield from node.values
    elif isinstance(node, ast.If | ast.IfExp | ast.While | ast.Assert):
        yield node.test
    elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
        yield node.operand
    elif isinstance(node, ast.comprehension):
        yield from node.ifs


def test_no_message_is_asked_whether_it_is_true() -> None:
    """One without a value is false: its length is that of its value."""
    for path in MODULES.values():
        for node in nodes_of(path):
            for each in _tested(node):
                name = each.attr if isinstance(each, ast.Attribute) else each.id if isinstance(each, ast.Name) else ""
                assert name not in {"message", "msg", "polled"}, f"{named(path)}:{each.lineno}: {ast.unparse(each)}"


def test_examples_use_what_pages_name() -> None:
    """A user can do the same: each of our modules that an example imports is on a page for users."""
    pages = " ".join(path.read_text(encoding="utf-8") for path in (ROOT / "docs").rglob("*.md"))
    found = [
        f"{named(path)}:{node.lineno}: {node.module}"
        for path in PYTHON_FILES
        if path.is_relative_to(ROOT / "examples")
        for node in nodes_of(path)
        if isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] in PACKAGES
        for each in node.names
        if not re.search(rf"\b{node.module}(\.{each.name})?(?!\.?\w)", pages)
    ]
    assert found == []


# -- the public surface -------------------------------------------------------------------------------------------


def all_of(tree: ast.Module) -> list[str] | None:
    for node in tree.body:
        if isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            if any(isinstance(target, ast.Name) and target.id == "__all__" for target in targets):
                assert node.value is not None
                names: list[str] = ast.literal_eval(node.value)
                return names
    return None


def package_of(module: str) -> str:
    return module if MODULES[module].name == "__init__.py" else module.rpartition(".")[0]


@cache  # not at import: each process that collects the tests would pay for it
def names_taken_from_other_packages() -> dict[str, set[str]]:
    """Module → names that a module outside its package (and what lies below) imports from it."""
    taken: dict[str, set[str]] = {name: set() for name in MODULES}
    for name, path in MODULES.items():
        for node in nodes_of(path):
            if isinstance(node, ast.ImportFrom) and node.module in MODULES:
                source = node.module
                if not f"{package_of(name)}.".startswith(f"{package_of(source)}."):
                    taken[source] |= {each.name for each in node.names if f"{source}.{each.name}" not in MODULES}
    return taken


@pytest.mark.parametrize("name", sorted(MODULES))
def test_all_is_true(name: str) -> None:
    """``__all__`` is a module's interface for other packages: each name exists, and no other is imported."""
    listed = all_of(tree_of(MODULES[name]))
    if listed is None:
        return
    assert len(listed) == len(set(listed))
    assert names_taken_from_other_packages()[name] - set(listed) == set()
    module = importlib.import_module(name)
    assert [each for each in listed if not hasattr(module, each)] == []


@pytest.mark.parametrize("package", ["kafka_marshal", "kafka_marshal.errors", "kafka_marshal.testing", "rationalizer"])
def test_what_users_import_says_what_is_public(package: str) -> None:
    assert all_of(tree_of(MODULES[package]))


def test_the_tree_of_errors_is_drawn_whole() -> None:
    tree = tree_of(MODULES["kafka_marshal.errors"])
    drawn = set(re.findall(r"\b[A-Z]\w+Error\b", ast.get_docstring(tree) or ""))
    assert drawn == set(all_of(tree) or ())


def is_trivial(function: Function) -> bool:
    """Whether it needs no docstring: a Protocol's bare ``...``."""
    body = function.body
    return len(body) == 1 and isinstance(body[0], ast.Expr) and isinstance(body[0].value, ast.Constant)


@cache
def documented_elsewhere() -> set[str]:
    """Names of methods that a Protocol or another of our base classes documents."""
    classes = [node for path in MODULES.values() for node in nodes_of(path) if isinstance(node, ast.ClassDef)]
    bases = {getattr(base, "id", "") for node in classes for base in node.bases}
    found = set()
    for node in classes:
        if node.name in bases or "Protocol" in {getattr(base, "id", "") for base in node.bases}:
            found |= {each.name for each in node.body if isinstance(each, Function)}
    return found


@cache
def classes() -> set[str]:
    return {node.name for path in MODULES.values() for node in nodes_of(path) if isinstance(node, ast.ClassDef)}


def has_a_foreign_base(node: ast.ClassDef) -> bool:
    """Whether another project documents its methods, such as click."""
    own = {*classes(), "Protocol", "Generic", "Exception", "NamedTuple"}
    bases = [base.value if isinstance(base, ast.Subscript) else base for base in node.bases]
    return any(isinstance(base, ast.Attribute) or getattr(base, "id", "") not in own for base in bases)


def undocumented(tree: ast.Module, elsewhere: set[str]) -> Iterator[str]:
    if ast.get_docstring(tree) is None:
        yield "the module"
    for node in tree.body:
        if not isinstance(node, ast.ClassDef | Function) or node.name.startswith("_"):
            continue
        if ast.get_docstring(node) is None:
            yield node.name
        if not isinstance(node, ast.ClassDef) or has_a_foreign_base(node):
            continue
        for each in node.body:
            if (
                isinstance(each, Function)
                and not each.name.startswith("_")
                and ast.get_docstring(each) is None
                and not is_trivial(each)
                and each.name not in elsewhere
            ):
                yield f"{node.name}.{each.name}"


def test_everything_public_is_documented() -> None:
    elsewhere = documented_elsewhere()
    missing = [f"{name}: {what}" for name, path in MODULES.items() for what in undocumented(tree_of(path), elsewhere)]
    assert not missing, "\n".join(missing)


# -- structure ----------------------------------------------------------------------------------------------------

MOST_METHODS = 25
MOST_ATTRIBUTES = 15

#: Larger classes: their limits (methods, attributes), to be reduced.
LARGE: dict[str, tuple[int, int]] = {
    "kafka_marshal.adapters.kafka.cluster.KafkaCluster": (30, 15),
    "kafka_marshal.adapters.memory.cluster.MemoryCluster": (28, 4),
    "kafka_marshal.client.attempt.Attempt": (15, 16),
    "kafka_marshal.client.base.AnyConsumer": (33, 14),
    "kafka_marshal.client.consumer.Consumer": (29, 1),
    "kafka_marshal.client.fetching.FetchingConsumer": (28, 10),
    "kafka_marshal.client.tries.Tries": (26, 17),
    "kafka_marshal.engine.engine.Engine": (31, 16),
    "kafka_marshal.engine.claims.peers.Peers": (29, 15),
    "kafka_marshal.engine.groups.checkpoints.answering.Answering": (29, 13),
    "kafka_marshal.engine.groups.checkpoints.member.Beginning": (16, 17),
    "kafka_marshal.engine.groups.checkpoints.member.MemberCheckpoints": (30, 22),
    "kafka_marshal.engine.groups.client.GroupClient": (29, 20),
    "kafka_marshal.engine.groups.member.Membership": (30, 18),
    "kafka_marshal.engine.shares.consumer.SharedAssignment": (30, 7),
    "kafka_marshal.engine.work.assignment.Assignment": (41, 17),
    "kafka_marshal.engine.work.consumer.ConsumerEngine": (34, 20),
    "kafka_marshal.engine.work.delivery.Delivery": (35, 15),
    "kafka_marshal.engine.work.lane.Lane": (2, 18),
    "kafka_marshal.engine.work.lanes.Lanes": (50, 26),
    "kafka_marshal.engine.work.positions.Positions": (30, 9),
    "kafka_marshal.engine.work.run.Run": (29, 24),
    "kafka_marshal.engine.work.tracker.Tracker": (30, 10),
    "kafka_marshal.node.replica.Replica": (25, 17),
    "kafka_marshal.testing.simulation.checks.Checks": (33, 16),
    "kafka_marshal.testing.simulation.member_invariants.MemberInvariants": (25, 20),
    "rationalizer.groups.group.Group": (26, 15),
    "kafka_marshal.testing.simulation.process.Job": (27, 19),
}


def imports_of(name: str) -> set[str]:
    """Modules that a module imports, anywhere in it, for types alone, too."""
    found: set[str] = set()
    for node in nodes_of(MODULES[name]):
        if isinstance(node, ast.ImportFrom) and node.module in MODULES:
            inner = {f"{node.module}.{each.name}" for each in node.names}
            found |= inner & MODULES.keys() or {node.module}
        elif isinstance(node, ast.Import):
            found |= {each.name for each in node.names if each.name in MODULES}
    return found - {name}


def test_no_modules_import_each_other() -> None:
    TopologicalSorter({name: imports_of(name) for name in MODULES}).prepare()  # CycleError names them


def is_overload(node: Function) -> bool:
    return any(isinstance(each, ast.Name) and each.id == "overload" for each in node.decorator_list)


def size_of(node: ast.ClassDef) -> tuple[int, int]:
    """Methods, and attributes that they set on ``self``. (Fields of a row don't count as state, nor overloads.)"""
    methods = [each for each in node.body if isinstance(each, Function) and not is_overload(each)]
    names = {
        each.attr
        for method in methods
        for each in ast.walk(method)
        if isinstance(each, ast.Attribute)
        and isinstance(each.ctx, ast.Store)
        and isinstance(each.value, ast.Name)
        and each.value.id == "self"
    }
    return len(methods), len(names)


def test_classes_stay_small() -> None:
    sizes = {
        f"{name}.{node.name}": size_of(node)
        for name, path in MODULES.items()
        for node in nodes_of(path)
        if isinstance(node, ast.ClassDef)
    }
    large = {name: size for name, size in sizes.items() if size[0] > MOST_METHODS or size[1] > MOST_ATTRIBUTES}
    known = {name: LARGE.get(name, (0, 0)) for name in large}
    assert {name: size for name, size in large.items() if size[0] > known[name][0] or size[1] > known[name][1]} == {}
    assert LARGE.keys() - large.keys() == set(), "they are small now: take them off the list"


# -- names --------------------------------------------------------------------------------------------------------

#: Classes of one name → why they keep it. Those private to a module need no place here.
SAME_NAME = {
    **dict.fromkeys(
        ("Consumer", "GroupConsumer", "Leader", "Marshal", "Transaction"), "the same for an event loop, in aio"
    ),
    "Message": "one thing: as type checkers see it, and as the engine and the in-memory log need it",
    "Group": "the mode is the word that users write; the core's is the group itself",
    "Piece": "the engine's stands in recordings by this name",
    "Worker": "users write it; the simulation's is what a user gives it to run",
}


def test_a_name_stands_for_one_class() -> None:
    places: dict[str, set[str]] = {}
    for module, path in MODULES.items():
        for node in nodes_of(path):
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                places.setdefault(node.name, set()).add(module)
    several = {name: sorted(modules) for name, modules in places.items() if len(modules) > 1}
    assert {name: modules for name, modules in several.items() if name not in SAME_NAME} == {}, "find a better word"
    assert SAME_NAME.keys() - several.keys() == set(), "they have one meaning now: take them off the list"


# -- reruns -------------------------------------------------------------------------------------------------------

#: Calls that search for broken promises.
CAMPAIGNS = {"fuzz_a_broker", "run_campaign", "run_offline", "simulate", "simulate_one", "soak"}


def calls(node: ast.AST) -> set[str]:
    return {ast.unparse(each.func) for each in ast.walk(node) if isinstance(each, ast.Call)}


#: One try; or another one if there was no broker, which breaks no promise.
ONE_TRY = "pytest.mark.flaky(reruns=0)"
ONE_TRY_WITH_A_BROKER = "pytest.mark.flaky(reruns=1, only_rerun=['BrokerDiedError'])"


def has_one_try(marks: Iterable[ast.AST]) -> bool:
    return any(mark in ast.unparse(each) for each in marks for mark in (ONE_TRY, ONE_TRY_WITH_A_BROKER))


def test_what_looks_for_broken_promises_has_one_try() -> None:
    """CI reruns failures because of other processes' load. A promise that was broken once is broken."""
    found, marked = [], 0
    for path in sorted((ROOT / "tests").rglob("test_*.py")):
        tree = tree_of(path)
        for_all = has_one_try(node for node in tree.body if isinstance(node, ast.Assign))
        for node in tree.body:
            if isinstance(node, Function) and node.name.startswith("test_") and calls(node) & CAMPAIGNS:
                marked += 1
                if not for_all and not has_one_try(node.decorator_list):
                    found.append(f"{named(path)}:{node.name}")
    assert found == []
    assert marked > 20


def test_who_has_one_try_gets_no_other(tmp_path: Path) -> None:
    """The mark wins over the command line, as .ci/run has it."""
    (tmp_path / "test_it.py").write_text(
        f"import pytest\n\n\n@{ONE_TRY}\ndef test_one():\n    assert 0\n\n\ndef test_three():\n    assert 0\n\n\n"
        "class BrokerDiedError(Exception): ...\n\n\n"
        f"@{ONE_TRY_WITH_A_BROKER}\ndef test_one_too():\n    assert 0\n\n\n"
        f"@{ONE_TRY_WITH_A_BROKER}\ndef test_two():\n    raise BrokerDiedError\n"
    )
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--reruns", "2", str(tmp_path)]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert "4 failed, 3 rerun" in done.stdout, done.stdout
