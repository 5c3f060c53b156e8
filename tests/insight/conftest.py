from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from pathlib import Path

    from inlay.program import Program


@pytest.fixture(scope="session")
def smollm2_report(smollm2_program: Program, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The page of the real model."""
    from inlay.insight.report import report_program, write_page

    page = tmp_path_factory.mktemp("report") / "smollm2.html"
    write_page(report_program(smollm2_program), page)
    return page


@pytest.fixture(scope="session")
def hundred_layers_report(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The page of a narrow model of a hundred layers."""
    from inlay.frontend import capture
    from inlay.insight.report import report_program, write_page
    from tests.models import config_folder

    folder = tmp_path_factory.mktemp("hundred")
    shape = {"hidden_size": 16, "intermediate_size": 16, "num_attention_heads": 2, "num_key_value_heads": 1}
    program = capture(str(config_folder(folder / "hundred-layers", num_hidden_layers=100, **shape)))
    write_page(report_program(program), folder / "hundred.html")
    return folder / "hundred.html"


@pytest.fixture(scope="session")
def two_programs_page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What differs between a model with two layers and one with three."""
    from inlay.frontend import capture
    from inlay.insight.report import write_page
    from inlay.insight.report.comparison import build_program_page
    from tests.models import config_folder

    folder = tmp_path_factory.mktemp("two")
    two, three = (
        capture(str(config_folder(folder / f"{layers}-layers", num_hidden_layers=layers, hidden_act=act)))
        for layers, act in ((2, "silu"), (3, "gelu"))
    )
    write_page(build_program_page(two, three, (two.name, three.name)), folder / "diff.html")
    return folder / "diff.html"
