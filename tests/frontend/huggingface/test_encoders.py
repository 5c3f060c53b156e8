"""Text encoders: stock architectures and folders of sentence-transformers, compared with transformers."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch.nn import functional

from inlay.errors import ModelError
from inlay.flow import compile_model
from inlay.frontend import identify, open_model
from inlay.program.encoder import EMBEDDINGS, MASK, TOKEN_TYPES, TOKENS
from tests.encoders import ENCODERS, POSITIONS, dense_folder, encoder_folder, random_encoder, sentence_folder

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from inlay.frontend import SourceModel

TOLERANCE = 1e-5
LENGTHS = (1, 5, 8, 21)


def tokens(length: int) -> torch.Tensor:
    return torch.randint(4, 16, (1, length), generator=torch.Generator().manual_seed(length))


def run(source: SourceModel, rows: list[torch.Tensor], padding: int = 0) -> torch.Tensor:
    """Embeddings of token rows in one batch, padded to the longest and further."""
    assert source.encoder is not None
    longest = max(row.shape[1] for row in rows) + padding
    pads = [(0, longest - row.shape[1]) for row in rows]
    given = {
        TOKENS: torch.cat(
            [functional.pad(row, pad, value=source.encoder.pad_token) for row, pad in zip(rows, pads, strict=True)]
        ),
        MASK: torch.cat([functional.pad(torch.ones_like(row), pad) for row, pad in zip(rows, pads, strict=True)]),
    }
    if TOKEN_TYPES in source.example.kwargs:
        given[TOKEN_TYPES] = torch.zeros_like(given[TOKENS])
    return compile_model(source, "eager")(given)[EMBEDDINGS]


def hidden(model: Any, row: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        return model(input_ids=row, attention_mask=torch.ones_like(row))[0][0]


IN_CI = ("bert",)


@pytest.mark.parametrize(
    "model_type", [pytest.param(each, marks=() if each in IN_CI else pytest.mark.nightly) for each in ENCODERS]
)
def test_bare_encoder(model_type: str, tmp_path: Path) -> None:
    """Mean pooling; neither the neighbours in a batch nor more padding change an embedding."""
    model = random_encoder(model_type)
    source = open_model(str(encoder_folder(tmp_path, model)))
    assert (source.architecture, identify(str(tmp_path)).architecture) == (model_type, model_type)
    assert source.encoder is not None
    rows = [tokens(length) for length in (*LENGTHS, source.encoder.max_length)]
    expected = torch.stack([hidden(model, row).mean(0) for row in rows])
    torch.testing.assert_close(run(source, rows), expected, atol=TOLERANCE, rtol=0)
    torch.testing.assert_close(run(source, rows[:1], padding=20), expected[:1], atol=TOLERANCE, rtol=0)


def _weighted(states: torch.Tensor) -> torch.Tensor:
    weights = torch.arange(1.0, len(states) + 1)[:, None]
    return (states * weights).sum(0) / weights.sum()


POOLINGS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "cls": lambda states: states[0],
    "max": lambda states: states.max(0).values,
    "mean": lambda states: states.mean(0),
    "mean_sqrt_len_tokens": lambda states: states.sum(0) / len(states) ** 0.5,
    "weightedmean": _weighted,
    "lasttoken": lambda states: states[-1],
}
OLDER = {
    "pooling_mode_lasttoken": True,
    "pooling_mode_mean_sqrt_len_tokens": True,
    "pooling_mode_cls_token": True,
    "pooling_mode_max_tokens": False,
}


@pytest.fixture(scope="module")
def bert() -> Any:
    return random_encoder("bert")


@pytest.mark.parametrize(
    ("pooling", "modes"),
    [
        ({"pooling_mode": list(POOLINGS)}, tuple(POOLINGS)),
        (OLDER, ("cls", "mean_sqrt_len_tokens", "lasttoken")),
        ({"word_embedding_dimension": 32}, ("mean",)),
    ],
    ids=["all", "older", "default"],
)
def test_pooling(pooling: dict[str, Any], modes: tuple[str, ...], bert: Any, tmp_path: Path) -> None:
    source = open_model(str(sentence_folder(tmp_path, bert, pooling=pooling, modules=())))
    assert source.encoder is not None
    assert source.encoder.pooling == modes
    rows = [tokens(length) for length in LENGTHS]
    expected = torch.stack([torch.cat([POOLINGS[mode](hidden(bert, row)) for mode in modes]) for row in rows])
    torch.testing.assert_close(run(source, rows), expected, atol=TOLERANCE, rtol=0)


def test_dense_and_normalize(bert: Any, tmp_path: Path) -> None:
    layer = torch.nn.Linear(32, 8)
    sentence_folder(tmp_path, bert, pooling={"pooling_mode": "mean"}, modules=("Dense", "Normalize"))
    dense_folder(tmp_path / "2_Dense", layer, "torch.nn.modules.activation.Tanh")
    rows = [tokens(length) for length in LENGTHS]
    pooled = torch.stack([hidden(bert, row).mean(0) for row in rows])
    expected = functional.normalize(torch.tanh(layer(pooled)), dim=-1)
    torch.testing.assert_close(run(open_model(str(tmp_path)), rows), expected.detach(), atol=TOLERANCE, rtol=0)


def test_a_decoder_as_encoder(tmp_path: Path) -> None:
    """A causal model in a folder of sentence-transformers, stored with its head; the last token is the embedding."""
    from transformers import AutoModelForCausalLM

    model = random_encoder("qwen3", head_dim=8, num_key_value_heads=2, tie_word_embeddings=False)
    stored = AutoModelForCausalLM.from_config(model.config)
    stored.base_model.load_state_dict(model.state_dict())
    sentence_folder(tmp_path, stored, pooling={"pooling_mode_lasttoken": True}, modules=())
    rows = [tokens(length) for length in LENGTHS]
    expected = torch.stack([hidden(model, row)[-1] for row in rows])
    torch.testing.assert_close(run(open_model(str(tmp_path)), rows), expected, atol=TOLERANCE, rtol=0)


def test_an_encoder_of_two_parts(tmp_path: Path) -> None:
    """Of a model with encoder and decoder, sentence-transformers uses the encoder."""
    from transformers import T5Config, T5ForConditionalGeneration

    torch.manual_seed(0)
    config = T5Config(d_model=32, d_kv=8, d_ff=48, num_layers=2, num_heads=4, vocab_size=32)
    model = T5ForConditionalGeneration(config).eval()
    sentence_folder(tmp_path, model, pooling={"pooling_mode": "mean"}, modules=())
    rows = [tokens(length) for length in LENGTHS]
    expected = torch.stack([hidden(model.encoder, row).mean(0) for row in rows])
    torch.testing.assert_close(run(open_model(str(tmp_path)), rows), expected, atol=TOLERANCE, rtol=0)


@pytest.mark.parametrize("cls", ["BertForMaskedLM", "BertForPreTraining", "BertModel"])
def test_checkpoints_with_a_head_or_without_a_pooler(cls: str, bert: Any, tmp_path: Path) -> None:
    import transformers

    torch.manual_seed(0)
    more = {"add_pooling_layer": False} if cls == "BertModel" else {}
    model = getattr(transformers, cls)(bert.config, **more).eval()
    source = open_model(str(encoder_folder(tmp_path, model)))
    rows = [tokens(9)]
    expected = hidden(model.base_model, rows[0]).mean(0, keepdim=True)
    torch.testing.assert_close(run(source, rows), expected, atol=TOLERANCE, rtol=0)


@pytest.mark.parametrize("cls", ["BertModel", "BertForPreTraining"])
def test_a_configuration_that_states_another_class(cls: str, bert: Any, tmp_path: Path) -> None:
    """Published checkpoints keep a pooler and the head of next sentences that the stated class does not have."""
    import transformers

    torch.manual_seed(0)
    model = getattr(transformers, cls)(bert.config).eval()
    encoder_folder(tmp_path, model)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "architectures": ["BertForMaskedLM"]}))
    expected = hidden(model.base_model, tokens(9)).mean(0, keepdim=True)
    torch.testing.assert_close(run(open_model(str(tmp_path)), [tokens(9)]), expected, atol=TOLERANCE, rtol=0)


@pytest.mark.parametrize(
    ("model_type", "text", "tokenizer", "expected"),
    [
        ("bert", {}, {}, POSITIONS),
        ("xlm-roberta", {}, {}, POSITIONS - 2),
        ("bert", {}, {"model_max_length": 24}, 24),
        ("bert", {"max_seq_length": 16}, {"model_max_length": 24}, 16),
        ("bert", {"max_seq_length": 512}, {}, POSITIONS),
    ],
)
def test_max_length(
    model_type: str, text: dict[str, Any], tokenizer: dict[str, Any], expected: int, tmp_path: Path
) -> None:
    """Of what the files state, the least; positions that follow a padding position are fewer."""
    encoder_folder(tmp_path, random_encoder(model_type), **tokenizer)
    if text:
        (tmp_path / "sentence_bert_config.json").write_text(json.dumps(text))
    found = open_model(str(tmp_path)).encoder
    assert found is not None
    assert found.max_length == expected


def test_transformer_in_a_subfolder(bert: Any, tmp_path: Path) -> None:
    """Older folders have nothing but modules.json at the top, and no class in config.json."""
    from safetensors.torch import load_file, save_file

    sentence_folder(tmp_path, bert, pooling={}, modules=())
    rows = json.loads((tmp_path / "modules.json").read_text())
    home = tmp_path / "0_Transformer"
    home.mkdir()
    for file in [each for each in tmp_path.iterdir() if each.is_file()]:
        file.rename(home / file.name)
    (tmp_path / "modules.json").write_text(json.dumps([{**rows[0], "path": home.name}, rows[1]]))
    config = json.loads((home / "config.json").read_text())
    (home / "config.json").write_text(json.dumps({**config, "architectures": None}))
    kept = {key: value for key, value in load_file(home / "model.safetensors").items() if "pooler" not in key}
    save_file(kept, home / "model.safetensors", {"format": "pt"})
    row = tokens(9)
    expected = hidden(bert, row).mean(0, keepdim=True)
    torch.testing.assert_close(run(open_model(str(tmp_path)), [row]), expected, atol=TOLERANCE, rtol=0)
    assert identify(str(tmp_path)).architecture == "bert"


def test_an_architecture_with_several_classes(tmp_path: Path) -> None:
    """transformers maps some configurations to a tuple of classes."""
    from transformers import FunnelConfig, FunnelModel

    sizes = {"d_model": 32, "n_head": 4, "d_head": 8, "d_inner": 48, "block_sizes": [1, 1], "num_decoder_layers": 1}
    model = FunnelModel(FunnelConfig(vocab_size=32, **sizes))
    assert open_model(str(encoder_folder(tmp_path, model))).encoder is not None


def test_settings_of_texts(bert: Any, tmp_path: Path) -> None:
    prompts = {"prompts": {"query": "query: ", "document": "", "none": None}, "default_prompt_name": "query"}
    text = {"do_lower_case": True}
    found = open_model(str(sentence_folder(tmp_path, bert, pooling={}, text=text, prompts=prompts))).encoder
    assert found is not None
    assert (found.lowercase, found.prompts, found.default_prompt) == (
        True,
        {"query": "query: ", "document": ""},
        "query",
    )
    assert found.normalized


OWN = {"type": "my.Own"}
UNSUPPORTED = [
    (
        "modules.json",
        [{"type": "sentence_transformers.models.Transformer", "path": ""}, {**OWN, "path": "1"}],
        "my.Own",
    ),
    ("modules.json", [1, 2], "does not give the type and the path"),
    ("modules.json", [{"type": "my.Own"}], "does not give the type and the path"),
    ("modules.json", [{**OWN, "path": "../other"}], "points outside its folder: ../other"),
    ("modules.json", [{**OWN, "path": "/other"}], "points outside its folder: /other"),
    ("1_Pooling/config.json", {"pooling_mode": 5}, "the pooling mode 5"),
    ("sentence_bert_config.json", {"max_seq_length": "512"}, "truncates texts to 512 tokens"),
    ("sentence_bert_config.json", {"max_seq_length": -1}, "truncates texts to -1 tokens"),
    ("tokenizer_config.json", {"truncation_side": "middle"}, "on the middle side"),
    ("config_sentence_transformers.json", {"prompts": ["a"]}, "have no names"),
    ("1_Pooling/config.json", {"pooling_mode": "median"}, "the pooling mode 'median'"),
    ("2_Normalize/config.json", {"module_input_name": "token_embeddings"}, "module_input_name = 'token_embeddings'"),
    ("sentence_bert_config.json", {"transformer_task": "fill-mask"}, "transformer_task = 'fill-mask'"),
    ("sentence_bert_config.json", {"tokenizer_args": {"use_fast": False}}, "tokenizer_args = {'use_fast': False}"),
    ("sentence_bert_config.json", [], "sentence_bert_config.json has an unexpected structure"),
    ("1_Pooling/config.json", None, "config.json cannot be read"),
]


@pytest.mark.parametrize(("file", "content", "said"), UNSUPPORTED, ids=[each[2] for each in UNSUPPORTED])
def test_unsupported_folders(file: str, content: Any, said: str, bert: Any, tmp_path: Path) -> None:
    sentence_folder(tmp_path, bert, pooling={})
    (tmp_path / file).write_text("{" if content is None else json.dumps(content))
    with pytest.raises(ModelError) as caught:
        open_model(str(tmp_path))
    assert said in str(caught.value)


@pytest.mark.parametrize("activation", ["my.module.Activation", "torch.nn.functional", "torch.nn.init.zeros_"])
def test_unsupported_activation(activation: str, bert: Any, tmp_path: Path) -> None:
    sentence_folder(tmp_path, bert, pooling={}, modules=("Dense",))
    dense_folder(tmp_path / "2_Dense", torch.nn.Linear(32, 8), activation)
    with pytest.raises(ModelError, match=r"not a layer of torch\.nn"):
        open_model(str(tmp_path))


def test_prompts_that_pooling_excludes(bert: Any, tmp_path: Path) -> None:
    prompts = {"prompts": {"query": "query: "}}
    sentence_folder(tmp_path, bert, pooling={"pooling_mode": "mean", "include_prompt": False}, prompts=prompts)
    with pytest.raises(ModelError, match="include_prompt = False"):
        open_model(str(tmp_path))
