"""all-MiniLM-L6-v2: folder of sentence-transformers → package → new process → the embeddings transformers gives."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest
import torch
from torch.nn import functional

import inlay
from tests.small_packages import in_new_process

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.nightly
LONGEST = 256
"""As its sentence_bert_config.json states."""
TEXTS = [
    *("", "a", "A fox jumps over a dog.", "An animal leaps.", "Interest rates rose.", "naïve café 東京 🦊"),
    *("word " * count for count in (1, 5, 6, 7, 30, 61, 62, 100, LONGEST - 2, LONGEST, 10_000)),
]
EMBED = """
import json, sys, inlay
made = inlay.load_encoder(sys.argv[1]).embed(json.loads(sys.argv[2]))
heavy = [name for name in sys.modules if name.startswith(("torch._inductor", "transformers"))]
print(json.dumps([made.tolist(), heavy]))
"""


@pytest.fixture(scope="module")
def package(minilm: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("minilm") / "package"
    inlay.build(str(minilm), path)
    return path


@pytest.fixture(scope="module")
def expected(minilm: Path) -> torch.Tensor:
    """Each text alone, without padding."""
    from transformers import AutoModel, AutoTokenizer

    model, tokenizer = AutoModel.from_pretrained(minilm).eval(), AutoTokenizer.from_pretrained(minilm)
    rows = []
    for text in TEXTS:
        given = tokenizer(text, truncation=True, max_length=LONGEST, return_tensors="pt")
        with torch.no_grad():
            rows.append(functional.normalize(model(**given)[0][0].mean(0), dim=0))
    return torch.stack(rows)


@pytest.mark.parametrize("batch_size", [1, 4, 32])
def test_equal_to_transformers(package: Path, expected: torch.Tensor, batch_size: int) -> None:
    made = inlay.load_encoder(package).embed(TEXTS, batch_size=batch_size)
    torch.testing.assert_close(made, expected, atol=1e-5, rtol=0)


def test_in_a_new_process(package: Path, expected: torch.Tensor) -> None:
    """Neither transformers nor the compiler is imported."""
    made, heavy = json.loads(in_new_process(EMBED, package, json.dumps(TEXTS)).stdout)
    torch.testing.assert_close(torch.tensor(made), expected, atol=1e-5, rtol=0)
    assert heavy == []
