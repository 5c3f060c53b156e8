"""`/v1/embeddings`: a server of a text encoder."""

from __future__ import annotations

import asyncio
import base64
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

from inlay.errors import UsageError
from inlay.runtime.request import EngineClosedError
from inlay.runtime.settings import EngineSettings
from inlay.runtime.text_codec import TextCodec
from inlay.serve.http.errors import ApiError
from inlay.serve.http.response_schema import Embedding, EmbeddingResponse, EmbeddingUsage
from inlay.serve.http.schema import EmbeddingRequest  # noqa: TC001 - FastAPI reads the annotation

if TYPE_CHECKING:
    from pathlib import Path

    from fastapi import FastAPI
    from tokenizers import Encoding
    from torch import Tensor

    from inlay.runtime.encoder import Encoder
    from inlay.runtime.measurements import Observer
    from inlay.runtime.request import Request, RequestHandle
    from inlay.serve.http.server_context import ServerContext

_WAITING = 64
"""Requests that may wait."""


class EncoderEngine:
    """A text encoder as the engine of a server. It computes one request after the other."""

    def __init__(self, encoder: Encoder, text: TextCodec) -> None:
        self._encoder, self.text = encoder, text
        self.settings, self.slots = EngineSettings(max_waiting=_WAITING), 1
        self.max_seq_len, self.dimension = encoder.facts.max_length, encoder.dimension
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="inlay-encoder")

    @classmethod
    def open(cls, package: Path | str) -> EncoderEngine:
        """Return an engine for the text encoder in a folder."""
        from inlay.package.loader import read_manifest
        from inlay.runtime.encoder import load_encoder

        return cls(load_encoder(package), TextCodec.load(read_manifest(package)[1] / "tokenizer"))

    def start(self, *, warm: bool = False) -> None:
        """Prepare for requests. `warm`: compute an embedding."""
        if warm:
            self._encoder.embed(["warm"])

    def close(self) -> None:
        """Stop after the request that runs."""
        self._thread.shutdown(cancel_futures=True)

    def submit(self, request: Request, loop: asyncio.AbstractEventLoop | None = None) -> RequestHandle:
        """Accept no request, because an encoder generates no text."""
        raise EngineClosedError

    def add_observer(self, observer: Observer) -> None:
        """Add no observer, because nothing is observed."""

    def counts(self) -> dict[str, float]:
        """Return counters and gauges by name."""
        idle = dict.fromkeys(("waiting_requests", "prefill_sequences", "decode_sequences", "blocks"), 0)
        return {"slots": self.slots, **idle}

    async def embed(self, texts: list[str]) -> tuple[Tensor, int]:
        """Return the embeddings of texts, and the number of their tokens. Raise an error if one is too long."""

        def work() -> tuple[Tensor, int]:
            encodings = self._encoder.encode(texts)
            for place, each in enumerate(encodings):
                self._check(place, each)
            return self._encoder.embed_tokens(encodings), sum(len(each.ids) for each in encodings)

        return await asyncio.get_running_loop().run_in_executor(self._thread, work)

    def _check(self, place: int, encoding: Encoding) -> None:
        if encoding.overflowing:
            count = len(encoding.ids) + sum(len(each.ids) for each in encoding.overflowing)
            message = f"Text {place} has about {count} tokens, but the limit is {self.max_seq_len}."
            raise ApiError(400, message, param="input", code="context_length_exceeded")


def add_embedding_route(
    app: FastAPI, context: ServerContext, engine: EncoderEngine, errors: dict[int | str, dict[str, Any]]
) -> None:
    """Add the route that returns embeddings."""

    @app.post("/v1/embeddings", response_model=EmbeddingResponse, responses=errors)
    async def embeddings(asked: EmbeddingRequest) -> EmbeddingResponse:
        """Return the embeddings of texts."""
        context.check_model(asked.model)
        if asked.dimensions not in (None, engine.dimension):
            message = f"This model has {engine.dimension} dimensions, which cannot be changed."
            raise ApiError(400, message, param="dimensions")
        texts = [asked.input] if isinstance(asked.input, str) else asked.input
        try:
            made, tokens = await engine.embed(texts)
        except UsageError as error:
            raise ApiError(400, str(error), param="input") from error
        rows = made.numpy().astype("<f4")
        as_text = asked.encoding_format == "base64"
        found = [base64.b64encode(row.tobytes()).decode() if as_text else row.tolist() for row in rows]
        return EmbeddingResponse(
            data=[Embedding(index=index, embedding=each) for index, each in enumerate(found)],
            model=context.settings.name,
            usage=EmbeddingUsage(prompt_tokens=tokens, total_tokens=tokens),
        )
