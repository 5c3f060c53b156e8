"""The arguments of a cluster: what `args` contains in the Serve config."""

from __future__ import annotations

import hashlib
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

from inlay.errors import UsageError
from inlay.package.loader import read_manifest
from inlay.runtime.settings import EngineSettings
from inlay.serve.http.api_keys import Keys, read_keys
from inlay.sizes import parse_bytes

if TYPE_CHECKING:
    from inlay.package.manifest import Manifest

Size = Annotated[str, Field(pattern=r"^\d+(\.\d+)?\s*[KMGT]?i?B?$")]
"""Bytes, such as 500MB or 2GiB."""


class Replicas(BaseModel):
    """Bounds of the number of engine replicas, and the load at which it changes."""

    model_config = ConfigDict(extra="forbid")

    min: Annotated[int, Field(ge=1)] = 1
    max: Annotated[int, Field(ge=1)]
    queued_tokens: Annotated[int, Field(ge=1)] = 2048
    """Prompt tokens that may wait for each replica. Above it, replicas are added."""
    up_seconds: Annotated[float, Field(ge=0)] = 5.0
    """How long a higher number must be needed before replicas are added."""
    down_seconds: Annotated[float, Field(ge=0)] = 120.0
    """How long a lower number must be enough before replicas are removed."""


class ClusterConfig(BaseModel):
    """A model, its replicas, and the limits of its API."""

    model_config = ConfigDict(extra="forbid")

    package: str
    """Folder of the package, at the same path on every node."""
    version: str | None = None
    """Version of the package, as its link `current` names it. Changed, it is rolled out. `inlay cluster up` sets it."""
    name: str | None = None
    """Model name in the API; by default that of the folder."""
    replicas: Annotated[int, Field(ge=1)] | Replicas = 1
    threads: Annotated[int, Field(ge=1)] = 1
    """Threads of each replica."""
    cpus: Annotated[float, Field(gt=0)] | None = None
    """CPUs that Ray reserves for each replica; by default one for each thread."""
    slots: Annotated[int, Field(ge=1)] | None = None
    """Sequences that a replica runs at once; by default those of the package."""
    queue: Annotated[int, Field(ge=1)] = 16
    """Requests that wait in a replica. As many more wait in the ingress for each replica that may exist."""
    cache_memory: Size | None = None
    """Memory for the prefix cache of a replica; by default for as many tokens as the slots."""
    host_cache_memory: Size = "0"
    """Memory for blocks that are evicted from the prefix cache."""
    disk_cache: str | None = None
    """Folder on every node that keeps blocks of the prefix cache on disk. Replicas on a node share it."""
    disk_cache_size: Size = "0"
    """Maximum size of this folder."""
    routing: Literal["kv", "least_loaded", "random"] = "kv"
    """How a replica is chosen: by cached prefix and load, by load, or at random."""
    ingress_replicas: Annotated[int, Field(ge=1)] = 1
    """Processes that tokenize requests and send them to replicas."""
    api_key_file: str | None = None
    """File with one API key per line, on every node; by default keys are read from INLAY_API_KEYS."""
    insecure: bool = False
    """Whether a cluster without API keys may be reached from other machines."""
    public_metrics: bool = False
    max_prompt: Annotated[int, Field(ge=1)] | None = None
    max_tokens: Annotated[int, Field(ge=1)] | None = None
    max_body: Size = "1M"
    drain_seconds: Annotated[float, Field(gt=0)] = 300.0
    """How long a replica that is replaced may finish its requests."""

    @property
    def most_replicas(self) -> int:
        """The largest number of replicas."""
        return self.replicas if isinstance(self.replicas, int) else self.replicas.max


def read_package(config: ClusterConfig) -> tuple[Manifest, Path]:
    """Return the manifest and folder of the package on this node, which must have the version of the config."""
    manifest, folder = read_manifest(config.package)
    if config.version not in (None, folder.name):
        problem = f"{config.package} has version {folder.name} on this node, and {config.version} is wanted."
        raise UsageError(problem, "Copy the package to this node, or deploy again with `inlay cluster up`.")
    return manifest, folder


def engine_settings(config: ClusterConfig) -> EngineSettings:
    """Return the settings of the engine of each replica."""
    cache = None if config.cache_memory is None else parse_bytes(config.cache_memory)
    settings = EngineSettings(
        slots=config.slots,
        max_waiting=config.queue,
        cache_bytes=cache,
        host_bytes=parse_bytes(config.host_cache_memory),
    )
    if config.disk_cache is None:
        return settings
    keys = read_keys(None if config.api_key_file is None else Path(config.api_key_file))
    size, owner = parse_bytes(config.disk_cache_size), Keys(keys).owner
    return replace(settings, disk_folder=Path(config.disk_cache), disk_bytes=size, disk_owner=owner)


def text_fingerprint(manifest: Manifest) -> str:
    """Return a hash of the tokenizer and chat template of a package. Equal ones make equal tokens of a request."""
    rows = sorted((name, row.sha256) for name, row in manifest.files.items() if name.startswith("tokenizer/"))
    return hashlib.sha256(repr(rows).encode()).hexdigest()[:16]
