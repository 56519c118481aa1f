"""Weft's own source checks: what a general linter does not know. Usage: checks.py [FILE...], default all tracked files.

Each rule is a function of a path (relative to the repository) and a text that yields findings. A line that must break
a rule says so and why, on the line itself or the one above it; a file in which many lines must says so once:

    // check: allow spin-loop: the accept loop blocks in poll()
    // check: allow-in-file function-size: operator schemas are flat

Exit status 1 if anything was found.
"""

# check: allow file-size: all rules about one file, read together

import ast
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

import import_circles

ROOT = Path(__file__).resolve().parent.parent
CPP_SUFFIXES = (".h", ".cuh", ".cc", ".cu", ".cpp", ".hpp")
PYTHON_SUFFIXES = (".py", ".pyi")
ALLOW = re.compile(r"check: allow(?P<in_file>-in-file)? (?P<rule>[a-z-]+): *(?P<reason>\S.*)")


@dataclass(frozen=True)
class Finding:
    """A place that breaks a rule."""

    path: str
    line: int
    rule: str
    message: str

    def __str__(self) -> str:
        return f"{self.path}:{self.line}: {self.rule}: {self.message}"


@dataclass(frozen=True)
class Source:
    """A file as the rules see it: `text` as written, `code` with comments and strings blanked out, lines kept."""

    path: str
    text: str
    code: str

    @property
    def is_cpp(self) -> bool:
        """Whether this is a C++ or CUDA file."""
        return self.path.endswith(CPP_SUFFIXES)

    @property
    def is_python(self) -> bool:
        """Whether this is a Python file or stub."""
        return self.path.endswith(PYTHON_SUFFIXES)

    def under(self, *folders: str) -> bool:
        """Whether the file lies in one of the folders."""
        return any(self.path.startswith(folder.rstrip("/") + "/") for folder in folders)


Rule = Callable[[Source], Iterator[Finding]]
RULES: list[Rule] = []


def rule(function: Rule) -> Rule:
    """Register a rule."""
    RULES.append(function)
    return function


def blank(text: str, pattern: str) -> str:
    """Replace every match by spaces, keeping line breaks, so that line numbers stay right."""
    return re.sub(pattern, lambda match: re.sub(r"[^\n]", " ", match[0]), text, flags=re.DOTALL)


def read_source(path: str, text: str) -> Source:
    """Make a Source; of C++ the comments and string contents are blanked, of Python the comments and strings."""
    if path.endswith(CPP_SUFFIXES):
        # An include names its file in quotes, so lines that begin with # keep theirs.
        code = blank(text, r"//[^\n]*|/\*.*?\*/|(?<!')\"(?:\\.|[^\"\\\n])*\"(?<!#)")
        lines = zip(text.split("\n"), code.split("\n"), strict=True)
        code = "\n".join(raw if re.match(r"\s*#\s*include", raw) else blanked for raw, blanked in lines)
    elif path.endswith(PYTHON_SUFFIXES):
        code = blank(text, r"(\"\"\"|''').*?\1|\"(?:\\.|[^\"\\\n])*\"|'(?:\\.|[^'\\\n])*'|\#[^\n]*")
    else:
        code = text
    return Source(path, text, code)


def find(source: Source, name: str, pattern: str, message: str, *, raw: bool = False) -> Iterator[Finding]:
    """Yield a finding for each match of a pattern in the code (or in the raw text)."""
    text = source.text if raw else source.code
    for match in re.finditer(pattern, text):
        yield Finding(
            source.path, text.count("\n", 0, match.start()) + 1, name, f"{message}: {match[0].strip()[:60]!r}"
        )


@rule
def inline_asm(source: Source) -> Iterator[Finding]:
    """Inline assembly lies in include/weft/ptx, one instruction a wrapper."""
    if source.is_cpp and not source.under("include/weft/ptx"):
        yield from find(
            source, "inline-asm", r"\b(asm|__asm__|__asm)\b[\s\w]*\(", "inline asm outside include/weft/ptx"
        )


@rule
def peer_address(source: Source) -> Iterator[Finding]:
    """Addresses of peers' memory are formed under include/weft/transport: another route has none."""
    if source.is_cpp and source.under("include/weft") and not source.under("include/weft/transport"):
        pattern = r"\bview(_|\(\))?\s*\.\s*(heap|control)\s*\["
        yield from find(source, "peer-address", pattern, "the address of a peer outside include/weft/transport")


@rule
def spin_loop(source: Source) -> Iterator[Finding]:
    """Loops without a bound, or that wait for an atomic, lie in include/weft/sync: every wait has a deadline (R7)."""
    if not source.is_cpp or not source.under("include", "src") or source.under("include/weft/sync"):
        return
    message = "unbounded or waiting loop outside include/weft/sync"
    loads = r"((\.|->)load|__atomic_load\w*|\b(ld|load)_(acquire|relaxed|volatile)\w*)\s*\("
    for pattern in (
        r"\bwhile\s*\(\s*(true|1)\s*\)",
        r"\bfor\s*\(\s*;\s*;[^;)]*\)",
        rf"\bwhile\s*\([^;{{}}]*?({loads})",
    ):
        yield from find(source, "spin-loop", pattern, message)


@rule
def foreign_include(source: Source) -> Iterator[Finding]:
    """Native code includes neither torch nor the CUDA toolkit; Python and nanobind only in src/bindings."""
    if not source.is_cpp or not source.under("include", "src"):
        return
    yield from find(source, "torch-include", r'#\s*include\s*[<"](torch|ATen|c10)\b[^\n]*', "torch in native code")
    toolkit = r'#\s*include\s*[<"](cuda|nvrtc|nvml|cooperative_groups|cub/|cutlass|thrust/)[^\n]*'
    yield from find(source, "toolkit-include", toolkit, "CUDA toolkit header; declare the functions in src/base")
    if not source.under("src/bindings"):
        bindings = r'#\s*include\s*[<"](nanobind|pybind11|Python\.h)[^\n]*'
        yield from find(source, "python-include", bindings, "Python outside src/bindings")


@rule
def stable_api(source: Source) -> Iterator[Finding]:
    """One module serves all Pythons from 3.12 on, so bindings take nothing but Python's stable API."""
    if source.is_cpp and source.under("src/bindings"):
        pattern = r"\bPy\w+_(GET|SET)_[A-Z]+\b|\bPyObject_(CallMethodNoArgs|CallMethodOneArg|CallOneArg|Vectorcall)\b"
        yield from find(source, "stable-api", pattern, "not in Python's stable API")


@rule
def environment(source: Source) -> Iterator[Finding]:
    """The environment is read in one file of each language; docs/environment.md lists what is read."""
    if source.is_cpp and source.under("include", "src") and source.path != "src/base/env.cc":
        yield from find(source, "environment", r"\b(secure_)?getenv\s*\(|\benviron\b", "only src/base/env.cc reads it")
    if source.is_python and source.under("python") and source.path != "python/weft/env.py":
        pattern = r"\bos\s*\.\s*(environb?|getenvb?|putenv)\b|\bfrom os import[^\n]*\b(environ|getenv)\b"
        yield from find(source, "environment", pattern, "only python/weft/env.py reads it")


@rule
def sleeping(source: Source) -> Iterator[Finding]:
    """Headers never sleep: a wait takes its pause as a policy, and the sleeping ones live in src/."""
    if source.is_cpp and source.under("include"):
        names = r"u?sleep|clock_nanosleep|sleep_for|sleep_until|sched_yield|futex|syscall|poll|select|pthread_\w+"
        if not source.under("include/weft/ptx"):  # where it is also the name of an instruction
            names += "|nanosleep"
        pattern = rf"\b({names})\s*\(|\bthis_thread\s*::"
        yield from find(source, "sleeping", pattern, "a call that can sleep in include/")


@rule
def named_memory(source: Source) -> Iterator[Finding]:
    """Shared memory has no name, so nothing can be left in /dev/shm or /tmp."""
    if source.under("include", "src", "python"):
        yield from find(source, "named-memory", r"\b(shm_open|shmget|mkfifo|mktemp|tmpnam)\s*\(", "use memfd_create")


@rule
def trap(source: Source) -> Iterator[Finding]:
    """Nothing traps or aborts: a failure is a typed error (R9)."""
    if source.is_cpp and source.under("include", "src"):
        yield from find(
            source, "trap", r"\b(__trap|__builtin_trap|std::abort|_exit|quick_exit)\s*\(", "raise a typed error"
        )
        yield from find(source, "trap", r"\"\s*trap;", "raise a typed error", raw=True)


@rule
def non_coherent_load(source: Source) -> Iterator[Finding]:
    """Windows are never read through the non-coherent path (R8)."""
    if source.is_cpp and source.under("include"):
        yield from find(source, "non-coherent-load", r"ld\.global[.\w]*\.nc|__ldg\s*\(", "stale data", raw=True)


@rule
def pickling(source: Source) -> Iterator[Finding]:
    """Nothing is pickled but between weft.spawn's own parent and children."""
    if source.is_python and source.under("python") and source.path != "python/weft/spawn.py":
        names = r"import pickle|from pickle|pickle\.\w+|torch\.(load|save)\s*\(|allow_pickle\s*=\s*True"
        pattern = rf"\b({names}|(all_gather|gather|scatter|broadcast)_object\w*)"
        yield from find(source, "pickling", pattern, "only weft.spawn pickles")


# Functions of torch that make a tensor on the default device, or of the default dtype, unless told otherwise.
TENSOR_MAKERS = {
    "arange", "as_tensor", "asarray", "empty", "empty_permuted", "empty_strided", "eye", "full", "linspace", "logspace",
    "ones", "rand", "randint", "randn", "randperm", "range", "scalar_tensor", "tensor", "tril_indices", "triu_indices",
    "zeros",
}  # fmt: skip


@rule
def ambient_tensor(source: Source) -> Iterator[Finding]:
    """A tensor made in python/weft names its device and dtype: a default of the user's would change both."""
    if not source.path.endswith(".py") or not source.under("python/weft"):
        return
    for node in ast.walk(ast.parse(source.text)):
        if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
            continue
        function = node.func
        if (
            not (isinstance(function.value, ast.Name) and function.value.id == "torch")
            or function.attr not in TENSOR_MAKERS
        ):
            continue
        missing = {"device", "dtype"} - {keyword.arg for keyword in node.keywords}
        if missing:
            message = f"torch.{function.attr} without {' and '.join(sorted(missing))}=: the user may have set a default"
            yield Finding(source.path, node.lineno, "ambient-tensor", message)


# What each layer of include/weft and each folder of src may include besides itself.
HEADER_LAYERS = {
    "config": set(),
    "layout": {"config"},
    "ptx": {"config"},
    "sync": {"ptx", "config", "layout"},
    "transport": {"sync", "ptx", "config", "layout"},
    "kernels": {"transport", "sync", "ptx", "config", "layout"},
}
SOURCE_LAYERS = {
    "base": set(),
    "topology": {"base"},
    "memory": {"base"},
    "jit": {"base"},
    "bootstrap": {"base", "memory"},
    "engine": {"base", "memory", "bootstrap", "topology", "jit"},
    "bindings": {"base", "memory", "bootstrap", "topology", "jit", "engine"},
}


@rule
def include_direction(source: Source) -> Iterator[Finding]:
    """Includes point one way: kernels > transport > sync > ptx; config and layout depend on nothing; src on include."""
    if not source.is_cpp:
        return
    parts = PurePosixPath(source.path).parts
    if parts[:2] == ("include", "weft") and len(parts) > 3:
        layer, allowed = parts[2], HEADER_LAYERS
    elif parts[:1] == ("src",) and len(parts) > 2:
        layer, allowed = parts[1], SOURCE_LAYERS
    else:
        return
    if layer not in allowed:
        yield Finding(source.path, 1, "include-direction", f"folder {layer!r} has no place in {sorted(allowed)}")
        return
    for number, line in enumerate(source.code.splitlines(), 1):
        match = re.match(r'\s*#\s*include\s*[<"](weft/)?(\w+)/', line)
        if not match:
            continue
        in_headers, target = bool(match[1]), match[2]
        if parts[0] == "include":
            wrong = target not in {layer, *allowed[layer]} if in_headers else target in SOURCE_LAYERS
        else:
            wrong = not in_headers and target in SOURCE_LAYERS and target not in {layer, *allowed[layer]}
        if wrong:
            yield Finding(source.path, number, "include-direction", f"{layer} must not include {target}")


@rule
def engine_include(source: Source) -> Iterator[Finding]:
    """No engine includes another; what both need is in src/engine, which includes none."""
    parts = PurePosixPath(source.path).parts
    if not source.is_cpp or parts[:2] != ("src", "engine"):
        return
    own = rf"(?!{parts[2]}/)" if len(parts) > 3 else ""
    yield from find(source, "engine-include", rf'#\s*include\s*"engine/{own}\w+/[^\n]*', "includes another engine")


MAX_LINES = 400
MAX_TEST_LINES = 500
MAX_DEVICE_LINES = 500
MAX_FUNCTION_LINES = 70
MAX_PARAMETERS = 6


@rule
def file_size(source: Source) -> Iterator[Finding]:
    """A host file has at most 400 lines, a device file or a test 500."""
    if not (source.is_cpp or source.is_python):
        return
    limit = MAX_DEVICE_LINES if source.path.endswith((".cuh", ".cu")) else MAX_LINES
    limit = MAX_TEST_LINES if source.under("tests") else limit
    num_lines = source.text.count("\n")
    if num_lines > limit:
        yield Finding(source.path, 1, "file-size", f"{num_lines} lines, allowed are {limit}")


@rule
def function_size(source: Source) -> Iterator[Finding]:
    """A Python function has at most 70 lines and six positional parameters (clang-tidy looks at the C++ ones).

    The commands of weft.cli are left out: there each parameter is a flag.
    """
    if not source.path.endswith(".py") or not source.under("python", "tools", "lab"):
        return
    for node in ast.walk(ast.parse(source.text)):
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        body = node.body[1:] if ast.get_docstring(node) and len(node.body) > 1 else node.body
        num_lines = (node.end_lineno or node.lineno) - body[0].lineno + 1
        num_parameters = len([a for a in [*node.args.posonlyargs, *node.args.args] if a.arg not in ("self", "cls")])
        if num_lines > MAX_FUNCTION_LINES:
            message = f"{node.name} has {num_lines} lines without its docstring, allowed are {MAX_FUNCTION_LINES}"
            yield Finding(source.path, node.lineno, "function-size", message)
        if num_parameters > MAX_PARAMETERS and not source.under("python/weft/cli"):
            message = f"{node.name} takes {num_parameters} positional parameters, allowed are {MAX_PARAMETERS}"
            yield Finding(source.path, node.lineno, "function-size", message)


@rule
def unfinished(source: Source) -> Iterator[Finding]:
    """Unfinished marks and words of somebody's private machine do not belong in the repository."""
    if source.under("tests/tools") or source.path == "tools/checks.py":
        return
    marks = r"\b(TODO|FIXME|XXX|HACK)\b|\bNotImplementedError\b"
    if source.is_cpp or source.is_python:
        yield from find(source, "unfinished", marks, "finish it, or say in the documentation what is missing", raw=True)
    private = r"/(work|farm)/\w+|/home/\w+/|/Users/\w+/|\bsub-?agents?\b|\bLLM-generated\b"
    yield from find(source, "private-words", private, "names something outside the repository", raw=True)


def check_imports(texts: dict[str, str]) -> list[Finding]:
    """No circle among the modules of python/weft, given by path; imports for types count, too."""
    return [
        Finding(path, 1, "import-circle", f"modules import each other: {' > '.join(modules)}")
        for path, modules in import_circles.circles(texts)
    ]


MAX_ROOT_FILES = 20


def check_root(paths: list[str]) -> list[Finding]:
    """The folder python/weft itself has at most 20 files: the public names; the rest lies in a folder by topic."""
    files = [path for path in paths if PurePosixPath(path).parent == PurePosixPath("python/weft")]
    if len(files) <= MAX_ROOT_FILES:
        return []
    return [Finding("python/weft", 1, "root-files", f"{len(files)} files, allowed are {MAX_ROOT_FILES}")]


def check_module_names(paths: list[str], folders: list[str]) -> list[Finding]:
    """Of modules that tests import by name from several folders (pytest's `pythonpath`) no two have one name: the first
    would hide the second. Tests themselves are not imported so."""
    found: dict[str, str] = {}
    findings = []
    for path in map(PurePosixPath, paths):
        is_imported = str(path.parent) in folders and path.suffix == ".py"
        if not is_imported or path.name == "conftest.py" or path.name.startswith("test_"):
            continue
        if (other := found.setdefault(path.name, str(path))) != str(path):
            findings.append(Finding(str(path), 1, "module-name", f"{other} has this name, too, and hides it"))
    return findings


def check_text(path: str, text: str) -> list[Finding]:
    """Return the findings in one file, without those that a line allows with a reason."""
    source = read_source(path, text)
    lines = text.split("\n")
    in_file = {match["rule"] for match in ALLOW.finditer(text) if match["in_file"] or match["rule"] == "file-size"}

    def is_allowed(finding: Finding) -> bool:
        if finding.rule in in_file:
            return True
        near = lines[max(finding.line - 2, 0) : finding.line]
        return any((match := ALLOW.search(line)) and match["rule"] == finding.rule for line in near)

    return [finding for check in RULES for finding in check(source) if not is_allowed(finding)]


def list_files() -> list[str]:
    """Return the tracked files of the repository."""
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    return [name for name in listed.split("\0") if name]


def main(arguments: list[str]) -> int:
    """Check the files named, or all tracked ones; print the findings and return the exit status."""
    findings: list[Finding] = []
    for name in arguments or list_files():
        try:
            text = (ROOT / name).read_text()
        except (UnicodeDecodeError, FileNotFoundError, IsADirectoryError):
            continue
        findings += check_text(name, text)
    project = ROOT / "pyproject.toml"
    if project.exists():
        folders = re.search(r"^pythonpath = \[(.*)\]", project.read_text(encoding="utf-8"), re.MULTILINE)
        findings += check_module_names(list_files(), re.findall(r'"(.*?)"', folders[1]) if folders else [])
    modules = sorted((ROOT / "python/weft").rglob("*.py*"))
    files = [path for path in (ROOT / "python/weft").glob("*") if path.is_file() and path.suffix != ".so"]
    findings += check_root([str(path.relative_to(ROOT)) for path in files])
    findings += check_imports(
        {str(path.relative_to(ROOT)): path.read_text() for path in modules if path.suffix in PYTHON_SUFFIXES}
    )
    for finding in findings:
        print(finding)
    return bool(findings)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
