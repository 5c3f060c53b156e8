"""`inlay serve`"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from inlay.cli.console import err, error_boundary, out
from inlay.cli.sizes import parse_bytes
from inlay.errors import UsageError
from inlay.machine import peak_memory

if TYPE_CHECKING:
    from inlay.serve.http.server_context import ServerContext


def serve(
    package: Annotated[
        str, typer.Argument(metavar="PACKAGE", help="A folder that `inlay build` wrote.", show_default=False)
    ],
    host: Annotated[str, typer.Option("--host", help="The address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option("--port", help="0 takes any that is free.")] = 8000,
    name: Annotated[str | None, typer.Option("--name", help="What clients call the model; else the folder.")] = None,
    api_key_file: Annotated[
        Path | None, typer.Option("--api-key-file", help="Keys, one a line; else those in INLAY_API_KEYS.")
    ] = None,
    insecure: Annotated[bool, typer.Option("--insecure", help="Let other machines ask without a key.")] = False,
    queue: Annotated[int, typer.Option("--queue", min=0, help="Requests that may wait for a slot.")] = 64,
    max_concurrent: Annotated[
        int | None, typer.Option("--max-concurrent", min=1, help="Answers at once; else slots and queue.")
    ] = None,
    max_prompt: Annotated[
        int | None, typer.Option("--max-prompt", min=1, help="Tokens of a prompt; else what the package holds.")
    ] = None,
    max_tokens: Annotated[
        int | None, typer.Option("--max-tokens", min=1, help="Tokens of an answer; else what the package holds.")
    ] = None,
    max_body: Annotated[str, typer.Option("--max-body", help="Size of a request.")] = "1M",
    cache_memory: Annotated[
        str | None, typer.Option("--cache-memory", help="For prompts to be found again; else as much as the slots.")
    ] = None,
    host_cache_memory: Annotated[
        str, typer.Option("--host-cache-memory", help="For what is pushed out of the cache.")
    ] = "0",
    read_seconds: Annotated[
        float, typer.Option("--read-seconds", min=0.1, help="Cut off a client whose header or body takes longer.")
    ] = 30.0,
    write_seconds: Annotated[
        float, typer.Option("--write-seconds", min=0.1, help="Cut off a client that reads nothing for so long.")
    ] = 60.0,
    kv_events: Annotated[
        str | None, typer.Option("--kv-events", help="Publish what is cached, such as tcp://127.0.0.1:5557.")
    ] = None,
    kv_replay: Annotated[str | None, typer.Option("--kv-replay", help="Where missed events are asked for.")] = None,
    kv_routes: Annotated[
        bool | None,
        typer.Option("--kv-routes/--no-kv-routes", help="The same over HTTP; else on loopback without keys."),
    ] = None,
    drain_seconds: Annotated[
        float, typer.Option("--drain-seconds", min=0, help="How long answers may take to end after SIGTERM.")
    ] = 30.0,
) -> None:
    """Serve a compiled package over HTTP, as OpenAI's clients expect it.

    Every request is a line of JSON on standard error. SIGTERM ends the server when all is answered.

    Example: [bold]inlay serve ./package[/]

    Example: [bold]inlay serve ./package --host 0.0.0.0 --port 80 --api-key-file keys.txt[/]
    """
    with error_boundary():
        from inlay.serve.http.api_keys import read_keys
        from inlay.serve.http.settings import ServerSettings, is_loopback, resolve_allowed_hosts

        keys = read_keys(api_key_file)
        if not keys and not is_loopback(host) and not insecure:
            raise UsageError(
                f"At {host} other machines can ask, and there are no API keys.",
                "Give --api-key-file, set INLAY_API_KEYS, or say --insecure.",
            )
        if kv_replay is not None and kv_events is None:
            raise UsageError("--kv-replay repeats what --kv-events publishes.", "Give both.")
        names = resolve_allowed_hosts(host, bool(keys))
        settings = ServerSettings(
            name=name or Path(package).resolve().name,
            keys=tuple(keys),
            max_concurrent=max_concurrent,
            max_prompt=max_prompt,
            max_tokens=max_tokens,
            max_body=parse_bytes(max_body),
            read_seconds=read_seconds,
            write_seconds=write_seconds,
            kv_routes=bool(names) if kv_routes is None else kv_routes,
            allowed_hosts=names,
        )
        cache_bytes = None if cache_memory is None else parse_bytes(cache_memory)
        host_bytes = parse_bytes(host_cache_memory)
        try:
            from inlay.serve.http import server
        except ImportError as error:
            raise UsageError(f"Serving needs {error.name}.", "pip install 'inlay[serve]'") from error
        at = server.bind(host, port)
        from inlay.runtime.engine import Engine
        from inlay.runtime.engine import EngineSettings as EngineSettings

        version = server.fingerprint(package)
        shown = f"[{host}]" if ":" in host else host
        url = f"http://{shown}:{at.getsockname()[1]}"
        limits = EngineSettings(max_waiting=queue, cache_bytes=cache_bytes, host_bytes=host_bytes)
        if err.is_terminal:
            err.print("loading and warming up …")
        server.serve(
            Engine.open(package, limits),
            settings,
            at,
            version,
            drain_seconds=drain_seconds,
            kv_events=kv_events,
            kv_replay=kv_replay,
            ready=lambda serving: _welcome(serving, url),
        )


def _welcome(serving: ServerContext, url: str) -> None:
    """Who is here, and what to type."""
    engine, name = serving.engine, serving.settings.name
    key = ' -H "Authorization: Bearer $KEY"' if serving.keys else ""
    asked = f'{{"model": "{name}", "messages": [{{"role": "user", "content": "Hello"}}]}}'
    out.print(
        f"Serving [bold]{name}[/] at [bold]{url}/v1[/]: {engine.slots} slots of {engine.max_seq_len} tokens,"
        f" {engine.memory_bytes / 1e6:.0f} MB for keys and values, {peak_memory() / 1e6:.0f} MB of memory in all.",
        soft_wrap=True,
    )
    line = f"curl {url}/v1/chat/completions{key} -H 'Content-Type: application/json' -d '{asked}'"
    out.print(f"Try: {line}", markup=False, soft_wrap=True)
    out.file.flush()
