"""The compiled library: right, the same bits in any company, and missed by nobody where it can't be had."""

import os
import stat
from pathlib import Path

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")

from refold.engine.models import find_model  # noqa: E402
from refold.gpu.company import Room, find_dependence  # noqa: E402
from refold.gpu.kv_cache import KvCache  # noqa: E402
from refold.gpu.model_runner import Entry, ModelRunner  # noqa: E402
from refold.gpu.models.native_llama import NativeLlama, Run, stored_dtype  # noqa: E402
from refold.gpu.native import (  # noqa: E402
    SWITCH,
    Library,
    build_library,
    check_switch,
    compiler_flags,
    find_compiler,
    load_library,
)
from refold.gpu.native_cache import temporary_folder, usual_folder  # noqa: E402
from refold.gpu.native_runner import NativeRunner  # noqa: E402
from refold.gpu.plain import find_error  # noqa: E402
from refold.gpu.trusted_runner import trusted_runner  # noqa: E402
from refold.gpu.weights import ModelDescription, describe_model, load_weights  # noqa: E402
from refold.journal.errors import Rejected  # noqa: E402
from tests.kit import tiny_llama  # noqa: E402

DTYPES = [torch.float32, torch.bfloat16, torch.int8]
LENGTH = 150
ROOM = Room(num_blocks=40, block_size=16, max_positions=LENGTH)


@pytest.fixture(scope="module")
def library() -> Library:
    found = load_library()
    if isinstance(found, str):
        pytest.skip(f"no library: {found}")
    return found


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> ModelDescription:
    return describe_model(str(tiny_llama.write_folder(tmp_path_factory.mktemp("tiny"), tiny_llama.tensors())))


def model_of(
    tiny: ModelDescription, library: Library, dtype: torch.dtype, *, threads: int = 1, block_size: int = 16
) -> NativeLlama:
    num_blocks = 4 * (LENGTH // block_size + 1)
    sizes = {"num_blocks": num_blocks, "block_size": block_size, "dtype": stored_dtype(dtype)}
    cache = KvCache(tiny.spec, **sizes, are_keys_transposed=True)
    return NativeLlama(
        library, tiny.spec, load_weights(tiny), cache, max_positions=LENGTH, dtype=dtype, threads=threads
    )


def tokens(seed: int) -> list[int]:
    return [(seed * 31 + at * at * 7) % tiny_llama.VOCAB for at in range(LENGTH)]


def blocks(model: NativeLlama, number: int) -> list[int]:
    """Every fourth of the pool's: requests lie between each other."""
    return list(range(number, model.cache.num_blocks, 4))


def whole(model: NativeLlama, number: int = 0) -> torch.Tensor:
    return model.run([Run(tokens(number), 0, blocks(model, number), LENGTH)]).clone()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_row_has_the_same_bits_alone_in_company_in_any_cut_and_with_any_threads(
    tiny: ModelDescription, library: Library, dtype: torch.dtype
) -> None:
    model = model_of(tiny, library, dtype)
    expected = [whole(model, number) for number in range(4)]
    for threads, block_size in ((1, 16), (2, 16), (3, 16), (2, 32), (2, 8), (1, 7)):
        other = model_of(tiny, library, dtype, threads=threads, block_size=block_size)
        assert other.threads == threads
        start = 0
        for cut in (1, 2, 3, 1, 13, 44, 1, 17, 47, 1, 20):
            stop = min(start + cut, LENGTH)
            # In company: the others are at places of their own, in another order at every step.
            runs = [Run(tokens(each)[start:stop], start, blocks(other, each), stop - start) for each in range(4)]
            order = [(each + start) % 4 for each in range(4)]
            found = other.run([runs[each] for each in order]).clone()
            for place, each in enumerate(order):
                rows = found[place * (stop - start) : (place + 1) * (stop - start)]
                assert torch.equal(rows, expected[each][start:stop]), (threads, block_size, start)
            start = stop
        assert start == LENGTH


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 0.05)], ids=str)
def test_it_computes_what_the_torch_operators_do_in_float32(
    tiny: ModelDescription, library: Library, dtype: torch.dtype, tolerance: float
) -> None:
    ours = NativeRunner(library, tiny.spec, load_weights(tiny), ROOM, dtype)
    plain = ModelRunner(tiny.spec, load_weights(tiny), **ROOM._asdict(), dtype=torch.float32)
    for first, count in ((0, 70), (70, 1), (71, 3), (74, 1)):
        entry = Entry(tokens(1)[first : first + count], first, list(range(3, 30)), 1)
        a, b = ours.run([entry]).clone(), plain.run([entry])
        assert float((a - b).abs().max() / b.abs().max()) < tolerance
    slots = torch.arange(48, 48 + 75)
    assert torch.allclose(ours.cache.read(slots).float(), plain.cache.read(slots), atol=30 * tolerance)


def test_bytes_are_close_and_need_the_library(
    tiny: ModelDescription, library: Library, monkeypatch: pytest.MonkeyPatch
) -> None:
    exact, coarse = (whole(model_of(tiny, library, dtype)) for dtype in (torch.float32, torch.int8))
    assert float((coarse - exact).pow(2).mean().sqrt() / exact.pow(2).mean().sqrt()) < 0.1
    monkeypatch.setenv(SWITCH, "torch")
    with pytest.raises(Rejected, match="dtype 'int8' needs the compiled library: REFOLD_STEP is torch"):
        trusted_runner(tiny.spec, load_weights(tiny), ROOM, torch.int8)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_library_is_trusted_if_it_is_right_and_named(
    tiny: ModelDescription, library: Library, dtype: torch.dtype
) -> None:
    runner, facts = trusted_runner(tiny.spec, load_weights(tiny), ROOM, dtype)
    assert isinstance(runner, NativeRunner)
    assert facts == {"step": "native", "native": library.build, "batch_invariant": "yes", "self_test": "passed"}


def test_a_library_that_is_wrong_is_given_up_for_torch(
    tiny: ModelDescription, library: Library, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = {name: each.flip(0) for name, each in load_weights(tiny).items()}
    monkeypatch.setattr("refold.gpu.trusted_runner.NativeRunner", Wrong)
    Wrong.weights = other
    _, facts = trusted_runner(tiny.spec, load_weights(tiny), ROOM, torch.float32)
    assert facts["step"] == "torch"
    assert facts["self_test"].startswith("passed (native: its logits are off by")
    with pytest.raises(Rejected, match="dtype 'int8' needs the compiled library: it fails its self-test"):
        trusted_runner(tiny.spec, load_weights(tiny), ROOM, torch.int8)


class Wrong(NativeRunner):
    """Computes another model."""

    weights: dict[str, torch.Tensor]

    def __init__(self, library: Library, spec: object, _: object, room: Room, dtype: torch.dtype) -> None:
        super().__init__(library, spec, self.weights, room, dtype)  # type: ignore[arg-type]


def test_without_a_library_torch_computes_and_says_why(tiny: ModelDescription, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(SWITCH, "torch")
    _, facts = trusted_runner(tiny.spec, load_weights(tiny), ROOM, torch.float32)
    assert (facts["step"], facts["not_native"], facts["self_test"]) == ("torch", "REFOLD_STEP is torch", "passed")


def test_without_a_compiler_there_are_words_instead(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", str(tmp_path / "c++"))
    assert load_library() == f"no C++ compiler: CXX names '{tmp_path}/c++', which is no program"
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CXX")
    assert load_library() == "no C++ compiler"
    broken = tmp_path / "c++"
    broken.write_text('#!/bin/sh\n[ "$1" = --version ] && echo broken 1.0 && exit 0\necho "cannot" >&2; exit 1\n')
    broken.chmod(broken.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("CXX", str(broken))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert load_library() == f"{broken}: cannot"
    assert os.listdir(tmp_path / "refold") == []  # noqa: PTH208 - nothing half made is left
    monkeypatch.setenv(SWITCH, "torch")
    assert load_library() == "REFOLD_STEP is torch"


@pytest.mark.parametrize("asked", ["foo", "TORCH", "1"])
def test_a_form_that_there_is_not_is_refused_with_those_that_there_are(
    tiny: ModelDescription, monkeypatch: pytest.MonkeyPatch, asked: str
) -> None:
    monkeypatch.setenv(SWITCH, asked)
    for refuses in (load_library, lambda: find_model(tiny.name)):
        with pytest.raises(Rejected, match=f"REFOLD_STEP='{asked}': give 'torch' for .* 'native', or nothing, for"):
            refuses()
    find_model("simulated")


def test_a_form_may_be_named_that_is_taken_anyway(monkeypatch: pytest.MonkeyPatch) -> None:
    for asked, form in {"": "native", "native": "native", "torch": "torch"}.items():
        monkeypatch.setenv(SWITCH, asked)
        assert check_switch() == form


@pytest.fixture
def copying_compiler(library: Library, tmp_path: Path) -> tuple[str, tuple[str, ...]]:
    """A compiler that takes no time: it copies a library that was made before."""
    kept = next(
        iter(sorted(usual_folder().glob("step-*.so"), key=lambda path: path.stat().st_mtime, reverse=True)), None
    )
    if kept is None:
        pytest.skip("the library isn't kept in the usual place")
    compiler = tmp_path / "c++"
    compiler.write_text(f'#!/bin/sh\n[ "$1" = --version ] && echo copying 1.0 && exit 0\ncp {kept} "$2"\n')
    compiler.chmod(0o700)
    return str(compiler), ()


@pytest.mark.parametrize("home", ["/proc/nowhere", "a file"])
def test_where_the_cache_cannot_be_written_a_temporary_folder_takes_its_place_and_stderr_says_so(
    copying_compiler: tuple[str, tuple[str, ...]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    home: str,
) -> None:
    (tmp_path / "a file").touch()
    usual, temporary = str(tmp_path / home), tmp_path / "temporary"
    temporary.mkdir()
    monkeypatch.setenv("XDG_CACHE_HOME", usual)
    monkeypatch.setattr("tempfile.tempdir", str(temporary))
    for _ in range(2):
        found = build_library.__wrapped__(*copying_compiler)
        assert isinstance(found, Library), found
        (line,) = capsys.readouterr().err.splitlines()
        assert line.startswith(f"refold: the compiled library can't be kept in {usual}/refold (")
        assert line.endswith("let XDG_CACHE_HOME name a folder that can be written")
    (folder,) = temporary.iterdir()
    assert str(folder) in line, "the second worker found what the first one had made"
    assert len(list(folder.iterdir())) == 1


def test_a_temporary_folder_that_somebody_else_could_write_is_not_taken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    ours = temporary_folder()
    assert temporary_folder() == ours
    ours.chmod(0o777)
    assert temporary_folder() != ours
    ours.rmdir()
    ours.symlink_to(tmp_path)
    assert temporary_folder() != ours


def test_a_kept_library_that_is_damaged_is_made_again(
    copying_compiler: tuple[str, tuple[str, ...]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "first"))
    assert isinstance(build_library.__wrapped__(*copying_compiler), Library)
    (kept,) = (tmp_path / "first" / "refold").iterdir()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "second"))
    damaged = tmp_path / "second" / "refold" / kept.name
    damaged.parent.mkdir(parents=True)
    damaged.write_bytes(b"\x7fELF and then nothing")
    assert isinstance(build_library.__wrapped__(*copying_compiler), Library)
    assert damaged.stat().st_size == kept.stat().st_size


@pytest.mark.skipif("REFOLD_EXHAUSTIVE" not in os.environ, reason="compiles for other processors: REFOLD_EXHAUSTIVE=1")
@pytest.mark.parametrize("target", ["-march=x86-64", "-march=x86-64-v3", "-DREFOLD_EMULATE_DOT"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_other_processors_code_is_right_too(
    tiny: ModelDescription, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, target: str, dtype: torch.dtype
) -> None:
    compiler = find_compiler()
    assert compiler is not None
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    found = build_library(compiler, (*compiler_flags(), target))
    assert isinstance(found, Library), found
    runner = NativeRunner(found, tiny.spec, load_weights(tiny), ROOM, dtype)
    assert find_dependence(runner.run, tiny.spec.vocab_size, ROOM) is None
    assert find_error(runner.run, tiny.spec, load_weights(tiny), ROOM, dtype) is None
    test_a_row_has_the_same_bits_alone_in_company_in_any_cut_and_with_any_threads(tiny, found, dtype)
