"""Breaks one line at a time and runs the test that must see it: tools/mutation.py [--only TEXT...] [--check].

tests/mutants/*.toml lists the mutants, one file an area: which text of which file becomes what, and the smallest test
that fails then. Each runs in a copy of the tree, two at a time. Prints a table by area. Exit status 1 if an area scores
less than 0.9, if there are fewer than 150 mutants, or if an entry is wrong: a text that is not found (or too often), a
test that doesn't pass without the mutant, a mutant that doesn't compile.

`--only` runs those whose area or name contains one of the texts; `--check` only looks for the texts. `--journal FILE`
keeps what was killed, so that a run that was cut off goes on: an entry counts for the very same files alone.
"""

# check: allow file-size: entries, copies of the tree, runs and the table of one program

from __future__ import annotations

import argparse
import ast
import collections
import contextlib
import dataclasses
import hashlib
import json
import os
import re
import resource
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import tomllib
from pytest_forks import Forks

ROOT = Path(__file__).resolve().parent.parent
LEAST_SCORE = 0.9
LEAST_MUTANTS = 150
SEARCHED = ("python/weft", "src", "include/weft")  # where a text that has left its file may be
LEAST_LIMIT_S = 30.0
TIMES_UNMUTATED = 6  # a run counts as hanging only after that many times the unmutated one


class Wrong(Exception):
    """An entry that says nothing about the tests: it must be mended."""


@dataclass(frozen=True)
class Mutant:
    """In `file`, `before` (the first one behind `near`) becomes `after`; `tests` must fail then.

    White space in `before` and `near` stands for any white space. `tests`: arguments of pytest, or "native PROGRAM
    [CASE]". `equivalent`: why no test can see it; such an entry is not run and not counted.
    """

    area: str
    name: str
    file: str
    before: str
    after: str
    tests: str = ""
    near: str = ""
    equivalent: str = ""

    @property
    def is_native(self) -> bool:
        """Whether something has to be compiled before the test."""
        return self.file.startswith("src/") or self.tests.startswith("native ")


@dataclass(frozen=True)
class Outcome:
    """What became of one mutant: "killed", "survived", "equivalent" or "wrong"; `note` says how or why."""

    mutant: Mutant
    verdict: str
    seconds: float = 0.0
    note: str = ""


def read_mutants(folder: Path) -> list[Mutant]:
    """All entries. Two of the same name, or an unknown key, raise Wrong."""
    found = []
    for path in sorted(folder.glob("*.toml")):
        for entry in tomllib.loads(path.read_text())["mutant"]:
            try:
                mutant = Mutant(area=path.stem.replace("_", " "), **entry)
            except TypeError as error:
                raise Wrong(f"{path.name}: {entry.get('name')}: {error}") from None
            if not mutant.equivalent and not mutant.tests:
                raise Wrong(f"{path.name}: {mutant.name}: neither tests nor equivalent")
            found.append(mutant)
    names = collections.Counter((mutant.area, mutant.name) for mutant in found)
    twice = [name for name, number in names.items() if number > 1]
    if twice:
        raise Wrong(f"names used twice: {twice}")
    return found


def _pattern(text: str) -> re.Pattern[str]:
    return re.compile(r"\s+".join(re.escape(word) for word in text.split()))


def _places(mutant: Mutant, text: str) -> list[tuple[int, int]]:
    begin = 0
    if mutant.near:
        near = _pattern(mutant.near).search(text)
        if near is None:
            return []
        begin = near.end()
    places = [match.span() for match in _pattern(mutant.before).finditer(text, begin)]
    return places[:1] if mutant.near else places


def mutated(mutant: Mutant, root: Path) -> tuple[Path, str]:
    """The file that holds the text, and what it becomes. A text that has moved is looked for in the other sources."""
    path = root / mutant.file
    places = _places(mutant, path.read_text()) if path.exists() else []
    if not places:
        sources = [
            each for folder in SEARCHED for each in sorted((root / folder).rglob("*")) if each.suffix in SUFFIXES
        ]
        holders = [each for each in sources if _places(mutant, each.read_text())]
        if len(holders) != 1:
            named = [str(each.relative_to(root)) for each in holders]
            raise Wrong(f"{mutant.before!r} is not in {mutant.file}, and elsewhere in {named or 'no file'}")
        path = holders[0]
        places = _places(mutant, path.read_text())
    if len(places) != 1:
        raise Wrong(f"{mutant.before!r} is {len(places)} times in {path.relative_to(root)}; say `near` what")
    text = path.read_text()
    begin, end = places[0]
    if text[begin:end] == mutant.after:
        raise Wrong("the text after is the text before")
    return path, text[:begin] + mutant.after + text[end:]


SUFFIXES = (".py", ".h", ".cuh", ".cc")


@dataclass(frozen=True)
class Run:
    """A finished command. `has_hung`: it was ended at its limit."""

    status: int
    output: str
    seconds: float
    has_hung: bool = False


def run_command(command: list[str], folder: Path, limit_s: float, env: dict[str, str]) -> Run:
    """In a process group of its own, which is gone afterwards with all it started."""
    begin = time.monotonic()
    with tempfile.TemporaryFile("w+") as output:
        child = subprocess.Popen(
            command, cwd=folder, env=env, stdout=output, stderr=subprocess.STDOUT, start_new_session=True
        )
        has_hung = False
        try:
            child.wait(limit_s)
        except subprocess.TimeoutExpired:
            has_hung = True
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(child.pid, signal.SIGKILL)
            child.wait()
        output.seek(0)
        return Run(child.returncode, output.read(), time.monotonic() - begin, has_hung)


def files_of_the_tree() -> list[str]:
    """All that git has or would take."""
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, check=True)
    return [name for name in listed.stdout.decode().split("\0") if name and (ROOT / name).is_file()]


class Journal:
    """Mutants that were killed, each with a digest of its entry and of all files but the entries and this program."""

    def __init__(self, path: Path | None, tree: str = "") -> None:
        self.path, self.tree = path, tree
        is_there = path is not None and path.exists()
        self._killed = {json.loads(line)["key"] for line in path.read_text().splitlines()} if is_there else set()

    def _key(self, mutant: Mutant) -> str:
        entry = json.dumps([self.tree, dataclasses.asdict(mutant)], sort_keys=True)
        return hashlib.sha256(entry.encode()).hexdigest()

    def has(self, mutant: Mutant) -> bool:
        """Whether it was killed in an earlier run of the same files."""
        return self._key(mutant) in self._killed

    def add(self, outcome: Outcome) -> None:
        """Note it, if it was killed."""
        if self.path is not None and outcome.verdict == "killed":
            with self.path.open("a") as file:
                line = {"key": self._key(outcome.mutant), "area": outcome.mutant.area, "name": outcome.mutant.name}
                print(json.dumps(line), file=file)


def digest_of_the_tree() -> str:
    """Of names and contents of the files that a mutant's test may depend on."""
    digest = hashlib.sha256()
    for name in sorted(files_of_the_tree()):
        if not name.startswith(("tests/mutants/", "tools/mutation.py", "tests/tools/test_mutation.py", ".ci/")):
            digest.update(name.encode() + b"\0" + hashlib.sha256((ROOT / name).read_bytes()).digest())
    return digest.hexdigest()


class Worker:
    """A copy of the tree in which one mutant after the other is built and run."""

    def __init__(self, folder: Path, temporary: Path) -> None:
        self.folder = folder
        temporary.mkdir()
        # Tests take names in the temporary folder for leftovers of theirs: each worker has its own.
        self._env = {
            **os.environ,
            "PYTHONPATH": str(folder / "python"),
            "PYTHONDONTWRITEBYTECODE": "1",
            "TMPDIR": str(temporary),
            "CCACHE_BASEDIR": str(folder),
            "CCACHE_NOHASHDIR": "1",
        }
        self._env["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{self._env['PATH']}"
        for name in files_of_the_tree():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, folder / name)
        self._configured: set[str] = set()
        self._forks: Forks | None = None
        self._module_is_old = not self._take_module()

    def _take_module(self) -> bool:
        """The module beside the sources, if it is newer than they are, spares a build."""
        modules = list((ROOT / "python" / "weft").glob("_native*.so"))
        sources = [each for folder in ("src", "include") for each in (ROOT / folder).rglob("*") if each.is_file()]
        newest = max(each.stat().st_mtime for each in [*sources, ROOT / "CMakeLists.txt"])
        if len(modules) != 1 or modules[0].stat().st_mtime < newest:
            return False
        shutil.copy2(modules[0], self.folder / "python" / "weft")
        return True

    def write(self, path: Path, text: str) -> None:
        """Change a source."""
        path.write_text(text)
        self._module_is_old = self._module_is_old or path.suffix not in (".py", ".cuh")  # these are not in it

    def build(self, kind: str, target: str) -> Run:
        """`kind`: "native" (tests) or "dev" (the module)."""
        build = self.folder / "build" / kind
        if kind not in self._configured:
            options = ["-DWEFT_BUILD_TESTS=ON", "-DWEFT_BUILD_MODULE=OFF"]
            if kind == "dev":
                options = [f"-DPython_EXECUTABLE={sys.executable}", f"-DWEFT_MODULE_DIR={self.folder}/python/weft"]
            configure = ["cmake", "-S", str(self.folder), "-B", str(build), "-G", "Ninja", *options]
            done = run_command(configure, self.folder, 300, self._env)
            if done.status:
                return done
            self._configured.add(kind)
        return run_command(
            ["cmake", "--build", str(build), "-j", "1", "--target", target], self.folder, 1800, self._env
        )

    def test(self, mutant: Mutant, limit_s: float) -> Run:
        """Build what the test needs, then run it. What doesn't compile raises Wrong."""
        words = shlex.split(mutant.tests)
        is_program = words[0] == "native"
        if is_program or self._module_is_old:
            built = self.build("native", words[1]) if is_program else self.build("dev", "_native")
            if built.status:
                raise Wrong(f"does not compile:\n{built.output[-3000:]}")
            self._module_is_old = self._module_is_old and is_program
        if is_program:
            program = next((self.folder / "build" / "native").rglob(words[1]))
            return run_command([str(program), *words[2:]], self.folder, limit_s, self._env)
        self._forks = self._forks or Forks(self.folder, self._env)
        begin = time.monotonic()
        ended = self._forks.run(["-x", "-q", "-m", "", "-p", "no:cacheprovider", "-p", "no:xdist", *words], limit_s)
        status, output, has_hung = ended
        return Run(status, output, time.monotonic() - begin, has_hung)

    def close(self) -> None:
        """End what serves it."""
        if self._forks is not None:
            self._forks.close()

    @staticmethod
    def look_at_pass(mutant: Mutant, run: Run) -> None:
        """Without the mutant all must have run and passed, or its failure says nothing."""
        if run.status or run.has_hung:
            raise Wrong(f"{mutant.tests} fails without the mutant, too:\n{run.output[-3000:]}")
        is_program = mutant.tests.startswith("native ")
        if not is_program and (" passed" not in run.output or " skipped" in run.output):
            raise Wrong(f"{mutant.tests} skips a test:\n{run.output[-1000:]}")


class Runner:
    """Mutants that are still to run, and how long each test takes without one."""

    def __init__(self, mutants: Iterable[Mutant], journal: Journal) -> None:
        self._journal = journal
        # What must be compiled is taken from the front, the rest from the back: the second worker seldom builds.
        self._left = collections.deque(sorted(mutants, key=lambda each: (not each.is_native, each.tests, each.file)))
        self._lock = threading.Lock()
        self._groups: dict[str, list[str]] = {}  # all that is selected in a file of tests, to be run together unmutated
        for mutant in self._left:
            if not mutant.equivalent:
                self._groups.setdefault(_file_of(mutant.tests), []).append(_selection_of(mutant.tests))
        self._unmutated: dict[str, float] = {}
        self._unmutated_locks = {group: threading.Lock() for group in self._groups}
        self.outcomes: list[Outcome] = []
        for mutant in [each for each in self._left if journal.has(each)]:
            self._left.remove(mutant)
            self.outcomes.append(Outcome(mutant, "killed", note="in an earlier run"))

    def take(self, *, from_front: bool) -> Mutant | None:
        """The next one."""
        with self._lock:
            if not self._left:
                return None
            return self._left.popleft() if from_front else self._left.pop()

    def run_one(self, worker: Worker, mutant: Mutant) -> Outcome:
        """Whether its test sees it."""
        begin = time.monotonic()

        def outcome(verdict: str, note: str = "") -> Outcome:
            return Outcome(mutant, verdict, time.monotonic() - begin, note)

        try:
            path, text = mutated(mutant, worker.folder)
            if mutant.equivalent:
                return outcome("equivalent", mutant.equivalent)
            unmutated_s = self._unmutated_seconds(worker, mutant)
            limit_s = max(LEAST_LIMIT_S, TIMES_UNMUTATED * unmutated_s)
            original = path.read_text()
            worker.write(path, text)
            try:
                run = worker.test(mutant, limit_s)
            finally:
                worker.write(path, original)
            if run.has_hung:
                return outcome("killed", f"hangs: {limit_s:.0f} s against {unmutated_s:.0f} s")
            is_program = mutant.tests.startswith("native ")
            if not is_program and run.status not in (0, 1):
                raise Wrong(f"pytest ended with {run.status}:\n{run.output[-3000:]}")
            return outcome("killed" if run.status else "survived")
        except Wrong as error:
            return outcome("wrong", str(error))

    def _unmutated_seconds(self, worker: Worker, mutant: Mutant) -> float:
        """How long all that mutants need of this file of tests takes; it must pass."""
        group = _file_of(mutant.tests)
        with self._unmutated_locks[group]:
            if group not in self._unmutated:
                selections = sorted(set(self._groups[group]))
                both = "" if "" in selections else f" -k {shlex.quote(' or '.join(f'({each})' for each in selections))}"
                whole = group if group.startswith("native ") else group + both
                together = dataclasses.replace(mutant, tests=whole)
                run = worker.test(together, 900)
                worker.look_at_pass(together, run)
                self._unmutated[group] = run.seconds
            return self._unmutated[group]

    def work(self, worker: Callable[[], Worker], *, from_front: bool) -> None:
        """Until none is left."""
        made: Worker | None = None
        while (mutant := self.take(from_front=from_front)) is not None:
            made = made or worker()
            result = self.run_one(made, mutant)
            with self._lock:
                self.outcomes.append(result)
                self._journal.add(result)
                print(_line(result), flush=True)
        if made is not None:
            made.close()


def _file_of(tests: str) -> str:
    """Files of pytest; of a native program the whole text."""
    return tests if tests.startswith("native ") else tests.partition(" -k ")[0]


def _selection_of(tests: str) -> str:
    """What `-k` selects there; "": all."""
    selected = tests.partition(" -k ")[2]
    return shlex.split(selected)[0] if selected else ""


def _line(outcome: Outcome) -> str:
    mutant = outcome.mutant
    text = f"{outcome.verdict:10} {mutant.area}: {mutant.name} ({outcome.seconds:.0f} s)"
    if outcome.verdict in ("survived", "wrong"):
        text += f"\n    {mutant.file}: {mutant.before!r} -> {mutant.after!r}\n    {mutant.tests}"
    return text + (f"\n    {outcome.note}" if outcome.note else "")


def table(outcomes: Iterable[Outcome]) -> Iterator[str]:
    """Lines of a table by area."""
    by_area: dict[str, collections.Counter[str]] = {}
    for outcome in outcomes:
        by_area.setdefault(outcome.mutant.area, collections.Counter())[outcome.verdict] += 1
    total = sum(by_area.values(), collections.Counter[str]())
    columns = ("killed", "survived", "wrong", "equivalent")
    yield f"{'area':28}{''.join(f'{each:>12}' for each in columns)}{'score':>8}"
    for area, counts in [*sorted(by_area.items()), ("all", total)]:
        counted = counts["killed"] + counts["survived"] + counts["wrong"]
        score = f"{counts['killed'] / counted:.2f}" if counted else "-"
        numbers = "".join(f"{counts[each]:12}" for each in columns)
        yield f"{area:28}{numbers}{score:>8}"


def problems(outcomes: list[Outcome], *, is_whole: bool) -> list[str]:
    """What is not good enough."""
    found = []
    counted = [outcome for outcome in outcomes if outcome.verdict != "equivalent"]
    if is_whole and len(counted) < LEAST_MUTANTS:
        found.append(f"{len(counted)} mutants were counted; at least {LEAST_MUTANTS} are needed")
    for area in sorted({outcome.mutant.area for outcome in counted}):
        verdicts = [outcome.verdict for outcome in counted if outcome.mutant.area == area]
        score = verdicts.count("killed") / len(verdicts)
        if score < LEAST_SCORE:
            found.append(f"{area}: the score is {score:.2f}; at least {LEAST_SCORE} is needed")
    wrong = [outcome.mutant.name for outcome in outcomes if outcome.verdict == "wrong"]
    if wrong:
        found.append(f"entries to be mended: {', '.join(wrong)}")
    return found


def _has_case(mutant: Mutant) -> bool:
    """Whether the native program has the case of an entry that names one."""
    if not mutant.tests.startswith("native "):
        return True
    _, program, *cases = mutant.tests.split()
    if not cases:
        return True
    folder = ROOT / "tests" / "native"
    for source in folder.rglob("*_test.cc"):
        stem = source.stem.removesuffix("_test")
        is_of_it = any(program.startswith(f"{each}_{stem}") for each in source.relative_to(folder).parts[:-1])
        if is_of_it and re.search(rf"TEST\(\w*{cases[0]}", source.read_text()):
            return True
    return False


def _parse(text: str) -> None:
    """A test that can't import what it tests sees nothing."""
    try:
        ast.parse(text)
    except SyntaxError as error:
        raise Wrong(f"no Python: {error}") from error


def check(mutants: list[Mutant]) -> int:
    """Whether each text is there, once, what takes its place is Python, and each case of a native program."""
    status = 0
    for mutant in mutants:
        try:
            path, text = mutated(mutant, ROOT)
            if path != ROOT / mutant.file:
                print(f"moved: {mutant.area}: {mutant.name}: to {path.relative_to(ROOT)}")
            if path.suffix == ".py":
                _parse(text)
            if not _has_case(mutant):
                raise Wrong(f"no such case: {mutant.tests}")
        except Wrong as error:
            print(f"wrong: {mutant.area}: {mutant.name}: {error}")
            status = 1
    print(f"{len(mutants)} entries")
    return status


def main() -> int:
    """See the module's docstring."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="*", default=[], help="areas or names that contain one of these")
    parser.add_argument("--check", action="store_true", help="look only whether texts and cases are there")
    parser.add_argument("--journal", type=Path, help="file of what was killed, which is not run again")
    parser.add_argument("--jobs", type=int, default=2)
    options = parser.parse_args()
    mutants = read_mutants(ROOT / "tests" / "mutants")
    if options.only:
        mutants = [each for each in mutants if any(text in f"{each.area}: {each.name}" for text in options.only)]
    if options.check:
        return check(mutants)
    begin = time.monotonic()
    runner = Runner(mutants, Journal(options.journal, digest_of_the_tree()))
    print(f"{len(runner.outcomes)} of {len(mutants)} were killed in an earlier run")
    with tempfile.TemporaryDirectory(prefix="mutation-") as folder:
        threads = []
        for idx in range(options.jobs):
            make = lambda idx=idx: Worker(Path(folder, f"tree{idx}"), Path(folder, f"t{idx}"))  # noqa: E731
            threads.append(threading.Thread(target=runner.work, args=(make,), kwargs={"from_front": idx % 2 == 0}))
            threads[-1].start()
        for thread in threads:
            thread.join()
    print("\n" + "\n".join(table(runner.outcomes)))
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    print(f"{time.monotonic() - begin:.0f} s, {used.ru_utime + used.ru_stime:.0f} s of processor time")
    found = problems(runner.outcomes, is_whole=not options.only)
    for problem in found:
        print(f"not good enough: {problem}")
    return 1 if found or len(runner.outcomes) != len(mutants) else 0


if __name__ == "__main__":
    sys.exit(main())
