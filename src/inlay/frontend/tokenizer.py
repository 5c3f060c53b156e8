"""The tokenizer files of a package, which are usable without transformers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from inlay.errors import ModelError


def save_tokenizer(tokenizer: Any, folder: Path) -> None:
    """Write the files of a transformers tokenizer, and `text.json`, which `inlay.runtime.text_codec` reads.

    `text.json` lists the end-of-sequence tokens, which `tokenizer.json` does not contain; chat models have several.
    """
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save_pretrained(folder)
    if not (folder / "tokenizer.json").is_file():
        raise ModelError(
            f"The tokenizer {type(tokenizer).__name__} runs in Python only and has no tokenizer.json.",
            "Convert it with the tokenizers library and put tokenizer.json into the folder of config.json.",
        )
    facts = {"eos": sorted(_eos_token_ids(tokenizer)), "special_tokens": dict(tokenizer.special_tokens_map)}
    (folder / "text.json").write_text(json.dumps(facts, indent=2, ensure_ascii=False) + "\n", "utf-8")


def _eos_token_ids(tokenizer: Any) -> set[int]:
    """Return the end-of-sequence ids of the tokenizer and of generation_config.json, or else of config.json.

    Files in the folder of a GGUF file are ignored: they may belong to another model.
    """
    found = {tokenizer.eos_token_id} - {None}
    source = Path(tokenizer.name_or_path)
    if not any((source / name).is_file() for name in ("tokenizer.json", "tokenizer_config.json")):
        return found
    for name in ("generation_config.json", "config.json"):
        if (source / name).is_file():
            stated = json.loads((source / name).read_text("utf-8")).get("eos_token_id")
            if stated is not None:
                return found | set(stated if isinstance(stated, list) else [stated])
    return found
