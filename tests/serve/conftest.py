from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch

from tests.models import random_model
from tests.serve.server_process import Server
from tests.shared_cache import once_a_run
from tests.small_packages import FIELDS
from tests.text_models import byte_tokenizer

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from inlay.runtime.engine import Engine

ROOM, SLOTS = 4096, 4
SHAPE = {**FIELDS, "num_hidden_layers": 2, "max_position_embeddings": ROOM, "initializer_range": 0.2}


@pytest.fixture(scope="session")
def package() -> Path:
    """A small random model that can talk for a while, four sequences at once. Read it only: all tests share it."""
    from inlay.flow import BuildOptions, build

    def make(folder: Path) -> None:
        tokenizer, model = byte_tokenizer(), random_model(SHAPE)
        letters = {token for name, token in tokenizer.get_vocab().items() if name.isascii() or name.startswith("Ġ")}
        with torch.no_grad():  # what it says are letters, for the most part, not bytes that are no characters
            model.lm_head.weight[[token for token in range(SHAPE["vocab_size"]) if token not in letters]] = 0
        model.save_pretrained(folder / "model")
        tokenizer.save_pretrained(folder / "model")
        build(str(folder / "model"), folder / "package", BuildOptions(max_length=ROOM, max_batch=SLOTS))

    return once_a_run("talks", make) / "package"


@pytest.fixture(scope="session")
def server(package: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server with nothing special about it, which all tests share."""
    with Server(package, tmp_path_factory.mktemp("log")) as running:
        yield running


@pytest.fixture(scope="session")
def engine(package: Path) -> Iterator[Engine]:
    """An engine in this process."""
    from inlay.runtime.engine import Engine

    made = Engine.open(package)
    made.start()
    yield made
    made.close()
