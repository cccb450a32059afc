"""The forward pass in C++, compiled on this machine at first use and kept in a cache folder. Optional: without it torch computes.

One call is one step: products with packed weights, norms, rotary embedding, paged attention, all in preallocated memory, by
threads that meet after each phase. From Python the same takes hundreds of operators, each of which is looked up, allocates
and wakes threads; that is most of a one-row step. Every sum runs in an order that no other row influences, so the bits of a
row don't depend on the batch, on its cutting, or on the number of threads.

The sources in `cpp/` are compiled for the very processor that they run on. The library's name holds a digest of the sources,
the flags, the compiler's version and the processor's abilities: whatever changes, another library is made. Where there is no
compiler, or it fails, the reason is part of the worker's environment, as is the library: the two forms add up in different
orders, so their last bits differ, and whoever replays a journal must know which one ran.
"""

import contextlib
import ctypes
import hashlib
import os
import platform
import shutil
import subprocess
from functools import cache
from pathlib import Path
from typing import NamedTuple

from refold.gpu.native_cache import in_first_usable
from refold.journal.errors import Rejected

SOURCES = Path(__file__).parent / "cpp"
COMPILERS = ("c++", "g++", "clang++")
COMPILE_TIMEOUT_S = 120.0
SWITCH = "REFOLD_STEP"
"""Environment variable: `torch` leaves the library aside. CXX names the compiler, XDG_CACHE_HOME where libraries are kept."""
CHOSEN = f"{SWITCH} is torch"
"""Why there is none where somebody wanted none."""


class Library(NamedTuple):
    """A library that is loaded, and how it was made, in words: part of what the numbers depend on."""

    functions: ctypes.CDLL
    build: str


class Shape(ctypes.Structure):
    """`Shape` of cpp/model.h."""

    _fields_ = [
        *((name, ctypes.c_int32) for name in ("layers", "width", "heads", "kv_heads", "head_dim", "mlp_width")),
        *((name, ctypes.c_int32) for name in ("vocab_size", "num_blocks", "block_size", "max_positions", "threads")),
        ("norm_eps", ctypes.c_float),
    ]


class Step(ctypes.Structure):
    """`Step` of cpp/model.h."""

    _fields_ = [
        *((name, ctypes.c_int32) for name in ("num_rows", "num_items", "num_sampled")),
        *((name, ctypes.c_void_p) for name in ("token_ids", "positions", "slots", "sampled", "items", "blocks")),
        ("logits", ctypes.c_void_p),
        ("only_linears", ctypes.c_int32),
    ]


def load_library() -> Library | str:
    """The library, compiled if need be; or why there is none, in words. Raises Rejected as `check_switch`."""
    if check_switch() == "torch":
        return CHOSEN
    compiler = find_compiler()
    if compiler is None:
        named = os.environ.get("CXX")
        return f"no C++ compiler: CXX names {named!r}, which is no program" if named else "no C++ compiler"
    return build_library(compiler, tuple(compiler_flags()))


def check_switch() -> str:
    """The form that the environment asks for, `native` unless told otherwise.

    Raises:
        Rejected: it asks for one that there is not.
    """
    asked = os.environ.get(SWITCH) or "native"
    if asked not in {"native", "torch"}:
        raise Rejected(
            f"the environment has {SWITCH}={asked[:40]!r}: give 'torch' for torch operators; 'native', or nothing, for the "
            "compiled library where it can be had"
        )
    return asked


@cache
def build_library(compiler: str, flags: tuple[str, ...]) -> Library | str:
    """The library made by this compiler with these flags."""
    try:
        version = _output([compiler, "--version"]).partition("\n")[0].strip()
        digest = _digest(version, flags)
        functions = in_first_usable(lambda folder: _loaded(folder, digest, compiler, flags))
        return Library(functions, f"{digest[:12]} by {version}")
    except subprocess.TimeoutExpired:
        return f"{compiler} took longer than {COMPILE_TIMEOUT_S:g} s"
    except (OSError, AttributeError, subprocess.SubprocessError, UnicodeError) as error:
        return f"{compiler}: {_first_line(error)}"


def find_compiler() -> str | None:
    """The program that CXX names, or the first of the usual ones; None if there is none."""
    named = os.environ.get("CXX")
    return next(filter(None, map(shutil.which, [named] if named else COMPILERS)), None)


def compiler_flags() -> list[str]:
    """For this very processor, and without what would let the compiler change the order of a sum."""
    native = "-march=native" if platform.machine() in {"x86_64", "AMD64"} else "-mcpu=native"
    wanted = ["-O3", "-std=c++17", "-ffp-contract=fast", "-fno-exceptions", "-fno-rtti", "-fvisibility=hidden"]
    return [native, *wanted, "-fPIC", "-shared", "-pthread"]


def _digest(version: str, flags: tuple[str, ...]) -> str:
    digest = hashlib.sha256("\n".join([version, *flags, platform.machine(), _abilities()]).encode())
    for source in sorted(SOURCES.iterdir()):
        digest.update(source.name.encode() + b"\0" + source.read_bytes())
    return digest.hexdigest()


def _abilities() -> str:
    """What the processor can do, as the system tells."""
    with contextlib.suppress(OSError):
        lines = Path("/proc/cpuinfo").read_text("utf-8", "replace").splitlines()
        told = {line.partition(":")[0].strip(): line for line in reversed(lines)}
        return "\n".join(
            told.get(key, "") for key in ("vendor_id", "cpu family", "model", "flags", "Features", "CPU part")
        )
    return platform.processor()


def _loaded(folder: Path, digest: str, compiler: str, flags: tuple[str, ...]) -> ctypes.CDLL:
    """The library of this digest from this folder. One kept there that can't be loaded is damaged, and made again."""
    path = folder / f"step-{digest[:32]}.so"
    if path.is_file() and path.stat().st_uid == os.getuid():
        with contextlib.suppress(OSError, AttributeError):
            return _declared(ctypes.CDLL(str(path)))
        path.unlink()
    _compile(compiler, flags, path)
    return _declared(ctypes.CDLL(str(path)))


def _compile(compiler: str, flags: tuple[str, ...], path: Path) -> None:
    """Compile beside `path` and rename: two processes may do so at once. Whether a file can be made is asked before the compiler."""
    draft = path.with_suffix(f".{os.getpid()}.tmp")
    draft.touch()
    try:
        _output([compiler, *flags, "-o", str(draft), str(SOURCES / "step.cpp")])
        draft.replace(path)
    finally:
        draft.unlink(missing_ok=True)


def _output(command: list[str]) -> str:
    """What a command prints. Raises CalledProcessError with its complaint, TimeoutExpired, OSError."""
    ran = subprocess.run(command, capture_output=True, text=True, timeout=COMPILE_TIMEOUT_S, check=True)  # noqa: S603
    return ran.stdout


def _first_line(error: Exception) -> str:
    complaint = error.stderr if isinstance(error, subprocess.CalledProcessError) else str(error)
    return next((line for line in str(complaint).splitlines() if line.strip()), type(error).__name__)[:200]


def _declared(functions: ctypes.CDLL) -> ctypes.CDLL:
    pointer, number = ctypes.c_void_p, ctypes.c_int
    functions.refold_create.argtypes = [ctypes.POINTER(Shape), number, *[pointer] * 4]
    functions.refold_create.restype = pointer
    functions.refold_set_weight.argtypes = [pointer, number, number, pointer]
    functions.refold_run.argtypes = [pointer, ctypes.POINTER(Step)]
    functions.refold_threads.argtypes = [pointer]
    functions.refold_free.argtypes = [pointer]
    functions.refold_free.restype = None
    return functions
