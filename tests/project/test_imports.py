"""What loads what: the import contracts, and what `import refold` costs those who embed it."""

import inspect
import json
import re
import subprocess
import sys
import tomllib
import typing

import pytest

import refold
from tests.project.tree import PACKAGES, ROOT

PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
CONTRACTS = PYPROJECT["tool"]["importlinter"]["contracts"]
HEAVY = (
    "torch",
    "numpy",
    "sqlalchemy",
    "alembic",
    "pydantic",
    "asyncio",
    "structlog",
    "click",
    "rich",
    "msgspec",
    "tokenizers",
)


def modules_after(statement: str) -> set[str]:
    code = f"{statement}\nimport json, sys\nprint(json.dumps(sorted(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return set(json.loads(done.stdout))


def test_the_import_contracts_hold() -> None:
    lint_imports = "from importlinter.cli import lint_imports_command; lint_imports_command()"
    done = subprocess.run(
        [sys.executable, "-c", lint_imports, "--no-cache"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"Contracts: {len(CONTRACTS)} kept, 0 broken" in done.stdout


def test_import_refold_loads_nothing_heavy() -> None:
    assert not modules_after("import refold") & set(HEAVY)


@pytest.mark.parametrize(
    "module", ["refold.scheduler.decide", "refold.scheduler.fold", "refold.scheduler.laws", "refold.journal.stores"]
)
def test_deciding_and_replaying_load_no_torch_and_no_database(module: str) -> None:
    assert not modules_after(f"import {module}") & {"torch", "numpy", "sqlalchemy", "alembic", "pydantic", "asyncio"}


def test_the_version_is_said_in_one_voice() -> None:
    assert PYPROJECT["project"]["version"] == refold.__version__
    assert f"## [{refold.__version__}]" in (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")


def test_every_public_name_loads() -> None:
    assert {getattr(refold, name).__name__ for name in refold.__all__} == set(refold.__all__)
    with pytest.raises(AttributeError, match="no attribute 'Motor'"):
        refold.Motor  # noqa: B018


def test_what_the_public_classes_return_and_raise_can_be_imported_from_refold() -> None:
    public = set(refold.__all__)
    for face in (refold.Engine, refold.Session):
        for name, member in inspect.getmembers(face):
            if not name.startswith("_"):
                function = getattr(member, "fget", member)
                assert ours_in(typing.get_type_hints(function).get("return")) <= public, f"{face.__name__}.{name}"
                assert raised(inspect.getdoc(function) or "") <= public, f"{face.__name__}.{name}"
    assert ours_in(refold.Engine.stall_report.__annotations__["return"]) == {"StallReport"}
    assert raised(refold.Engine.open.__doc__ or "") == {"Rejected", "JournalOwned", "JournalError", "WorkerLost"}


def ours_in(hint: object) -> set[str]:
    """The names of our classes in a type hint."""
    inside = {name for part in typing.get_args(hint) for name in ours_in(part)}
    is_ours = isinstance(hint, type) and hint.__module__.startswith("refold.")
    return inside | ({hint.__name__} if is_ours else set())


def raised(doc: str) -> set[str]:
    """The errors that a docstring says are raised."""
    _, _, section = doc.partition("Raises:")
    return set(re.findall(r"^\s+([A-Z]\w+):", section, re.MULTILINE)) | set(re.findall(r"Raises (\w+)", doc))


def test_every_package_is_linked_into_the_import_package() -> None:
    for package in PACKAGES:
        link = ROOT / "src" / "refold" / package
        assert link.is_symlink()
        assert link.resolve() == ROOT / package
