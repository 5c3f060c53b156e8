"""Assertions for transforms and models.

Transform assertions check that a transform matches only where it should and keeps the results. Model assertions check
each stage of the compiler; docs/stages.md lists which assertion checks which stage.
"""

from inlay.testing.compile_cache import RoundTrip, cache_round_trip
from inlay.testing.in_place_check import StateTraffic, assert_in_place
from inlay.testing.inductor_code import GeneratedCode, generated_code
from inlay.testing.model_check import ModelCheck, check_model
from inlay.testing.post_grad_graphs import post_grad_graphs
from inlay.testing.recompiles import CompileCounts, assert_no_recompiles
from inlay.testing.rewrites import assert_rewrites, assert_untouched, program_of

__all__ = [
    "CompileCounts",
    "GeneratedCode",
    "ModelCheck",
    "RoundTrip",
    "StateTraffic",
    "assert_in_place",
    "assert_no_recompiles",
    "assert_rewrites",
    "assert_untouched",
    "cache_round_trip",
    "check_model",
    "generated_code",
    "post_grad_graphs",
    "program_of",
]
