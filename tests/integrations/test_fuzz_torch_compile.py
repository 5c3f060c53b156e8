"""torch.compile(backend="inlay") on random small modules: it never fails where eager runs, and gives what eager gives.

    python tests/integrations/test_fuzz_torch_compile.py --below eager 0 300

runs a range of seeds and tells what happened; CI runs a few, nightly all of them.
"""

from __future__ import annotations

import argparse
import logging
import warnings
from collections import Counter

import pytest
import torch

from inlay.integrations.torch_compile import CompiledGraph, inlay
from inlay.testing import check_model
from tests.integrations.random_modules import draw


def _check(seed: int, below: str) -> list[CompiledGraph]:
    """Outputs, inputs and buffers afterwards, and who shares memory with whom, against eager."""
    drawn, seen = draw(seed), list[CompiledGraph]()
    options = {"inner_backend": below, "on_compiled": seen.append}
    try:
        check_model(
            drawn.model,
            [*drawn.sets],
            backend=inlay,
            dtypes=(drawn.dtype,),
            gradients=drawn.trained,
            dynamic=drawn.dynamic,
            options=options,
        )
    except Exception as error:
        error.add_note(f"{drawn}, below={below}")
        raise
    return seen


@pytest.mark.parametrize("seed", [*range(4), *(pytest.param(seed, marks=pytest.mark.nightly) for seed in range(4, 12))])
def test_eager_below(seed: int) -> None:
    for made in _check(seed, "eager"):
        assert not [record.key for record in made.records if record.status == "failed"], made.notes


@pytest.mark.nightly
@pytest.mark.parametrize("seed", [3, 7, 11])
def test_inductor_below(seed: int) -> None:
    _check(seed, "inductor")


@pytest.mark.nightly
@pytest.mark.parametrize("below", ["eager", "aot_eager"])
@pytest.mark.parametrize("seed", range(300))
def test_three_hundred(seed: int, below: str) -> None:
    _check(seed, below)


@pytest.mark.nightly
@pytest.mark.parametrize("seed", range(300, 340))
def test_forty_compiled(seed: int) -> None:
    _check(seed, "inductor")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("first", type=int)
    parser.add_argument("end", type=int)
    parser.add_argument("--below", default="eager")
    given = parser.parse_args()
    warnings.simplefilter("ignore")
    logging.getLogger("inlay").setLevel(logging.ERROR)
    sites: Counter[str] = Counter()
    notes: Counter[str] = Counter()
    failed = []
    for seed in range(given.first, given.end):
        try:
            seen = _check(seed, given.below)
        except Exception as error:
            failed.append(seed)
            print(f"{type(error).__name__}: {str(error)[:2000]}", *error.__notes__, sep="\n", flush=True)
            continue
        sites.update({record.key: record.sites for made in seen for record in made.records if record.sites})
        notes.update(note.partition(":")[0] for made in seen for note in made.notes)
        notes.update(["pieces"] * len(seen))
    print(f"{given.end - given.first} modules, {len(failed)} failed: {failed}")
    print(f"sites: {dict(sites)}\nnotes: {dict(notes)}\ntorch {torch.__version__}")


if __name__ == "__main__":
    main()
