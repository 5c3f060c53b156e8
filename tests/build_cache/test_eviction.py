"""Room in the cache of builds: who goes first, what is held, and two processes that share one."""

from __future__ import annotations

import getpass
import json
import os
import subprocess
import sys
import tempfile
import textwrap
import time
from collections import Counter
from pathlib import Path

import pytest
from typer.testing import CliRunner

from inlay.build_cache.store import HITS, BuildCache
from inlay.cli.main import app
from inlay.package.files import sha256
from tests.build_cache.tiny_builds import VARIANTS

pytestmark = pytest.mark.usefixtures("cache")


def _keep(cache: BuildCache, key: str, size: int = 1000) -> bool:
    about = {"model": "tiny", "seconds": 1.0, "factors": {}, "manifest": {}, "records": []}

    def write(folder: Path) -> None:
        (folder / "file").write_bytes(os.urandom(size))

    return cache.store(key, about, write)


@pytest.mark.fast
class TestRoom:
    def test_least_recently_used_goes_first(self, cache: BuildCache) -> None:
        for place, key in enumerate("abcd"):
            assert _keep(cache, key)
            os.utime(cache.folder / key / HITS, (1000 + place, 1000 + place))
        with cache.open_entry("a") as entry:
            assert entry is not None
            entry.note_hit()
        cache.limit = sum(row["size"] for row in cache.listing()) - 1
        assert {entry.key for entry in cache.entries()} == {"a", "c", "d"}
        _keep(cache, "e")
        assert {entry.key for entry in cache.entries()} == {"a", "d", "e"}
        assert sum(row["size"] for row in cache.listing()) <= cache.limit
        assert not _keep(cache, "too large", 10_000)
        assert {entry.key for entry in cache.entries()} == {"a", "d", "e"}

    def test_who_reads_is_not_disturbed(self, cache: BuildCache, tmp_path: Path) -> None:
        _keep(cache, "a")
        with cache.open_entry("a") as entry:
            assert entry is not None
            assert cache.clear() == (0, 0)
            cache.limit = 1
            assert not cache.drop("a")
            entry.copy("file", tmp_path / "copy")
        assert sha256(tmp_path / "copy") == entry.metadata["files"]["file"][1]
        assert cache.clear()[0] == 1
        with cache.open_entry("a") as entry:
            assert entry is None

    def test_what_died_is_swept(self, cache: BuildCache) -> None:
        _keep(cache, "a")
        for name in (".writing-dead", ".gone-dead"):
            (cache.folder / name).mkdir()
        (cache.folder / ".lock-dead").touch()
        _keep(cache, "b")
        assert sorted(path.name for path in cache.folder.iterdir()) == ["a", "b"]

    def test_the_command_line(self, cache: BuildCache) -> None:
        run = CliRunner().invoke
        assert "0 entries" in run(app, ["cache", "ls"]).stdout
        for key in ("old", "new"):
            _keep(cache, key)
        long_ago = time.time() - 10 * 86400
        os.utime(cache.folder / "old" / HITS, (long_ago, long_ago))
        said = run(app, ["cache", "ls"]).stdout
        assert "10 days ago" in said
        assert "2 entries" in said
        listed = json.loads(run(app, ["cache", "ls", "--json"]).stdout)
        assert [row["entry"] for row in listed["entries"]] == ["new", "old"]
        assert "Removed 1 entry" in run(app, ["cache", "clear", "--older-than", "7d"]).stdout
        assert [entry.key for entry in cache.entries()] == ["new"]
        assert "4.0 GB" in run(app, ["cache", "limit"]).stdout
        assert "8.0 GB" in run(app, ["cache", "limit", "8GB"]).stdout
        assert cache.limit == 8 * 10**9
        assert run(app, ["cache", "limit", "much"]).exit_code == 2
        assert run(app, ["cache", "clear", "--older-than", "long"]).exit_code == 2
        assert "Removed 1 entry" in run(app, ["cache", "clear"]).stdout

    def test_one_builds_and_the_others_wait(self, cache: BuildCache) -> None:
        code = """
            import sys, time
            from pathlib import Path
            from inlay.build_cache.store import BuildCache
            with BuildCache(Path(sys.argv[1])).lock_key("a"):
                print("begin", flush=True)
                time.sleep(0.05)
                print("end", flush=True)
        """
        command = [sys.executable, "-c", textwrap.dedent(code), str(cache.folder)]
        with (cache.folder.parent / "said").open("w+") as out:
            running = [subprocess.Popen(command, stdout=out) for _ in range(5)]
            assert [each.wait(60) for each in running] == [0] * 5
            out.seek(0)
            assert out.read().split() == ["begin", "end"] * 5
        assert not list(cache.folder.iterdir())


@pytest.mark.nightly
@pytest.mark.parametrize("builds", [10, 1000])
def test_two_processes(tmp_path: Path, cache: BuildCache, builds: int) -> None:
    """Builds by two processes at once, with clearing, eviction and kills in between: every package is right."""
    paths = os.pathsep.join([str(Path(__file__).parents[2]), *sys.path])
    headers = os.environ.get("TORCHINDUCTOR_CACHE_DIR") or f"{tempfile.gettempdir()}/torchinductor_{getpass.getuser()}"
    environment = os.environ | {"PYTHONPATH": paths, "TMPDIR": str(tmp_path), "TORCHINDUCTOR_CACHE_DIR": headers}
    command = [sys.executable, "-m", "tests.build_cache.tiny_builds", str(tmp_path), str(builds // 2)]
    running = [
        subprocess.Popen(
            [*command, str(seed)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment
        )
        for seed in (1, 2)
    ]
    said = [each.communicate(timeout=3000) for each in running]
    assert [each.returncode for each in running] == [0, 0], said
    seen = sum((Counter(json.loads(text.splitlines()[-1])) for text, _ in said), Counter())
    print(dict(seen))
    assert seen["hit"] + seen["miss"] == builds
    # How many are hits depends on when one process clears, or limits, what the other was about to find.
    assert seen["hit"] > 0
    assert seen["miss"] >= VARIANTS
    assert not [reason for reason in seen if "damaged" in reason or "differ from" in reason], seen
    cache.limit = 10**12
    entries = cache.entries()
    assert len(entries) == len(cache._folders()), "every entry that is there can be read"
    for entry in entries:
        for name in entry.metadata["files"]:
            entry.copy(name, tmp_path / "copy")
