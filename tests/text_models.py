"""Small real things to generate text with: tokenizers, a stock model that computes everything again at each step."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from inlay.frontend.tokenizer import save_tokenizer
from inlay.runtime.text_codec import TextCodec
from tests.models import LLAMA, random_model

if TYPE_CHECKING:
    from pathlib import Path

VOCABULARY = 320
TEMPLATE = (
    "{% for message in messages %}\n"
    "    {% if message['role'] not in ['system', 'user', 'assistant'] %}\n"
    "        {{ raise_exception('unknown role ' + message['role']) }}\n"
    "    {% endif %}\n"
    "{{ '<turn>' + message['role'] + '\n' + message['content'] | trim + '<end>' }}\n"
    "{% endfor %}\n"
    "{% if add_generation_prompt %}{{ '<turn>assistant\n' }}{% endif %}"
)
CORPUS = ["The quick brown fox jumps over the lazy dog. Über Fuß, 你好 世界, naïve café 🦊."] * 4


def byte_tokenizer(begin: bool = True) -> Any:
    """Bytes and a few merges, as most models have them; every id below VOCABULARY is a token or nothing."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY - 8,
        special_tokens=["<begin>", "<end>", "<turn>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    if begin:
        tokenizer.post_processor = processors.TemplateProcessing("<begin> $A", special_tokens=[("<begin>", 0)])
    tokenizer.enable_truncation(5)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<begin>", eos_token="<end>", chat_template=TEMPLATE
    )


def fallback_tokenizer() -> Any:
    """Pieces with ▁ for spaces and single bytes for what is not in the vocabulary."""
    from tokenizers import Tokenizer, decoders, models, normalizers
    from transformers import PreTrainedTokenizerFast

    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", "a", "b", "▁a", "é"]
    tokenizer = Tokenizer(
        models.BPE(
            {piece: index for index, piece in enumerate(pieces)}, [("▁", "a")], unk_token="<unk>", byte_fallback=True
        )
    )
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", unk_token="<unk>")


def text_of(tokenizer: Any, folder: Path) -> TextCodec:
    save_tokenizer(tokenizer, folder)
    return TextCodec.load(folder)


def small_model(seed: int = 0) -> Any:
    return random_model(LLAMA | {"vocab_size": VOCABULARY, "initializer_range": 0.2}, seed)


class EagerStepper:
    """A stock model without a cache."""

    def __init__(self, model: Any, max_seq_len: int = 64) -> None:
        self.model = model
        self.max_seq_len = max_seq_len
        self.tokens: list[int] = []

    @property
    def length(self) -> int:
        return len(self.tokens)

    def restart(self) -> None:
        self.tokens = []

    @torch.no_grad()
    def advance(self, tokens: list[int]) -> torch.Tensor:
        self.tokens += tokens
        assert self.length <= self.max_seq_len
        logits: torch.Tensor = self.model(torch.tensor([self.tokens]), use_cache=False).logits[0, -1]
        return logits.float()
