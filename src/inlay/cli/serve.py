"""`inlay serve`"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from pathlib import Path  # noqa: TC003 - typer reads the annotation
from typing import TYPE_CHECKING, Annotated

import typer
from rich.markup import escape

from inlay.cli import model_options as options
from inlay.cli.console import err, out
from inlay.cli.passes import SetOption  # noqa: TC001 - typer reads the annotations
from inlay.errors import UsageError
from inlay.machine import peak_memory
from inlay.sizes import parse_bytes

if TYPE_CHECKING:
    from inlay.runtime.engine import Engine
    from inlay.serve.http.server_context import ServerContext


def serve(
    target: options.PackageOrModelArgument,
    host: Annotated[str, typer.Option("--host", help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option("--port", help="Port to listen on; 0 selects a free one.")] = 8000,
    name: Annotated[
        str | None, typer.Option("--name", help="Model name in the API; by default that of the model or folder.")
    ] = None,
    api_key_file: Annotated[
        Path | None,
        typer.Option(
            "--api-key-file", help="File with one API key per line; by default keys are read from INLAY_API_KEYS."
        ),
    ] = None,
    public_metrics: Annotated[
        bool, typer.Option("--public-metrics", help="Serve /metrics without an API key.")
    ] = False,
    insecure: Annotated[
        bool, typer.Option("--insecure", help="Allow other machines to send requests without an API key.")
    ] = False,
    queue: Annotated[
        int, typer.Option("--queue", min=0, help="Maximum number of completions that wait for a slot.")
    ] = 64,
    max_concurrent: Annotated[
        int | None,
        typer.Option(
            "--max-concurrent", min=1, help="Maximum number of completions in flight; by default slots + queue."
        ),
    ] = None,
    max_prompt: Annotated[
        int | None, typer.Option("--max-prompt", min=1, help="Maximum prompt tokens; by default the package's limit.")
    ] = None,
    max_tokens: Annotated[
        int | None,
        typer.Option("--max-tokens", min=1, help="Maximum completion tokens; by default the package's limit."),
    ] = None,
    max_body: Annotated[
        str, typer.Option("--max-body", metavar="SIZE", help="Maximum size of a request body, such as 500KB or 2MiB.")
    ] = "1M",
    cache_memory: Annotated[
        str | None,
        typer.Option(
            "--cache-memory",
            metavar="SIZE",
            help="Memory for the prefix cache, such as 2GB; by default for as many tokens as the slots. 0 disables it.",
        ),
    ] = None,
    host_cache_memory: Annotated[
        str,
        typer.Option(
            "--host-cache-memory",
            metavar="SIZE",
            help="Memory for blocks evicted from the prefix cache, such as 2GB. 0 disables it.",
        ),
    ] = "0",
    speculation: Annotated[
        int,
        typer.Option("--speculation", min=0, help="Maximum tokens of a sequence drafted in a step. 0 disables drafts."),
    ] = 7,
    disk_cache: Annotated[
        Path | None,
        typer.Option(
            "--disk-cache", help="Folder that keeps blocks of the prefix cache on disk; needs --disk-cache-size."
        ),
    ] = None,
    disk_cache_size: Annotated[
        str | None,
        typer.Option("--disk-cache-size", metavar="SIZE", help="Maximum size of this folder, such as 20GB."),
    ] = None,
    read_seconds: Annotated[
        float, typer.Option("--read-seconds", min=0.1, help="Time limit for receiving a request's header or body.")
    ] = 30.0,
    write_seconds: Annotated[
        float, typer.Option("--write-seconds", min=0.1, help="Disconnect a client that blocks sending for this long.")
    ] = 60.0,
    kv_events: Annotated[
        str | None, typer.Option("--kv-events", metavar="ADDRESS", help="Publish KV cache events: tcp://HOST:PORT.")
    ] = None,
    kv_replay: Annotated[
        str | None, typer.Option("--kv-replay", help="Address at which subscribers request missed KV events.")
    ] = None,
    kv_topic: Annotated[
        str, typer.Option("--kv-topic", help="Topic of KV cache events; llm-d and AIBrix expect kv@POD@MODEL.")
    ] = "",
    kv_encoding: Annotated[
        str,
        typer.Option("--kv-encoding", help="Form of KV cache events: map, or array as before vLLM of June 2026."),
    ] = "map",
    kv_routes: Annotated[
        bool | None,
        typer.Option(
            "--kv-routes/--no-kv-routes",
            help="Serve KV events over HTTP; by default only on loopback without API keys.",
        ),
    ] = None,
    drain_seconds: Annotated[
        float, typer.Option("--drain-seconds", min=0, help="Time limit for running requests after SIGTERM.")
    ] = 30.0,
    max_length: options.MaxLengthOption = None,
    max_batch: options.MaxBatchOption = None,
    weights: options.WeightsOption = None,
    build_settings: SetOption = None,
    trust: options.TrustOption = False,
) -> None:
    """Serve a model or a compiled package over HTTP with OpenAI's API.

    A model is built first and kept in the package cache (`inlay cache ls`), so the next start takes seconds. Each
    request is logged as one line of JSON on standard error. After SIGTERM, accepted requests are completed for up to
    --drain-seconds, and the rest are aborted.

    Example: [bold]inlay serve SmolLM2-135M-Instruct.Q4_1.gguf --max-batch 16[/]

    Example: [bold]inlay serve ./package --host 0.0.0.0 --port 80 --api-key-file keys.txt[/]
    """
    from inlay.package_cache import model_name
    from inlay.serve.http.api_keys import Keys, read_keys
    from inlay.serve.http.settings import ServerSettings, is_loopback, resolve_allowed_hosts
    from inlay.serve.kv_events.wire_format import encode_events

    keys = read_keys(api_key_file)
    if not keys and not is_loopback(host) and not insecure:
        raise UsageError(
            f"{host} is reachable from other machines, and there are no API keys.",
            "Pass --api-key-file, set INLAY_API_KEYS, or pass --insecure.",
        )
    given = {"--kv-replay": kv_replay is not None, "--kv-topic": kv_topic, "--kv-encoding": kv_encoding != "map"}
    if kv_events is None and (wrong := [option for option, is_given in given.items() if is_given]):
        raise UsageError(f"{', '.join(wrong)} needs --kv-events.", "Pass both.")
    encode_events([], kv_encoding)
    names = resolve_allowed_hosts(host, bool(keys))
    settings = ServerSettings(
        name=name or model_name(target),
        keys=tuple(keys),
        max_concurrent=max_concurrent,
        max_prompt=max_prompt,
        max_tokens=max_tokens,
        max_body=parse_bytes(max_body),
        read_seconds=read_seconds,
        write_seconds=write_seconds,
        kv_routes=bool(names) if kv_routes is None else kv_routes,
        allowed_hosts=names,
        public_metrics=public_metrics,
    )
    cache_bytes = None if cache_memory is None else parse_bytes(cache_memory)
    host_bytes = parse_bytes(host_cache_memory)
    if (disk_cache is None) != (disk_cache_size is None):
        raise UsageError("Blocks on disk need --disk-cache and --disk-cache-size.", "Pass both.")
    disk_bytes = parse_bytes(disk_cache_size or "0")
    try:
        from inlay.serve.http import server
    except ImportError as error:
        raise UsageError(f"Serving needs {error.name}.", "pip install 'inlay[serve]'") from error
    at = server.bind(host, port)
    package = options.ensure_package(target, max_length, max_batch, weights, build_settings, trust)
    from inlay.package.loader import read_manifest
    from inlay.runtime.engine import Engine
    from inlay.runtime.settings import EngineSettings
    from inlay.serve.http.embeddings import EncoderEngine

    version = server.fingerprint(package)
    shown = f"[{host}]" if ":" in host else host
    url = f"http://{shown}:{at.getsockname()[1]}"
    limits = EngineSettings(
        max_waiting=queue,
        cache_bytes=cache_bytes,
        host_bytes=host_bytes,
        speculation=speculation,
        disk_folder=disk_cache,
        disk_bytes=disk_bytes,
        disk_owner=Keys(keys).owner,
    )
    if err.is_terminal:
        err.print("loading the package …")
    if read_manifest(package)[0].encoder is not None:
        for option, value in (("--kv-events", kv_events), ("--disk-cache", disk_cache)):
            if value is not None:
                raise UsageError("A text encoder has no KV cache.", f"Leave {option} out.")
        server.serve(EncoderEngine.open(package), settings, at, version, drain_seconds, lambda _: _welcome_encoder(url))
        return
    engine = Engine.open(package, limits)
    publisher: AbstractContextManager[object] = nullcontext()
    if kv_events is not None:
        from inlay.serve.kv_events.publisher import Publisher

        log, size = engine.event_log, engine.settings.block_size
        publisher = Publisher(log, size, bind=kv_events, replay=kv_replay, topic=kv_topic, encoding=kv_encoding)
    with publisher:
        server.serve(engine, settings, at, version, drain_seconds, lambda serving: _welcome(serving, engine, url))


def _welcome_encoder(url: str) -> None:
    out.print(f"Serving embeddings at [bold]{url}/v1/embeddings[/]")
    out.file.flush()


def _welcome(serving: ServerContext, engine: Engine, url: str) -> None:
    """Print the address of the server and an example request."""
    name = serving.settings.name
    key = ' -H "Authorization: Bearer $KEY"' if serving.keys else ""
    asked = f'{{"model": "{name}", "messages": [{{"role": "user", "content": "Hello"}}]}}'
    out.print(
        f"Serving [bold]{escape(name)}[/] at [bold]{url}/v1[/]: {engine.slots} slots of {engine.max_seq_len} tokens,"
        f" {engine.memory_bytes / 1e6:.0f} MB for keys and values, {peak_memory() / 1e6:.0f} MB of memory in all.",
        soft_wrap=True,
    )
    if engine.settings.speculation and engine.speculation.problem:
        out.print(f"No tokens are drafted: {engine.speculation.problem}.", markup=False, soft_wrap=True)
    line = f"curl {url}/v1/chat/completions{key} -H 'Content-Type: application/json' -d '{asked}'"
    out.print(f"Try: {line}", markup=False, soft_wrap=True)
    out.file.flush()
