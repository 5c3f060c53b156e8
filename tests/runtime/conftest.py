from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from tests.models import random_model
from tests.shared_cache import once_a_run
from tests.text_models import byte_tokenizer

if TYPE_CHECKING:
    from pathlib import Path

ROOM = 256
FIELDS: dict[str, Any] = {
    "model_type": "llama",
    "num_hidden_layers": 2,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 320,
    "max_position_embeddings": ROOM,
    "tie_word_embeddings": False,
}


@pytest.fixture(scope="session")
def served_package() -> Path:
    """A small package with four slots, float32. Read it only: all tests share it."""
    from inlay.flow import BuildOptions, build

    def make(folder: Path) -> None:
        random_model(FIELDS).save_pretrained(folder / "model")
        byte_tokenizer().save_pretrained(folder / "model")
        build(str(folder / "model"), folder / "package", BuildOptions(max_length=ROOM, max_batch=4))

    return once_a_run("served", make) / "package"
