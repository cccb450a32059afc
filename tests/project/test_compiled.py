"""The core can be compiled, all of it but its structs; `make compiled` does it and compares the journals of both forms."""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType

ROOT = Path(__file__).resolve().parents[2]

STRUCTS = {"commands", "images", "plan_parts"}
"""Modules of the core that are structs and little else. Another one here is code that stays slow: put its structs apart."""


def the_build() -> ModuleType:
    spec = importlib.util.spec_from_file_location("build_of_refold", ROOT / "setup.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_all_of_the_core_is_compiled_but_its_structs(monkeypatch) -> None:
    monkeypatch.chdir(ROOT)
    chosen = {Path(name) for name in the_build().core_files()}
    for package in ("scheduler", "projections"):
        there = {path for path in Path("src/refold", package).glob("*.py") if path.name != "__init__.py"}
        assert {path.stem for path in there - chosen} <= STRUCTS
    assert {"decide.py", "fold.py", "laws.py", "planning.py", "codec.py", "content.py"} <= {
        path.name for path in chosen
    }


def test_a_module_with_a_frozen_struct_is_not_compiled(tmp_path: Path) -> None:
    frozen, plain = tmp_path / "frozen.py", tmp_path / "plain.py"
    frozen.write_text("import msgspec\nclass Hit(msgspec.Struct, frozen=True):\n    block_id: int\n", encoding="utf-8")
    plain.write_text("class Pool:\n    __slots__ = ('free',)\n\nNONE = None\n", encoding="utf-8")
    assert the_build().can_be_compiled(plain)
    assert not the_build().can_be_compiled(frozen)


def test_mypyc_makes_c_of_every_file_of_the_core(tmp_path: Path) -> None:
    (tmp_path / "src").symlink_to(ROOT / "src")
    (tmp_path / "build_of_refold.py").write_bytes((ROOT / "setup.py").read_bytes())
    program = "import build_of_refold as b; print(len(b.core_files()), len(b.compiled()))"
    made = subprocess.run(
        [sys.executable, "-c", program],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert made.returncode == 0, made.stdout[-2000:] + made.stderr[-2000:]
    num_files, num_extensions = map(int, made.stdout.split()[-2:])
    assert num_extensions >= num_files > 30
    for name in ("decide", "fold", "planning"):
        assert f"CPyDef_{name}" in "".join(path.read_text() for path in tmp_path.glob("build/**/*.c"))
