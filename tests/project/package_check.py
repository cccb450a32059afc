"""Builds sdist and wheel as for a release, and uses the wheel as a stranger would: `python tests/project/package_check.py`.

The wheel is made from the sdist, installed into an empty environment outside the checkout, without extras. Then: it holds
exactly what git holds of the packages; every module that needs no extra can be imported; the command runs; and a program
that embeds refold type-checks under `mypy --strict`.
"""

import subprocess
import sys
import tempfile
import venv
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("engine", "gpu", "journal", "migrations", "projections", "scheduler")
# What the extras bring; a module may miss these and nothing else.
EXTRAS = ("torch", "numpy", "gguf", "safetensors", "tokenizers", "jinja2", "psycopg", "duckdb")
# Modules that must import without any extra: reading, replaying and checking a journal.
LIGHT = (
    "refold.journal",
    "refold.projections",
    "refold.scheduler",
    "refold.migrations",
    "refold.engine.cli",
    "refold.engine.history",
)

IMPORT_ALL = f"""
import importlib, pkgutil, sys
import refold
names, missing = [], []
for module in pkgutil.walk_packages(refold.__path__, "refold.", onerror=lambda name: None):
    name = module.name
    if name.endswith(".__main__") or name == "refold.migrations.env":  # programs, not modules
        continue
    try:
        importlib.import_module(name)
        names.append(name)
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] not in {EXTRAS} or name.startswith({LIGHT}):
            if not name.startswith("refold.journal.testing") or error.name != "pytest":
                raise
        missing.append(f"{{name}} ({{error.name}})")
assert len(names) > 40, names
print(f"{{len(names)}} modules imported; left to the extras: {{', '.join(missing) or 'none'}}")
"""


def main() -> None:
    """Run all checks; the first that fails ends the program with its output."""
    with tempfile.TemporaryDirectory(prefix="refold-package-") as folder:
        wheel = build(Path(folder))
        compare_with_git(wheel)
        python = install(wheel, Path(folder))
        say(run(python, "-I", "-c", IMPORT_ALL, cwd=folder).strip())
        assert run(python.with_name("refold"), "--help", cwd=folder).startswith("Usage: refold")
        assert run(python.with_name("refold"), "--version", cwd=folder).startswith("refold ")
        program = Path(folder, "consumer.py")
        program.write_text((ROOT / "tests" / "project" / "consumer.py").read_text(encoding="utf-8"), encoding="utf-8")
        checker = [
            sys.executable,
            "-m",
            "mypy",
            "--strict",
            "--python-executable",
            python,
            "--cache-dir",
            f"{folder}/cache",
        ]
        say("a consumer of the wheel: " + run(*checker, program, cwd=folder).strip())


def build(folder: Path) -> Path:
    """The wheel, made from the sdist."""
    run(sys.executable, "-m", "build", "--outdir", folder / "dist", ROOT, cwd=folder)
    (wheel,) = (folder / "dist").glob("*.whl")
    say(f"built {', '.join(sorted(path.name for path in (folder / 'dist').iterdir()))}")
    return wheel


def compare_with_git(wheel: Path) -> None:
    """The files of the wheel are those of the commit, no more and no less."""
    listed = run("git", "ls-files", "-z", *PACKAGES, "src/refold", cwd=ROOT).split("\0")
    names = [name for name in listed if name and not (ROOT / name).is_symlink()]
    expected = {f"refold/{name.removeprefix('src/refold/')}" for name in names}
    with zipfile.ZipFile(wheel) as archive:
        found = {name for name in archive.namelist() if ".dist-info/" not in name}
        metadata = {name.partition(".dist-info/")[2] for name in archive.namelist()} - {""}
    assert found == expected, f"only in the wheel: {sorted(found - expected)}; only in git: {sorted(expected - found)}"
    assert "refold/py.typed" in found
    assert {"METADATA", "entry_points.txt", "licenses/LICENSE"} <= metadata, metadata
    say(f"the wheel holds the {len(found)} files that git holds")


def install(wheel: Path, folder: Path) -> Path:
    """The interpreter of a new environment with the wheel and its plain dependencies in it."""
    venv.create(folder / "venv", with_pip=True)
    python = folder / "venv" / "bin" / "python"
    constraints = ROOT / "constraints.txt"
    run(python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "-c", constraints, wheel, cwd=folder)
    return python


def run(*command: object, cwd: Path | str) -> str:
    """What a command printed on stdout; its failure is ours, with all that it printed."""
    done = subprocess.run([str(word) for word in command], cwd=cwd, capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(f"{' '.join(map(str, command[:4]))} ... exit status {done.returncode}\n{done.stdout}{done.stderr}")
    return done.stdout


def say(line: str) -> None:
    """One line of progress."""
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
