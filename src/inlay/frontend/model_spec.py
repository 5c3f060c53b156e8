"""Resolution of the MODEL argument, shared by all commands."""

from __future__ import annotations

import importlib
import json
import re
import sys
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from inlay.errors import ModelError, UsageError, one_line, suggest
from inlay.frontend.safetensors_files import index_folder
from inlay.frontend.source_model import Example, SourceModel
from inlay.split_files import split_parts

if TYPE_CHECKING:
    from collections.abc import Callable

    from inlay.frontend.huggingface.checkpoint import HFOptions

MODEL_FORMS = (
    "MODEL is a Hugging Face folder or id (org/name or org/name@revision), a GGUF file, a .pt2 file of"
    " torch.export.save, or package.module:factory."
)
_HUB_ID = re.compile(r"^[A-Za-z0-9][\w.-]*(/[\w.-]+)?(@[\w./-]+)?$")
_FACTORY = re.compile(r"^[A-Za-z_][\w.]*:[A-Za-z_][\w.]*$")


def open_model(text: str, options: HFOptions | None = None) -> SourceModel:
    """Find MODEL, check it and its weights, and build it without loading weights.

    >>> open_model("no/such folder")
    Traceback (most recent call last):
    ...
    inlay.errors.ModelError: There is no file or folder no/such folder. MODEL is a Hugging Face folder or id \
(org/name or org/name@revision), a GGUF file, a .pt2 file of torch.export.save, or package.module:factory.
    """
    try:
        path = _find_path(text)
        if path.is_file():
            return _open_file(path, options)
        if path.is_dir():
            return _open_folder(path, text, options)
    except (OSError, RuntimeError) as error:
        raise ModelError(f"{text[:80]} cannot be read: {one_line(error)}.", MODEL_FORMS) from error
    if _FACTORY.match(text):
        if options is not None and options.dtype is not None:
            raise UsageError(
                f"A dtype was requested, but {text} builds the module itself.", "Set the dtype in the factory."
            )
        return _open_factory(text)
    if _is_hub_id(text):
        return _open_id(text, options)
    raise ModelError(f"There is no file or folder {text}.", MODEL_FORMS)


@dataclass(frozen=True)
class Identity:
    """The name and architecture of a captured program; the architecture is empty if it is unknown."""

    name: str
    architecture: str = ""


def identify(text: str, options: HFOptions | None = None) -> Identity:
    """Identify MODEL from its configuration or header; no module is built and no weights are read.

    >>> identify("package.module:factory")
    Identity(name='package.module:factory', architecture='')
    """
    try:
        path = _find_path(text)
        if path.is_file():
            if path.suffix == ".pt2":
                return Identity(path.stem)
            _check_file(path)
            from inlay.frontend.huggingface.causal_lm import gguf_architecture

            return Identity(path.name, gguf_architecture(path))
        if path.is_dir():
            _check_folder(path, text)
            return _identify_folder(path, path.resolve().name, options)
    except (OSError, RuntimeError) as error:
        raise ModelError(f"{text[:80]} cannot be read: {one_line(error)}.", MODEL_FORMS) from error
    if _FACTORY.match(text):
        return Identity(text)
    if _is_hub_id(text):
        return _identify_id(text, options)
    raise ModelError(f"There is no file or folder {text}.", MODEL_FORMS)


def _identify_folder(path: Path, name: str, options: HFOptions | None) -> Identity:
    from inlay.frontend.huggingface.causal_lm import folder_architecture
    from inlay.frontend.huggingface.encoder import find_transformer

    return Identity(name, folder_architecture(find_transformer(path), name, _default_options(options)))


def _identify_id(text: str, options: HFOptions | None) -> Identity:
    repo, _, revision = text.partition("@")
    arguments = {"repo_id": repo, "revision": revision or None, "allow_patterns": ["config.json"]}
    try:
        from huggingface_hub import snapshot_download

        folder = _download_snapshot(snapshot_download, arguments, lambda folder: (folder / "config.json").exists())
    except Exception:  # without a configuration, only the name is known
        return Identity(repo)
    return _identify_folder(folder, _commit_name(repo, folder), options)


def _is_hub_id(text: str) -> bool:
    return bool(_HUB_ID.match(text)) and not text.endswith((".gguf", ".safetensors", ".json", ".py"))


def _default_options(options: HFOptions | None) -> HFOptions:
    from inlay.frontend.huggingface.checkpoint import HFOptions

    return options or HFOptions()


def _open_file(path: Path, options: HFOptions | None) -> SourceModel:
    if path.suffix == ".pt2":
        return _open_exported(path, options)
    from inlay.frontend.huggingface.causal_lm import open_gguf

    _check_file(path)
    return open_gguf(path, _default_options(options))


def _open_exported(path: Path, options: HFOptions | None) -> SourceModel:
    import torch

    if options is not None and options.dtype is not None:
        raise UsageError(f"A dtype was requested, but {path} has its types.", "Leave it out.")
    try:
        return SourceModel.from_exported(torch.export.load(path), path.stem)
    except Exception as error:
        problem = f"{path} cannot be read by torch.export.load: {type(error).__name__}: {one_line(error)}."
        raise ModelError(problem, "Write it with torch.export.save and the same version of torch.") from error


def _check_file(path: Path) -> None:
    with path.open("rb") as file:
        magic = file.read(4)
    if magic == b"GGUF" or path.suffix == ".gguf":
        return
    if path.suffix in (".safetensors", ".json"):
        raise ModelError(f"{path} is only one file of a model.", f"Pass its folder: {path.parent}")
    raise ModelError(f"{path} is not a supported model file.", MODEL_FORMS)


def _open_folder(path: Path, text: str, options: HFOptions | None) -> SourceModel:
    _check_folder(path, text)
    return _open_checkpoint(path, path.resolve().name, _default_options(options))


def _open_checkpoint(path: Path, name: str, options: HFOptions) -> SourceModel:
    from inlay.frontend.huggingface.causal_lm import open_folder
    from inlay.frontend.huggingface.encoder import is_encoder, open_encoder

    return open_encoder(path, name, options) if is_encoder(path, name, options) else open_folder(path, name, options)


def _check_folder(path: Path, text: str) -> None:
    if (path / "current" / "manifest.json").exists():
        raise ModelError(
            f"{text} is a compiled package; this command needs the model it was built from.",
            f"Run `inlay inspect {text}` to describe it.",
        )
    _refuse_adapter(path, text)
    if not (path / "config.json").exists() and not (path / "modules.json").exists():
        files = sorted(path.glob("*.gguf"))
        hint = f"Pass one of its GGUF files, such as {files[0]}." if files else MODEL_FORMS
        raise ModelError(f"{text} has no config.json, so it is not a Hugging Face folder.", hint)


def _refuse_adapter(path: Path, text: str) -> None:
    """Reject a folder that contains an adapter and no model."""
    weights = {file.name for file in path.glob("*.safetensors")} - {"adapter_model.safetensors"}
    if not (path / "adapter_config.json").exists() or weights:
        return
    kind, base = "LoRA", None
    with suppress(OSError, ValueError, AttributeError):
        stated = json.loads((path / "adapter_config.json").read_text("utf-8"))
        kind, base = str(stated.get("peft_type") or "LoRA"), stated.get("base_model_name_or_path")
    raise ModelError(
        f"{text} is a {kind} adapter{f' of {base}' if base else ''}, not a whole model.",
        "Merge it into its model: `merge_and_unload()` of peft, then `save_pretrained()`, and pass that folder.",
    )


def _find_path(text: str) -> Path:
    """Return the file or folder of MODEL. For a split GGUF model, or a folder that is one, it is the first part."""
    path = Path(text).expanduser()
    if path.is_dir() and not (path / "config.json").exists():
        files = sorted(path.glob("*.gguf"))
        parts = split_parts(files[0]) if files else []
        return files[0] if len(parts) > 1 and set(files) <= set(parts) else path
    first = split_parts(path)[0]
    return first if first.is_file() else path


def _open_factory(text: str) -> SourceModel:
    module_name, _, attribute = text.partition(":")
    if "" not in sys.path and str(Path.cwd()) not in sys.path:
        sys.path.insert(0, str(Path.cwd()))
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        raise ModelError(
            f"{text}: there is no Python module {error.name}.", "Run from the folder that contains it, or install it."
        ) from error
    except Exception as error:
        raise ModelError(
            f"{text}: importing {module_name} failed: {one_line(error)}.", "Fix the import error above."
        ) from error
    factory: Any = module
    for part in attribute.split("."):
        factory = getattr(factory, part, None)
    if not callable(factory):
        raise ModelError(f"{module_name} has no callable {attribute}.", suggest(attribute, dir(module)))
    try:
        made = factory()
    except Exception as error:
        raise ModelError(f"{text} raised {type(error).__name__}: {one_line(error)}.", "Fix the error above.") from error
    return SourceModel(text, "module", _to_example(text, made), {}, architecture="")


def _to_example(text: str, made: Any) -> Example:
    import torch

    if isinstance(made, Example) and isinstance(made.module, torch.nn.Module):
        return made
    if isinstance(made, tuple) and 2 <= len(made) <= 3 and isinstance(made[0], torch.nn.Module):
        module, args = made[0], made[1]
        axes = made[2] if len(made) == 3 else {}
        if isinstance(args, dict):
            return Example(module, (), args, axes)
        return Example(module, args if isinstance(args, tuple) else (args,), {}, axes)
    raise ModelError(
        f"{text} returned a {type(made).__name__}, not an Example or a tuple that starts with a torch.nn.Module.",
        "Return inlay.Example(module, args, kwargs, axes) or a tuple (module, args[, axes]) from the factory.",
    )


def _open_id(text: str, options: HFOptions | None) -> SourceModel:
    repo, _, revision = text.partition("@")
    try:
        from huggingface_hub import snapshot_download
    except ImportError as error:
        raise ModelError("Hugging Face ids need the transformers package.", "pip install 'inlay[hf]'") from error
    code = ["*.py"] if options is not None and options.trust_remote_code else []
    wanted = ["*.json", "*.safetensors", "*.model", "*.txt", "*.jinja", *code]
    arguments: dict[str, Any] = {"repo_id": repo, "revision": revision or None, "allow_patterns": wanted}
    try:
        folder = _download_snapshot(snapshot_download, arguments, lambda folder: bool(index_folder(folder)))
    except UsageError:
        raise
    except Exception as error:
        raise ModelError(
            f"{text} is not a local file or folder, and downloading it as a Hugging Face id failed: {one_line(error)}.",
            "Check the spelling and the network, or pass a local folder.",
        ) from error
    _refuse_adapter(folder, text)
    return _open_checkpoint(folder, _commit_name(repo, folder), _default_options(options))


def find_snapshot(text: str) -> Path | None:
    """Return the folder of a Hugging Face id in the local hub cache, or None. The network is not used."""
    if not _is_hub_id(text):
        return None
    repo, _, revision = text.partition("@")
    try:
        from huggingface_hub import snapshot_download

        folder = Path(snapshot_download(repo_id=repo, revision=revision or None, local_files_only=True))
        return folder if index_folder(folder) else None
    except Exception:  # not installed, not cached or not readable: the build reports which
        return None


def _commit_name(repo: str, folder: Path) -> str:
    """Return the repository with its commit; the snapshot folder is named after the commit."""
    return f"{repo}@{folder.name[:12]}"


def _download_snapshot(download: Any, arguments: dict[str, Any], suffices: Callable[[Path], bool]) -> Path:
    """Return the snapshot in the local cache if it has the required files, without network access; else download it."""
    try:
        cached = Path(download(**arguments, local_files_only=True))
        if suffices(cached):
            return cached
    except Exception:  # noqa: S110 - not cached, so it is downloaded
        pass
    return Path(download(**arguments))
