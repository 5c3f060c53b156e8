from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from eager import byte_tokenizer
from models import random_model

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
def served_package(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small package with four slots, float32. Read it only: all tests share it."""
    from inlay.flow import Options, build

    folder = tmp_path_factory.mktemp("served")
    random_model(FIELDS).save_pretrained(folder / "model")
    byte_tokenizer().save_pretrained(folder / "model")
    build(str(folder / "model"), folder / "package", Options(max_length=ROOM, max_batch=4))
    return folder / "package"
