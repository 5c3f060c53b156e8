"""Adapter: stock decoders with transformers' static cache, its tensors as named arguments of the captured program.

A static cache layer contains rows for keys and values, and a counter of filled rows, which it also updates. All three
are state: `key_0`, `value_0`, `count_0` for the first layer, and so on. Positions and masks are computed from the
counters, so no position is baked into the program.

A sliding-window layer has a second counter, a Python number, which capture would freeze. It is replaced by a full
layer. The mask that the model builds from its configuration already hides rows outside the window, and masked rows do
not contribute. This costs memory (all rows are kept, not only the window) but does not change results.
"""

from __future__ import annotations

import copy
import inspect
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from inlay.errors import ModelError, UsageError, one_line
from inlay.frontend.fake_tensors import fake_mode_of
from inlay.frontend.huggingface.checkpoint import read_config_facts
from inlay.frontend.source_model import Example, SourceModel

if TYPE_CHECKING:
    from collections.abc import Callable

_MASK_IMPLEMENTATIONS = ("sdpa", "eager")
"""Attention implementations that take the mask as a tensor; others read the cache sizes directly."""


def with_static_cache(
    model: SourceModel | Any, *, max_length: int, batch: int = 1, length: int | None = 1
) -> SourceModel:
    """Return a stock decoder as one step: tokens and caches in, logits out, caches updated in place.

    `model` is a model from `AutoModelForCausalLM`, or the result of `open_model`, which has no weights in memory.
    `max_length` is the maximum number of tokens of a sequence. `length` is the number of tokens of each call: 1 for
    decode, None for any number from two (an axis called `length`) for prefill. Both kinds of step take the same caches.

    >>> from transformers import LlamaConfig, LlamaForCausalLM
    >>> small = LlamaConfig(hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=2)
    >>> step = with_static_cache(LlamaForCausalLM(small), max_length=32)
    >>> {name: tuple(value.shape) for name, value in step.example.kwargs.items()}
    {'key_0': (1, 2, 32, 4), 'value_0': (1, 2, 32, 4), 'count_0': ()}
    """
    found = _to_source_model(model)
    stock = found.example.module
    _check_model(stock)
    _check_sizes(stock, max_length, batch, length)
    module = StaticCacheStep(stock, max_length).eval()
    caches = module.make_caches(batch)
    any_length = length is None
    ids = torch.zeros(batch, length or min(8, max_length), dtype=torch.int64, device=caches["count_0"].device)
    return replace(
        found,
        example=Example(module, (ids,), caches, {"input_ids": {1: "length"}} if any_length else {}),
        tensors={f"model.{name}": ref for name, ref in found.tensors.items()},
        max_sizes={"length": max_length} if any_length else {},
    )


def _to_source_model(model: Any) -> SourceModel:
    if isinstance(model, SourceModel):
        return model
    _check_model(model)
    facts, architecture = read_config_facts(model)
    return SourceModel(type(model).__name__, "huggingface", Example(model), {}, facts, architecture)


class StaticCacheStep(torch.nn.Module):
    """A stock decoder that takes the tensors of its cache as arguments of every call."""

    def __init__(self, model: Any, max_length: int) -> None:
        super().__init__()
        self.model = model
        self._cache = _make_full_cache(model, max_length)
        self._has_position_ids = "position_ids" in inspect.signature(model.forward).parameters
        self.forward = self._make_forward()

    def _make_forward(self) -> Callable[..., torch.Tensor]:
        """Return `step` with a separate parameter for each cache: torch.export has no dynamic axes for `**kwargs`."""

        def forward(*args: torch.Tensor, **kwargs: torch.Tensor) -> torch.Tensor:
            return self.step(**signature.bind(*args, **kwargs).arguments)

        kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
        signature = inspect.Signature([inspect.Parameter(name, kind) for name in ("input_ids", *self.cache_names)])
        forward.__signature__ = signature  # type: ignore[attr-defined]
        return forward

    @property
    def cache_names(self) -> list[str]:
        """The names of the caches, layer by layer."""
        return [f"{what}_{index}" for index in range(len(self._cache.layers)) for what in ("key", "value", "count")]

    def step(self, input_ids: torch.Tensor, **caches: torch.Tensor) -> torch.Tensor:
        """Return the logits of all tokens; append their keys and values to the caches."""
        cache = copy.copy(self._cache)
        cache.layers = [
            _bind_layer(layer, caches[f"key_{index}"], caches[f"value_{index}"], caches[f"count_{index}"])
            for index, layer in enumerate(self._cache.layers)
        ]
        return self._call_model(input_ids, cache, caches["count_0"])

    def make_caches(self, batch: int) -> dict[str, torch.Tensor]:
        """Return empty caches with the shapes that the model requires."""
        cache = copy.deepcopy(self._cache)
        with torch.no_grad(), fake_mode_of(self.model):
            ids = torch.zeros(batch, 1, dtype=torch.int64, device=self.model.device)
            try:
                self._call_model(ids, cache, ids.new_zeros(()))
            except Exception as error:
                raise ModelError(
                    f"{type(self.model).__name__} cannot run with a static cache: {one_line(error)}.",
                    "Capture it without a cache, or write a module that takes its state as arguments.",
                ) from error
        made: dict[str, torch.Tensor] = {}
        for index, layer in enumerate(cache.layers):
            if not layer.is_initialized:
                raise ModelError(f"Layer {index} of {type(self.model).__name__} never wrote to its cache.")
            held = {"key": layer.keys, "value": layer.values, "count": layer.cumulative_length}
            for what, value in held.items():
                made[f"{what}_{index}"] = torch.zeros(value.shape, dtype=value.dtype, device=value.device)
        return made

    def _call_model(self, input_ids: torch.Tensor, cache: Any, count: torch.Tensor) -> torch.Tensor:
        positions = {}
        if self._has_position_ids:
            positions["position_ids"] = (torch.arange(input_ids.shape[1], device=count.device) + count).unsqueeze(0)
        logits: torch.Tensor = self.model(
            input_ids=input_ids, past_key_values=cache, use_cache=True, **positions
        ).logits
        return logits


def _make_full_cache(model: Any, max_length: int) -> Any:
    """Return the static cache that transformers makes for a model, with sliding-window layers replaced by full ones."""
    from transformers.cache_utils import StaticCache, StaticLayer, StaticSlidingWindowLayer

    try:
        cache = StaticCache(config=model.config, max_cache_len=max_length)
    except Exception as error:
        raise ModelError(
            f"transformers has no static cache for {type(model).__name__}: {one_line(error)}.",
            "Capture it without a cache, or write a module that takes its state as arguments.",
        ) from error
    for index, layer in enumerate(cache.layers):
        if type(layer) is StaticSlidingWindowLayer:
            cache.layers[index] = StaticLayer(max_length)
        elif type(layer) is not StaticLayer:
            raise ModelError(
                f"Layer {index} of {type(model).__name__} stores its state in a {type(layer).__name__}, "
                "which is neither a full nor a sliding-window KV cache.",
                "Write a module that takes its state as arguments.",
            )
    return cache


def _bind_layer(layer: Any, keys: torch.Tensor, values: torch.Tensor, count: torch.Tensor) -> Any:
    """Return a copy of a cache layer with these tensors."""
    made = copy.copy(layer)
    made.keys, made.values, made.cumulative_length = keys, values, count
    made.dtype, made.device, made.is_initialized = keys.dtype, keys.device, True
    made.batch_size, made.num_heads = keys.shape[:2]
    made.k_head_dim, made.v_head_dim = keys.shape[-1], values.shape[-1]
    return made


def _check_model(model: Any) -> None:
    try:
        from transformers import PreTrainedModel
    except ImportError as error:
        raise ModelError("A static cache needs the transformers package.", "pip install 'inlay[hf]'") from error
    if not isinstance(model, PreTrainedModel) or not model.can_generate():
        raise UsageError(
            f"A {type(model).__name__} is not a causal language model of transformers.",
            "Pass a model from AutoModelForCausalLM.from_pretrained.",
        )
    config = model.config.get_text_config()
    if config.is_encoder_decoder:
        raise ModelError(f"{type(model).__name__} has an encoder, whose output a static cache does not store.")
    if config._attn_implementation not in _MASK_IMPLEMENTATIONS:
        raise ModelError(
            f"{type(model).__name__} uses {config._attn_implementation} attention, which takes no mask tensor.",
            f"Load it with attn_implementation={' or '.join(map(repr, _MASK_IMPLEMENTATIONS))}.",
        )


def _check_sizes(model: Any, max_length: int, batch: int, length: int | None) -> None:
    if batch < 1:
        raise UsageError(f"batch is {batch}, but must be at least 1.")
    if length is not None and length < 1:
        raise UsageError(f"length is {length}, but must be at least 1.", "Pass None for any length.")
    least = 2 if length is None else length
    if max_length < least:
        raise UsageError(f"max_length is {max_length}, but one step has {least} tokens.")
    known = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    if isinstance(known, int) and max_length > known:
        raise UsageError(
            f"max_length is {max_length}, but {type(model).__name__} supports {known} positions.",
            f"Choose at most {known}.",
        )


def cache_layers(config: Any) -> tuple[list[Any], bool]:
    """Return the layers of the cache that transformers makes for a model, and whether any contains keys and values."""
    from transformers.cache_utils import CacheLayerMixin, DynamicCache

    try:
        layers = list(DynamicCache(config=config).layers)
    except Exception:  # transformers has no cache for this model
        return [], False
    return layers, any(isinstance(each, CacheLayerMixin) for each in layers)
