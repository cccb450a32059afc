"""A worker tries its arithmetic in company before it is trusted, falls back where it fails, and says what it found."""

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")

from refold.gpu import attention, linear, model_runner  # noqa: E402
from refold.gpu.company import LENGTHS, STEPS, Fault, Room, find_dependence  # noqa: E402
from refold.gpu.factory import create_worker  # noqa: E402
from refold.gpu.model_runner import Entry, ModelRunner  # noqa: E402
from refold.gpu.models import llama  # noqa: E402
from refold.gpu.native import SWITCH  # noqa: E402
from refold.gpu.weights import describe_model, load_weights  # noqa: E402
from tests.kit import tiny_llama  # noqa: E402
from tests.kit.worker_contract import config_for  # noqa: E402


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(tiny_llama.write_folder(tmp_path_factory.mktemp("tiny"), tiny_llama.tensors()))


def environment(model: str, **options: object) -> dict[str, str]:
    return create_worker(config_for(model), threads=1, **options).environment()  # type: ignore[arg-type]


def test_the_pieces_make_up_the_requests() -> None:
    ends = [0] * len(LENGTHS)
    for step in STEPS:
        assert len({piece.request for piece in step}) == len(step) > 1
        for piece in step:
            assert piece.start == ends[piece.request] < piece.stop
            ends[piece.request] = piece.stop
    assert tuple(ends) == LENGTHS


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_sound_worker_passes(tiny: str, dtype: str) -> None:
    told = environment(tiny, dtype=dtype)
    assert (told["self_test"], told["batch_invariant"]) == ("passed", "yes")


@pytest.mark.parametrize("room", [Room(1, 1, 768), Room(2, 8, 768), Room(40, 4, 768), Room(96, 8, 7)])
def test_a_small_cache_is_tried_as_far_as_it_goes(tiny: str, room: Room) -> None:
    found = describe_model(tiny)
    assert found.spec is not None
    runner = ModelRunner(found.spec, load_weights(found), **room._asdict(), dtype=torch.float32)
    assert find_dependence(runner.run, found.spec.vocab_size, room) is None


def test_one_bit_in_one_step_of_company_is_found() -> None:
    steps = 0

    def run(entries: list[Entry]) -> torch.Tensor:
        """A model of its own: a row of logits is its token and its position. It counts wrong in the sixth step."""
        nonlocal steps
        steps += 1
        rows = [
            [float(token), float(entry.first_position + at), 1.0]
            for entry in entries
            for at, token in list(enumerate(entry.token_ids))[len(entry.token_ids) - entry.num_logits :]
        ]
        found = torch.tensor(rows)
        if steps == 6:
            found.view(torch.int32)[2, 1] ^= 1
        return found

    assert find_dependence(run, 160, Room(64, 16, 768)) == Fault(1, 17, 1, 3)
    steps = 10
    assert find_dependence(run, 160, Room(64, 16, 768)) is None


@pytest.fixture
def without_library(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(SWITCH, "torch")


def row_dependent(rows: torch.Tensor) -> torch.Tensor:
    """Rows of a size that no probe of single layers has get other bits."""
    return rows * (1 + 2.0**-20) if len(rows) in {100, 20, 33} else rows


@pytest.mark.usefixtures("without_library")
def test_packed_layers_that_fail_in_company_are_given_up_for_plain_ones(
    tiny: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    packed = linear.Linear.__call__

    def broken(self: linear.Linear, rows: torch.Tensor) -> torch.Tensor:
        if self._kind == "plain":  # row by row: slow, and surely independent of the others
            return torch.stack([torch.mv(self._weight, row) for row in rows])
        return row_dependent(packed(self, rows))

    monkeypatch.setattr(linear.Linear, "__call__", broken)
    monkeypatch.setattr(model_runner, "smallest_invariant_rows", lambda *_: 2)
    told = environment(tiny)
    assert told["linear"] == "plain"
    assert told["self_test"].startswith("passed (packed: the row at position 94 of a request of 140 tokens differs in ")
    assert told["batch_invariant"] == "yes"


@pytest.mark.usefixtures("without_library")
def test_without_packing_operators_the_plain_ones_are_tried_and_named(
    tiny: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def missing(*_: object) -> torch.Tensor:
        raise AttributeError("no such operator")

    monkeypatch.setattr(torch.ops.mkldnn, "_reorder_linear_weight", missing)
    told = environment(tiny)
    assert told["linear"] == "plain"
    assert told["self_test"].startswith(("passed", "failed (packed: "))


@pytest.mark.usefixtures("without_library")
def test_where_everything_fails_the_worker_works_and_says_so(tiny: str, monkeypatch: pytest.MonkeyPatch) -> None:
    attend = attention.attend

    def broken(queries: torch.Tensor, *others: object) -> torch.Tensor:
        return row_dependent(attend(queries, *others))  # type: ignore[arg-type]

    monkeypatch.setattr(llama, "attend", broken)
    told = environment(tiny)
    assert told["batch_invariant"] == "no"
    assert told["self_test"].startswith("failed (packed: the row at position 94")
    assert "; plain: " in told["self_test"]
